"""Progress bars on standard error, if that is a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.table import Column
from rich.text import Text

from hearth.cli.console import err

#: Width of all columns but the title, which is cut if it is longer than the rest of the line.
OTHER_COLUMNS = 44


class Advance(Protocol):
    def __call__(self, done: int, total: int | None, what: str | None = None) -> None:
        """Show progress in bytes or steps; `what` None: the title stays."""


class _OnceKnown(ProgressColumn):
    def __init__(self, column: ProgressColumn, is_known: Callable[[Task], bool]) -> None:
        super().__init__()
        self._column, self._is_known = column, is_known

    def render(self, task: Task) -> RenderableType:
        return self._column.render(task) if self._is_known(task) else Text()


@contextmanager
def step_bar(title: str) -> Iterator[Advance]:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        _OnceKnown(MofNCompleteColumn(), lambda task: task.total is not None),
        TimeElapsedColumn(),
    )
    with _shown(title, None, *columns) as advance:
        yield advance


@contextmanager
def bar(title: str, total_bytes: int | None = None) -> Iterator[Advance]:
    width = max(err.width - OTHER_COLUMNS, 1)
    columns = (
        TextColumn(
            "{task.description}",
            markup=False,
            table_column=Column(no_wrap=True, overflow="ellipsis", max_width=width),
        ),
        BarColumn(),
        _OnceKnown(DownloadColumn(), lambda task: task.total is not None),
        _OnceKnown(TransferSpeedColumn(), lambda task: bool(task.finished_speed or task.speed)),
        TimeElapsedColumn(),
    )
    with _shown(title, total_bytes, *columns) as advance:
        yield advance


@contextmanager
def _shown(title: str, total: int | None, *columns: ProgressColumn) -> Iterator[Advance]:
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as shown:
        task = shown.add_task(title, total=total)

        def advance(done: int, total: int | None, what: str | None = None) -> None:
            shown.update(task, completed=done, total=total, description=what)

        yield advance

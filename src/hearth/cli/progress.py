"""Shows a bar of progress on standard error, if that is a terminal. Measures nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from hearth.cli.console import err


class Advance(Protocol):
    def __call__(self, done_bytes: int, total_bytes: int | None, what: str | None = None) -> None:
        """Show so many bytes; `what` is done now, None: the same as before."""


class _OnceKnown(ProgressColumn):
    """A column that is empty, instead of showing a question mark, until there is something to show."""

    def __init__(self, column: ProgressColumn, is_known: Callable[[Task], bool]) -> None:
        super().__init__()
        self._column, self._is_known = column, is_known

    def render(self, task: Task) -> RenderableType:
        return self._column.render(task) if self._is_known(task) else Text()


@contextmanager
def bar(title: str, total_bytes: int | None = None) -> Iterator[Advance]:
    columns = (
        "{task.description}",
        BarColumn(),
        _OnceKnown(DownloadColumn(), lambda task: task.total is not None),
        _OnceKnown(TransferSpeedColumn(), lambda task: bool(task.finished_speed or task.speed)),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as shown:
        task = shown.add_task(title, total=total_bytes)

        def advance(done_bytes: int, total_bytes: int | None, what: str | None = None) -> None:
            shown.update(task, completed=done_bytes, total=total_bytes, description=what)

        yield advance

"""Shows a bar of progress on standard error, if that is a terminal. Measures nothing itself."""

from __future__ import annotations

from collections.abc import Iterator
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


class _OnceTotalKnown(ProgressColumn):
    """A column that is empty while nobody knows how many bytes there are."""

    def __init__(self, column: ProgressColumn) -> None:
        super().__init__()
        self._column = column

    def render(self, task: Task) -> RenderableType:
        return Text() if task.total is None else self._column.render(task)


@contextmanager
def bar(title: str) -> Iterator[Advance]:
    columns = (
        "{task.description}",
        BarColumn(),
        _OnceTotalKnown(DownloadColumn()),
        _OnceTotalKnown(TransferSpeedColumn()),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as shown:
        task = shown.add_task(title, total=None)

        def advance(done_bytes: int, total_bytes: int | None, what: str | None = None) -> None:
            shown.update(task, completed=done_bytes, total=total_bytes, description=what)

        yield advance

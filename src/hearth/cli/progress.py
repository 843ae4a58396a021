"""Shows a bar of progress on standard error, if that is a terminal. Measures nothing itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.progress import BarColumn, DownloadColumn, Progress, TimeElapsedColumn, TransferSpeedColumn

from hearth.cli.console import err


class Advance(Protocol):
    def __call__(self, done_bytes: int, total_bytes: int | None, what: str | None = None) -> None:
        """Show so many bytes; `what` is done now, None: the same as before."""


@contextmanager
def bar(title: str) -> Iterator[Advance]:
    columns = (
        "{task.description}",
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as shown:
        task = shown.add_task(title, total=None)

        def advance(done_bytes: int, total_bytes: int | None, what: str | None = None) -> None:
            shown.update(task, completed=done_bytes, total=total_bytes, description=what)

        yield advance

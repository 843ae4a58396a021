"""The `hearth` command: reads flags, puts the parts together and prints. It decides nothing about serving.

torch and all that needs it are imported inside the commands, so that `hearth --help` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.text import Text

# Each adds its commands to the application, in the order of the help.
from hearth.cli import run, chat, demo, deploy, snapshot, explain, keys  # noqa: F401  # isort: skip
from hearth.cli import doctor, convert, upgrade, serve, ps, simulate  # noqa: F401  # isort: skip
from hearth.cli.console import app, err
from hearth.cli.help import command_of
from hearth.errors import ConfigError, HearthError, ModelError, RequestError, Unreached
from hearth.version import hearth_version


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. Exit codes: 0 done, 1 failed, 2 wrong input, 3 not there, 130 interrupted."""
    try:
        command_of(app)(argv, prog_name="hearth")
    except HearthError as error:
        _complain(str(error))
        sys.exit(_code(error))
    except OSError as error:  # of a file or device that no command expects to fail
        where = "" if error.filename is None else f"`{error.filename}`: "
        _complain(f"{where}{error.strerror or error}")
        sys.exit(1)


def _code(error: HearthError) -> int:
    if isinstance(error, Unreached) or error.http_status == 404:
        return 3
    return 2 if isinstance(error, ConfigError | ModelError | RequestError) else 1


def _complain(message: str) -> None:
    err.print(Text(f"hearth: {message}", style="red"), soft_wrap=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hearth {hearth_version()}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass

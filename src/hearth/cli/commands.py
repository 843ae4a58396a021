"""All commands in one application, and what comes of their errors. It decides nothing about serving.

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
from hearth.control.template_process import TemplateProcess
from hearth.errors import ConfigError, HearthError, ModelError, RequestError, Unreached
from hearth.version import hearth_version


def run_command(argv: Sequence[str] | None, template: TemplateProcess | None) -> None:
    """Run a command and exit; None: that of this process. `template`: of the service that it may start."""
    try:
        command_of(app)(argv, prog_name="hearth", obj=template)
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

"""The application of all commands, and the exit codes of their errors.

Only the module of the requested command is imported, and torch only inside commands, so that `hearth ps` and
`hearth --help` start fast.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Annotated

import typer
from rich.text import Text

from hearth.cli.console import app, err
from hearth.cli.familiar import answer_to, translated
from hearth.cli.help import command_of
from hearth.core.errors import ConfigError, HearthError, ModelError, RequestError, Unreached
from hearth.core.version import hearth_version
from hearth.node.template_process import TemplateProcess

#: The commands of each module, in the order of the help.
MODULES: Mapping[str, tuple[str, ...]] = {
    "run": ("run",),
    "demo": ("demo",),
    "deploy": ("deploy", "list", "rm"),
    "create": ("create", "cp"),
    "convert": ("show", "convert", "verify"),
    "snapshot": ("snapshot",),
    "serve": ("serve",),
    "ps": ("ps", "stop", "logs"),
    "explain": ("explain",),
    "forecast": ("forecast",),
    "open": ("open",),
    "keys": ("keys",),
    "cluster": ("join", "cluster"),
    "nodes": ("nodes",),
    "doctor": ("doctor", "config"),
    "simulate": ("simulate",),
}


def whole_app() -> typer.Typer:
    for module in MODULES:
        import_module(f"hearth.cli.{module}")
    order = [name for names in MODULES.values() for name in names]
    app.registered_commands.sort(
        key=lambda one: order.index(str(one.name or getattr(one.callback, "__name__", None)))
    )
    return app


def _app_for(words: Sequence[str]) -> typer.Typer:
    for module, commands in MODULES.items():
        if words[:1] and words[0] in commands:
            import_module(f"hearth.cli.{module}")
            return app
    return whole_app()


def _words() -> Sequence[str]:
    if "_HEARTH_COMPLETE" not in os.environ:
        return sys.argv[1:]
    return os.environ.get("COMP_WORDS", "").split()[1 : int(os.environ.get("COMP_CWORD") or 0)]


def run_command(argv: Sequence[str] | None, template: TemplateProcess | None) -> None:
    words = translated(_words() if argv is None else argv)
    app = _app_for(words) if argv is None else whole_app()
    try:
        if (answer := answer_to(words)) is not None:
            raise ConfigError(answer)
        command_of(app)(words, prog_name="hearth", obj=template)
    except HearthError as error:
        _complain(str(error))
        sys.exit(_code(error))
    except OSError as error:
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

"""`hearth keys`: API keys of the service, added, listed and removed. Keeps no key itself, only hashes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.text import Text

from hearth.cli.console import DEFAULT_DATA_DIR, AsJson, DataDirectory, app, err, print_columns
from hearth.cli.figures import duration
from hearth.cli.tab_completion import complete_group, complete_key
from hearth.control import keys
from hearth.control.caller import Role
from hearth.control.datadir import DataDir, running_service
from hearth.errors import DataDirError

KeysFile = Annotated[
    Path | None,
    typer.Option("--api-keys-file", metavar="FILE", help="By default keys.json in the data directory."),
]
KeyName = Annotated[str, typer.Argument(metavar="NAME", help="Whose key it is.")]

KnownKey = Annotated[
    str, typer.Argument(metavar="NAME", help="Whose key it is.", autocompletion=complete_key)
]

keys_app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
app.add_typer(keys_app, name="keys", help="Add, list and remove API keys.", rich_help_panel="Service")


@keys_app.command()
def add(
    name: KeyName,
    admin: Annotated[
        bool, typer.Option("--admin", help="May also deploy, remove and unload; implies --monitor.")
    ] = False,
    monitor: Annotated[
        bool, typer.Option("--monitor", help="May also look at the whole service: ps, metrics, all requests.")
    ] = False,
    group: Annotated[
        str | None,
        typer.Option(
            "--group",
            metavar="GROUP",
            help="Share cached prompts with all keys of this group; by default with no other key.",
            autocompletion=complete_group,
        ),
    ] = None,
    file: KeysFile = None,
    data_dir: DataDirectory = DEFAULT_DATA_DIR,
) -> None:
    """Make a key and print it.

    It is shown this once: only its hash is kept. From the first key on a service asks for one, also if it
    runs already, and takes further ones at once.

    A prompt that begins like an earlier one is answered sooner, and `cached_tokens` in the answer's usage
    says so. So that nobody learns what others ask, only prompts of the same key count. Keys of one group
    trust each other: what they have in common, such as a system prompt, is computed once for all of them,
    and each may explain the requests of the others.

    [bold]Examples[/bold]

      hearth keys add ada

      hearth keys add support-1 --group support

      hearth keys add prometheus --monitor

      hearth keys add deployer --admin
    """
    path = _path(file, data_dir)
    role: Role = "admin" if admin else "monitor" if monitor else "user"
    typer.echo(keys.add(path, name, role, group))
    err.print(Text("keep it: it is not shown again", style="dim"))
    _tell_of_service(path, data_dir, "asks everybody for a key from now on, and takes this one")


@keys_app.command("list")
def list_keys(
    file: KeysFile = None, data_dir: DataDirectory = DEFAULT_DATA_DIR, as_json: AsJson = False
) -> None:
    """List who has a key, for what, and which keys share cached prompts: those of one group."""
    known = keys.list_keys(_path(file, data_dir))
    if as_json:
        typer.echo(msgspec.json.encode(known))
        return
    rows = [
        [key.name, key.role, key.group or "-", f"{duration(time.time() - key.created_at_s)} ago"]
        for key in known
    ]
    print_columns(["NAME", "ROLE", "GROUP", "CREATED"], rows)


@keys_app.command()
def rm(name: KnownKey, file: KeysFile = None, data_dir: DataDirectory = DEFAULT_DATA_DIR) -> None:
    """Remove a key: whoever has it is refused from now on.

    With the last key gone a service that runs refuses everybody until there is another. One that is started
    then asks for none on this machine's own address, and does not start on another.
    """
    path = _path(file, data_dir)
    keys.remove(path, name)
    typer.echo(f"removed the key of {name}")
    if keys.list_keys(path):
        _tell_of_service(path, data_dir, "refuses it from now on")
    else:
        _tell_of_service(
            path, data_dir, "refuses everybody from now on, until a key is added or it is restarted"
        )


def _tell_of_service(path: Path, data_dir: Path, effect: str) -> None:
    """Say what a change of keys means for the service on the data directory, which may have other keys."""
    try:
        service = running_service(data_dir)
    except DataDirError as error:  # the keys are changed all the same
        warning = f"whether a service runs that reads these keys cannot be told: {error}"
        err.print(Text(warning, style="yellow"), soft_wrap=True)
        return
    if service is None:
        return
    if Path(service.keys_path).resolve() == path.resolve():
        err.print(Text(f"the service at {service.url} {effect}", style="dim"), soft_wrap=True)
    else:
        warning = (
            f"the service at {service.url} has other keys: it reads `{service.keys_path}`, and this was "
            f"`{path}`; name that with `--api-keys-file`"
        )
        err.print(Text(warning, style="yellow"), soft_wrap=True)


def _path(file: Path | None, data_dir: Path) -> Path:
    return DataDir.open(data_dir).keys_path if file is None else file.expanduser()

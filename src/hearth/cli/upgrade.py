"""`hearth upgrade`: files that an older Hearth has written. Converts nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hearth.cli.console import DEFAULT_DATA_DIR, DataDirectory, app, err
from hearth.cli.progress import bar
from hearth.control.datadir import VERSION, DataDir

if TYPE_CHECKING:  # looks at models, which takes its time to import
    from hearth.control.upgrade import Upgraded


@app.command(rich_help_panel="Models")
def upgrade(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="PATH", help="A converted model; without it, the data directory and all its models."
        ),
    ] = None,
    data_dir: DataDirectory = DEFAULT_DATA_DIR,
    is_rollback: Annotated[
        bool, typer.Option("--rollback", help="Go back to the format before, for the Hearth before.")
    ] = False,
) -> None:
    """Bring what an older Hearth has written up to date.

    All weights are read once, since their names change; interrupted, it goes on where it stopped. `hearth
    serve` does the same as it starts. The way back is open until a model is deployed or removed.

    [bold]Examples[/bold]

      hearth upgrade

      hearth upgrade --rollback

      hearth upgrade ./models/qwen-7b
    """
    from hearth.control.upgrade import roll_back, upgrade_directory

    if path is not None and is_rollback:
        raise typer.BadParameter("a single model is not rolled back; convert it again with the Hearth before")
    if path is not None:
        with bar(f"upgrading {path.name}") as advance:
            done = upgrade_directory(
                path, lambda _, done_bytes, total_bytes: advance(done_bytes, total_bytes)
            )
        typer.echo(
            f"{path} is up to date" if done is None else f"upgraded {path}: its digest is {done.new} now"
        )
        return
    with DataDir.hold(data_dir, may_be_old=True) as held:
        if is_rollback:
            roll_back(held)
            typer.echo(f"{held.path} has version {held.version} again; use the Hearth before")
        elif held.version == VERSION:
            typer.echo(f"{held.path} is up to date: version {VERSION}")
        else:
            tell(upgrade_held(held))


def upgrade_held(data_dir: DataDir) -> list[Upgraded]:
    """Bring a data directory that this process holds up to date, behind a bar; does nothing if it is."""
    if data_dir.version == VERSION:
        return []
    from hearth.control.upgrade import upgrade as upgrade_data_dir

    with bar(f"upgrading {data_dir.path}") as advance:
        return upgrade_data_dir(data_dir, lambda _, done_bytes, total_bytes: advance(done_bytes, total_bytes))


def tell(models: list[Upgraded]) -> None:
    for model in models:
        if model.new is None:
            err.print(f"hearth: {model.name} stays as it was, deploy it again: {model.reason}", style="red")
        else:
            typer.echo(f"upgraded {model.name}: its digest is {model.new[:16]}... now, was {model.old}")

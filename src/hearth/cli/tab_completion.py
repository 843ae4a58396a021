"""Names of deployed models for the shell: press Tab. Never fails and never prints.

They are those that the command would find: of the service at `--url`, or of the data directory, where a
service registers its models too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hearth.cli.client import Client
from hearth.cli.console import DEFAULT_DATA_DIR
from hearth.cli.local_models import names
from hearth.errors import HearthError


def complete_model(context: typer.Context, incomplete: str) -> list[str]:
    try:
        return [name for name in _known(context) if name.startswith(incomplete)]
    except (HearthError, OSError):
        return []


def _known(context: typer.Context) -> list[str]:
    url, data_dir = context.params.get("url"), context.params.get("data_dir") or DEFAULT_DATA_DIR
    if url is None:
        return names(Path(data_dir).expanduser())
    with Client(url, context.params.get("api_key")) as client:
        return [view.name for view in client.models()]


ModelName = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="A deployed model, by its name or an alias.", autocompletion=complete_model
    ),
]

"""Names of deployed models for the shell: press Tab. Never fails and never prints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hearth.cli.console import DEFAULT_DATA_DIR
from hearth.cli.local_models import names
from hearth.errors import HearthError


def complete_model(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names that begin so, from the data directory, where a service registers its models too."""
    data_dir = context.params.get("data_dir") or DEFAULT_DATA_DIR
    try:
        known = names(Path(data_dir).expanduser())
    except (HearthError, OSError):
        return []
    return [name for name in known if name.startswith(incomplete)]


ModelName = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="A deployed model, by its name or an alias.", autocompletion=complete_model
    ),
]

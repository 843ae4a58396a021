"""Shell completion of model names, key names and groups. Never fails or prints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hearth.cli.client import Client
from hearth.cli.console import DEFAULT_DATA_DIR
from hearth.cli.local_models import views
from hearth.control.datadir import DataDir
from hearth.control.keys.keys import KeyInfo, list_keys
from hearth.control.observe.views import ModelView
from hearth.core.errors import ConfigError, HearthError


def complete_model(context: typer.Context, incomplete: str) -> list[str]:
    try:
        return [view.name for view in _known(context) if view.name.startswith(incomplete)]
    except (HearthError, OSError):
        return []


def complete_base(context: typer.Context, incomplete: str) -> list[str]:
    try:
        return [
            view.name for view in _known(context) if view.base is None and view.name.startswith(incomplete)
        ]
    except (HearthError, OSError):
        return []


def _known(context: typer.Context) -> list[ModelView]:
    url, data_dir = context.params.get("url"), context.params.get("data_dir") or DEFAULT_DATA_DIR
    if url is None:
        return views(Path(data_dir).expanduser())
    with Client(url, context.params.get("api_key")) as client:
        return client.models()


def complete_key(context: typer.Context, incomplete: str) -> list[str]:
    return [key.name for key in _keys(context) if key.name.startswith(incomplete)]


def complete_group(context: typer.Context, incomplete: str) -> list[str]:
    groups = {key.group for key in _keys(context) if key.group is not None}
    return sorted(group for group in groups if group.startswith(incomplete))


def _keys(context: typer.Context) -> list[KeyInfo]:
    data_dir = DataDir(Path(context.params.get("data_dir") or DEFAULT_DATA_DIR))
    try:
        return list_keys(Path(context.params.get("file") or data_dir.keys_path).expanduser())
    except ConfigError:
        return []


_NAMED = typer.Argument(
    metavar="NAME", help="Name or alias of a deployed model.", autocompletion=complete_model
)
ModelName = Annotated[str, _NAMED]
ModelNames = Annotated[list[str], _NAMED]

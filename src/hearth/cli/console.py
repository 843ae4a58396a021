"""What commands share: the application, how it prints, options that several take. No command is here."""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Sequence
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hearth.config import HearthConfig, load
from hearth.errors import ConfigError, ModelError

app = typer.Typer(
    help="Serve many large language models on few GPUs.",
    epilog="Start with `hearth doctor`, then `hearth run PATH 'your question'`.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
out = Console()
err = Console(stderr=True)


class Dtype(StrEnum):
    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Settings in TOML.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="One setting, over the file's; may be repeated."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def url_of(path: Path) -> str | None:
    """The URL that was given where a path is taken, which has lost one of its slashes."""
    scheme, colon, rest = str(path).partition(":/")
    return f"{scheme}://{rest}" if colon and scheme.isalnum() else None


def existing(path: Path) -> Path:
    if not path.exists() and (url := url_of(path)):
        raise ModelError(f"`{url}` is a URL, but this command reads local models; `hearth run` takes URLs")
    if not path.exists():
        raise ModelError(f"no model at `{path}`; name the directory that holds its files, or a GGUF file")
    return path


def configured(path: Path | None, settings: Sequence[str] | None) -> HearthConfig:
    """The resolved configuration; logging follows it from here on."""
    config = load(path, dict(map(_setting, settings or ())))
    logging.basicConfig(
        level=config.log.level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    return config


def _setting(text: str) -> tuple[str, object]:
    """`engine.max_seqs=8` as key and value; what is no TOML value is taken as a string."""
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"`--set` takes KEY=VALUE, like engine.max_seqs=8, given: {text!r}")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def print_table(title: str, facts: dict[str, object]) -> None:
    table = Table("", "", title=title, show_header=False, title_justify="left")
    for name, value in facts.items():
        table.add_row(Text(name, style="bold"), Text(_cell(value)))
    out.print(table)


def _cell(value: object) -> str:
    """For people: digits in groups, equal neighbours in a list counted."""
    match value:
        case None:
            return "-"
        case int() if not isinstance(value, bool):
            return f"{value:,}"
        case list():
            runs = [(_cell(item), len(list(group))) for item, group in groupby(value)]
            return ", ".join(item if count == 1 else f"{count} x {item}" for item, count in runs) or "-"
        case _:
            return str(value)

"""The parts that commands share: the application, common options, configuration and printing."""

from __future__ import annotations

import logging
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from hearth.cli.environment import API_KEY, CONFIG, DATA_DIR, read_environment, variable_of
from hearth.cli.help import HELP_FLAGS
from hearth.core.config import HearthConfig, keys_in, load
from hearth.core.errors import ConfigError, ModelError, UnknownModel
from hearth.core.log_format import LOG_FORMAT, formatter_of

app = typer.Typer(
    help="Serve many large language models on few GPUs.",
    epilog=(
        "Start with `hearth demo`, or `hearth deploy SOURCE` and `hearth serve`, then `hearth run NAME`. "
        "Exit codes: 0 success, 1 failure, 2 wrong input, 3 no such service, model or request, "
        "130 interrupted."
    ),
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": HELP_FLAGS},
)
out = Console()
err = Console(stderr=True)


class Device(StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Dtype(StrEnum):
    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


#: For help texts, where Typer's list of choices is too wide.
SPELLED_DTYPES = "auto, float32, float16 or bfloat16"

ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", envvar=CONFIG, help="Settings file in TOML.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one setting; may be repeated."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DEFAULT_DATA_DIR = Path("~/.hearth")
DATA_DIR_VARIABLES = [DATA_DIR, variable_of("service.data_dir")]
DataDirectory = Annotated[
    Path,
    typer.Option(
        "--data-dir",
        metavar="DIR",
        envvar=DATA_DIR_VARIABLES,
        help="Directory for models, keys and logs.",
        callback=Path.expanduser,
        readable=False,  # later errors say more
    ),
]
Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="URL of the service; by default the one that runs on the data directory.",
        show_default=False,
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option("--api-key", metavar="KEY", envvar=API_KEY, help="API key, if the service requires one."),
]


def is_flag_given(context: typer.Context, parameter: str) -> bool:
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def data_dir_of(context: typer.Context, data_dir: Path, config: HearthConfig) -> Path:
    source = context.get_parameter_source("data_dir")
    is_default = source is None or source.name == "DEFAULT"
    return Path(config.service.data_dir).expanduser() if is_default else data_dir


def url_of(path: Path) -> str | None:
    """Return the URL that was given as a path; `Path` has dropped one of its slashes."""
    scheme, colon, rest = str(path).partition(":/")
    return f"{scheme}://{rest}" if colon and scheme.isalnum() else None


def is_place(text: str) -> bool:
    """True if `text` is a path or URL, and not the name of a deployed model.

    Names may contain a `/`: such a text is a path only if the path exists. A directory without a `/` needs
    `./`, so that it never hides the model of that name.
    """
    if text.startswith((".", "/", "~")):
        return True
    if not any(mark in text for mark in (":", "/", ".gguf")):
        return False
    from hearth.control.deploy.sources import PathSource, UrlSource, parse_source

    match parse_source(text):
        case UrlSource():
            return True
        case PathSource(path):
            return text.endswith(".gguf") or ("/" in text and path.exists())
        case _:
            return False


def refuse_url(url: str | None, place: str) -> None:
    if url is not None:
        raise ConfigError(
            f"`--url` is for deployed models, but `{place}` is read in this process; give the name of a "
            "deployed model, or drop `--url`"
        )


@contextmanager
def named(text: str) -> Iterator[None]:
    try:
        yield
    except UnknownModel as error:
        if not Path(text).exists():
            raise
        raise UnknownModel(f"{error}; for the local files, write `./{text}`") from error


def warn(message: str) -> None:
    err.print(Text(message, style="yellow"), soft_wrap=True)


def existing(path: Path) -> Path:
    if not path.exists() and (url := url_of(path)):
        raise ModelError(f"`{url}` is a URL, but this command reads local models; `hearth run` takes URLs")
    if not path.exists():
        raise ModelError(f"no model at `{path}`; give the directory of its files, or a GGUF file")
    return path


@dataclass(frozen=True, slots=True)
class Configuration:
    config: HearthConfig
    origins: Mapping[str, str]  #: file, variable or flag of each non-default setting, like "service.port"
    notes: tuple[str, ...]  #: why variables that look like settings are ignored

    def print_notes(self) -> None:
        for note in self.notes:
            warn(f"note: {note}")


def format_origins(origins: Mapping[str, str]) -> str:
    settings: dict[str, list[str]] = {}
    for setting, origin in origins.items():
        settings.setdefault(origin, []).append(setting)
    return "; ".join(f"{', '.join(names)} by {origin}" for origin, names in settings.items())


def resolved(
    path: Path | None, settings: Sequence[str] | None, flags: Mapping[str, object | None] | None = None
) -> Configuration:
    """Resolve the settings: flags override `--set`, which overrides the environment, then the file."""
    environment = read_environment(os.environ)
    set_by_hand = dict(map(_setting, settings or ()))
    given = {key: value for key, value in (flags or {}).items() if value is not None}
    origins = {
        **dict.fromkeys([] if path is None else keys_in(path), str(path)),
        **environment.variables,
        **dict.fromkeys(set_by_hand, "--set"),
        **dict.fromkeys(given, "a flag"),
    }
    config = load(path, {**environment.values, **set_by_hand, **given})
    return Configuration(config, origins, environment.notes)


def configured(
    path: Path | None, settings: Sequence[str] | None, flags: Mapping[str, object | None] | None = None
) -> HearthConfig:
    configuration = resolved(path, settings, flags)
    configuration.print_notes()
    return configuration.config


def log_to_terminal(config: HearthConfig) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(formatter_of(config.log.format))
    logging.basicConfig(level=config.log.level.upper(), handlers=[handler])


def log_beside_answer(config: HearthConfig) -> None:
    level = "warning" if config.log.level == "info" else config.log.level
    logging.basicConfig(level=level.upper(), format=LOG_FORMAT)


def _setting(text: str) -> tuple[str, object]:
    """Parse `engine.max_seqs=8`; a value that is not TOML is a string."""
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"`--set` takes KEY=VALUE, like engine.max_seqs=8, given: {text!r}")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def print_table(title: str, facts: dict[str, object]) -> None:
    table = Table("", Column(overflow="fold"), title=title, show_header=False, title_justify="left")
    for name, value in facts.items():
        table.add_row(Text(name, style="bold"), Text(_cell(value)))
    out.print(table)


def print_columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip_longest(header, *rows, fillvalue="")]
    for number, row in enumerate((header, *rows)):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        out.print(Text(line, style="" if number else "bold"), soft_wrap=True)


def _cell(value: object) -> str:
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

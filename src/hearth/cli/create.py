"""`hearth create` and `cp`: presets of deployed models, from Modelfiles or as copies."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from hearth.cli import local_models
from hearth.cli.client import Client
from hearth.cli.console import (
    DEFAULT_DATA_DIR,
    ApiKey,
    DataDirectory,
    Url,
    app,
    warn,
)
from hearth.cli.deploy import absolute_source, carry_out, deployed
from hearth.cli.endpoint import running
from hearth.cli.tab_completion import ModelName
from hearth.control.deploy.deploy import DeployOrder
from hearth.control.deploy.preset import Preset
from hearth.core.errors import ConfigError

_REPLACES = "Name of the preset; replaces one of that name."


@app.command(rich_help_panel="Models")
def create(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help=_REPLACES)],
    file: Annotated[
        Path, typer.Option("--file", "-f", metavar="FILE", help="Modelfile; - reads standard input.")
    ] = Path("Modelfile"),
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDirectory = DEFAULT_DATA_DIR,
) -> None:
    """Make a preset of a model from a Modelfile.

    A preset shares the weights of its base and follows it when the base is deployed again. FROM names a
    deployed model or a source, which is deployed if need be; ADAPTER is deployed as NAME-adapter. SYSTEM,
    PARAMETER and TEMPLATE (in Jinja; by default the model's own) apply where a request does not set them.

    [bold]Example[/bold]

      hearth create pirate -f Modelfile
    """
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read a Modelfile at `{file}`: {reason}; name it with `-f FILE`") from error
    modelfile = parse_modelfile(text)
    preset = _preset_of(modelfile)
    client = running(context, url, api_key, data_dir)
    with client or nullcontext():
        base = deployed(client, _place(modelfile["FROM"][-1], file.parent), data_dir, asks=False)
        for adapter in modelfile.get("ADAPTER", []):
            source = absolute_source(_place(adapter, file.parent), is_elsewhere=url is not None)
            order = DeployOrder(source, f"{name}-adapter", overwrite=True, base=base.name)
            base = carry_out(client, order, data_dir)
        _put(client, name, base.name, preset, data_dir)
    typer.echo(f"created {name}: preset of {base.name}")


@app.command(rich_help_panel="Models")
def cp(
    context: typer.Context,
    source: ModelName,
    name: Annotated[str, typer.Argument(metavar="NEW_NAME", help=_REPLACES)],
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDirectory = DEFAULT_DATA_DIR,
) -> None:
    """Give a deployed model, adapter or preset another name.

    The copy is a preset: it shares the weights of the model, and follows it when it is deployed again.

    [bold]Example[/bold]

      hearth cp smollm2 gpt-4o-mini
    """
    client = running(context, url, api_key, data_dir)
    with client or nullcontext():
        _put(client, name, source, Preset(), data_dir)
    typer.echo(f"copied {source} to {name}")


def _put(client: Client | None, name: str, base: str, preset: Preset, data_dir: Path) -> None:
    if client is None:
        local_models.put_preset(data_dir, name, base, preset)
    else:
        client.put_preset(name, base, preset)


#: A comment, or an instruction with its value: to the end of the line, or between triple quotes.
_ENTRY = re.compile(r'\s*(?:#.*|(?P<word>\w+)[ \t]+(?P<value>"""[\s\S]*?"""|.*))(?:\n|\Z)')
_KNOWN = ("FROM", "ADAPTER", "SYSTEM", "TEMPLATE", "PARAMETER", "LICENSE", "REQUIRES")


def parse_modelfile(text: str) -> dict[str, list[str]]:
    """Return the values of each instruction. Raises ConfigError."""
    found: dict[str, list[str]] = {}
    text, position = text.strip() + "\n", 0
    while position < len(text):
        if (match := _ENTRY.match(text, position)) is None:
            line = text[position:].strip().partition("\n")[0]
            raise ConfigError(f"a line of a Modelfile is an instruction and its value, given: {line!r:.80}")
        position = match.end()
        if match["word"] is not None:
            found.setdefault(match["word"].upper(), []).append(match["value"].strip())
    if unknown := found.keys() - {*_KNOWN}:
        known = ", ".join(_KNOWN)
        raise ConfigError(f"an instruction of a Modelfile is one of {known}, given: {min(unknown):.40}")
    if "FROM" not in found:
        raise ConfigError("a Modelfile needs `FROM` with a deployed model or a source, given: none")
    return found


def _preset_of(modelfile: Mapping[str, Sequence[str]]) -> Preset:
    """Warn of ignored parameters. Raises ConfigError, RequestError."""
    from pydantic import ValidationError  # with the API's modules it takes tenths of a second to load

    from hearth.api.ollama.body import OllamaOptions, preset_of

    pairs = [value.partition(" ")[::2] for value in modelfile.get("PARAMETER", ())]
    given = {name.lower(): _value(value) for name, value in pairs}
    if "stop" in given:
        given["stop"] = [_value(value) for name, value in pairs if name.lower() == "stop"]
    try:
        options = OllamaOptions.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        name = first["loc"][0] if first["loc"] else first.get("ctx", {}).get("field", "")
        raise ConfigError(f"`PARAMETER {name}`: {first['msg']}") from error
    for parameter in options.ignored(""):
        warn(
            f"note: `PARAMETER {parameter}` is ignored: it does not concern sampling; `[models.NAME]` in the "
            "configuration has settings of a model, such as `context`"
        )
    system, template = (modelfile.get(word, ("",))[-1] for word in ("SYSTEM", "TEMPLATE"))
    preset = preset_of(options, _unquoted(system), _unquoted(template))
    preset.check()
    return preset


def _place(text: str, folder: Path) -> str:
    """Return a name or source; a path that begins with a dot is relative to the Modelfile."""
    text = _unquoted(text)
    return str((folder / text).absolute()) if text.startswith(".") else text


def _unquoted(text: str) -> str:
    for quote in ('"""', '"'):
        if len(text) >= 2 * len(quote) and text.startswith(quote) and text.endswith(quote):
            return text[len(quote) : -len(quote)].strip("\n")
    return text


def _value(text: str) -> object:
    try:
        return json.loads(text.strip())
    except ValueError:
        return _unquoted(text.strip())

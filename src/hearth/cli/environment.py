"""Settings from environment variables: `HEARTH_SERVICE_PORT` is `port` of [service].

Kubernetes sets `HEARTH_SERVICE_HOST` and `HEARTH_SERVICE_PORT` in every pod if a Service is called `hearth`.
They are recognised by their values and ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from hearth.core.config import from_text, load, setting_keys
from hearth.core.errors import ConfigError

PREFIX = "HEARTH_"
#: A JSON object of the settings of single models, by name.
MODELS = "HEARTH_MODELS"
#: Other variables that Hearth reads; the second is a short name of HEARTH_SERVICE_DATA_DIR.
CONFIG, DATA_DIR, API_KEY = "HEARTH_CONFIG", "HEARTH_DATA_DIR", "HEARTH_API_KEY"
#: The address of a Service as Kubernetes writes it, like tcp://10.96.0.7:8000.
_SERVICE_URL = re.compile(r"(?:tcp|udp|sctp)://\[?(.+?)\]?:(\d+)")


@dataclass(frozen=True, slots=True)
class EnvironmentSettings:
    values: Mapping[str, object]  #: by setting, like "service.port"
    variables: Mapping[str, str]  #: the variable that gave each of them
    notes: tuple[str, ...]  #: why variables that look like settings are ignored


def variable_of(key: str) -> str:
    """Return the variable of a setting: "service.port" has HEARTH_SERVICE_PORT."""
    return PREFIX + key.upper().replace(".", "_")


def read_environment(environment: Mapping[str, str]) -> EnvironmentSettings:
    given = {name: text for name, text in environment.items() if name.startswith(PREFIX) and text}
    links = _service_links(given)
    # The short name comes last and wins.
    keys = {variable_of(key): key for key in setting_keys()} | {DATA_DIR: "service.data_dir"}
    values: dict[str, object] = {}
    variables: dict[str, str] = {}
    for name, key in keys.items():
        if name in given and name not in links:
            values[key], variables[key] = _checked(name, key, from_text(key, given[name])), name
    for key, value in _of_models(given.get(MODELS)):
        values[key], variables[key] = value, MODELS
    others = [name for name in given if name not in {*keys, *links, MODELS, CONFIG, API_KEY}]
    notes = [_unknown(name, [*keys, MODELS, CONFIG, API_KEY]) for name in others]
    notes += [
        f"environment variable {name} is ignored: Kubernetes set it for a Service; "
        "`enableServiceLinks: false` in the pod removes it"
        for name in sorted(links & keys.keys())
    ]
    return EnvironmentSettings(values, variables, tuple(notes))


def _checked(variable: str, key: str, value: object) -> object:
    try:
        load(None, {key: value})
    except ConfigError as error:
        raise ConfigError(f"environment variable `{variable}`: {error}") from None
    return value


def _of_models(text: str | None) -> Iterator[tuple[str, object]]:
    try:
        tables = json.loads(text or "{}")
    except ValueError:
        tables = None
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise ConfigError(
            f'environment variable `{MODELS}` must be a JSON object of settings by model, like {{"NAME": '
            f'{{"pinned": true}}}}, given: {text!r:.80}'
        )
    for name, table in tables.items():
        for key, value in table.items():
            yield f"models.{name}.{key}", _checked(MODELS, f"models.{name}.{key}", value)


def _unknown(name: str, valid: list[str]) -> str:
    nearest = get_close_matches(name, valid, n=1)
    hint = f"did you mean `{nearest[0]}`?" if nearest else "`hearth config` lists the settings"
    if name.startswith(tuple(variable_of(f"{key.partition('.')[0]}.") for key in setting_keys())):
        raise ConfigError(f"unknown environment variable `{name}`; {hint}")
    return f"unknown environment variable {name}; {hint}"


def _service_links(given: Mapping[str, str]) -> set[str]:
    links: set[str] = set()
    for name, text in given.items():
        if not name.endswith("_PORT") or not (url := _SERVICE_URL.fullmatch(text)):
            continue
        service = name.removesuffix("_PORT")
        address = {f"{service}_SERVICE_HOST": url[1], f"{service}_SERVICE_PORT": url[2]}
        links |= {name, *(other for other, value in address.items() if given.get(other) == value)}
        links |= {other for other in given if other.startswith((f"{name}_", f"{service}_SERVICE_PORT_"))}
    return links

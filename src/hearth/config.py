"""Configuration: a TOML file and flags become small frozen sections, checked once. It reads no environment
variables and does not know what the sections are for.

A section is a frozen dataclass whose `__post_init__` calls `_settle`; a field of `HearthConfig` puts it into
the file. Type and limits of a key are its annotation; a key named `..._bytes` also takes sizes like "8GiB".
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from fractions import Fraction
from pathlib import Path
from types import NoneType
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

from hearth.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a number, `low` and `high` included."""

    low: float
    high: float = math.inf

    def told(self, unit: Callable[[float], str]) -> str:
        """For people, each limit as `unit` writes it."""
        return f"at least {unit(self.low)}" + (
            "" if math.isinf(self.high) else f" and at most {unit(self.high)}"
        )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    max_batch_tokens: Annotated[int, Limits(1)] = 4096  #: token budget of one step
    max_seqs: Annotated[int, Limits(1)] = 256  #: sequences that run at the same time
    block_tokens: Annotated[int, Limits(1, 1024)] = 16  #: tokens per block of KV
    kv_bytes: Annotated[int | None, Limits(1)] = None  #: KV memory; None: derived from the device's memory
    memory_fraction: Annotated[float, Limits(0.05, 1.0)] = 0.9  #: share of the device's memory to use
    graphs: Literal["lazy", "start", "off"] = "lazy"  #: when decode steps are captured as CUDA graphs

    def __post_init__(self) -> None:
        _settle(self, "engine")


@dataclass(frozen=True, slots=True)
class StoreConfig:
    path: str = "~/.cache/hearth"  #: where models and chunks from object storage are kept on disk
    disk_bytes: Annotated[int | None, Limits(0)] = None  #: the most they may take there; None: no quota
    host_bytes: Annotated[int, Limits(16 << 20)] = 1 << 30  #: host memory for chunks, pinned for CUDA

    def __post_init__(self) -> None:
        _settle(self, "store")


@dataclass(frozen=True, slots=True)
class LogConfig:
    level: Literal["debug", "info", "warning", "error"] = "info"

    def __post_init__(self) -> None:
        _settle(self, "log")


@dataclass(frozen=True, slots=True)
class HearthConfig:
    engine: EngineConfig = field(default_factory=EngineConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    log: LogConfig = field(default_factory=LogConfig)


def load(path: Path | None = None, overrides: Mapping[str, object] | None = None) -> HearthConfig:
    """The configuration in `path` (None: all defaults), under `overrides` such as {"engine.max_seqs": 8}.

    Raises:
        ConfigError: an unreadable file, an unknown section or key, a wrong type, a value out of range.
    """
    raw = _read(path) if path is not None else {}
    for dotted, value in (overrides or {}).items():
        section, _, key = dotted.partition(".")
        raw.setdefault(section, {})[key] = value
    section_types = get_type_hints(HearthConfig)
    _refuse_unknown(raw, section_types, "section")
    for section, values in raw.items():
        names = [f.name for f in fields(section_types[section])]
        _refuse_unknown(
            [f"{section}.{key}" for key in values], [f"{section}.{name}" for name in names], "key"
        )
    return HearthConfig(**{section: section_types[section](**values) for section, values in raw.items()})


def to_toml(config: HearthConfig) -> str:
    """`config` as a file that `load` reads back; a value of None has no TOML and becomes a comment."""
    lines: list[str] = []
    for section, values in asdict(config).items():
        lines += ["", f"[{section}]"]
        for key, value in values.items():
            lines.append(
                f"# {key} is derived" if value is None else f"{key} = {json.dumps(value, ensure_ascii=False)}"
            )
    return "\n".join(lines[1:]) + "\n"


UNITS = {"B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_BYTES_BY_UNIT = {"": 1} | {unit.lower(): num_bytes for unit, num_bytes in UNITS.items()}


def parse_bytes(size: str | int) -> int:
    """Bytes of `size`: 512, "512", "512 MB" (10**6 each), "1.5GiB" (2**30 each); the case does not matter."""
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", size.lower(), re.ASCII)
    if match is None or match[2] not in _BYTES_BY_UNIT:
        raise ConfigError(f'a size is a number and one of {", ".join(UNITS)}, like "8GiB", given: {size!r}')
    return int(Fraction(match[1]) * _BYTES_BY_UNIT[match[2]])


def _read(path: Path) -> dict[str, dict[str, object]]:
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file `{path}`: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"`{path}` is not valid TOML: {error}") from error
    for name, value in raw.items():
        if not isinstance(value, dict):
            raise ConfigError(
                f"`{name}` stands outside any section in `{path}`; put it under one, like [engine]"
            )
    return raw


def _refuse_unknown(given: Iterable[str], valid: Iterable[str], what: str) -> None:
    valid = list(valid)
    for name in given:
        if name not in valid:
            nearest = get_close_matches(name, valid, n=1)
            hint = f"did you mean `{nearest[0]}`?" if nearest else f"valid: {', '.join(valid)}"
            raise ConfigError(f"unknown configuration {what} `{name}`; {hint}")


def _settle(section: object, name: str) -> None:
    """Replaces every field of `section` by its checked value; called once, while `section` is being made."""
    for key, hint in get_type_hints(type(section), include_extras=True).items():
        object.__setattr__(section, key, _checked(f"{name}.{key}", hint, getattr(section, key)))


def _checked(key: str, hint: object, value: object) -> object:
    """`value` as `hint` wants it: a size becomes an int, an int becomes a float where a float is due."""
    limits = None
    if get_origin(hint) is Annotated:
        hint, limits = get_args(hint)
    choices = get_args(hint)  # of a Literal: values; of a union: types
    if get_origin(hint) is Literal:
        if value not in choices:
            raise ConfigError(f"`{key}` must be one of {', '.join(map(repr, choices))}, given: {value!r}")
        return value
    types = choices or (hint,)
    if int in types and key.endswith("_bytes") and isinstance(value, str):
        value = _size(key, value)
    if float in types and type(value) is int:
        value = float(value)
    if type(value) not in types:  # not isinstance: True is no number here
        names = " or ".join(t.__name__ for t in types if isinstance(t, type) and t is not NoneType)
        raise ConfigError(f"`{key}` must be of type {names}, given: {value!r} of type {type(value).__name__}")
    if (
        isinstance(limits, Limits)
        and isinstance(value, int | float)
        and not limits.low <= value <= limits.high
    ):
        told = limits.told(_told_bytes if key.endswith("_bytes") else "{:g}".format)
        raise ConfigError(f"`{key}` must be {told}, given: {value}")
    return value


def _told_bytes(num_bytes: float) -> str:
    """In the largest unit of which it is a multiple: 16MiB, 1B."""
    units = {unit: size for unit, size in UNITS.items() if size <= num_bytes and not num_bytes % size}
    unit = max(units, key=units.__getitem__, default="B")
    return f"{num_bytes / UNITS[unit]:.0f}{unit}"


def _size(key: str, size: str) -> int:
    try:
        return parse_bytes(size)
    except ConfigError as error:
        raise ConfigError(f"`{key}`: {error}") from None

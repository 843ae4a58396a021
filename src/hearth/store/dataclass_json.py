"""Frozen dataclasses to JSON and back, each field checked against its type. Knows no particular class."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import TypeVar, get_args, get_origin, get_type_hints

import msgspec

from hearth.errors import BadCheckpoint
from hearth.model_files import brief

T = TypeVar("T")

#: The library looks at a class when it first meets it. A thread that meets it meanwhile ends the process.
_converting = threading.Lock()


def decode(kind: type[T], value: object, where: str) -> T:
    """Return a value from JSON as a `kind`. Raises BadCheckpoint at the first field that does not fit."""
    if (converted := _convert(kind, value)) is not None:
        return converted
    decoded = _decode(kind, value, where)
    assert isinstance(decoded, kind), f"{where}: {decoded!r} is no {kind}"
    return decoded


def _convert(kind: type[T], value: object) -> T | None:
    """Return a value from JSON as a `kind` in a twentieth of the time; None: `_decode` has to look at it.

    The library leaves out fields that a class does not have, so what it read must be all that was given.
    """
    try:
        with _converting:
            converted = msgspec.convert(value, kind)
        is_all = msgspec.json.decode(msgspec.json.encode(converted)) == value
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError):
        return None
    return converted if is_all else None


def _decode(hint: object, value: object, where: str) -> object:
    if type(value) is hint and hint is not float:  # by far the most: integers and texts
        return value
    if isinstance(hint, UnionType):
        (inner,) = (part for part in get_args(hint) if part is not NoneType)
        return None if value is None else _decode(inner, value, where)
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise _misfit(where, "a list", value)
        return tuple(_decode(get_args(hint)[0], item, f"{where}[{at}]") for at, item in enumerate(value))
    if not isinstance(hint, type):  # a NewType
        return _decode(getattr(hint, "__supertype__", None), value, where)
    if is_dataclass(hint):
        return _decode_fields(hint, value, where)
    if issubclass(hint, StrEnum):
        if not isinstance(value, str) or value not in list(hint):
            raise _misfit(where, f"one of {', '.join(hint)}", value)
        return hint(value)
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not abs(value) <= sys.float_info.max:
            raise _misfit(where, "a finite number", value)
        return float(value)
    if type(value) is not hint:  # not isinstance: true is no number here
        raise _misfit(where, hint.__name__, value)
    return value


def _decode_fields(kind: type, value: object, where: str) -> object:
    if not isinstance(value, Mapping):
        raise _misfit(where, "an object", value)
    hints = _hints_of(kind)
    missing, unknown = [n for n in hints if n not in value], [n for n in value if n not in hints]
    if missing or unknown:
        shown = [f"{name:.80}" for name in unknown[:8]]
        raise BadCheckpoint(
            f"{where}: missing fields: {', '.join(missing) or 'none'}, "
            f"unknown fields: {', '.join(shown) or 'none'}; convert the model again"
        )
    return kind(**{name: _decode(hint, value[name], f"{where}.{name}") for name, hint in hints.items()})


@cache
def _hints_of(kind: type) -> dict[str, object]:
    """Return the types of a class's fields, cached: a manifest has thousands of instances of few classes."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _misfit(where: str, wanted: str, value: object) -> BadCheckpoint:
    return BadCheckpoint(f"{where}: must be {wanted}, given: {brief(value)}; convert the model again")

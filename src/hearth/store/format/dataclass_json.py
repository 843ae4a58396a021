"""Decodes frozen dataclasses from JSON, strictly. Knows no particular class."""

from __future__ import annotations

import threading
from typing import TypeVar

import msgspec

from hearth.core.errors import BadCheckpoint
from hearth.core.model_files import brief

T = TypeVar("T")

#: msgspec inspects a class on first use; two threads doing so at once crash the process.
_converting = threading.Lock()


def decode(kind: type[T], value: object, where: str) -> T:
    """Raises BadCheckpoint at the first field that does not fit.

    msgspec ignores unknown fields and fills in defaults, so the result, encoded again, must equal what was
    given.
    """
    try:
        with _converting:
            decoded = msgspec.convert(value, kind)
        read = msgspec.json.decode(msgspec.json.encode(decoded))
    except (msgspec.MsgspecError, ValueError) as error:
        reason, *path = str(error).split(" - at `$")
        place = f"{where}{''.join(path)[:80].rstrip('`')}"
        raise BadCheckpoint(f"{place}: {reason:.200}; convert the model again") from error
    if read != value:
        raise BadCheckpoint(f"{_difference(value, read, where)}; convert the model again")
    return decoded


def _difference(given: object, read: object, where: str) -> str:
    if isinstance(given, dict) and isinstance(read, dict):
        missing, unknown = sorted(read.keys() - given), sorted(given.keys() - read)
        if missing or unknown:
            shown = [f"{name:.80}" for name in unknown[:8]]
            return (
                f"{where}: missing fields: {', '.join(missing) or 'none'}, "
                f"unknown fields: {', '.join(shown) or 'none'}"
            )
        name = next(name for name in given if given[name] != read[name])
        return _difference(given[name], read[name], f"{where}.{name}")
    if isinstance(given, list) and isinstance(read, list):
        at = next(at for at, item in enumerate(given) if item != read[at])
        return _difference(given[at], read[at], f"{where}[{at}]")
    return f"{where}: unsupported value: {brief(given)}"

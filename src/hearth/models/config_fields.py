"""Typed reading of a Hugging Face `config.json`: each field is checked when it is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hearth.core.errors import BadCheckpoint, UnsupportedModel
from hearth.core.model_files import brief

#: The largest integer that a field may have; model sizes are far smaller.
MAX_INTEGER = 2**31 - 1
#: About the smallest and the largest float32.
MIN_NUMBER, MAX_NUMBER = 1.2e-38, 3.4e38


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of a config with a family's defaults. `where` names the config in messages."""

    family: str
    values: Mapping[str, object]
    where: str = "config.json"

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def integer(self, name: str, *, least: int = 1, most: int = MAX_INTEGER) -> int:
        value = self._required(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise BadCheckpoint(
                f"{self.where}: `{name}` must be an integer of at least {least}, given: {brief(value)}"
            )
        if value > most:
            raise BadCheckpoint(f"{self.where}: `{name}` must be at most {most}, given: {brief(value)}")
        return value

    def maybe_integer(self, name: str) -> int | None:
        return self.integer(name) if self.has(name) else None

    def number(self, name: str) -> float:
        value = self._required(name)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not (MIN_NUMBER <= value <= MAX_NUMBER)
        ):
            raise BadCheckpoint(
                f"{self.where}: `{name}` must be a number from {MIN_NUMBER:g} to {MAX_NUMBER:g}, "
                f"given: {brief(value)}"
            )
        return float(value)

    def maybe_number(self, name: str) -> float | None:
        return self.number(name) if self.has(name) else None

    def numbers(self, name: str, count: int) -> list[float]:
        return [item.number(name) for item in self._items(name, count)]

    def integers(self, name: str, count: int) -> list[int]:
        return [item.integer(name, least=0) for item in self._items(name, count)]

    def _items(self, name: str, count: int) -> list[Fields]:
        values = self._required(name)
        if not isinstance(values, list) or len(values) != count:
            raise BadCheckpoint(
                f"{self.where}: `{name}` must be a list of {count} numbers, given: {brief(values)}"
            )
        return [Fields(self.family, {name: value}, self.where) for value in values]

    def flag(self, name: str) -> bool:
        """Return a flag; null counts as false, as in transformers."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise BadCheckpoint(f"{self.where}: `{name}` must be true or false, given: {brief(value)}")
        return bool(value)

    def text(self, name: str) -> str:
        value = self._required(name)
        if not isinstance(value, str):
            raise BadCheckpoint(f"{self.where}: `{name}` must be a string, given: {brief(value)}")
        return value

    def texts(self, name: str) -> list[str] | None:
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise BadCheckpoint(f"{self.where}: `{name}` must be a list of strings, given: {brief(value)}")
        return [str(item) for item in value]

    def section(self, name: str) -> Fields:
        value = self.values.get(name) or {}
        if not isinstance(value, Mapping):
            raise BadCheckpoint(f"{self.where}: `{name}` must be an object, given: {brief(value)}")
        return Fields(self.family, value, where=f"{self.where}: `{name}`")

    def unsupported(self, name: str, why: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.where}: `{name}` is {brief(self.values.get(name))}: {why}")

    def _required(self, name: str) -> object:
        if name not in self.values:
            raise BadCheckpoint(f"{self.where} has no `{name}`, which a `{self.family}` model needs")
        return self.values[name]

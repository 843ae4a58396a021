"""Answers of `bench.coldstart`, as its parts give them. Measures nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from bench.report import Row, peers


@dataclass(frozen=True, slots=True)
class Part:
    """The answers of one part."""

    rows: list[Row]
    details: Mapping[str, object]
    error: str | None = None  #: why the figures are not those that were asked for; None: they are

    @staticmethod
    def failed(error: BaseException) -> Part:
        return Part([], {}, f"{type(error).__name__}: {error}")

    def as_json(self, seconds: float) -> dict[str, object]:
        """Return the part with the seconds that it took."""
        rows = [asdict(row) for row in self.rows]
        return {"seconds": seconds, "error": self.error, "rows": rows, **self.details}


def figures_of_peers(measure: str) -> dict[str, float]:
    """Return what peers say of a measure, by their names."""
    about: Mapping[str, Mapping[str, float]] = peers()["coldstart"]["peers"]  # type: ignore[index] # JSON
    return {name: figures[measure] for name, figures in about.items() if measure in figures}

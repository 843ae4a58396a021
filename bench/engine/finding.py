"""What one question to one shape came to, as a line of JSON and as a part of a result. Measures nothing."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.report import Row, environment


@dataclass(frozen=True, slots=True)
class Found:
    """Lines of the table, and all else that is worth keeping."""

    rows: Sequence[Row]
    details: Mapping[str, object]


#: A question that is still to be asked.
Arm = Callable[[], Found]


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer of one arm, or why there is none. Becomes a line of JSON."""

    part: str  #: of the benchmark, whose result it belongs to
    name: str  #: within the part
    seconds: float  #: that the answer took
    rows: Sequence[Mapping[str, object]] = ()
    details: Mapping[str, object] = field(default_factory=dict)
    error: str | None = None

    @property
    def line(self) -> str:
        return json.dumps(_rounded(asdict(self)))

    @property
    def brief(self) -> str:
        """The same for people and logs: of each row only its value."""
        values = {row["measure"]: row["value"] for row in self.rows}
        told = {"part": self.part, "name": self.name, "seconds": self.seconds, **values, **self.details}
        return json.dumps(_rounded(told if self.error is None else {**told, "error": self.error}))

    @staticmethod
    def of_line(line: str) -> Finding:
        return Finding(**json.loads(line))


def found_by(part: str, name: str, arm: Arm) -> Finding:
    """Ask, and return the answer; an arm that fails must not cost the answers of others."""
    began_s = time.perf_counter()
    try:
        found = arm()
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        return Finding(part, name, time.perf_counter() - began_s, error=f"{type(error).__name__}: {error}")
    rows = [asdict(row) for row in found.rows]
    return Finding(part, name, time.perf_counter() - began_s, rows, found.details)


def document(findings: Iterable[Finding], earlier: Path) -> dict[str, object]:
    """Return the result of a part; what was not asked now is as in an earlier one, if there is any.

    Each finding says when and on what it was measured.
    """
    kept = json.loads(earlier.read_text(encoding="utf-8")).get("results", {}) if earlier.is_file() else {}
    results = {name: result for name, result in kept.items() if "rows" in result}
    for finding in findings:
        if finding.error is None:
            details = {"seconds": finding.seconds, **finding.details}
            results[finding.name] = {"environment": environment(), "rows": finding.rows, **details}
    return {"rows": [row for result in results.values() for row in result["rows"]], "results": results}


def _rounded(value: object) -> object:
    """Return the same with five digits of each number: who reads along needs no more."""
    match value:
        case float():
            return float(f"{value:.5g}")
        case dict():
            return {key: _rounded(one) for key, one in value.items()}
        case list() | tuple():
            return [_rounded(one) for one in value]
        case _:
            return value

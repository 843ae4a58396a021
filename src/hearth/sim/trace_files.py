"""Reads traces from CSV files, plain or gzipped. The columns tell the kind of trace.

    requests   arrival_s, [model,] input_tokens, output_tokens           one line each, times from the first
               TIMESTAMP, ContextTokens, GeneratedTokens                 Azure's LLM inference traces
               Timestamp, Model, Request tokens, Response tokens         BurstGPT
    counts     func or HashFunction, 1, 2, ... 1440                      Azure Functions: of every minute
               day, hour, conversation, api                              BurstGPT, of every hour
    rates      model, t_s, rate_rps [, client, cv]                       ServeGen: of ten minutes
    lengths    input_tokens, output_tokens                               requests without times

Other columns are ignored. Counted requests are drawn at random. Requests without input or output tokens
failed when they were traced, and are skipped.
"""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from random import Random
from typing import TextIO, TypeVar

from hearth.core.errors import ConfigError
from hearth.sim.arrivals import (
    CountedPeriod,
    Lengths,
    Period,
    RatedPeriod,
    RequestLength,
    count_before,
    draw_trace,
)
from hearth.sim.traces import Trace, TracedRequest

MINUTE_S, HOUR_S, SERVEGEN_S = 60.0, 3600.0, 600.0

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class _Line:
    path: Path
    number: int
    fields: Mapping[str, str]

    def read(self, column: str, parse: Callable[[str], Value]) -> Value:
        text = self.fields[column]
        try:
            return parse(text)
        except ValueError as error:
            raise self.error(f"column `{column}`: {error}, given: {text!r}") from error

    def error(self, what: str) -> ConfigError:
        return ConfigError(f"{self.path}, line {self.number}: {what}")


@dataclass(frozen=True, slots=True)
class _RequestColumns:
    arrival: str
    input: str
    output: str
    tenant: str  #: where there is no such column, all requests are of one tenant
    is_clock: bool  #: arrivals are dates; else they are seconds

    @property
    def needed(self) -> set[str]:
        return {self.arrival, self.input, self.output}


_REQUESTS = (
    _RequestColumns("arrival_s", "input_tokens", "output_tokens", "model", is_clock=False),
    _RequestColumns("TIMESTAMP", "ContextTokens", "GeneratedTokens", "Model", is_clock=True),
    _RequestColumns("Timestamp", "Request tokens", "Response tokens", "Model", is_clock=False),
)


def read_trace(
    path: Path, lengths: Lengths, chooser: Random, begin_s: float = 0.0, length_s: float = math.inf
) -> Trace:
    """Read the requests of a window of a trace, which then begins at 0 s.

    `lengths`: of requests that a trace only counts; their times are drawn as well.

    Raises:
        ConfigError: the file is no trace, or a line is wrong.
    """
    header = set(_read_header(path))
    for columns in _REQUESTS:
        if columns.needed <= header:
            return _read_requests(path, columns).window(begin_s, length_s)
    for needed, read in _PERIODS.items():
        if set(needed) <= header:
            # All requests of a window of some hours may be millions: others are never drawn.
            periods = [
                period
                for period in read(_lines(path))
                if period.begin_s < begin_s + length_s and begin_s < period.begin_s + period.length_s
            ]
            return draw_trace(path.name, periods, lengths, chooser).window(begin_s, length_s)
    known = [sorted(columns.needed) for columns in _REQUESTS] + [list(needed) for needed in _PERIODS]
    raise ConfigError(
        f"{path} is no trace: its first line must name the columns of one, "
        f"{'; or '.join(', '.join(names) for names in known)}"
    )


def read_counts(path: Path, begin_s: float, step_s: float) -> dict[str, list[float]]:
    """Return how many requests each tenant of a trace has in the whole steps before a time.

    Raises:
        ConfigError: as of `read_trace`.
    """
    header = set(_read_header(path))
    for needed, read in _PERIODS.items():
        if set(needed) <= header:
            return count_before(begin_s, read(_lines(path)), step_s)
    return count_requests(begin_s, read_trace(path, Lengths.fixed(1, 1), Random(0)).requests, step_s)


def count_requests(
    begin_s: float, requests: Iterable[TracedRequest], step_s: float
) -> dict[str, list[float]]:
    moments = (CountedPeriod(one.tenant, one.arrival_s, 1e-3, 1) for one in requests)
    return count_before(begin_s, moments, step_s)


def is_counted(path: Path) -> bool:
    """True if a file only has counts of requests, perhaps millions: read only a window of it."""
    header = set(_read_header(path))
    return not any(columns.needed <= header for columns in _REQUESTS)


def read_lengths(path: Path) -> Lengths:
    """Read lengths of requests from a file, with or without times.

    Raises:
        ConfigError: the file has no lengths, or a line is wrong.
    """
    header = set(_read_header(path))
    for columns in _REQUESTS:
        if {columns.input, columns.output} <= header:
            read = [_length(line, columns) for line in _lines(path)]
            lengths = tuple(length for length in read if length is not None)
            if not lengths:
                raise ConfigError(f"{path} has no requests, at least 1 is needed to draw lengths from")
            return Lengths(lengths)
    raise ConfigError(f"{path} has no lengths: its first line must name `input_tokens` and `output_tokens`")


def _read_requests(path: Path, columns: _RequestColumns) -> Trace:
    requests, parse = list[TracedRequest](), _clock_s if columns.is_clock else _seconds
    for line in _lines(path):
        arrival_s = line.read(columns.arrival, parse)
        tenant = line.fields.get(columns.tenant, "all")
        if (length := _length(line, columns)) is not None:
            requests.append(
                TracedRequest(arrival_s, tenant, length.num_input_tokens, length.num_output_tokens)
            )
    trace = Trace.of(path.name, requests)
    return trace.window(trace.requests[0].arrival_s) if columns.is_clock and requests else trace


def _length(line: _Line, columns: _RequestColumns) -> RequestLength | None:
    num_input, num_output = line.read(columns.input, _count), line.read(columns.output, _count)
    return RequestLength(num_input, num_output) if num_input and num_output else None


def _minutes(tenant: str) -> Callable[[Iterator[_Line]], Iterator[Period]]:
    def read(lines: Iterator[_Line]) -> Iterator[Period]:
        for line in lines:
            minutes = [name for name in line.fields if name.isdecimal()]
            for minute in minutes:
                if line.fields[minute] != "0" and (count := line.read(minute, _count)):
                    yield CountedPeriod(line.fields[tenant], (int(minute) - 1) * MINUTE_S, MINUTE_S, count)

    return read


def _hours(lines: Iterator[_Line]) -> Iterator[Period]:
    for line in lines:
        begin_s = (24 * line.read("day", _count) + line.read("hour", _count)) * HOUR_S
        for tenant in ("conversation", "api"):
            yield CountedPeriod(tenant, begin_s, HOUR_S, line.read(tenant, _count))


def _rates(lines: Iterator[_Line]) -> Iterator[Period]:
    for line in lines:
        tenant, begin_s = line.fields["model"], line.read("t_s", _seconds)
        if "client" in line.fields:
            tenant += f"/{line.fields['client']}"
        cv = line.read("cv", _positive) if "cv" in line.fields else 1.0
        if rate := line.read("rate_rps", _seconds):
            yield RatedPeriod(tenant, begin_s, SERVEGEN_S, rate, cv)


_PERIODS: dict[tuple[str, ...], Callable[[Iterator[_Line]], Iterator[Period]]] = {
    ("func", "1"): _minutes("func"),
    ("HashFunction", "1"): _minutes("HashFunction"),
    ("day", "hour", "conversation", "api"): _hours,
    ("model", "t_s", "rate_rps"): _rates,
}


@dataclass(frozen=True, slots=True)
class _Row:
    number: int  #: of its last line in the file, from 1
    fields: list[str]


def _read_header(path: Path) -> list[str]:
    return next((row.fields for row in _rows(path)), [])


def _lines(path: Path) -> Iterator[_Line]:
    rows = _rows(path)
    header = next(rows).fields
    for row in rows:
        line = _Line(path, row.number, dict(zip(header, row.fields, strict=False)))
        if len(row.fields) != len(header):
            raise line.error(f"it has {len(row.fields)} fields, the first line names {len(header)}")
        yield line


def _rows(path: Path) -> Iterator[_Row]:
    try:
        with _open_text(path) as file:
            reader = csv.reader(file, strict=True)
            for fields in reader:
                if fields:
                    yield _Row(reader.line_num, [field.strip() for field in fields])
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read as a CSV file: {error}") from error


def _open_text(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _count(text: str) -> int:
    if not text.isdecimal() or not text.isascii():
        raise ValueError("must be a whole number, 0 or more")
    return int(text)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.0 <= value < math.inf:
        raise ValueError("must be a number, 0 or more")
    return value


def _positive(text: str) -> float:
    value = _seconds(text)
    if not value:
        raise ValueError("must be above 0")
    return value


def _clock_s(text: str) -> float:
    moment = datetime.fromisoformat(text)
    return (moment - datetime(1970, 1, 1, tzinfo=moment.tzinfo)).total_seconds()

"""The record of a load: bytes and seconds per rung and per phase. Measures nothing itself."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hearth.core.messages import RungBytes
from hearth.core.types import Rung


@dataclass(frozen=True, slots=True)
class Delivery:
    rung: Rung
    num_bytes: int
    began_s: float
    read_s: float
    verify_s: float
    num_failures: int  #: places or answers that were no good before
    source: str = ""  #: the node that it came from; empty: this one, or object storage


@dataclass(frozen=True, slots=True)
class RungTotals:
    """How much a rung gave to a load, and for how long it was busy with that.

    For disk and object storage, `seconds` is the time in which at least one reader was at work. Host memory
    gets its share, by bytes, of the time in which the load did not wait.
    """

    num_chunks: int
    num_bytes: int
    seconds: float
    bytes_by_source: Mapping[str, int] = field(default_factory=dict)  #: by node, of what other nodes sent


@dataclass(frozen=True, slots=True)
class LoadRecord:
    model: str
    num_bytes: int  #: bytes that reached the device
    rungs: Mapping[Rung, RungTotals]
    read_s: float  #: summed over readers
    verify_s: float  #: summed over readers
    wait_s: float  #: time with nothing to copy, because the next chunk was not in host memory yet
    first_layer_s: float  #: time until the first layer could run
    total_s: float
    num_failures: int  #: places or answers that were no good; others made up for them
    shared_bytes: int = 0  #: of chunks that another load was reading; no rung counts them


@dataclass(slots=True)
class Tally:
    """The record of a load in the making. Mutable; written by the thread of that load."""

    began_s: float
    num_bytes: int = 0  #: of all that is to be copied
    wait_s: float = 0.0
    first_layer_s: float | None = None
    num_host_chunks: int = 0
    host_bytes: int = 0
    shared_bytes: int = 0
    deliveries: list[Delivery] = field(default_factory=list)

    def took(self, delivery: Delivery | None, num_bytes: int, *, is_shared: bool = False) -> None:
        """Count a chunk: this load had it read, another one did (`is_shared`), or it was in host memory."""
        if is_shared:
            self.shared_bytes += num_bytes
        elif delivery is not None:
            self.deliveries.append(delivery)
        else:
            self.num_host_chunks += 1
            self.host_bytes += num_bytes

    def waited(self, seconds: float) -> None:
        self.wait_s += seconds

    def record(self, model: str, now_s: float) -> LoadRecord:
        total_s = now_s - self.began_s
        rungs = totals_by_rung(self.deliveries)
        if self.num_host_chunks:
            rungs[Rung.HOST] = self._host_totals(total_s)
        return LoadRecord(
            model=model,
            num_bytes=self.num_bytes,
            rungs=rungs,
            read_s=sum(d.read_s for d in self.deliveries),
            verify_s=sum(d.verify_s for d in self.deliveries),
            wait_s=self.wait_s,
            first_layer_s=total_s if self.first_layer_s is None else self.first_layer_s,
            total_s=total_s,
            num_failures=sum(d.num_failures for d in self.deliveries),
            shared_bytes=self.shared_bytes,
        )

    def _host_totals(self, total_s: float) -> RungTotals:
        taken_bytes = self.host_bytes + self.shared_bytes + sum(d.num_bytes for d in self.deliveries)
        seconds = (total_s - self.wait_s) * self.host_bytes / taken_bytes
        return RungTotals(self.num_host_chunks, self.host_bytes, seconds)


def totals_by_rung(deliveries: Sequence[Delivery]) -> dict[Rung, RungTotals]:
    """Sum deliveries by rung; rungs that gave nothing are left out."""
    by_rung: dict[Rung, list[Delivery]] = {}
    for delivery in deliveries:
        by_rung.setdefault(delivery.rung, []).append(delivery)
    return {
        rung: RungTotals(len(given), sum(d.num_bytes for d in given), _busy_s(given), _bytes_by_source(given))
        for rung, given in by_rung.items()
    }


def rung_bytes(*records: LoadRecord) -> tuple[RungBytes, ...]:
    """Sum loads by rung and sending node. Nodes share the seconds of their rung by what they sent."""
    num_bytes, seconds = Counter[tuple[Rung, str]](), defaultdict[tuple[Rung, str], float](float)
    for record in records:
        for rung, use in record.rungs.items():
            for source, source_bytes in (use.bytes_by_source or {"": use.num_bytes}).items():
                num_bytes[rung, source] += source_bytes
                seconds[rung, source] += use.seconds * (source_bytes / use.num_bytes)
    return tuple(
        RungBytes(rung, num_bytes[rung, source], seconds[rung, source], source) for rung, source in num_bytes
    )


def _bytes_by_source(deliveries: Sequence[Delivery]) -> dict[str, int]:
    num_bytes = Counter[str]()
    for delivery in deliveries:
        if delivery.source:
            num_bytes[delivery.source] += delivery.num_bytes
    return dict(num_bytes)


def _busy_s(deliveries: Sequence[Delivery]) -> float:
    busy_s, until_s = 0.0, -math.inf
    for delivery in sorted(deliveries, key=lambda d: d.began_s):
        ended_s = delivery.began_s + delivery.read_s + delivery.verify_s
        busy_s += max(0.0, ended_s - max(delivery.began_s, until_s))
        until_s = max(until_s, ended_s)
    return busy_s

"""What a load did: bytes and seconds per rung and per phase. Measures nothing itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hearth.store.climb import Delivery
from hearth.types import Rung


@dataclass(frozen=True, slots=True)
class RungUse:
    """`seconds` is from the first byte asked of the rung to its last byte here, readers side by side."""

    num_chunks: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LoadRecord:
    """All times count from the beginning of the load."""

    model: str
    num_bytes: int  #: that reached the device
    rungs: Mapping[Rung, RungUse]
    read_s: float  #: summed over readers
    verify_s: float  #: summed over readers
    wait_s: float  #: with nothing to copy, because the next chunk was not in host memory yet
    first_layer_s: float  #: until the first layer could run
    total_s: float
    num_failures: int  #: places or answers that were no good; others made up for them


@dataclass(slots=True)
class Tally:
    """A record in the making. Mutable; written by the thread of one load."""

    began_s: float
    num_bytes: int = 0
    wait_s: float = 0.0
    first_layer_s: float | None = None
    num_host_chunks: int = 0
    num_host_bytes: int = 0
    deliveries: list[Delivery] = field(default_factory=list)

    def took(self, delivery: Delivery | None, num_bytes: int) -> None:
        if delivery is not None:
            self.deliveries.append(delivery)
        else:
            self.num_host_chunks += 1
            self.num_host_bytes += num_bytes

    def record(self, model: str, now_s: float) -> LoadRecord:
        total_s = now_s - self.began_s
        rungs = {
            rung: _use_of([d for d in self.deliveries if d.rung is rung]) for rung in (Rung.DISK, Rung.OBJECT)
        }
        rungs[Rung.HOST] = RungUse(self.num_host_chunks, self.num_host_bytes, total_s - self.wait_s)
        return LoadRecord(
            model=model,
            num_bytes=self.num_bytes,
            rungs={rung: use for rung, use in rungs.items() if use.num_chunks},
            read_s=sum(d.read_s for d in self.deliveries),
            verify_s=sum(d.verify_s for d in self.deliveries),
            wait_s=self.wait_s,
            first_layer_s=total_s if self.first_layer_s is None else self.first_layer_s,
            total_s=total_s,
            num_failures=sum(d.num_failures for d in self.deliveries),
        )


def _use_of(deliveries: list[Delivery]) -> RungUse:
    if not deliveries:
        return RungUse(0, 0, 0.0)
    began_s = min(d.began_s for d in deliveries)
    ended_s = max(d.began_s + d.read_s + d.verify_s for d in deliveries)
    return RungUse(len(deliveries), sum(d.num_bytes for d in deliveries), ended_s - began_s)

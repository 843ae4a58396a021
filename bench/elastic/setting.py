"""Settings that the parts of `bench.elastic` share: how large everything is, what an answer looks like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bench.elastic.stage import Arm


@dataclass(frozen=True, slots=True)
class Batch:
    num_requests: int
    num_rounds: int  #: short runs need more of them


@dataclass(frozen=True, slots=True)
class Surge:
    """A load beyond what KV can hold."""

    factor: float  #: requests of a wave over those that fit
    num_waves: int
    #: Before each wave weights of other models fill the memory, and growing has to take them.
    is_pressed: bool


@dataclass(frozen=True, slots=True)
class Scale:
    batches: tuple[Batch, ...]
    prompt_tokens: int
    new_tokens: int
    arms: tuple[Arm, ...]  #: that the throughput is measured of
    num_fitting: int  #: sequences that the KV of the saturated runs has room for
    surges: tuple[Surge, ...]
    num_surge_rounds: int
    gaps_batch: int  #: whose gaps between tokens get a row

    @property
    def seq_tokens(self) -> int:
        return self.prompt_tokens + self.new_tokens


@dataclass(frozen=True, slots=True)
class Aim:
    measure: str
    measured: float
    aim: str
    met: bool

    @staticmethod
    def least(measure: str, measured: float, limit: float) -> Aim:
        return Aim(measure, measured, f"at least {limit:g}", measured >= limit)


@dataclass(frozen=True, slots=True)
class Part:
    """The findings of one question."""

    aims: list[Aim]
    rows: list[dict[str, object]]  #: of the table in the documents
    details: Mapping[str, object]

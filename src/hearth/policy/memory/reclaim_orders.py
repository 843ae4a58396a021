"""The orders by which memory on a worker is reallocated.

A decision takes several orders, each of which depends on the outcome of the one before. So a decision is a
generator: it yields one order at a time and is sent the outcome, a number of blocks or bytes. `carry_out`
runs it, on a worker and in a simulation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass

from hearth.core.types import AdapterId, ModelId, SamplingTable


@dataclass(frozen=True, slots=True)
class GrowKv:
    """Give a model blocks of KV out of free memory. Outcome: how many."""

    model: ModelId
    num_blocks: int
    ahead_blocks: int  #: that should lie ready for the next call, if memory is free


@dataclass(frozen=True, slots=True)
class ClearKv:
    """Take an extent of KV from a model. Outcome: its blocks, or 0 if not possible."""

    model: ModelId
    extent: range
    may_preempt: bool  #: running requests may lose their blocks, and be computed again; and if so,
    keeps_floor: bool  #: only those beyond what the model is promised in its turn
    may_forget: bool  #: cached prefixes in the extent may be lost


@dataclass(frozen=True, slots=True)
class TakeWeights:
    """Take weights of retained models, then of warm, then of paused ones, the cheapest first.

    Outcome: bytes freed.
    """

    num_bytes: int
    below_s_per_byte: float = math.inf  #: only models whose reload cost is less


@dataclass(frozen=True, slots=True)
class TakeWorkspaces:
    """Take the workspace bytes that only retained, warm and paused models need. Outcome: bytes freed."""


@dataclass(frozen=True, slots=True)
class PlaceTable:
    """Give a model a table out of free memory. Outcome: its bytes, or 0 if memory is short.

    A table in the pool that has become too small leaves it first, with its contents.
    """

    model: ModelId
    table: SamplingTable
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SpillTable:
    model: ModelId
    table: SamplingTable


@dataclass(frozen=True, slots=True)
class DropTable:
    model: ModelId
    table: SamplingTable


@dataclass(frozen=True, slots=True)
class PlaceAdapter:
    """Give an adapter its pieces out of free memory. Outcome: its bytes, or 0 if memory is short."""

    adapter: AdapterId
    sizes: tuple[int, ...]  #: of its pieces, in bytes
    owed_bytes: int  #: that have to be free even then


@dataclass(frozen=True, slots=True)
class DropAdapter:
    """Take back the pieces of an idle adapter. Outcome: bytes freed.

    May be 0 although another adapter has room then: adapters share pages.
    """

    adapter: AdapterId


@dataclass(frozen=True, slots=True)
class AskForKv:
    """Ask the other members of a pipeline for so many blocks in all. Outcome: 0, as they answer later."""

    model: ModelId
    num_blocks: int
    needed_blocks: int  #: of these: for the others only free memory is taken


@dataclass(frozen=True, slots=True)
class AskKvBack:
    """Ask the first member of a pipeline for the blocks beyond so many. Outcome: 0, as they come later."""

    model: ModelId
    num_blocks: int
    is_promised: bool  #: to another model: requests of this one have to give way


ReclaimOrder = (
    GrowKv
    | ClearKv
    | AskForKv
    | AskKvBack
    | TakeWeights
    | TakeWorkspaces
    | PlaceTable
    | SpillTable
    | DropTable
    | PlaceAdapter
    | DropAdapter
)
#: Yields orders, is sent what came of each, and returns what came of all of them.
Orders = Generator[ReclaimOrder, int, int]


def carry_out(orders: Orders, act: Callable[[ReclaimOrder], int]) -> int:
    """Let `act` carry out all orders; return the result. Stops if `act` raises."""
    with closing(orders):
        try:
            order = next(orders)
            while True:
                order = orders.send(act(order))
        except StopIteration as end:
            total: int = end.value
            return total

"""The orders by which memory changes hands on a worker. Decides nothing, and carries out none itself.

A decision takes several orders, and each depends on what came of the one before. So whoever decides is a
generator: it yields one order at a time and is sent the outcome, a number of blocks or of bytes. `carry_out`
runs it, for a worker as for a simulator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass

from hearth.core.types import AdapterId, ModelId, SamplingTable


@dataclass(frozen=True, slots=True)
class GrowKv:
    """Give a model blocks of KV out of free memory. The outcome: how many blocks it got."""

    model: ModelId
    num_blocks: int
    ahead_blocks: int  #: that should lie ready for the next call, if memory is free


@dataclass(frozen=True, slots=True)
class ClearKv:
    """Take an extent of KV back from a model. The outcome: its blocks, or 0 where that was not possible."""

    model: ModelId
    extent: range
    may_preempt: bool  #: running requests may lose their blocks, and be computed again; and if so,
    keeps_floor: bool  #: only those beyond what the model is promised in its turn
    may_forget: bool  #: cached prefixes in the extent may be lost


@dataclass(frozen=True, slots=True)
class TakeWeights:
    """Take weights of retained models, then of warm, then of paused ones, of each the cheapest first.

    The outcome: how many bytes came free.
    """

    num_bytes: int
    below_s_per_byte: float = math.inf  #: only models whose reload cost is less


@dataclass(frozen=True, slots=True)
class TakeWorkspaces:
    """Take the workspace bytes that only retained, warm and paused models need. Outcome: bytes freed.

    For pools without fixed addresses; in the others all models share one workspace.
    """


@dataclass(frozen=True, slots=True)
class PlaceTable:
    """Give a model a table out of free memory. The outcome: its bytes, or 0 where that does not suffice.

    A table that lies in the pool and has become too small leaves it first, with what it holds.
    """

    model: ModelId
    table: SamplingTable
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SpillTable:
    """Have a table lie outside of the pool, with what it holds. The outcome: how many bytes came free."""

    model: ModelId
    table: SamplingTable


@dataclass(frozen=True, slots=True)
class DropTable:
    """Take back the memory of a table that nobody needs. The outcome: how many bytes came free."""

    model: ModelId
    table: SamplingTable


@dataclass(frozen=True, slots=True)
class PlaceAdapter:
    """Give an adapter its pieces out of free memory. The outcome: its bytes, or 0 where that is short."""

    adapter: AdapterId
    sizes: tuple[int, ...]  #: of its pieces, in bytes
    owed_bytes: int  #: that have to be free even then


@dataclass(frozen=True, slots=True)
class DropAdapter:
    """Take back the pieces of an idle adapter. The outcome: how many bytes came free.

    That may be none though others of its kind have room then: several adapters lie on one page.
    """

    adapter: AdapterId


ReclaimOrder = (
    GrowKv
    | ClearKv
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
    """Have `act` carry out all orders; return what came of them. What `act` raises ends it."""
    with closing(orders):
        try:
            order = next(orders)
            while True:
                order = orders.send(act(order))
        except StopIteration as end:
            total: int = end.value
            return total

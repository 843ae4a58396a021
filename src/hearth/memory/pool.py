"""Device memory as whoever hosts models asks for it: one pool for weights, KV and tables of all of them.

A pool keeps books of its own, and no reading of the device is ever asked again. It places, maps and moves; it
never decides that somebody has to go: its caller makes room first, in the order

    free memory, KV that nobody reads, idle adapters, weights of retained models, of warm ones, of paused
    ones, KV of paused models, KV of running requests

and says with `EvictionTerms` whose weights may be taken, and at which price. Two pools do this: mapped pages
(`memory/vmm.py`), where any free page fits anywhere, and one contiguous arena (`memory/arena.py`), where
tensors have to be moved together now and then.

One thread, that of the steps, calls all methods but `prepare`, `prepare_rest` and `prepare_pieces`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hearth.core.types import AdapterId, ChunkId, Digest, Hold, ModelId, SamplingTable
from hearth.memory.pages import Mark
from hearth.memory.piece_book import PiecePlan
from hearth.models.layout import ByteRange, Layout
from hearth.models.weights import TensorPlace


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes and layouts of a model, as far as a pool has to know them."""

    digest: Digest  #: of its manifest: another one means other bytes
    stored: Layout  #: as its bytes lie in the file
    served: Layout  #: as it is computed; another one only where it is widened, on a CPU
    chunk_bytes: int
    chunks: tuple[ChunkId, ...]  #: of the stored bytes: what is equal may be shared
    workspace_bytes: int
    tables_bytes: int  #: of what its engine always has besides
    block_bytes: int  #: of KV
    max_blocks: int  #: KV never has more, the sink included
    #: Of its addresses, where those are kept, the same on all workers; None: its digest decides.
    slot: int | None = None


@dataclass(frozen=True, slots=True)
class EvictionTerms:
    """Terms on which weights of a model may be taken when somebody needs room."""

    hold: Hold  #: only what is retained, warm or paused is ever taken
    cost_s_per_byte: float  #: the reload cost of one byte; among equally held models the cheapest goes first
    is_loading: bool  #: its bytes are being written: they are neither taken nor moved nor shared
    #: A step of it is in flight: whoever gets its weights waits for what the device has queued.
    is_computing: bool = False


@dataclass(frozen=True, slots=True)
class PieceRun:
    """Pieces of an adapter that lie one behind the other.

    Whoever brings their bytes needs no tensor, and one of each takes longer to make than their places.
    """

    address: int
    sizes: tuple[int, ...]  #: of the pieces, between which nothing lies
    #: Returns memory of uint8, of so many bytes from an address on.
    memory_at: Callable[[int, int], torch.Tensor]

    def split(self) -> Sequence[torch.Tensor]:
        """Return the memory of each piece."""
        return self.memory_at(self.address, sum(self.sizes)).split_with_sizes(list(self.sizes))


def piece_runs(
    plan: PiecePlan, sizes: Sequence[int], base: int, memory_at: Callable[[int, int], torch.Tensor]
) -> list[PieceRun]:
    """Return pieces of these sizes in their places, which are behind `base`. `memory_at`: see `PieceRun`."""
    if plan.sizes != tuple(sizes):  # between two of them may lie what they were rounded up by
        return [
            PieceRun(base + part.begin, (size,), memory_at)
            for part, size in zip(plan.parts, sizes, strict=True)
        ]
    return [
        PieceRun(base + stretch.begin, plan.sizes[stretch.first : stretch.end], memory_at)
        for stretch in plan.stretches
    ]


@dataclass(frozen=True, slots=True)
class Gap:
    """Stored bytes that a model lacks, and where they go."""

    part: ByteRange
    destination: torch.Tensor  #: uint8, of that length


@dataclass(frozen=True, slots=True)
class Space:
    """A model's memory. What it has not got yet holds arbitrary bits, or must not be touched at all."""

    places: Mapping[str, TensorPlace]  #: of every tensor, as served
    #: These two and the sink must not be touched before `prepare_rest` has returned.
    workspace: torch.Tensor  #: uint8; arbitrary bits between two steps; another one each time it is placed
    tables: torch.Tensor  #: uint8; arbitrary bits when the model is placed, and its own until it is retired
    #: uint8. Block `b` lies at `b * block_bytes`; those that the pool has not given must not be touched.
    kv: torch.Tensor
    sink: int  #: the block that takes the writes of padded rows; it is there from the beginning
    #: In the order of the file, none overlapping another, as are the parts below.
    gaps: tuple[Gap, ...]
    #: Stored bytes that must not be touched, written or read, before `prepare` has returned for them.
    parts: tuple[ByteRange, ...]


@dataclass(frozen=True, slots=True)
class Holding:
    """Memory of one model in a pool."""

    model: ModelId
    weights_bytes: int  #: that are there, of `total_bytes`; shared ones count for each who has them
    total_bytes: int
    stored_bytes: int  #: what `weights_bytes` take in the file, which is less where they were widened
    shared_bytes: int  #: of `weights_bytes`, those that another model has as well
    kv_bytes: int  #: the sink and what is ready to be given included
    tables_bytes: int  #: of its engine, and those of its sampler while requests need them


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """A pool at one moment.

    Free, workspace, lost, pieces and all holdings, shared bytes once, make up the budget.
    """

    budget_bytes: int
    free_bytes: int
    workspace_bytes: int
    lost_bytes: int  #: to rounding and fragments: in nobody's hands and of no use
    holdings: tuple[Holding, ...]  #: in the order of their names
    pieces_bytes: Mapping[AdapterId, int]  #: of each adapter that has pieces, in the order of their ids
    moved_bytes: int  #: so far, to make place; 0 for ever where pages are mapped
    fallbacks: Mapping[str, int]  #: what had to be done otherwise than wished, by name


class Pool(Protocol):
    """Device memory of one worker. Mutable; see above for the threads."""

    @property
    def budget_bytes(self) -> int: ...

    @property
    def free_bytes(self) -> int:
        """Bytes that nobody has, at no cost worth mentioning."""

    @property
    def keeps_addresses(self) -> bool:
        """True if a model's space is the same, however often its bytes leave and come back, unless
        `take_displaced` names it."""

    @property
    def page_bytes(self) -> int:
        """Pieces of adapters share pages of so many bytes; 1: they lie anywhere."""

    def missing_bytes(self, model: ModelId, shape: Shape) -> int:
        """Return the bytes that have to come free before a model can be placed; 0: it can."""

    def place(self, model: ModelId, shape: Shape) -> Space:
        """Return memory for all weights, for workspace, tables and the sink; KV is grown later.

        What is there of the model stays, unless its digest is another one. Weights of others may be moved.
        Raises DeviceError where `missing_bytes` is not 0.
        """

    def place_front(self, model: ModelId, shape: Shape, num_bytes: int) -> Space | None:
        """Return memory for the first so many of the weights that a model lacks, out of free memory, and for
        nothing else; fewer where that is short. None: nothing is missing or free, or only whole models are
        placed here. Its gaps are filled and given back as those of `place`, before which they must be."""

    def prepare(self, model: ModelId, part: ByteRange) -> None:
        """Make a part of a space, or a piece of one, ready to be written. Any one thread may call it."""

    def prepare_rest(self, model: ModelId) -> None:
        """Make workspace, tables and sink of a placed model ready to be used. Any thread may call it; of a
        model that was dropped or retired meanwhile nothing is done."""

    def load_ended(self, model: ModelId, *, is_whole: bool) -> None:
        """Note that a load has ended: all gaps are filled, or, unless `is_whole`, given back."""

    def resident_bytes(self, model: ModelId) -> int:
        """Return about how many stored bytes of a model's weights have memory, at no cost worth mentioning;
        those of a load under way count. 0 for one that is unknown."""

    def is_incomplete(self, model: ModelId) -> bool:
        """True if a model is known, and some of its weights or its workspace have no memory, so that it must
        be placed again before it computes. Costs as little."""

    def take_weights(
        self,
        num_bytes: int,
        most: Hold,
        below_s_per_byte: float = math.inf,
        *,
        with_workspaces: bool = False,
    ) -> int:
        """Take at least so many bytes of weights from models held at most so, cheapest first; returns how
        many came free, which is less only where there are no more. No step begins with any of them; one may
        be in flight, as the terms say.

        `below_s_per_byte`: only those whose reload cost is less. `with_workspaces`: if weights do not
        suffice, also the bytes that only the workspaces of these models need; `is_incomplete` says whose.
        """

    def grow(self, model: ModelId, num_blocks: int, ahead_blocks: int = 0) -> list[range]:
        """Give a placed model up to so many blocks of KV more, out of free memory. Each range is an extent.

        Some more than asked where an extent has more; fewer where memory is short. `ahead_blocks` more are
        made ready in the background, if memory is free, for the next call. Weights may be moved.
        """

    def growth_bytes(self, model: ModelId, num_blocks: int) -> int:
        """Return the free memory that so many blocks of KV more would take, which are a placed model's."""

    def shrink(self, model: ModelId, extent: range) -> None:
        """Take back an extent that `extents` names. The device may still be computing with it: whoever gets
        the memory next waits for what is queued now."""

    def extents(self, model: ModelId) -> list[range]:
        """Return extents that could be taken back next, best first; at most one with mapped pages."""

    def place_table(self, model: ModelId, table: SamplingTable, num_bytes: int) -> torch.Tensor | None:
        """Give a placed model memory (uint8) for a table of its sampler that it has not got, if any is free.

        None where that does not suffice, and nothing has changed. It holds arbitrary bits, and never moves;
        weights may be moved for it.
        """

    def drop_table(self, model: ModelId, table: SamplingTable) -> None:
        """Take back the memory of a table. The device may still be computing with it, as in `shrink`."""

    def place_pieces(
        self, owner: AdapterId, sizes: Sequence[int], spare_bytes: int = 0
    ) -> list[PieceRun] | None:
        """Give an adapter that has no pieces one of each size, in this order, out of free memory, but nothing
        of the last `spare_bytes` of it.

        None where that does not suffice, and nothing has changed. They begin at multiples of 256 bytes, never
        move, and must not be touched before `prepare_pieces` has returned; weights may be moved for them.
        """

    def prepare_pieces(self, owner: AdapterId) -> None:
        """Make the pieces of an adapter ready to be written. Any one thread may call it."""

    def mark(self) -> Mark | None:
        """Return a mark behind all that is queued now; None: it would make no difference to this pool."""

    def drop_pieces(self, owner: AdapterId, last_read: Mark | None = None) -> None:
        """Take back all pieces of an adapter that nobody writes. The device may still read them, as in
        `shrink`: whatever is queued may, or by `last_read` only what is before that."""

    def retire(self, model: ModelId) -> None:
        """Take back KV, tables, workspace and sink of a model that computes no more; its weights stay. One
        that is unknown has nothing."""

    def drop(self, model: ModelId) -> None:
        """Have all of a model go that nobody computes with or loads. One that is unknown has nothing."""

    def take_moved(self) -> dict[ModelId, Mapping[str, TensorPlace]]:
        """Return the placed models whose tensors have moved since the last call, and where they are now."""

    def take_displaced(self) -> list[ModelId]:
        """Return models that had nothing left, and whose addresses went to another that was placed since the
        last call: what was built there must not be used again."""

    def usage(self) -> PoolUsage:
        """Return who has which memory."""


EvictionTermsOf = Callable[[ModelId], EvictionTerms]

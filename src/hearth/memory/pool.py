"""Device memory of one worker: one pool for the weights, KV, tables and adapters of all its models.

A pool places, maps and moves. Its caller decides when to evict and frees memory in the order

    free memory, unused cached KV, idle adapters, weights of retained models, of warm ones, of paused ones,
    KV of paused models, KV of running requests

and gives `EvictionTerms` for each model. There are two pools: mapped pages (`memory/vmm.py`), where any free
page fits anywhere, and one contiguous arena (`memory/arena.py`), which moves tensors to fill gaps. A pool
goes by its own books and never by the device's reading of free memory.

The step thread calls all methods but `Pool.prepare`, `Pool.prepare_rest` and `PieceMemory.prepare`.
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
    digest: Digest  #: of the manifest
    stored: Layout  #: of the bytes in the file
    served: Layout  #: of the bytes that are computed with; differs from `stored` only if widened, on a CPU
    chunk_bytes: int
    chunks: tuple[ChunkId, ...]  #: of the stored bytes: equal chunks may share memory
    workspace_bytes: int
    tables_bytes: int  #: of the tables that the engine always has
    block_bytes: int  #: of KV
    max_blocks: int  #: of KV, the sink included
    #: Slot of its addresses, the same on all workers; None: derived from the digest.
    slot: int | None = None


@dataclass(frozen=True, slots=True)
class EvictionTerms:
    hold: Hold  #: weights are taken only from retained, warm and paused models
    cost_s_per_byte: (
        float  #: reload cost of one byte; among models with the same hold the cheapest goes first
    )
    is_loading: bool  #: its bytes are being written: they are not taken, moved or shared
    #: A step of it is in flight: the next owner of its weights waits for the work that is queued now.
    is_computing: bool = False


EvictionTermsOf = Callable[[ModelId], EvictionTerms]


@dataclass(frozen=True, slots=True)
class PieceRun:
    """Adjacent pieces of an adapter. A tensor per piece takes longer to create than to place."""

    address: int
    sizes: tuple[int, ...]  #: of the pieces, in order, without padding
    #: Returns uint8 memory, given an address and a number of bytes.
    memory_at: Callable[[int, int], torch.Tensor]

    def split(self) -> Sequence[torch.Tensor]:
        return self.memory_at(self.address, sum(self.sizes)).split_with_sizes(list(self.sizes))


def piece_runs(
    plan: PiecePlan, sizes: Sequence[int], base: int, memory_at: Callable[[int, int], torch.Tensor]
) -> list[PieceRun]:
    if plan.sizes != tuple(sizes):  # sizes were rounded up: there may be padding between pieces
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
    part: ByteRange
    destination: torch.Tensor  #: uint8, of that length


@dataclass(frozen=True, slots=True)
class Space:
    """A model's memory. Parts that are not loaded hold arbitrary bits or are not mapped."""

    places: Mapping[str, TensorPlace]  #: of every tensor, as served
    #: Workspace, tables and sink must not be touched before `prepare_rest` has returned.
    workspace: torch.Tensor  #: uint8; arbitrary bits between two steps; may change with each `place`
    tables: torch.Tensor  #: uint8; arbitrary bits when the model is placed; kept until it is retired
    kv: (
        torch.Tensor
    )  #: uint8; block `b` begins at `b * block_bytes`; only blocks given by `grow` may be touched
    sink: int  #: block that takes the writes of padded rows; present from the beginning
    gaps: tuple[Gap, ...]  #: in file order, disjoint
    #: Stored bytes that must not be touched before `prepare` has returned for them. In file order, disjoint.
    parts: tuple[ByteRange, ...]


@dataclass(frozen=True, slots=True)
class Holding:
    model: ModelId
    weights_bytes: int  #: present, of `total_bytes`; shared bytes count for each model that has them
    total_bytes: int
    stored_bytes: int  #: size of `weights_bytes` in the file, which is less where they were widened
    shared_bytes: int  #: of `weights_bytes`, those that another model has as well
    kv_bytes: int  #: including the sink and pages that are mapped ahead
    tables_bytes: int  #: of the engine, and of its sampler while requests need them


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """A pool at one moment. Free, workspace, lost, pieces and holdings, shared bytes once, are the budget."""

    budget_bytes: int
    free_bytes: int
    workspace_bytes: int
    lost_bytes: int  #: to rounding and fragmentation
    holdings: tuple[Holding, ...]  #: in the order of their names
    pieces_bytes: Mapping[AdapterId, int]  #: by adapter, in the order of their ids
    moved_bytes: int  #: in total, to make room; always 0 with mapped pages
    fallbacks: Mapping[str, int]  #: count by name


class KvMemory(Protocol):
    """KV blocks of placed models. A range of blocks that comes and goes as one is an extent."""

    def grow(
        self, model: ModelId, num_blocks: int, ahead_blocks: int = 0, max_blocks: int | None = None
    ) -> list[range]:
        """Give a model about `num_blocks` more out of free memory; return them as extents.

        Rounded up to whole extents, up to `max_blocks` with the sink (None: those of its shape); fewer if
        memory is short. `ahead_blocks` more are made ready in the background for the next call, if memory is
        free. May move weights.
        """

    def growth_bytes(self, model: ModelId, num_blocks: int) -> int: ...

    def shrink(self, model: ModelId, extent: range) -> None:
        """Take back an extent that `extents` returned, or the tail of one. The device may still be computing
        with it: the next owner of the memory waits for the work that is queued now."""

    def extents(self, model: ModelId) -> list[range]:
        """Return the extents that can be taken back next, best first; at most one with mapped pages."""


class TableMemory(Protocol):
    """Tables of samplers, which models have only while requests need them."""

    def place(self, model: ModelId, table: SamplingTable, num_bytes: int) -> torch.Tensor | None:
        """Give a placed model uint8 memory for a table that it does not have, out of free memory.

        It holds arbitrary bits and never moves. May move weights. None: memory is short, nothing changed.
        """

    def drop(self, model: ModelId, table: SamplingTable) -> None:
        """Take back a table. The device may still be computing with it, as in `KvMemory.shrink`."""


class PieceMemory(Protocol):
    """Memory of adapters, each of which has many small pieces."""

    @property
    def page_bytes(self) -> int:
        """Size of the pages that pieces share; 1: they lie anywhere."""

    def place(self, owner: AdapterId, sizes: Sequence[int], spare_bytes: int = 0) -> list[PieceRun] | None:
        """Give an adapter without pieces one of each size, in this order, out of free memory except
        `spare_bytes`.

        Pieces begin at multiples of 256 bytes, never move, and must not be touched before `prepare` has
        returned. May move weights. None: memory is short, nothing changed.
        """

    def prepare(self, owner: AdapterId) -> None:
        """Make the pieces of an adapter writable. Any one thread may call it."""

    def mark(self) -> Mark | None:
        """Return an event after all queued work, for `drop`; None: this pool needs none."""

    def drop(self, owner: AdapterId, last_read: Mark | None = None) -> None:
        """Take back all pieces of an adapter that is not being written. The device may still read them: the
        next owner waits for the work before `last_read`, or for all that is queued now."""


class Pool(Protocol):
    """Device memory of one worker. Mutable; see the module for its threads."""

    budget_bytes: int
    #: The space of a model stays the same while its bytes leave and return, unless `take_displaced` names it.
    keeps_addresses: bool
    kv: KvMemory
    tables: TableMemory
    pieces: PieceMemory

    @property
    def free_bytes(self) -> int: ...

    def missing_bytes(self, model: ModelId, shape: Shape) -> int:
        """Return the bytes that must be freed before a model can be placed; 0: it can be placed now."""

    def place(self, model: ModelId, shape: Shape) -> Space:
        """Return memory for all weights, workspace, tables and the sink; KV grows later.

        Keeps the bytes that are present, unless their digest differs. May move weights of other models.
        Raises DeviceError if `missing_bytes` is not 0.
        """

    def place_front(self, model: ModelId, shape: Shape, num_bytes: int) -> Space | None:
        """Return memory for the first `num_bytes` of the weights that a model lacks, out of free memory and
        for nothing else; fewer if memory is short. None: nothing is missing or free, or this pool only places
        whole models. Its gaps must be filled or given back before `place`."""

    def prepare(self, model: ModelId, part: ByteRange) -> None:
        """Make a part of a space writable. Any one thread may call it."""

    def prepare_rest(self, model: ModelId) -> None:
        """Make workspace, tables and sink of a placed model usable. Any thread may call it; does nothing if
        the model was dropped or retired meanwhile."""

    def load_ended(self, model: ModelId, *, is_whole: bool) -> None:
        """Record the end of a load: all gaps are filled or, unless `is_whole`, given back."""

    def resident_bytes(self, model: ModelId) -> int:
        """Return about how many stored bytes of a model's weights have memory, loading ones included; 0 if
        the model is unknown. Cheap."""

    def is_incomplete(self, model: ModelId) -> bool:
        """True if a known model lacks weights or its workspace, so that it must be placed before it computes.
        Cheap."""

    def take_weights(self, num_bytes: int, most: Hold, below_s_per_byte: float = math.inf) -> int:
        """Take at least `num_bytes` of weights from models with a hold up to `most` and a reload cost under
        `below_s_per_byte`, cheapest first. Returns how many bytes came free: fewer if there are no more.

        No step may begin with any of these models; one may be in flight, as the terms say.
        """

    def take_workspaces(self, most: Hold) -> int:
        """Take the workspace bytes that only models with a hold up to `most` need; return how many came free.
        `is_incomplete` names the models that lost theirs."""

    def retire(self, model: ModelId) -> None:
        """Take back KV, tables, workspace and sink of a model that no longer computes; its weights stay.
        Ignores unknown models."""

    def drop(self, model: ModelId) -> None:
        """Take back all memory of a model that neither computes nor loads. Ignores unknown models."""

    def take_moved(self) -> dict[ModelId, Mapping[str, TensorPlace]]:
        """Return the placed models whose tensors moved since the last call, and where they are now."""

    def take_displaced(self) -> list[ModelId]:
        """Return the models whose addresses went to another model since the last call. Nothing that was built
        for those addresses may be used again."""

    def usage(self) -> PoolUsage: ...

"""Who has what in an arena, with the bytes that follow the books. Finds no place and takes from nobody."""

from __future__ import annotations

import mmap
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch

from hearth.core.types import AdapterId, ModelId
from hearth.memory.arena_tenant import ArenaTenant
from hearth.memory.contiguous import ContiguousMemory
from hearth.memory.piece_book import PiecePlan, piece_bytes
from hearth.memory.pool import PieceRun, Shape, piece_runs
from hearth.memory.regions import COMMON, Owner, RegionList, Span, Use
from hearth.models.layout import ByteRange
from hearth.policy.memory.packing import Move


@dataclass(frozen=True, slots=True)
class ArenaPieces:
    """Pieces of one adapter, which lie behind each other in one region."""

    owner: Owner
    sizes: tuple[int, ...]
    #: On CUDA: what was queued when they were placed. It may still read or move what was there.
    queued: torch.cuda.Event | None
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_bytes", sum(map(piece_bytes, self.sizes)))


class ArenaBooks:
    """Mutable; written only by the pool that owns it, by one thread."""

    def __init__(self, memory: ContiguousMemory) -> None:
        self._memory = memory
        self.regions = RegionList(len(memory.bytes))
        #: Models that have anything here.
        self.tenants: dict[ModelId, ArenaTenant] = {}
        self.moved: set[ModelId] = set()  #: placed models whose tensors have moved, until they are told
        self.moved_bytes = 0
        self.pieces: dict[AdapterId, ArenaPieces] = {}
        self._numbers = count()  #: of regions of pieces
        #: Bytes that have come free and whose pages the system has not got yet: somebody may be about to get
        #: them, and pages that come back have to be cleared first, which takes longer than filling them.
        self.freed: list[ByteRange] = []

    @property
    def memory(self) -> torch.Tensor:
        return self._memory.bytes

    def tenant(self, model: ModelId, shape: Shape) -> ArenaTenant:
        """Return the model's own if its bytes are the same, else a new one in its place."""
        tenant = self.tenants.get(model)
        if tenant is None or tenant.is_other(shape):
            self.remove(model)
            tenant = self.tenants[model] = ArenaTenant(model, shape)
        tenant.shape = shape
        return tenant

    def regions_for(self, model: ModelId, shape: Shape) -> RegionList:
        """Return the regions without what the model will lose because its bytes are other ones now."""
        tenant = self.tenants.get(model)
        if tenant is None or not tenant.is_other(shape):
            return self.regions
        regions = self.regions.copy()
        for owner in _owned(regions, model):
            regions.give(owner)
        return regions

    def take(self, tenant: ArenaTenant, span: Span) -> None:
        """Give a model that is being placed one of its regions, or all a larger common workspace."""
        if span.owner == COMMON and COMMON in self.regions:
            self.regions.give(COMMON)  # to have it with what is behind it
        self.regions.take(span)
        match span.owner:
            case Owner(use=Use.TENSOR, index=index):
                tenant.coming.add(index)
            case Owner(use=Use.KV, index=sink):
                tenant.extents[sink] = range(sink, sink + 1)

    def next_pieces_owner(self) -> Owner:
        return Owner(ModelId(""), Use.PIECES, next(self._numbers))

    def take_pieces(self, adapter: AdapterId, span: Span, sizes: Sequence[int]) -> list[PieceRun]:
        """Give an adapter a region for its pieces; return them."""
        assert adapter not in self.pieces, f"adapter {adapter} has its pieces"
        assert span.owner is not None, f"{span} is for nobody"
        self.regions.take(span)
        self.pieces[adapter] = ArenaPieces(span.owner, tuple(sizes), self.queued_now())
        base = self.memory.data_ptr()
        plan = PiecePlan.in_a_row(sizes, span.begin)
        return piece_runs(
            *(plan, sizes, base),
            lambda address, num_bytes: self.memory[address - base : address - base + num_bytes],
        )

    def queued_now(self) -> torch.cuda.Event | None:
        """Return a mark behind what the device has queued; None: it does everything at once."""
        if not self.memory.is_cuda:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch leaves it untyped
        event.record(torch.cuda.current_stream(self.memory.device))
        return event

    def give(self, owner: Owner, *, is_wanted: bool = False) -> None:
        """Have a region be free. `is_wanted`: for another who is to be placed, so that its pages may stay."""
        span = self.regions.give(owner)
        self._note_freed(span.begin, span.end)
        if not is_wanted:
            self.give_back()

    def move(self, moves: Iterable[Move]) -> None:
        """Have tensors elsewhere, with their bytes."""
        for move in moves:
            owner = move.key
            assert isinstance(owner, Owner), f"{move} is of nobody"
            self._memory.move(move.source, move.target, move.num_bytes)
            self.regions.give(owner)
            self.regions.take(Span(move.target, move.target + move.num_bytes, owner))
            self.moved_bytes += move.num_bytes
            if self.tenants[owner.model].extents:
                self.moved.add(owner.model)
            self._note_freed(move.source, move.source + move.num_bytes)

    def remove(self, model: ModelId) -> None:
        """Have all regions of a model be free. One that is unknown has none."""
        if model in self.tenants:
            for owner in _owned(self.regions, model):
                self.give(owner)
            del self.tenants[model]
            self.moved.discard(model)

    def forget_if_empty(self, model: ModelId) -> None:
        tenant = self.tenants[model]
        if not tenant.extents and not tenant.tensors(self.regions):
            del self.tenants[model]

    def take_workspaces(self, tenants: Collection[ArenaTenant]) -> None:
        """Take the workspaces of models that do not compute, unless models that do need the same bytes."""
        others = self.tenants.keys() - {tenant.model for tenant in tenants}
        kept_bytes = max((self.tenants[model].common_bytes(self.regions) for model in others), default=0)
        for tenant in tenants:
            if tenant.has_own_workspace(self.regions):
                self.give(tenant.own_workspace, is_wanted=True)
                tenant.has_workspace = False
            elif tenant.common_bytes(self.regions) > kept_bytes:
                tenant.has_workspace = False
        self.cut_common()

    def cut_common(self) -> None:
        """Give back what no placed model uses of the common workspace."""
        if COMMON not in self.regions:
            return
        num_bytes, end = self._common_bytes(), self.regions.span_of(COMMON).end
        if num_bytes < end:
            self.regions.give(COMMON)
            if num_bytes:
                self.regions.take(Span(0, num_bytes, COMMON))
            self._note_freed(num_bytes, end)
            self.give_back()

    def check(self) -> None:
        """Raise unless the regions are sound and are those of the tenants. For tests."""
        self.regions.check()
        owners = set()
        for model, tenant in self.tenants.items():
            assert model == tenant.model, f"`{tenant.model}` is known as `{model}`"
            owners |= tenant.checked_owners(self.regions)
        common_bytes = self._common_bytes()
        if common_bytes:
            assert self.regions.span_of(COMMON) == Span(0, common_bytes, COMMON), f"{common_bytes=}"
            owners.add(COMMON)
        owners |= {pieces.owner for pieces in self.pieces.values()}
        assert owners == {span.owner for span in self.regions if span.owner}, "a region is nobody's"
        assert all(self.tenants[model].extents for model in self.moved), f"{self.moved=}"

    def give_back(self) -> None:
        """Give the system the pages of all that has come free and that nobody got since.

        A page that two regions share goes with the one that comes free last.
        """
        freed, self.freed = self.freed, []
        for part in freed:
            for free in self.regions.free_within(part.begin, part.end):
                begin = max(part.begin - mmap.PAGESIZE, free.begin)
                self._memory.give_back(begin, min(part.end + mmap.PAGESIZE, free.end))

    def _note_freed(self, begin: int, end: int) -> None:
        self.freed.append(ByteRange(begin, end))
        for free in self.regions.free_within(begin, end):
            self._memory.freed(max(begin, free.begin), min(end, free.end))

    def _common_bytes(self) -> int:
        return max((tenant.common_bytes(self.regions) for tenant in self.tenants.values()), default=0)


def _owned(regions: RegionList, model: ModelId) -> list[Owner]:
    return [span.owner for span in regions if span.owner is not None and span.owner.model == model]

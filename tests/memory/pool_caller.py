"""A pool, its caller, and what the caller knows to be in memory, for tests of any pool. Has no tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import numpy as np
import pytest
import torch

from hearth.core.errors import DeviceError
from hearth.core.types import AdapterId, Digest, Hold, ModelId, SamplingTable
from hearth.memory.pool import EvictionTerms, Gap, Holding, Pool, Shape, Space
from hearth.models.layout import ALIGNMENT_BYTES, ByteRange, Layout, TensorSpec
from hearth.models.weights import TensorPlace
from hearth.store.format.manifest import Chunk

_TENSOR_BYTES = 3 * ALIGNMENT_BYTES


class Audited(Pool, Protocol):
    """A pool that can say whether its books are sound."""

    def check(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Sample:
    """A model to be hosted, and its bytes."""

    shape: Shape
    content: torch.Tensor


def sample(
    chunks: Sequence[int],
    chunk_bytes: int,
    *,
    digest: int,
    cut_bytes: int = 0,
    workspace_bytes: int = ALIGNMENT_BYTES,
    tables_bytes: int = 0,
    block_bytes: int = ALIGNMENT_BYTES,
    max_blocks: int = 1000,
) -> Sample:
    """One whose chunks are made of these seeds, so equal seeds are equal chunks; the end is cut off."""
    parts = [np.random.default_rng(seed).integers(0, 255, chunk_bytes, np.uint8) for seed in chunks]
    content = torch.from_numpy(np.concatenate(parts))[: len(parts) * chunk_bytes - cut_bytes]
    begins = range(0, len(content), _TENSOR_BYTES)
    specs = tuple(
        TensorSpec(f"t{begin}", "int8", (min(_TENSOR_BYTES, len(content) - begin) - begin % 7,), begin)
        for begin in begins
    )
    layout = Layout(specs, len(content))
    sizes = [chunk_bytes] * (len(chunks) - 1) + [chunk_bytes - cut_bytes]
    ids = [Chunk(Digest(f"{seed:064x}"), size).id for seed, size in zip(chunks, sizes, strict=True)]
    return Sample(
        Shape(
            digest=Digest(f"{digest:064x}"),
            stored=layout,
            served=layout,
            chunk_bytes=chunk_bytes,
            chunks=tuple(ids),
            workspace_bytes=workspace_bytes,
            tables_bytes=tables_bytes,
            block_bytes=block_bytes,
            max_blocks=max_blocks,
        ),
        content,
    )


def part_of(whole: Sample, has: Callable[[int], bool]) -> Sample:
    """A stage of a model: its tensors at the offsets that `has` accepts."""
    layout = whole.shape.stored
    part = Layout(tuple(spec for spec in layout.tensors if has(spec.offset)), layout.num_bytes, is_part=True)
    return Sample(replace(whole.shape, stored=part, served=part), whole.content)


def wipe(freed: torch.Tensor) -> None:
    """What a pool does with memory that comes free, so that nobody can live on what was there before."""
    freed.fill_(0xFF)


class Holds:
    """What the caller of a pool says of its models: mutable, for tests to write."""

    def __init__(self) -> None:
        self.by_model: dict[ModelId, Hold] = {}
        self.loading: set[ModelId] = set()
        self.computing: set[ModelId] = set()

    def eviction_terms(self, model: ModelId) -> EvictionTerms:
        hold = self.by_model.get(model, Hold.RETAINED)
        is_loading, is_computing = model in self.loading, model in self.computing
        return EvictionTerms(hold, 1.0 + len(model), is_loading, is_computing)


class PoolCaller:
    """Each method is one thing that a worker does with its pool. What is given up is 0xFF in memory."""

    def __init__(self, pool: Audited, holds: Holds, samples: Mapping[ModelId, Sample]) -> None:
        self.pool, self.holds, self.samples = pool, holds, dict(samples)
        self.places: dict[ModelId, Mapping[str, TensorPlace]] = {}  #: of placed models
        self.spaces: dict[ModelId, Space] = {}
        self.blocks: dict[ModelId, set[int]] = {}  #: that placed models were given, without the sink
        self.tables: dict[ModelId, dict[SamplingTable, torch.Tensor]] = {}  #: of placed models
        self.pieces: dict[AdapterId, list[torch.Tensor]] = {}
        self.gaps: dict[ModelId, list[Gap]] = {}  #: of models that are being loaded, still to be filled

    def host(self, model: ModelId, *, is_whole: bool = True) -> bool:
        if not self.begin(model):
            return False
        self.end(model, is_whole=is_whole)
        return True

    def begin(self, model: ModelId) -> bool:
        """Place a model, and have it be loading; False: there is no room even when others give way."""
        if model in self.gaps:
            return False
        held = self.holds.by_model.get(model, Hold.RETAINED)
        self.holds.by_model[model] = Hold.BUSY
        shape = self.samples[model].shape
        while lack_bytes := self.pool.missing_bytes(model, shape):
            before = self.pool.usage()
            with pytest.raises(DeviceError):
                self.pool.place(model, shape)
            assert self.pool.usage() == before
            if not self.take(lack_bytes, Hold.WARM) and not self._clear_one(model):
                self.holds.by_model[model] = held
                return False
        space = self.pool.place(model, shape)
        self.pool.prepare_rest(model)
        self._placed(model, space)
        return True

    def end(self, model: ModelId, *, is_whole: bool) -> None:
        """Fill the gaps, or all but the last, and say so."""
        if model in self.gaps:
            self.fill(model, self.gaps[model] if is_whole else self.gaps[model][:-1])
            for part in self.spaces[model].parts:
                self.pool.prepare(model, part)
            del self.gaps[model]
            self.pool.load_ended(model, is_whole=is_whole)
            self.holds.loading.discard(model)

    def front(self, model: ModelId, num_bytes: int, *, is_whole: bool = True) -> int:
        """Load the first so many bytes that a model lacks, or give them back; returns how many have come."""
        shape = self.samples[model].shape
        if model in self.gaps or (space := self.pool.place_front(model, shape, num_bytes)) is None:
            return 0
        before = self.holdings()
        gap_bytes = sum(len(gap.destination) for gap in space.gaps)
        assert gap_bytes > 0, f"{space.gaps}"
        if is_whole:
            self.fill(model, space.gaps)
            for part in space.parts:
                self.pool.prepare(model, part)
        self.pool.load_ended(model, is_whole=is_whole)
        for other, holding in self.holdings().items():
            assert other == model or holding == before[other], f"`{other}` gave way to `{model}`"
        return gap_bytes if is_whole else 0

    def fill(self, model: ModelId, gaps: Sequence[Gap]) -> None:
        """What the thread of a load does."""
        content, step = self.samples[model].content, self.samples[model].shape.chunk_bytes
        for gap in gaps:
            for begin in range(gap.part.begin, gap.part.end, step):
                part = ByteRange(begin, min(begin + step, gap.part.end))
                self.pool.prepare(model, part)
                where = slice(part.begin - gap.part.begin, part.end - gap.part.begin)
                gap.destination[where] = content[part.begin : part.end].to(gap.destination.device)

    def take(self, num_bytes: int, most: Hold) -> int:
        before = self.holdings()
        freed_bytes = self.pool.take_weights(num_bytes, most)
        if freed_bytes < num_bytes:
            freed_bytes += self.pool.take_workspaces(most)
        after = self.holdings()
        lost = {model for model in before if self._weights(before, model) > self._weights(after, model)}
        terms_by_model = {model: self.holds.eviction_terms(model) for model in before}
        for model in lost:
            assert terms_by_model[model].hold <= min(most, Hold.PAUSED), f"{model} {terms_by_model[model]}"
            assert not terms_by_model[model].is_loading, f"{model} is loading"
        most_lost = max((terms_by_model[model].hold for model in lost), default=Hold.RETAINED)
        for model, terms in terms_by_model.items():
            is_spared = terms.hold < most_lost and not terms.is_loading
            assert not is_spared or not self._weights(after, model), f"{lost} before {model}"
        if freed_bytes < num_bytes:
            assert not any(
                self._weights(after, model)
                for model, terms in terms_by_model.items()
                if terms.hold <= min(most, Hold.PAUSED) and not terms.is_loading
            ), "there was more to take"
        return freed_bytes

    def grow(
        self, model: ModelId, num_blocks: int, ahead_blocks: int = 0, max_blocks: int | None = None
    ) -> None:
        if model not in self.spaces:
            return
        blocks, space = self.blocks[model], self.spaces[model]
        num_before = len(blocks)
        extents = self.pool.kv.grow(model, num_blocks, ahead_blocks, max_blocks)
        given = [block for extent in extents for block in extent]
        assert len(set(given)) == len(given), f"given twice: {extents}"
        assert not blocks & {*given, space.sink}, f"had them before: {extents}"
        assert space.sink not in given
        blocks.update(given)
        assert max_blocks is None or len(blocks) < max(max_blocks, 1 + num_before), "with the sink"
        assert len(blocks) < self.samples[model].shape.max_blocks
        for block in given:
            self._block(model, block).fill_(self._pattern(model, block))

    def shrink(self, model: ModelId, most_blocks: int | None = None) -> bool:
        """Take back an extent, or up to `most_blocks` of one; False: there is none."""
        if model not in self.spaces or not (extents := self.pool.kv.extents(model)):
            return False
        extent = extents[0]
        tail = extent if most_blocks is None else extent[-most_blocks:]
        assert set(tail) <= self.blocks[model], f"{extents}"
        self.blocks[model] -= set(tail)
        free_bytes = self.pool.usage().free_bytes
        self.pool.kv.shrink(model, tail)
        assert self.pool.usage().free_bytes > free_bytes or tail != extent
        return True

    def place_table(self, model: ModelId, table: SamplingTable, num_bytes: int) -> bool:
        """Place a table that a placed model has not got; False: it is no such model, or memory is short."""
        if model not in self.spaces or table in self.tables[model]:
            return False
        before = self.pool.usage()
        memory = self.pool.tables.place(model, table, num_bytes)
        if memory is None:
            assert self.pool.usage() == before
            return False
        assert (memory.dtype, len(memory)) == (torch.uint8, num_bytes)
        assert memory.data_ptr() % ALIGNMENT_BYTES == 0
        self.tables[model][table] = memory.fill_(self._table_pattern(model, table))
        return True

    def drop_table(self, model: ModelId, table: SamplingTable) -> None:
        if model in self.spaces and table in self.tables[model]:
            num_bytes = len(self.tables[model].pop(table))
            free_bytes = self.pool.usage().free_bytes
            self.pool.tables.drop(model, table)
            assert self.pool.usage().free_bytes >= free_bytes + num_bytes

    def place_pieces(self, adapter: AdapterId, sizes: Sequence[int], spare_bytes: int = 0) -> bool:
        """Place the pieces of an adapter that has none; False: it has, or memory is short."""
        if adapter in self.pieces:
            return False
        before = self.pool.usage()
        runs = self.pool.pieces.place(adapter, sizes, spare_bytes)
        if runs is None:
            assert self.pool.usage() == before
            return False
        pieces = [piece for run in runs for piece in run.split()]
        assert [(piece.dtype, len(piece)) for piece in pieces] == [(torch.uint8, size) for size in sizes]
        assert all(piece.data_ptr() % 256 == 0 for piece in pieces)
        self.pool.pieces.prepare(adapter)
        for index, piece in enumerate(pieces):
            piece.fill_(self._piece_pattern(adapter, index))
        self.pieces[adapter] = pieces
        return True

    def drop_pieces(self, adapter: AdapterId) -> None:
        if self.pieces.pop(adapter, None) is not None:
            free_bytes = self.pool.usage().free_bytes
            self.pool.pieces.drop(adapter)
            assert self.pool.usage().free_bytes >= free_bytes

    def retire(self, model: ModelId) -> None:
        if model in self.spaces and model not in self.gaps:
            self.holds.by_model[model] = Hold.RETAINED
            self._forget(model)
            self.pool.retire(model)

    def drop(self, model: ModelId) -> None:
        if model not in self.gaps:
            self._forget(model)
            self.pool.drop(model)
            assert model not in self.holdings()

    def holdings(self) -> dict[ModelId, Holding]:
        return {one.model: one for one in self.pool.usage().holdings}

    def check(self) -> None:
        """Everything that has to be there is intact, and every byte is in one hand."""
        self.places.update(self.pool.take_moved())
        self.pool.check()
        self._check_usage()
        for model, space in self.spaces.items():
            if not self.pool.is_incomplete(model):
                space.workspace.fill_(0xEE)
            self._block(model, space.sink).fill_(0xDD)
        holdings = self.holdings()
        for model, holding in holdings.items():
            self._check_resident_bytes(model, holding)
        for model in self.spaces:
            holding = holdings[model]
            if model not in self.gaps and holding.weights_bytes == holding.total_bytes:
                self._check_content(model, ())
            for block in self.blocks[model]:
                assert (self._block(model, block) == self._pattern(model, block)).all(), f"{model} {block}"
            for table, memory in self.tables[model].items():
                assert (memory == self._table_pattern(model, table)).all(), f"{model} {table}"
            engine_tables = self.spaces[model].tables
            assert (engine_tables == self._engine_pattern(model)).all(), f"{model}"
            own_bytes = len(engine_tables) + sum(map(len, self.tables[model].values()))
            assert own_bytes <= holding.tables_bytes, f"{own_bytes=} {holding}"
            assert bool(own_bytes) == bool(holding.tables_bytes), f"{own_bytes=} {holding}"
        for adapter, pieces in self.pieces.items():
            for index, piece in enumerate(pieces):
                assert (piece == self._piece_pattern(adapter, index)).all(), f"{adapter} {index}"

    def _placed(self, model: ModelId, space: Space) -> None:
        assert (space.tables.dtype, len(space.tables)) == (
            torch.uint8,
            self.samples[model].shape.tables_bytes,
        )
        assert space.tables.data_ptr() % ALIGNMENT_BYTES == 0
        if model not in self.spaces:
            self.blocks[model], self.tables[model] = set(), {}
            space.tables.fill_(self._engine_pattern(model))
        self.spaces[model], self.places[model] = space, space.places
        for before, after in pairwise(space.gaps):
            assert before.part.end <= after.part.begin, f"{space.gaps}"
        for gap in space.gaps:
            assert len(gap.destination) == gap.part.end - gap.part.begin > 0, f"{gap.part}"
        self._check_content(model, space.parts)
        self.gaps[model] = list(space.gaps)
        self.holds.loading.add(model)

    def _check_content(self, model: ModelId, parts: Sequence[ByteRange]) -> None:
        """All tensors, as far as they are not in a part that was not prepared yet."""
        content = self.samples[model].content
        is_there = torch.ones(len(content), dtype=torch.bool)
        for part in parts:
            is_there[part.begin : part.end] = False
        for spec in self.samples[model].shape.served.tensors:
            place, where = self.places[model][spec.name], slice(spec.offset, spec.offset + spec.nbytes)
            found = place.base[place.offset : place.offset + spec.nbytes]
            for run in _runs(is_there[where]):  # the rest may not be mapped
                expected = content[where][run.start : run.stop]
                assert torch.equal(found[run.start : run.stop].cpu(), expected), f"`{model}` at {spec} {run}"

    def _check_usage(self) -> None:
        usage = self.pool.usage()
        assert usage.budget_bytes == self.pool.budget_bytes
        holdings_bytes = sum(one.weights_bytes + one.kv_bytes + one.tables_bytes for one in usage.holdings)
        shared_bytes = sum(one.shared_bytes for one in usage.holdings)
        total_bytes = usage.free_bytes + usage.workspace_bytes + usage.lost_bytes + holdings_bytes
        total_bytes += sum(usage.pieces_bytes.values())
        assert usage.pieces_bytes.keys() == self.pieces.keys(), f"{usage}"
        for adapter, pieces in self.pieces.items():
            own_bytes = sum(map(len, pieces))
            assert 0 <= usage.pieces_bytes[adapter] - own_bytes < 256 * len(pieces), f"{adapter} {usage}"
        assert usage.budget_bytes <= total_bytes <= usage.budget_bytes + shared_bytes, f"{usage}"
        assert list(usage.holdings) == sorted(usage.holdings, key=lambda one: one.model)

    def _clear_one(self, kept: ModelId) -> bool:
        """Shrink or vacate another model, or say that none of them has anything to give."""
        for model in sorted(self.spaces):
            if model != kept and model not in self.gaps:
                if not self.shrink(model):
                    self.retire(model)
                return True
        return False

    def _forget(self, model: ModelId) -> None:
        for books in (self.spaces, self.places, self.blocks, self.tables):
            books.pop(model, None)

    def _block(self, model: ModelId, block: int) -> torch.Tensor:
        num_bytes = self.samples[model].shape.block_bytes
        return self.spaces[model].kv[block * num_bytes : (block + 1) * num_bytes]

    @staticmethod
    def _pattern(model: ModelId, block: int) -> int:
        return (sum(map(ord, model)) * 31 + block) % 200

    @staticmethod
    def _engine_pattern(model: ModelId) -> int:
        return 250 - sum(map(ord, model)) % 50

    @staticmethod
    def _table_pattern(model: ModelId, table: SamplingTable) -> int:
        return 200 + (sum(map(ord, model + table)) % 50)

    @staticmethod
    def _piece_pattern(adapter: AdapterId, index: int) -> int:
        return (ord(adapter[0]) * 7 + index) % 250

    def _check_resident_bytes(self, model: ModelId, holding: Holding) -> None:
        """A page that is not full may count as one."""
        resident_bytes = self.pool.resident_bytes(model)
        num_bytes = self.samples[model].shape.chunk_bytes
        assert 0 <= resident_bytes - holding.stored_bytes < num_bytes, f"{model} {resident_bytes=} {holding}"
        is_whole = holding.weights_bytes == holding.total_bytes
        assert not is_whole or resident_bytes == holding.stored_bytes, f"{model} {resident_bytes=} {holding}"

    @staticmethod
    def _weights(holdings: Mapping[ModelId, Holding], model: ModelId) -> int:
        return holdings[model].weights_bytes if model in holdings else 0


def _runs(is_there: torch.Tensor) -> list[range]:
    """Where it is true without a break."""
    edges = np.flatnonzero(np.diff(np.pad(is_there.numpy(), 1).astype(np.int8))).tolist()
    return [range(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True)]

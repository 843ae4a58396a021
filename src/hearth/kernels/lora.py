"""Adds what adapters say to the output of a projection, for rows of many adapters and of none at once.

    rows of a step:      |  B  |  -  |  A  |  B  |  -  |  B  |  A  |  ...     letters: adapters, -: none
    order:               |  2  |  6  |  0  |  3  |  5  |  ...                 rows that have one, by adapter
    tiles of the order:  |  A, 2 rows  |  B, 3 rows  |  ...                   at most so many rows of one

An adapter multiplies twice, `a @ x` of few numbers and `b` times these, so there are two launches for all of
a projection: the first shrinks the rows of each tile and leaves the result in scratch, in parts where many
programs share one sum; the second adds up the parts, expands them and adds that to the output.

Lists of rows and tiles lie on the device at fixed addresses, and a tile names the table of its adapter, from
which a program takes addresses and ranks. So one captured launch serves any adapters, of any ranks, and no
rank is filled up to another. A tile's factors are cut into chunks, and each program has as many of all chunks
as any other, wherever tiles begin and end in them. A tile of one row, which most are while requests decode,
is multiplied without tensor cores: its factors pass once, from memory through registers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from hearth.kernels.jit import (
    HAS_TRITON,
    cdiv,
    launch,
    next_power_of_2,
    num_processors,
    runs_triton,
    tl,
    triton,
)
from hearth.kernels.overlap import wait_for_inputs
from hearth.sizes import (
    ADAPTER_SPLITS,
    ADAPTER_TILE_FIELDS,
    ADAPTER_TILE_ROWS,
    MAX_SHRUNK_RANK,
    TARGET_FIELDS,
)


def _for_kernels(value: int) -> int:
    """Return a number as kernels may read it."""
    return tl.constexpr(value) if HAS_TRITON else value


#: Where a target's numbers lie in an adapter's table, behind the address of `a`: for each of three slices the
#: address of its `b`, its rank, where its outputs begin, how many they are; then all ranks together.
_B, _RANK, _BEGIN, _SIZE, _TOTAL = map(_for_kernels, (1, 4, 7, 10, 13))
_FIELDS, _TILE_FIELDS = map(_for_kernels, (TARGET_FIELDS, ADAPTER_TILE_FIELDS))


@dataclass(frozen=True, slots=True)
class SliceFactor:
    """The second factor of some outputs of a projection."""

    begin: int  #: the first of them
    b: torch.Tensor  #: [outputs, rank]


@dataclass(frozen=True, slots=True)
class TargetFactors:
    """The factors by which an adapter changes a projection."""

    a: torch.Tensor  #: [ranks of all slices, inputs]
    slices: tuple[SliceFactor, ...]  #: in order

    @property
    def fields(self) -> list[int]:
        """The numbers by which kernels find the factors."""
        missing = [0] * (3 - len(self.slices))
        ranks = [one.b.shape[1] for one in self.slices]
        columns = (
            [one.b.data_ptr() for one in self.slices],
            ranks,
            [one.begin for one in self.slices],
            [len(one.b) for one in self.slices],
        )
        fields = [self.a.data_ptr(), *(value for column in columns for value in (*column, *missing))]
        fields.append(sum(ranks))
        return fields + [0] * (TARGET_FIELDS - len(fields))


@dataclass(frozen=True, slots=True)
class AdapterGroup:
    """The rows of a step that have the same adapter."""

    factors: Mapping[int, TargetFactors]  #: by target
    address: int  #: of its table on the device, [targets, TARGET_FIELDS]
    rows: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Which rows of a step have which adapter."""

    groups: tuple[AdapterGroup, ...]  #: for the torch reference
    #: The same for kernels. int64 [rows]: those that have an adapter, by adapter.
    order: torch.Tensor
    #: int64 [capacity, ADAPTER_TILE_FIELDS]: the address of a table, the first of its rows in the order, and
    #: how many of them there are.
    tiles: torch.Tensor
    count: torch.Tensor  #: int64 [1]: how many tiles there are in this step
    tile_rows: int  #: of a whole tile

    @staticmethod
    def of(groups: Sequence[AdapterGroup], tile_rows: int, device: torch.device | str) -> AdapterRows:
        """Lists with memory of their own, just as long as they must be."""
        order, tiles = cut_adapter_tiles(groups, tile_rows)
        found = torch.from_numpy(tiles).to(device).view(-1, ADAPTER_TILE_FIELDS)
        count = torch.tensor([len(found)], device=device)
        return AdapterRows(tuple(groups), torch.from_numpy(order).to(device), found, count, tile_rows)


def cut_adapter_tiles(
    groups: Sequence[AdapterGroup], tile_rows: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the rows of all groups behind each other, and the fields of all tiles."""
    tiles: list[int] = []
    begin = 0
    for group in groups:
        end = begin + len(group.rows)
        for first in range(begin, end, tile_rows):
            tiles += (group.address, first, min(tile_rows, end - first))
        begin = end
    rows = [group.rows for group in groups]
    return np.concatenate([*rows, np.empty(0, np.int64)]), np.array(tiles, np.int64)


def add_adapters(
    x: torch.Tensor, rows: AdapterRows, target: int, *, scratch: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Add `b @ (a @ x)` to the rows of `out` whose adapter has factors for `target`, as its tables count.

    x is [rows, inputs] and out [rows, outputs]. `scratch` (float32, flat) is for the CUDA path: it has room
    for MAX_SHRUNK_RANK numbers a row, and that ADAPTER_SPLITS times where tiles are of few rows.
    """
    if runs_triton(x):
        assert scratch is not None, "the CUDA path needs scratch"
        add_adapters_triton(x, rows, target, scratch=scratch, out=out)
    else:
        add_adapters_reference(x, rows, target, out=out)


def add_adapters_reference(x: torch.Tensor, rows: AdapterRows, target: int, *, out: torch.Tensor) -> None:
    for group in rows.groups:
        factors = group.factors.get(target)
        if factors is None:
            continue
        at = torch.from_numpy(group.rows).to(x.device)
        shrunk = x[at] @ factors.a.to(x.dtype).t()
        ranks = [one.b.shape[1] for one in factors.slices]
        for one, part in zip(factors.slices, shrunk.split(ranks, 1), strict=True):
            outputs = slice(one.begin, one.begin + len(one.b))
            out[at, outputs] += part @ one.b.to(x.dtype).t()


@dataclass(frozen=True, slots=True)
class AdapterBlocks:
    """How much a program multiplies at a time, and how many programs there are."""

    #: Of tiles of several rows: inputs, outputs and ranks.
    inputs: int
    outputs: int
    ranks: int
    row_inputs: int  #: of tiles of one row: inputs of each chunk of the first factor
    row_chunk: int  #: likewise: numbers of a chunk of either factor
    num_splits: int  #: parts of a row's inputs, which are summed up apart
    programs_per_processor: int
    num_warps: int
    num_stages: int


#: Inputs of one row that a program reads at a time.
_ROW_INPUTS = 1024


@lru_cache(maxsize=64)
def adapter_blocks(k: int, tile_rows: int, dtype: torch.dtype) -> AdapterBlocks:
    """Return the blocks for rows of so many inputs, in tiles of few rows (decode) or of many (prompts)."""
    is_small, is_float32 = tile_rows <= ADAPTER_TILE_ROWS, dtype == torch.float32
    return AdapterBlocks(
        inputs=64 if is_float32 else 128,
        outputs=64 if is_float32 else 128,
        ranks=16 if is_small or is_float32 else 64,
        row_inputs=_ROW_INPUTS,
        row_chunk=8192,
        # A power of two, and none of them shorter than what a program reads at a time.
        num_splits=min(ADAPTER_SPLITS, next_power_of_2(k // _ROW_INPUTS + 1) // 2 or 1) if is_small else 1,
        programs_per_processor=4,
        num_warps=4,
        num_stages=2 if is_float32 else 3,
    )


#: Tiles whose ranks a program reads at a time.
_BLOCK_TILES = 128


def add_adapters_triton(
    x: torch.Tensor,
    rows: AdapterRows,
    target: int,
    *,
    scratch: torch.Tensor,
    out: torch.Tensor,
    blocks: AdapterBlocks | None = None,
) -> None:
    blocks = adapter_blocks(x.shape[1], rows.tile_rows, x.dtype) if blocks is None else blocks
    num_needed = blocks.num_splits * len(x) * MAX_SHRUNK_RANK
    assert scratch.numel() >= num_needed, f"{scratch.numel()=} {num_needed=} for {x.shape=}"
    if len(rows.tiles):
        shrink_triton(x, rows, target, blocks, out=scratch)
        expand_triton(scratch, rows, target, blocks, out=out)


def shrink_triton(
    x: torch.Tensor, rows: AdapterRows, target: int, blocks: AdapterBlocks, *, out: torch.Tensor
) -> None:
    """Leave `a @ x` in `out`, in parts that add up to it: [splits, rows of the order, MAX_SHRUNK_RANK]."""
    num_rows, k = x.shape
    assert x.is_contiguous(), f"{x.stride()=}"
    # Parts of whole blocks, so that each begins where a row is aligned.
    share = cdiv(cdiv(k, blocks.num_splits), blocks.inputs) * blocks.inputs
    launch(
        _shrink_kernel,
        (blocks.programs_per_processor * num_processors(),),
        out,
        x,
        rows.order,
        rows.tiles,
        rows.count,
        target,
        num_rows,
        k,
        share,
        SPLITS=blocks.num_splits,
        STRIDE=MAX_SHRUNK_RANK,
        BLOCK_T=_BLOCK_TILES,
        BLOCK_M=rows.tile_rows,
        BLOCK_R=blocks.ranks,
        BLOCK_K=blocks.inputs,
        ROW_R=blocks.row_chunk // blocks.row_inputs,
        ROW_K=blocks.row_inputs,
        EVEN_K=k % blocks.inputs == 0,
        STAGES=blocks.num_stages,
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
    )


def expand_triton(
    shrunk: torch.Tensor, rows: AdapterRows, target: int, blocks: AdapterBlocks, *, out: torch.Tensor
) -> None:
    """Add `b` times what `shrink_triton` has left to the rows of `out`."""
    num_rows, n = out.shape
    assert out.is_contiguous(), f"{out.stride()=}"
    launch(
        _expand_kernel,
        (blocks.programs_per_processor * num_processors(),),
        out,
        shrunk,
        rows.order,
        rows.tiles,
        rows.count,
        target,
        num_rows,
        n,
        SPLITS=blocks.num_splits,
        STRIDE=MAX_SHRUNK_RANK,
        BLOCK_T=_BLOCK_TILES,
        BLOCK_M=rows.tile_rows,
        BLOCK_R=blocks.ranks,
        BLOCK_N=blocks.outputs,
        ROW_CHUNK=blocks.row_chunk,
        num_warps=blocks.num_warps,
        num_stages=1,  # there is little to loop over, and shared memory is better left to other programs
    )


# A step's lists, the tables of adapters and their factors are in place before its first kernels have ended,
# and those do not overlap with others. So they are read before the wait, which is for x, scratch and out.


@triton.jit(do_not_specialize=["target", "num_rows"])
def _shrink_kernel(
    scratch,
    x,
    order,
    tiles,
    count,
    target,
    num_rows,
    k,
    share,
    SPLITS: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROW_R: tl.constexpr,
    ROW_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    num_tiles = tl.load(count).to(tl.int32)
    total = 0
    for at in range(0, num_tiles, BLOCK_T):
        total += tl.sum(_shrink_chunks(tiles, at, num_tiles, target, SPLITS, BLOCK_T, BLOCK_R, ROW_R), 0)
    own = tl.cdiv(total, tl.num_programs(0))
    chunk = tl.program_id(0) * own
    last = tl.minimum(chunk + own, total)
    # The tile that the first chunk is of, and how many chunks lie before that tile.
    tile, before, passed = 0, 0, 0
    if (chunk < last) & (num_tiles > 1):
        for at in range(0, num_tiles, BLOCK_T):
            chunks = _shrink_chunks(tiles, at, num_tiles, target, SPLITS, BLOCK_T, BLOCK_R, ROW_R)
            is_before = (at + tl.arange(0, BLOCK_T) < num_tiles) & (passed + tl.cumsum(chunks, 0) <= chunk)
            tile += tl.sum(is_before.to(tl.int32), 0)
            before += tl.sum(tl.where(is_before, chunks, 0), 0)
            passed += tl.sum(chunks, 0)
    wait_for_inputs(OVERLAPS)

    while chunk < last:
        begin = tl.load(tiles + tile * _TILE_FIELDS + 1)
        num = tl.load(tiles + tile * _TILE_FIELDS + 2).to(tl.int32)
        fields = tl.load(tiles + tile * _TILE_FIELDS).to(tl.pointer_type(tl.int64)) + target * _FIELDS
        a = tl.load(fields).to(tl.pointer_type(x.dtype.element_ty))
        a = tl.multiple_of(a, 16)
        rank = tl.load(fields + _TOTAL).to(tl.int32)
        num_chunks = _num_blocks(rank, num, ROW_R, BLOCK_R) * SPLITS
        stop = tl.minimum(before + num_chunks, last)
        for at in range(chunk - before, stop - before):
            block, split = at // SPLITS, at % SPLITS
            first, end = split * share, tl.minimum((split + 1) * share, k)
            left = scratch + (split * num_rows + begin) * STRIDE
            if num == 1:
                row_x = x + tl.load(order + begin) * k
                _shrink_row(left, row_x, a, block, rank, first, end, k, ROW_R, ROW_K)
            else:
                member = tl.arange(0, BLOCK_M)
                in_rows = member < num
                rows_x = x + tl.load(order + begin + member, in_rows, other=0)[:, None] * k
                rows_left = left + member[:, None] * STRIDE
                _shrink_tile(
                    rows_left,
                    rows_x,
                    a,
                    block,
                    rank,
                    first,
                    end,
                    k,
                    in_rows,
                    BLOCK_M,
                    BLOCK_R,
                    BLOCK_K,
                    EVEN_K,
                    STAGES,
                )
        chunk = stop
        before += num_chunks
        tile += 1


@triton.jit
def _shrink_chunks(
    tiles,
    at,
    num_tiles,
    target,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ROW_R: tl.constexpr,
):
    """How many chunks each of the tiles from `at` on has."""
    tile = at + tl.arange(0, BLOCK_T)
    is_tile = tile < num_tiles
    num = tl.load(tiles + tile * _TILE_FIELDS + 2, is_tile, other=0).to(tl.int32)
    table = tl.load(tiles + tile * _TILE_FIELDS, is_tile, other=0).to(tl.pointer_type(tl.int64))
    rank = tl.load(table + target * _FIELDS + _TOTAL, is_tile, other=0).to(tl.int32)
    return _num_blocks(rank, num, ROW_R, BLOCK_R) * SPLITS


@triton.jit
def _shrink_row(left, x, a, block, rank, first, end, k, ROW_R: tl.constexpr, ROW_K: tl.constexpr):
    """Leave some ranks of one row, of its inputs from `first` to `end`."""
    ranks = block * ROW_R + tl.arange(0, ROW_R)
    in_rank = ranks < rank
    acc = tl.zeros([ROW_R, ROW_K], tl.float32)
    for at in range(first, end, ROW_K):
        inputs = at + tl.arange(0, ROW_K)
        in_k = inputs < end
        at_a = a + ranks[:, None] * k + inputs[None, :]
        factor = tl.load(at_a, in_rank[:, None] & in_k[None, :], other=0.0, eviction_policy="evict_first")
        part = tl.load(x + inputs, in_k, other=0.0)
        acc += factor.to(tl.float32) * part.to(tl.float32)[None, :]
    tl.store(left + ranks, tl.sum(acc, 1), in_rank)


@triton.jit
def _shrink_tile(
    left,
    x,
    a,
    block,
    rank,
    first,
    end,
    k,
    in_rows,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Leave some ranks of the rows of a tile, of their inputs from `first` to `end`."""
    ranks = block * BLOCK_R + tl.arange(0, BLOCK_R)
    in_rank = ranks < rank
    inputs = tl.arange(0, BLOCK_K)
    at_a = a + ranks[:, None] * k + inputs[None, :]
    at_x = x + inputs[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for at in tl.range(first, end, BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            factor = tl.load(at_a + at, in_rank[:, None], other=0.0)
            part = tl.load(at_x + at, in_rows[:, None], other=0.0)
        else:
            in_k = (inputs < end - at)[None, :]
            factor = tl.load(at_a + at, in_rank[:, None] & in_k, other=0.0)
            part = tl.load(at_x + at, in_rows[:, None] & in_k, other=0.0)
        acc = tl.dot(part, tl.trans(factor), acc, input_precision="ieee")
    tl.store(left + ranks[None, :], acc, in_rows[:, None] & in_rank[None, :])


@triton.jit
def _num_blocks(size, num_rows, OF_ROW: tl.constexpr, OF_TILE: tl.constexpr):
    """How many blocks there are of some size: other ones where a tile has just one row."""
    return tl.where(num_rows == 1, tl.cdiv(size, OF_ROW), tl.cdiv(size, OF_TILE))


@triton.jit(do_not_specialize=["target", "num_rows"])
def _expand_kernel(
    out,
    scratch,
    order,
    tiles,
    count,
    target,
    num_rows,
    n,
    SPLITS: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROW_CHUNK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    num_tiles = tl.load(count).to(tl.int32)
    total = 0
    for at in range(0, num_tiles, BLOCK_T):
        total += tl.sum(_expand_chunks(tiles, at, num_tiles, target, BLOCK_T, BLOCK_N, ROW_CHUNK), 0)
    own = tl.cdiv(total, tl.num_programs(0))
    chunk = tl.program_id(0) * own
    last = tl.minimum(chunk + own, total)
    tile, before, passed = 0, 0, 0
    if (chunk < last) & (num_tiles > 1):
        for at in range(0, num_tiles, BLOCK_T):
            chunks = _expand_chunks(tiles, at, num_tiles, target, BLOCK_T, BLOCK_N, ROW_CHUNK)
            is_before = (at + tl.arange(0, BLOCK_T) < num_tiles) & (passed + tl.cumsum(chunks, 0) <= chunk)
            tile += tl.sum(is_before.to(tl.int32), 0)
            before += tl.sum(tl.where(is_before, chunks, 0), 0)
            passed += tl.sum(chunks, 0)
    wait_for_inputs(OVERLAPS)

    apart = num_rows.to(tl.int64) * STRIDE
    while chunk < last:
        begin = tl.load(tiles + tile * _TILE_FIELDS + 1)
        num = tl.load(tiles + tile * _TILE_FIELDS + 2).to(tl.int32)
        fields = tl.load(tiles + tile * _TILE_FIELDS).to(tl.pointer_type(tl.int64)) + target * _FIELDS
        rank_0 = tl.load(fields + _RANK).to(tl.int32)
        rank_1 = tl.load(fields + _RANK + 1).to(tl.int32)
        rank_2 = tl.load(fields + _RANK + 2).to(tl.int32)
        size_0 = tl.load(fields + _SIZE).to(tl.int32)
        begin_0 = tl.load(fields + _BEGIN).to(tl.int32)
        chunks_0 = _slice_chunks(rank_0, begin_0, size_0, num, BLOCK_N, ROW_CHUNK)
        size_1 = tl.load(fields + _SIZE + 1).to(tl.int32)
        begin_1 = tl.load(fields + _BEGIN + 1).to(tl.int32)
        chunks_1 = _slice_chunks(rank_1, begin_1, size_1, num, BLOCK_N, ROW_CHUNK)
        size_2 = tl.load(fields + _SIZE + 2).to(tl.int32)
        begin_2 = tl.load(fields + _BEGIN + 2).to(tl.int32)
        chunks_2 = _slice_chunks(rank_2, begin_2, size_2, num, BLOCK_N, ROW_CHUNK)
        num_chunks = chunks_0 + chunks_1 + chunks_2
        stop = tl.minimum(before + num_chunks, last)
        for at in range(chunk - before, stop - before):
            is_behind_0 = at >= chunks_0
            is_behind_1 = at >= chunks_0 + chunks_1
            number = is_behind_0.to(tl.int32) + is_behind_1.to(tl.int32)
            block = at - tl.where(is_behind_0, chunks_0, 0) - tl.where(is_behind_1, chunks_1, 0)
            rank = tl.where(is_behind_1, rank_2, tl.where(is_behind_0, rank_1, rank_0))
            before_rank = tl.where(is_behind_0, rank_0, 0) + tl.where(is_behind_1, rank_1, 0)
            left = scratch + begin * STRIDE + before_rank
            b = tl.load(fields + _B + number).to(tl.pointer_type(out.dtype.element_ty))
            b = tl.multiple_of(b, 16)
            to = tl.where(is_behind_1, begin_2, tl.where(is_behind_0, begin_1, begin_0))
            size = tl.where(is_behind_1, size_2, tl.where(is_behind_0, size_1, size_0))
            # What is even is said so that the compiler can see it, which then loads eight numbers at a time.
            is_even = _is_even(rank, to, size)
            even_rank, even_to, even_size = rank // 8 * 8, to // 8 * 8, size // 8 * 8
            if num == 1:
                row = out + tl.load(order + begin) * n
                if not is_even:
                    _expand_row(row + to, b, left, apart, rank, size, block, SPLITS, ROW_CHUNK, 16)
                elif rank <= 8:
                    _expand_row(
                        row + even_to, b, left, apart, even_rank, even_size, block, SPLITS, ROW_CHUNK, 8
                    )
                elif rank <= 16:
                    _expand_row(
                        row + even_to, b, left, apart, even_rank, even_size, block, SPLITS, ROW_CHUNK, 16
                    )
                elif rank <= 32:
                    _expand_row(
                        row + even_to, b, left, apart, even_rank, even_size, block, SPLITS, ROW_CHUNK, 32
                    )
                else:
                    _expand_row(
                        row + even_to, b, left, apart, even_rank, even_size, block, SPLITS, ROW_CHUNK, 64
                    )
            else:
                member = tl.arange(0, BLOCK_M)
                in_rows = member < num
                rows = out + tl.load(order + begin + member, in_rows, other=0)[:, None] * n
                rows_left = left + member[:, None] * STRIDE
                if is_even:
                    _expand_tile(
                        rows + even_to,
                        b,
                        rows_left,
                        apart,
                        even_rank,
                        even_size,
                        block,
                        in_rows,
                        SPLITS,
                        BLOCK_R,
                        BLOCK_N,
                    )
                else:
                    _expand_tile(
                        rows + to, b, rows_left, apart, rank, size, block, in_rows, SPLITS, BLOCK_R, BLOCK_N
                    )
        chunk = stop
        before += num_chunks
        tile += 1


@triton.jit
def _expand_chunks(
    tiles,
    at,
    num_tiles,
    target,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROW_CHUNK: tl.constexpr,
):
    """How many chunks each of the tiles from `at` on has."""
    tile = at + tl.arange(0, BLOCK_T)
    is_tile = tile < num_tiles
    num = tl.load(tiles + tile * _TILE_FIELDS + 2, is_tile, other=0).to(tl.int32)
    table = tl.load(tiles + tile * _TILE_FIELDS, is_tile, other=0).to(tl.pointer_type(tl.int64))
    fields = table + target * _FIELDS
    chunks = tl.zeros([BLOCK_T], tl.int32)
    for number in tl.static_range(3):
        rank = tl.load(fields + _RANK + number, is_tile, other=0).to(tl.int32)
        size = tl.load(fields + _SIZE + number, is_tile, other=0).to(tl.int32)
        begin = tl.load(fields + _BEGIN + number, is_tile, other=0).to(tl.int32)
        chunks += _slice_chunks(rank, begin, size, num, BLOCK_N, ROW_CHUNK)
    return chunks


@triton.jit
def _slice_chunks(rank, begin, size, num, BLOCK_N: tl.constexpr, ROW_CHUNK: tl.constexpr):
    """How many chunks a slice has. Those of a single row have as many outputs as its ranks leave room for."""
    width = tl.where(rank <= 8, 8, tl.where(rank <= 16, 16, tl.where(rank <= 32, 32, 64)))
    width = tl.where(_is_even(rank, begin, size), width, 16)
    return tl.where(num == 1, tl.cdiv(size, ROW_CHUNK // width), tl.cdiv(size, BLOCK_N))


@triton.jit
def _is_even(rank, begin, size):
    return (rank % 8 == 0) & (begin % 8 == 0) & (size % 8 == 0)


@triton.jit
def _expand_row(
    out,
    b,
    left,
    apart,
    rank,
    size,
    block,
    SPLITS: tl.constexpr,
    ROW_CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Add a chunk of a slice to one row."""
    output = block * (ROW_CHUNK // WIDTH) + tl.arange(0, ROW_CHUNK // WIDTH)
    in_slice = output < size
    before = tl.load(out + output, in_slice, other=0.0)
    acc = tl.zeros([ROW_CHUNK // WIDTH, WIDTH], tl.float32)
    split = tl.arange(0, SPLITS)
    for first in range(0, rank, WIDTH):
        ranks = first + tl.arange(0, WIDTH)
        in_rank = ranks < rank
        at_b = b + output[:, None] * rank + ranks[None, :]
        factor = tl.load(at_b, in_slice[:, None] & in_rank[None, :], other=0.0, eviction_policy="evict_first")
        parts = tl.load(left + split[:, None] * apart + ranks[None, :], in_rank[None, :], other=0.0)
        shrunk = tl.sum(parts, 0).to(factor.dtype).to(tl.float32)
        acc += factor.to(tl.float32) * shrunk[None, :]
    after = before.to(tl.float32) + tl.sum(acc, 1)
    tl.store(out + output, after.to(before.dtype), in_slice)


@triton.jit
def _expand_tile(
    out,
    b,
    left,
    apart,
    rank,
    size,
    block,
    in_rows,
    SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add a chunk of a slice to the rows of a tile."""
    output = block * BLOCK_N + tl.arange(0, BLOCK_N)
    in_slice = output < size
    inside = in_rows[:, None] & in_slice[None, :]
    before = tl.load(out + output[None, :], inside, other=0.0)
    acc = before.to(tl.float32)
    for first in range(0, rank, BLOCK_R):
        ranks = first + tl.arange(0, BLOCK_R)
        in_rank = ranks < rank
        factor = tl.load(
            b + output[:, None] * rank + ranks[None, :], in_slice[:, None] & in_rank[None, :], other=0.0
        )
        is_shrunk = in_rows[:, None] & in_rank[None, :]
        shrunk = tl.load(left + ranks[None, :], is_shrunk, other=0.0)
        for split in tl.static_range(1, SPLITS):
            shrunk += tl.load(left + split * apart + ranks[None, :], is_shrunk, other=0.0)
        acc = tl.dot(shrunk.to(factor.dtype), tl.trans(factor), acc, input_precision="ieee")
    tl.store(out + output[None, :], acc.to(before.dtype), inside)

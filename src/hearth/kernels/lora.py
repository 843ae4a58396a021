"""Adds what adapters say to the output of a projection, for rows of many adapters and of none at once.

    rows of a step:      |  B  |  -  |  A  |  B  |  -  |  B  |  A  |  ...     letters: adapters, -: none
    order:               |  2  |  6  |  0  |  3  |  5  |  ...                 rows that have one, by adapter
    tiles of the order:  |  A, 2 rows  |  B, 3 rows  |  ...                   at most so many rows of one

An adapter multiplies twice, `a @ x` of few numbers and `b` times these, so there are two launches for all of
a projection: the first shrinks the rows of each tile and leaves the result in scratch, in parts where many
programs share one sum; the second adds up the parts, expands them and adds that to the output.

Lists of rows and tiles lie on the device at fixed addresses, and a tile names the table of its adapter, from
which a program takes addresses and ranks. So one captured launch serves any adapters, of any ranks, and no
rank is filled up to another. Tiles beyond the count cost next to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hearth.kernels.jit import HAS_TRITON, cdiv, launch, num_processors, runs_triton, tl, triton
from hearth.kernels.overlap import wait_for_inputs
from hearth.sizes import ADAPTER_TILE_FIELDS, MAX_SHRUNK_RANK, TARGET_FIELDS


def _for_kernels(value: int) -> int:
    """Return a number as kernels may read it."""
    return tl.constexpr(value) if HAS_TRITON else value


#: Where a target's numbers lie in an adapter's table, behind the address of `a`: for each of three slices the
#: address of its `b`, its rank, where its outputs begin, where they end; then all ranks together.
_B, _RANK, _BEGIN, _END, _TOTAL = map(_for_kernels, (1, 4, 7, 10, 13))
_FIELDS, _TILE_FIELDS = map(_for_kernels, (TARGET_FIELDS, ADAPTER_TILE_FIELDS))

#: Programs of a launch for each multiprocessor, if there is work for so many.
_PROGRAMS_PER_PROCESSOR = 8


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
            [one.begin + len(one.b) for one in self.slices],
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

    x is [rows, inputs] and out [rows, outputs]. `scratch` (float32, flat, of `MAX_SHRUNK_RANK` numbers a row
    at least) is for the CUDA path.
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
    """How much a program multiplies at a time, and how many programs share a sum."""

    inputs: int
    outputs: int
    num_splits: int
    num_warps: int
    num_stages: int


def adapter_blocks(num_rows: int, tile_rows: int, dtype: torch.dtype) -> AdapterBlocks:
    """Return the blocks for steps of so many rows, padding included."""
    num_splits = 4 if num_rows <= 128 else 1
    if dtype == torch.float32:
        return AdapterBlocks(64, 64, num_splits, num_warps=4, num_stages=2)
    return AdapterBlocks(256 if tile_rows <= 16 else 128, 128, num_splits, num_warps=4, num_stages=3)


#: Ranks that are multiplied at a time.
_BLOCK_R = 16


def add_adapters_triton(
    x: torch.Tensor,
    rows: AdapterRows,
    target: int,
    *,
    scratch: torch.Tensor,
    out: torch.Tensor,
    blocks: AdapterBlocks | None = None,
) -> None:
    num_rows, k = x.shape
    blocks = adapter_blocks(num_rows, rows.tile_rows, x.dtype) if blocks is None else blocks
    num_splits = min(
        blocks.num_splits, cdiv(k, blocks.inputs), scratch.numel() // (num_rows * MAX_SHRUNK_RANK)
    )
    assert num_splits, f"scratch of {scratch.numel()} is too small for {num_rows=}"
    if len(rows.tiles):
        shrink_triton(x, rows, target, num_splits, blocks, out=scratch)
        expand_triton(scratch, rows, target, num_splits, blocks, out=out)


def shrink_triton(
    x: torch.Tensor,
    rows: AdapterRows,
    target: int,
    num_splits: int,
    blocks: AdapterBlocks,
    *,
    out: torch.Tensor,
) -> None:
    """Leave `a @ x` in `out`, in parts that add up to it: [splits, rows of the order, MAX_SHRUNK_RANK]."""
    (num_rows, k), max_tiles = x.shape, len(rows.tiles)
    assert x.is_contiguous(), f"{x.stride()=}"
    num_programs = cdiv(_PROGRAMS_PER_PROCESSOR * num_processors(), max_tiles * num_splits)
    launch(
        _shrink_kernel,
        (max_tiles, min(num_programs, MAX_SHRUNK_RANK // _BLOCK_R), num_splits),
        out,
        x,
        rows.order,
        rows.tiles,
        rows.count,
        target,
        num_rows,
        k,
        STRIDE=MAX_SHRUNK_RANK,
        BLOCK_M=rows.tile_rows,
        BLOCK_R=_BLOCK_R,
        BLOCK_K=blocks.inputs,
        EVEN_K=k % blocks.inputs == 0,
        STAGES=blocks.num_stages,
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
    )


def expand_triton(
    shrunk: torch.Tensor,
    rows: AdapterRows,
    target: int,
    num_splits: int,
    blocks: AdapterBlocks,
    *,
    out: torch.Tensor,
) -> None:
    """Add `b` times what `shrink_triton` has left to the rows of `out`."""
    (num_rows, n), max_tiles = out.shape, len(rows.tiles)
    assert out.is_contiguous(), f"{out.stride()=}"
    num_programs = cdiv(_PROGRAMS_PER_PROCESSOR * num_processors(), max_tiles)
    launch(
        _expand_kernel,
        (max_tiles, min(num_programs, cdiv(n, blocks.outputs))),
        out,
        shrunk,
        rows.order,
        rows.tiles,
        rows.count,
        target,
        num_rows,
        num_splits,
        n,
        STRIDE=MAX_SHRUNK_RANK,
        BLOCK_M=rows.tile_rows,
        BLOCK_R=_BLOCK_R,
        BLOCK_N=blocks.outputs,
        num_warps=blocks.num_warps,
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
    STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    tile = tl.program_id(0)
    is_tile = tile < tl.load(count)
    fields = _fields_of(tiles, tile, is_tile, target)
    begin = tl.load(tiles + tile * _TILE_FIELDS + 1, is_tile, other=0)
    num = tl.load(tiles + tile * _TILE_FIELDS + 2, is_tile, other=0)
    member = tl.arange(0, BLOCK_M)
    in_rows = member < num
    row = tl.load(order + begin + member, in_rows, other=0)
    a = tl.load(fields, is_tile, other=0).to(tl.pointer_type(x.dtype.element_ty))
    a = tl.multiple_of(a, 16)
    rank = tl.load(fields + _TOTAL, is_tile, other=0).to(tl.int32)
    wait_for_inputs(OVERLAPS)

    share = tl.cdiv(tl.cdiv(k, BLOCK_K), tl.num_programs(2)) * BLOCK_K
    first = tl.program_id(2) * share
    last = tl.minimum(first + share, k)
    inputs = tl.arange(0, BLOCK_K)
    x_at = x + row[:, None] * k + inputs[None, :]
    left = scratch + (tl.program_id(2) * num_rows + begin + member)[:, None] * STRIDE
    for block in range(tl.program_id(1), tl.cdiv(rank, BLOCK_R), tl.num_programs(1)):
        ranks = block * BLOCK_R + tl.arange(0, BLOCK_R)
        in_rank = ranks < rank
        a_at = a + ranks[:, None] * k + inputs[None, :]
        acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for at in tl.range(first, last, BLOCK_K, num_stages=STAGES):
            if EVEN_K:
                factor = tl.load(a_at + at, in_rank[:, None], other=0.0, eviction_policy="evict_first")
                part = tl.load(x_at + at, in_rows[:, None], other=0.0)
            else:
                in_k = (inputs < k - at)[None, :]
                factor = tl.load(a_at + at, in_rank[:, None] & in_k, other=0.0)
                part = tl.load(x_at + at, in_rows[:, None] & in_k, other=0.0)
            acc = tl.dot(part, tl.trans(factor), acc, input_precision="ieee")
        tl.store(left + ranks[None, :], acc, in_rows[:, None] & in_rank[None, :])


@triton.jit(do_not_specialize=["target", "num_rows", "num_splits"])
def _expand_kernel(
    out,
    scratch,
    order,
    tiles,
    count,
    target,
    num_rows,
    num_splits,
    n,
    STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    tile = tl.program_id(0)
    is_tile = tile < tl.load(count)
    fields = _fields_of(tiles, tile, is_tile, target)
    begin = tl.load(tiles + tile * _TILE_FIELDS + 1, is_tile, other=0)
    num = tl.load(tiles + tile * _TILE_FIELDS + 2, is_tile, other=0)
    member = tl.arange(0, BLOCK_M)
    in_rows = member < num
    row = tl.load(order + begin + member, in_rows, other=0)
    rank_0 = tl.load(fields + _RANK, is_tile, other=0).to(tl.int32)
    rank_1 = tl.load(fields + _RANK + 1, is_tile, other=0).to(tl.int32)
    rank_2 = tl.load(fields + _RANK + 2, is_tile, other=0).to(tl.int32)
    has_target = rank_0 > 0
    wait_for_inputs(OVERLAPS)

    left = scratch + (begin + member)[:, None] * STRIDE
    apart = num_rows.to(tl.int64) * STRIDE
    num_blocks = tl.where(has_target, tl.cdiv(n, BLOCK_N), 0)
    for block in range(tl.program_id(1), num_blocks, tl.num_programs(1)):
        first = block * BLOCK_N
        outputs = first + tl.arange(0, BLOCK_N)
        at = out + row[:, None] * n + outputs[None, :]
        inside = in_rows[:, None] & (outputs < n)[None, :]
        acc = tl.load(at, inside, other=0.0).to(tl.float32)
        acc = _add_slice(
            acc, out, first, fields, 0, rank_0, left, apart, num_splits, in_rows, BLOCK_R, BLOCK_N
        )
        left_1 = left + rank_0
        acc = _add_slice(
            acc, out, first, fields, 1, rank_1, left_1, apart, num_splits, in_rows, BLOCK_R, BLOCK_N
        )
        left_2 = left_1 + rank_1
        acc = _add_slice(
            acc, out, first, fields, 2, rank_2, left_2, apart, num_splits, in_rows, BLOCK_R, BLOCK_N
        )
        tl.store(at, acc.to(out.dtype.element_ty), inside)


@triton.jit
def _fields_of(tiles, tile, is_tile, target):
    """Return where the fields of a tile's target lie; nowhere, if there is no such tile."""
    table = tl.load(tiles + tile * _TILE_FIELDS, is_tile, other=0)
    return table.to(tl.pointer_type(tl.int64)) + target * _FIELDS


@triton.jit
def _add_slice(
    acc,
    out,
    first,
    fields,
    SLICE: tl.constexpr,
    rank,
    left,
    apart,
    num_splits,
    in_rows,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return `acc`, of the outputs from `first` on, with what a slice adds to those that are its own."""
    if rank > 0:
        begin = tl.load(fields + _BEGIN + SLICE).to(tl.int32)
        end = tl.load(fields + _END + SLICE).to(tl.int32)
        if (first < end) & (first + BLOCK_N > begin):
            b = tl.load(fields + _B + SLICE).to(tl.pointer_type(out.dtype.element_ty))
            b = tl.multiple_of(b, 16)
            output = first - begin + tl.arange(0, BLOCK_N)
            in_slice = (output >= 0) & (output < end - begin)
            if rank % 8 == 0:
                # Said in a way that the compiler can see, so that it loads eight numbers at a time.
                even_rank = rank // 8 * 8
                acc = _add_product(
                    acc, b, even_rank, left, apart, num_splits, output, in_slice, in_rows, BLOCK_R
                )
            else:
                acc = _add_product(acc, b, rank, left, apart, num_splits, output, in_slice, in_rows, BLOCK_R)
    return acc


@triton.jit
def _add_product(acc, b, rank, left, apart, num_splits, output, in_slice, in_rows, BLOCK_R: tl.constexpr):
    ranks = tl.arange(0, BLOCK_R)
    b_at = b + output[:, None] * rank + ranks[None, :]
    for at in range(0, rank, BLOCK_R):
        in_rank = ranks < rank - at
        factor = tl.load(
            b_at + at, in_slice[:, None] & in_rank[None, :], other=0.0, eviction_policy="evict_first"
        )
        is_shrunk = in_rows[:, None] & in_rank[None, :]
        shrunk_at = left + at + ranks[None, :]
        shrunk = tl.load(shrunk_at, is_shrunk, other=0.0)
        for split in range(1, num_splits):
            shrunk += tl.load(shrunk_at + split * apart, is_shrunk, other=0.0)
        acc = tl.dot(shrunk.to(factor.dtype), tl.trans(factor), acc, input_precision="ieee")
    return acc

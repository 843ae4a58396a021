"""Causal attention over prompts on Hopper devices, in Gluon, for some shapes.

Of a program's nine warps one copies, and two groups of four compute 64 rows each:

    copier    q | K0 | V0 | K1 | V1 | K2 | ...             pages of KV, into shared memory
    group 0     | Q K0 | softmax 0 | Q K1, P0 V0 | softmax 1 beside P0 V0 | Q K2, P1 V1 | ...
    group 1     the same for the other rows, over the same K and V

The rows of both groups are 128 tokens of one head, or 64 tokens of two heads that share K and V; the context
is read in tiles of `BLOCK_N` tokens. A tile of query tokens with one head, or two, is an item. There are as
many programs as multiprocessors, each of which computes several items; the copier starts the next item while
the groups finish the previous one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from hearth.kernels.jit import HAS_TRITON, capability, launch, num_processors, triton
from hearth.kernels.paged import Heads, PagedRows
from hearth.kernels.prompt_tiles import PromptTiles, num_packed

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    # Renamed in Triton 3.9, whose names are used here.
    _fetch = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
    _memory = gl.shared_memory_descriptor
    _reinterpret = _memory.reinterpret if hasattr(_memory, "reinterpret") else _memory._reinterpret
    HAS_GLUON = (3, 6) <= tuple(map(int, triton.__version__.split(".")[:2])) <= (3, 9)
except (ImportError, AttributeError):  # no Triton, or one whose Gluon has other names
    HAS_GLUON = False
    if not TYPE_CHECKING:

        class gluon:
            """Decorate kernels that cannot run here; see `gluon_obstacle`."""

            @staticmethod
            def jit(kernel=None, **options):
                return (lambda kernel: kernel) if kernel is None else kernel

        gl = None

_LOG2E = 1.4426950408889634
#: Query rows of a warp group, and of both.
_GROUP_ROWS, _TILE_ROWS = 64, 128
#: Columns of a box that is copied at once: 128 bytes, the layout of tensor cores.
_BOX_COLUMNS = 64
#: By head size: tokens of a context tile, and number of tiles in flight.
_CONTEXT_TILES = {64: (128, 4), 128: (128, 3), 256: (64, 2)}
_DTYPES = (torch.bfloat16, torch.float16)
_BLOCK_TOKENS = (8, 16, 32, 64)


def is_hopper() -> bool:
    return capability() // 10 == 9


def gluon_obstacle() -> str | None:
    if HAS_GLUON:
        return None
    found = triton.__version__ if HAS_TRITON else "none"
    return f"the kernel for Hopper needs Gluon as of Triton 3.6 to 3.9, given: {found}"


def hopper_obstacle(heads: Heads, dtype: torch.dtype, block_tokens: int) -> str | None:
    if (obstacle := gluon_obstacle()) is not None:
        return obstacle
    if heads.cap is not None:
        return f"the kernel for Hopper has no soft cap of scores, given: {heads.cap:g}"
    if dtype not in _DTYPES:
        return f"the kernel for Hopper takes bfloat16 and float16, given: {str(dtype).removeprefix('torch.')}"
    if heads.dim not in _CONTEXT_TILES:
        return (
            f"the kernel for Hopper takes heads of {', '.join(map(str, _CONTEXT_TILES))}, given: {heads.dim}"
        )
    if block_tokens not in _BLOCK_TOKENS:
        sizes = ", ".join(map(str, _BLOCK_TOKENS))
        return f"the kernel for Hopper takes blocks of {sizes} tokens, given: {block_tokens}"
    return None


def hopper_tile_tokens(heads: Heads) -> int:
    return _TILE_ROWS // num_packed(heads)


def prefill_attention_hopper(
    qkv: torch.Tensor,
    heads: Heads,
    rows: PagedRows,
    tiles: PromptTiles,
    kv: torch.Tensor,
    *,
    window: int | None,
    out: torch.Tensor,
    num_stages: int | None = None,
    max_programs: int | None = None,
) -> None:
    packed, dtype = _TILE_ROWS // tiles.tile_tokens, qkv.dtype
    block_n, usual_stages = _CONTEXT_TILES[heads.dim]
    block_tokens, kv_row = kv.shape[2], heads.num_kv * heads.dim
    # One layer's KV as a matrix, a row per token with all heads; blocks have a stride in rows.
    block_rows = kv.stride(0) // kv_row
    num_kv_rows = (kv.shape[0] - 1) * block_rows + 2 * block_tokens
    q_width = heads.num_q * heads.dim
    num_items = len(tiles.items) * (heads.num_q // packed)
    launch(
        _prefill_hopper_kernel,
        (min(num_items, max_programs or num_processors()),),
        out,
        _boxes(qkv.data_ptr(), dtype, qkv.shape[0], q_width, qkv.stride(0), _GROUP_ROWS, heads.dim),
        _boxes(kv.data_ptr(), dtype, num_kv_rows, kv_row, kv_row, block_tokens, _BOX_COLUMNS),
        tiles.items,
        tiles.count,
        rows.slots,
        rows.block_table,
        rows.block_table.stride(0),
        block_rows,
        num_kv_rows,
        heads.score_scale * _LOG2E,
        window or 0,
        HAS_WINDOW=window is not None,
        NUM_Q=heads.num_q,
        NUM_KV=heads.num_kv,
        DIM=heads.dim,
        BLOCK_TOKENS=block_tokens,
        BLOCK_N=block_n,
        STAGES=num_stages or usual_stages,
        PACKED=packed,
        ROWS=_GROUP_ROWS,
        num_warps=4,
    )


@dataclass(frozen=True, slots=True)
class _Address:
    """The address of a tensor, which does not keep its memory alive."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


@lru_cache(maxsize=4096)  # one per layer and step size; making one takes as long as a launch
def _boxes(
    address: int,
    dtype: torch.dtype,
    num_rows: int,
    num_columns: int,
    stride: int,
    box_rows: int,
    box_columns: int,
) -> TensorDescriptor:
    """Describe a matrix of 16-bit numbers from which boxes are copied. Outside of it, zeros are read."""
    layout = gl.NVMMASharedLayout(128, 16, 2)
    shape, strides, box = [num_rows, num_columns], [stride, 1], [box_rows, box_columns]
    return TensorDescriptor(_Address(address, dtype), shape, strides, box, layout)


@gluon.jit(
    do_not_specialize=["table_stride", "num_kv_rows", "window"],
    do_not_specialize_on_alignment=["tiles", "num_tiles", "slots", "table"],
)
def _prefill_hopper_kernel(
    out,
    q_boxes,
    kv_boxes,
    tiles,
    num_tiles,
    slots,
    table,
    table_stride,
    block_rows,
    num_kv_rows,
    scale,
    window,
    HAS_WINDOW: gl.constexpr,
    NUM_Q: gl.constexpr,
    NUM_KV: gl.constexpr,
    DIM: gl.constexpr,
    BLOCK_TOKENS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    PACKED: gl.constexpr,
    ROWS: gl.constexpr,
):
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_tiles = gl.allocate_shared_memory(q_boxes.dtype, [2, ROWS, DIM], swizzled)
    k_tiles = gl.allocate_shared_memory(q_boxes.dtype, [STAGES, BLOCK_N, DIM], swizzled)
    v_tiles = gl.allocate_shared_memory(q_boxes.dtype, [STAGES, BLOCK_N, DIM], swizzled)
    # `full`: the copies are done. `free`: both groups have read them.
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_free, count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_free.index(stage), count=2)
    fence_async_shared()
    shared = (q_tiles, k_tiles, v_tiles, q_full, q_free, k_full, k_free, v_full, v_free)
    items = (tiles, num_tiles, window)
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    0, out, shared, items, scale,
                    HAS_WINDOW, NUM_Q, DIM, BLOCK_TOKENS, BLOCK_N, STAGES, PACKED, ROWS,
                ),
            ),
            (
                _attend,
                (
                    1, out, shared, items, scale,
                    HAS_WINDOW, NUM_Q, DIM, BLOCK_TOKENS, BLOCK_N, STAGES, PACKED, ROWS,
                ),
            ),
            (
                _copy,
                (
                    q_boxes, kv_boxes, shared, items, slots, table, table_stride, block_rows, num_kv_rows,
                    HAS_WINDOW, NUM_Q, NUM_KV, DIM, BLOCK_TOKENS, BLOCK_N, STAGES, PACKED, ROWS,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def _num_turns(num_tiles, NUM_Q: gl.constexpr, PACKED: gl.constexpr):
    num_items = gl.load(num_tiles) * (NUM_Q // PACKED)
    num_programs = gl.num_programs(0)
    num_whole = num_items // num_programs
    return num_whole + (_item(num_whole) < num_items).to(gl.int32)


@gluon.jit
def _item(turn):
    """Return an item of this program. The longest of one round is followed by the shortest of the next."""
    program = gl.program_id(0)
    num_programs = gl.num_programs(0)
    return turn * num_programs + gl.where(turn % 2 == 0, program, num_programs - 1 - program)


@gluon.jit
def _read_item(
    turn,
    tiles,
    window,
    HAS_WINDOW: gl.constexpr,
    NUM_Q: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PACKED: gl.constexpr,
    ROWS: gl.constexpr,
):
    item = _item(turn)
    head = item % (NUM_Q // PACKED) * PACKED
    fields = tiles + item // (NUM_Q // PACKED) * 4
    begin = gl.load(fields)
    num_tokens = gl.load(fields + 1)
    start = gl.load(fields + 2)
    tile = gl.load(fields + 3)
    end = start + gl.minimum(tile + 2 * ROWS // PACKED, num_tokens)
    first = 0
    if HAS_WINDOW:
        first = gl.maximum(start + tile - window + 1, 0) // BLOCK_N
    return head, begin, num_tokens, start, tile, first, end


@gluon.jit
def _copy(
    q_boxes,
    kv_boxes,
    shared,
    items,
    slots,
    table,
    table_stride,
    block_rows,
    num_kv_rows,
    HAS_WINDOW: gl.constexpr,
    NUM_Q: gl.constexpr,
    NUM_KV: gl.constexpr,
    DIM: gl.constexpr,
    BLOCK_TOKENS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    PACKED: gl.constexpr,
    ROWS: gl.constexpr,
):
    q_tiles, k_tiles, v_tiles, q_full, q_free, k_full, k_free, v_full, v_free = shared
    tiles, num_tiles, window = items
    step = 0  # tiles of K and V since the start, through all items
    for turn in range(_num_turns(num_tiles, NUM_Q, PACKED)):
        head, begin, _, _, tile, first, end = _read_item(
            turn, tiles, window, HAS_WINDOW, NUM_Q, BLOCK_N, PACKED, ROWS
        )
        row_table = table + gl.load(slots + begin).to(gl.int64) * table_stride
        column = head // (NUM_Q // NUM_KV) * DIM
        mbarrier.wait(q_free, (turn & 1) ^ 1)
        mbarrier.expect(q_full, 2 * ROWS * DIM * 2)
        _fetch(q_boxes, [begin + tile, head * DIM], q_full, q_tiles.index(0))
        if PACKED == 2:
            _fetch(q_boxes, [begin + tile, (head + 1) * DIM], q_full, q_tiles.index(1))
        else:
            _fetch(q_boxes, [begin + tile + ROWS, head * DIM], q_full, q_tiles.index(1))
        for j in range(first, (end + BLOCK_N - 1) // BLOCK_N):
            stage = step % STAGES
            phase = (step // STAGES) & 1
            mbarrier.wait(k_free.index(stage), phase ^ 1)
            _copy_pages(
                kv_boxes, k_tiles.index(stage), k_full.index(stage), row_table, j, end, 0, column, block_rows,
                num_kv_rows, DIM, BLOCK_TOKENS, BLOCK_N,
            )  # fmt: skip
            mbarrier.wait(v_free.index(stage), phase ^ 1)
            _copy_pages(
                kv_boxes, v_tiles.index(stage), v_full.index(stage), row_table, j, end, BLOCK_TOKENS, column,
                block_rows, num_kv_rows, DIM, BLOCK_TOKENS, BLOCK_N,
            )  # fmt: skip
            step += 1


@gluon.jit
def _copy_pages(
    kv_boxes,
    target,
    full,
    row_table,
    j,
    end,
    side_row,
    column,
    block_rows,
    num_kv_rows,
    DIM: gl.constexpr,
    BLOCK_TOKENS: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """Copy k or v of a tile: all tokens of the first 64 columns, then those of the next columns."""
    PAGES: gl.constexpr = BLOCK_N // BLOCK_TOKENS
    BOXES: gl.constexpr = DIM // 64
    mbarrier.expect(full, BLOCK_N * DIM * 2)
    boxes = _reinterpret(target, kv_boxes.dtype, [BOXES * PAGES, BLOCK_TOKENS, 64], kv_boxes.layout)
    num_pages = (end + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    for p in gl.static_range(PAGES):
        page = j * PAGES + p
        row = gl.load(row_table + gl.minimum(page, num_pages - 1)) * block_rows + side_row
        # Beyond the end nothing is read: outside of the matrix there are zeros.
        row = gl.where(page < num_pages, row, num_kv_rows)
        for box in gl.static_range(BOXES):
            _fetch(kv_boxes, [row, column + box * 64], full, boxes.index(box * PAGES + p))


@gluon.jit
def _attend(
    half: gl.constexpr,
    out,
    shared,
    items,
    scale,
    HAS_WINDOW: gl.constexpr,
    NUM_Q: gl.constexpr,
    DIM: gl.constexpr,
    BLOCK_TOKENS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    PACKED: gl.constexpr,
    ROWS: gl.constexpr,
):
    by_key: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    by_dim: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, by_dim, 2)
    q_tiles, k_tiles, v_tiles, q_full, q_free, k_full, k_free, v_full, v_free = shared
    kv = (k_tiles, v_tiles, k_full, k_free, v_full, v_free)
    tiles, num_tiles, window = items
    dtype: gl.constexpr = q_tiles.dtype
    step = 0  # tiles of K and V since the start, through all items
    zeros = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, by_key)
    for turn in range(_num_turns(num_tiles, NUM_Q, PACKED)):
        head, begin, num_tokens, start, tile, first, end = _read_item(
            turn, tiles, window, HAS_WINDOW, NUM_Q, BLOCK_N, PACKED, ROWS
        )
        if PACKED == 2:
            head += half
        else:
            tile += half * ROWS
        index = tile + gl.arange(0, ROWS, gl.SliceLayout(1, by_key))
        position = start + index
        last = (end + BLOCK_N - 1) // BLOCK_N
        # Every row sees all tokens of the tiles before this one; with a window, also from a first tile on.
        unmasked_end = gl.minimum((start + tile + 1) // BLOCK_N, last)
        q = q_tiles.index(half)
        acc = gl.full([ROWS, DIM], 0.0, gl.float32, by_dim)
        best = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, by_key))
        total = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, by_key))

        mbarrier.wait(q_full, turn & 1)
        stage = step % STAGES
        mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
        score = warpgroup_mma(q, k_tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        score = warpgroup_mma_wait(0, deps=(score,))
        mbarrier.arrive(k_free.index(stage), count=1)
        score = _mask(score, first, position, window, HAS_WINDOW, BLOCK_N, by_key)
        p, best, total, _ = _soften(score, best, total, scale, HAS_WINDOW)
        p = gl.convert_layout(p.to(dtype), operand)
        mbarrier.wait(k_full.index((step + 1) % STAGES), ((step + 1) // STAGES) & 1, pred=first + 1 < last)

        at = first + 1
        if HAS_WINDOW:
            masked_end = (gl.maximum(start + tile + ROWS - window, 0) + BLOCK_N - 1) // BLOCK_N
            masked_end = gl.maximum(gl.minimum(masked_end, unmasked_end), at)
            for j in range(at, masked_end):
                acc, best, total, p = _attend_tile(
                    j, step, acc, best, total, p, q, kv, zeros, position, last, window, scale,
                    True, HAS_WINDOW, BLOCK_N, STAGES, by_key, by_dim, operand,
                )  # fmt: skip
                step += 1
            at = masked_end
        for j in range(at, unmasked_end):
            acc, best, total, p = _attend_tile(
                j, step, acc, best, total, p, q, kv, zeros, position, last, window, scale,
                False, HAS_WINDOW, BLOCK_N, STAGES, by_key, by_dim, operand,
            )  # fmt: skip
            step += 1
        for j in range(gl.maximum(at, unmasked_end), last):
            acc, best, total, p = _attend_tile(
                j, step, acc, best, total, p, q, kv, zeros, position, last, window, scale,
                True, HAS_WINDOW, BLOCK_N, STAGES, by_key, by_dim, operand,
            )  # fmt: skip
            step += 1

        mbarrier.arrive(q_free, count=1)
        stage = step % STAGES
        mbarrier.wait(v_full.index(stage), (step // STAGES) & 1)
        if end % BLOCK_TOKENS != 0:
            _clear_tail(v_tiles.index(stage), end, DIM, BLOCK_TOKENS, BLOCK_N)
        acc = warpgroup_mma(p, v_tiles.index(stage), acc, is_async=True)
        acc, p = warpgroup_mma_wait(0, deps=(acc, p))
        mbarrier.arrive(v_free.index(stage), count=1)
        step += 1

        index = gl.convert_layout(index, gl.SliceLayout(1, by_dim))
        row = (begin + index).to(gl.int64)
        dim = gl.arange(0, DIM, gl.SliceLayout(0, by_dim))
        acc = acc / gl.convert_layout(total, gl.SliceLayout(1, by_dim))[:, None]
        out_at = out + row[:, None] * (NUM_Q * DIM) + head * DIM + dim[None, :]
        gl.store(out_at, acc.to(dtype), (index < num_tokens)[:, None])


@gluon.jit
def _attend_tile(
    j,
    step,
    acc,
    best,
    total,
    p,
    q,
    kv,
    zeros,
    position,
    last,
    window,
    scale,
    MASKED: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    by_key: gl.constexpr,
    by_dim: gl.constexpr,
    operand: gl.constexpr,
):
    """Add tile `j - 1`, whose softmax is `p`, to the result, and take the softmax of tile `j` meanwhile."""
    k_tiles, v_tiles, k_full, k_free, v_full, v_free = kv
    stage = step % STAGES
    k_stage = (step + 1) % STAGES
    score = warpgroup_mma(q, k_tiles.index(k_stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(stage), (step // STAGES) & 1)
    acc = warpgroup_mma(p, v_tiles.index(stage), acc, is_async=True)
    score, acc, p = warpgroup_mma_wait(1, deps=(score, acc, p))
    mbarrier.arrive(k_free.index(k_stage), count=1)
    if MASKED:
        score = _mask(score, j, position, window, HAS_WINDOW, BLOCK_N, by_key)
    soft, best, total, shrink = _soften(score, best, total, scale, HAS_WINDOW)
    soft = gl.convert_layout(soft.to(q.dtype), operand)
    # This wait is here and not before the product that needs it, because it ends a basic block: else ptxas
    # moves the softmax after the next wait, and nothing overlaps.
    mbarrier.wait(k_full.index((step + 2) % STAGES), ((step + 2) // STAGES) & 1, pred=j + 1 < last)
    acc, p, soft = warpgroup_mma_wait(0, deps=(acc, p, soft))
    mbarrier.arrive(v_free.index(stage), count=1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, by_dim))[:, None]
    return acc, best, total, soft


@gluon.jit
def _mask(score, j, position, window, HAS_WINDOW: gl.constexpr, BLOCK_N: gl.constexpr, by_key: gl.constexpr):
    token = j * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, by_key))
    seen = token[None, :] <= position[:, None]
    if HAS_WINDOW:
        seen = seen & (token[None, :] > position[:, None] - window)
    return gl.where(seen, score, -float("inf"))


@gluon.jit
def _soften(score, best, total, scale, HAS_WINDOW: gl.constexpr):
    new_best = gl.maximum(best, gl.max(score, 1) * scale)
    pivot = new_best
    if HAS_WINDOW:
        # A row that has seen nothing yet leaves the maximum at -inf; 0 keeps the differences finite.
        pivot = gl.where(new_best == -float("inf"), 0.0, new_best)
    p = gl.exp2(score * scale - pivot[:, None])
    shrink = gl.exp2(best - pivot)
    return p, new_best, total * shrink + gl.sum(p, 1), shrink


@gluon.jit
def _clear_tail(v_tile, end, DIM: gl.constexpr, BLOCK_TOKENS: gl.constexpr, BLOCK_N: gl.constexpr):
    """Clear v beyond `end` in the last page, where memory may hold NaN: 0 times NaN is NaN.

    Both groups write the same zeros before they read.
    """
    PAGES: gl.constexpr = BLOCK_N // BLOCK_TOKENS
    boxed: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    boxes = _reinterpret(v_tile, v_tile.dtype, [DIM // 64 * PAGES, BLOCK_TOKENS, 64], boxed)
    page = (end - 1) % BLOCK_N // BLOCK_TOKENS
    written = gl.arange(0, BLOCK_TOKENS, gl.SliceLayout(1, flat))[:, None] < end % BLOCK_TOKENS
    for box in gl.static_range(DIM // 64):
        v = boxes.index(box * PAGES + page)
        v.store(gl.where(written, v.load(flat), 0.0))
    fence_async_shared()

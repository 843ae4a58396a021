"""Products of 8-bit weight matrices and activations of 16 bits or more (W8A16).

    out[row, j] = scale[j] * sum(x[row, i] * weight[j, i]) + bias[j]

The weight stays in 8 bits until it is in registers, where int8 and float8_e4m3fn are converted to the
activations' dtype without loss; sums are float32 and are scaled once.

Up to 256 rows, where memory is the limit, the work is shared evenly, whatever the weight's shape:

    steps:      | tile 0               | tile 1               | ...      a step: BLOCK_K inputs of a tile
    programs:   |   0           |   1           |   2          | ...      the same number of steps each

If a tile belongs to several programs, each writes partial sums, and the one that finishes last adds them up
in the order of the inputs, so the result does not depend on timing. There are as many programs as fit on the
multiprocessors. They start after the previous kernel has ended: programs that start early are distributed
unevenly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hearth.kernels.jit import capability, cdiv, launch, runs_triton, tl, triton
from hearth.kernels.overlap import wait_for_inputs
from hearth.kernels.packed_products import packed_linear

#: Up to so many rows a program per row beats tensor cores.
MAX_SKINNY_ROWS = 1


def quantized_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    out: torch.Tensor,
    scratch: ProductScratch | None = None,
) -> None:
    """Compute `out = (x @ weight.T) * scale + bias` for x [rows, k], weight [n, k] and scale [n].

    Without `scratch`, or with too little for one program per multiprocessor, programs share no sums.
    """
    if not runs_triton(x):
        if not packed_linear(x, weight, scale, bias, out=out):
            quantized_linear_reference(x, weight, scale, bias, out=out)
    elif x.shape[0] <= MAX_SKINNY_ROWS:
        quantized_skinny_triton(x, weight, scale, bias, out=out)
    else:
        quantized_tiled_triton(x, weight, scale, bias, out=out, scratch=scratch)


def quantized_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    out: torch.Tensor,
) -> None:
    """Compute in float32, because sums before scaling may exceed float16's range."""
    product = torch.mm(x.float(), weight.float().t()).mul_(scale)
    out.copy_(product if bias is None else product.add_(bias))


def quantized_rows(
    weight: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor, *, out: torch.Tensor
) -> None:
    """Look up rows of an 8-bit weight [n, k]: `out[i] = weight[rows[i]] * scale[rows[i]]`."""
    if not runs_triton(out):
        out.copy_(weight[rows].float().mul_(scale[rows, None]))
        return
    k = weight.shape[1]
    launch(_rows_kernel, (len(rows), cdiv(k, 1024)), out, weight, scale, rows, k, BLOCK_K=1024, num_warps=4)


@triton.jit
def _rows_kernel(out, weight, scale, rows, k, BLOCK_K: tl.constexpr, OVERLAPS: tl.constexpr):
    wait_for_inputs(OVERLAPS)
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    inputs = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    values = tl.load(weight + row * k + inputs, inputs < k, other=0.0).to(tl.float32) * tl.load(scale + row)
    out_at = out + tl.program_id(0).to(tl.int64) * k + inputs
    tl.store(out_at, values.to(out.dtype.element_ty), inputs < k)


def quantized_skinny_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    out: torch.Tensor,
    block_n: int | None = None,
    block_k: int = 1024,
    num_warps: int = 2,
) -> None:
    rows, (n, k) = x.shape[0], weight.shape
    if block_n is None:
        block_n = 2 if weight.dtype == torch.int8 else 1  # measured: 64.7 against 66.8 us, 62.6 against 64.7
    launch(
        _skinny_kernel,
        (rows * cdiv(n, block_n),),
        out,
        x,
        weight,
        scale,
        bias,
        rows,
        n,
        k,
        HAS_BIAS=bias is not None,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        EVEN_N=n % block_n == 0,
        EVEN_K=k % block_k == 0,
        AS_MANTISSAS=not x.is_cpu,  # the interpreter knows no assembly
        num_warps=num_warps,
    )


@triton.jit(do_not_specialize=["rows"])
def _skinny_kernel(
    out,
    x,
    weight,
    scale,
    bias,
    rows,
    n,
    k,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    AS_MANTISSAS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_inputs(OVERLAPS)
    # Programs that run together share their weights.
    row = (tl.program_id(0) % rows).to(tl.int64)
    outputs = tl.program_id(0) // rows * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = outputs < n
    weight_at = weight + outputs.to(tl.int64)[:, None] * k
    # Each thread loads 16 weights at a time and adds up their products. To have the same 16 of x without
    # shared memory, x is loaded in the shape of the weights.
    acc = tl.zeros([BLOCK_N, BLOCK_K // 16], tl.float32)
    inputs = tl.arange(0, BLOCK_K)[None, :]
    x_at = tl.broadcast_to(x + row * k + inputs, [BLOCK_N, BLOCK_K])
    num_whole = k // BLOCK_K * BLOCK_K
    for at in range(0, num_whole, BLOCK_K):
        if EVEN_N:
            w = tl.load(weight_at + at + inputs, eviction_policy="evict_first")
        else:
            w = tl.load(weight_at + at + inputs, in_n[:, None], other=0.0, eviction_policy="evict_first")
        a = tl.load(x_at + at)
        products = _widened(w, AS_MANTISSAS) * a.to(tl.float32)
        acc += tl.sum(products.reshape(BLOCK_N, BLOCK_K // 16, 16), 2)
    if not EVEN_K:
        valid = in_n[:, None] & (inputs < k - num_whole)
        w = tl.load(weight_at + num_whole + inputs, valid, other=0.0)
        a = tl.load(x_at + num_whole, valid, other=0.0)
        products = _widened(w, AS_MANTISSAS) * a.to(tl.float32)
        acc += tl.sum(products.reshape(BLOCK_N, BLOCK_K // 16, 16), 2)
    result = tl.sum(acc, 1) * tl.load(scale + outputs, in_n, other=0.0)
    if HAS_BIAS:
        result += tl.load(bias + outputs, in_n, other=0.0).to(tl.float32)
    tl.store(out + row * n + outputs, result.to(out.dtype.element_ty), in_n)


@triton.jit
def _widened(w, AS_MANTISSAS: tl.constexpr):
    """Eight bits as float32. With AS_MANTISSAS integers take a short cut, for their conversion is slow:
    shifted to 0..255, a byte is put under the exponent of 2**23, four of them from one register."""
    if w.dtype.is_floating() or not AS_MANTISSAS:
        return w.to(tl.float32)
    mantissas = tl.inline_asm_elementwise(
        """
        {
        .reg .b32 shifted;
        xor.b32 shifted, $4, 0x80808080;
        prmt.b32 $0, shifted, 0x4B000000, 0x7440;
        prmt.b32 $1, shifted, 0x4B000000, 0x7441;
        prmt.b32 $2, shifted, 0x4B000000, 0x7442;
        prmt.b32 $3, shifted, 0x4B000000, 0x7443;
        }
        """,
        "=r,=r,=r,=r,r",
        [w],
        dtype=tl.float32,
        is_pure=True,
        pack=4,
    )
    return mantissas - 8388736.0  # 2**23 and the shift


@dataclass(frozen=True, slots=True)
class Tile:
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    per_processor: int = 0  #: programs that share all steps evenly; 0: one per tile


@dataclass(frozen=True, slots=True)
class ProductScratch:
    """Memory for partial sums of programs. Counters are zero between launches."""

    num_processors: int  #: of the device
    partial: torch.Tensor  #: float32, flat: [program][first, last][tile]
    counters: torch.Tensor  #: int32, flat: [program]

    def num_programs(self, tile: Tile) -> int:
        """Return how many programs share the steps: the same number per multiprocessor, each with room for
        two parts of tiles; 0: each tile has its own program."""
        room = min(len(self.counters), len(self.partial) // (2 * tile.block_m * tile.block_n))
        return min(tile.per_processor, room // self.num_processors) * self.num_processors


#: Tiles by their largest number of rows; the last serves all larger ones. Programs fill a multiprocessor,
#: each with one warp group (docs/log: others gave wrong sums).
TILES = {
    16: Tile(16, 64, 128, num_warps=4, num_stages=5, per_processor=3),
    32: Tile(32, 64, 128, num_warps=4, num_stages=4, per_processor=3),
    64: Tile(64, 64, 128, num_warps=4, num_stages=4, per_processor=2),
    256: Tile(128, 64, 128, num_warps=4, num_stages=3, per_processor=2),
    1 << 31: Tile(256, 128, 64, num_warps=8, num_stages=4),
}

#: The tile for float32, which tensor cores would round.
FLOAT32_TILE = Tile(16, 32, 32, num_warps=4, num_stages=2)

#: Weight tiles in the L2 cache at a time, while all rows use them.
GROUP_N = 8


def tile_for(rows: int, dtype: torch.dtype) -> Tile:
    if dtype == torch.float32:
        return FLOAT32_TILE
    return next(tile for max_rows, tile in TILES.items() if rows <= max_rows)


def sharing_obstacle(
    scratch: ProductScratch,
    max_rows: int,
    dtype: torch.dtype,
    tiles: Mapping[int, Tile] = TILES,
    fewest: int = MAX_SKINNY_ROWS + 1,
) -> str | None:
    """Say which products of `fewest` to `max_rows` rows have fewer programs than their tiles want, if any."""
    for most, tile in tiles.items():
        if fewest > max_rows or not tile.per_processor or dtype == torch.float32:
            return None
        num_programs, wanted = scratch.num_programs(tile), tile.per_processor * scratch.num_processors
        if num_programs < wanted:
            return (
                f"scratch of {len(scratch.partial)} numbers and {len(scratch.counters)} counters lets "
                f"{num_programs} programs share products of {fewest} to {min(most, max_rows)} rows, "
                f"not {wanted}"
            )
        fewest = most + 1
    return None


def quantized_tiled_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    out: torch.Tensor,
    scratch: ProductScratch | None = None,
    tile: Tile | None = None,
) -> None:
    rows, (n, k) = x.shape[0], weight.shape
    tile = tile_for(rows, x.dtype) if tile is None else tile
    if scratch is not None and not scratch.num_programs(tile):
        scratch = None
    num_tiles = cdiv(rows, tile.block_m) * cdiv(n, tile.block_n)
    launch(
        _tiled_kernel,
        (num_tiles if scratch is None else scratch.num_programs(tile),),
        out,
        x,
        weight,
        scale,
        bias,
        None if scratch is None else scratch.partial,
        None if scratch is None else scratch.counters,
        rows,
        n,
        k,
        HAS_BIAS=bias is not None,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        EVEN_K=k % tile.block_k == 0,
        GROUP_N=GROUP_N,
        SHARES=scratch is not None,
        AS_MANTISSAS=not x.is_cpu,  # the interpreter knows no assembly
        BY_PAIRS=scratch is not None and capability() >= 90,  # older devices have no such subtraction
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@triton.jit(do_not_specialize=["rows"])
def _tiled_kernel(
    out,
    x,
    weight,
    scale,
    bias,
    partial,
    counters,
    rows,
    n,
    k,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    GROUP_N: tl.constexpr,
    SHARES: tl.constexpr,
    BY_PAIRS: tl.constexpr,
    AS_MANTISSAS: tl.constexpr,
):
    # A program has a run of steps, or one tile; knowing which at compile time saves registers.
    num_k = tl.cdiv(k, BLOCK_K)
    first, end, share = tl.program_id(0), tl.program_id(0) + 1, 1
    if SHARES:
        total = tl.cdiv(rows, BLOCK_M) * tl.cdiv(n, BLOCK_N) * num_k
        share = tl.cdiv(total, tl.num_programs(0))
        first = tl.program_id(0) * share
        end = tl.minimum(first + share, total)
    inputs = tl.arange(0, BLOCK_K)
    while first < end:
        tile, begin, num_steps = first, 0, num_k
        if SHARES:  # this program's steps of the tile, from `begin` on
            tile, begin = first // num_k, first % num_k
            num_steps = tl.minimum(num_k - begin, end - first)
        outputs, tokens = _place(tile, rows, n, BLOCK_M, BLOCK_N, GROUP_N)
        # Beyond the last output or row, that one is computed again and dropped: loads need no mask.
        weight_at = weight + tl.minimum(outputs, n - 1).to(tl.int64)[:, None] * k + inputs[None, :]
        x_at = x + tl.minimum(tokens, rows - 1).to(tl.int64)[None, :] * k + inputs[:, None]
        # Transposed, out.T = weight @ x.T: the factor on the left may be converted in registers.
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for at in range(begin * BLOCK_K, (begin + num_steps) * BLOCK_K, BLOCK_K):
            if EVEN_K:
                w, a = tl.load(weight_at + at), tl.load(x_at + at)
            else:
                in_k = inputs < k - at
                w = tl.load(weight_at + at, in_k[None, :], other=0.0)
                a = tl.load(x_at + at, in_k[:, None], other=0.0)
            factor = _factor(w, a.dtype, BY_PAIRS, AS_MANTISSAS)
            acc = tl.dot(factor, a, acc, input_precision="ieee")
        is_whole = True
        if SHARES:
            is_whole = num_steps == num_k
            if num_steps < num_k:
                # The first part of a tile is its program's last; other parts are their programs' first.
                tl.store(_part_at(partial, tl.program_id(0), begin == 0, BLOCK_M, BLOCK_N), acc)
                opens = tile * num_k // share
                num_parts = (tile * num_k + num_k - 1) // share - opens + 1
                tl.debug_barrier()
                is_whole = tl.atomic_add(counters + opens, 1, sem="acq_rel") == num_parts - 1
                tl.debug_barrier()
                if is_whole:  # all parts are written: add them up in order
                    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                    for part in range(num_parts):
                        part_at = _part_at(partial, opens + part, part == 0, BLOCK_M, BLOCK_N)
                        acc += tl.load(part_at, cache_modifier=".cg")
                    tl.store(counters + opens, 0)
        if is_whole:
            acc *= tl.load(scale + outputs, outputs < n, other=0.0)[:, None]
            if HAS_BIAS:
                acc += tl.load(bias + outputs, outputs < n, other=0.0).to(tl.float32)[:, None]
            out_at = out + tokens.to(tl.int64)[None, :] * n + outputs[:, None]
            tl.store(out_at, acc.to(out.dtype.element_ty), (outputs[:, None] < n) & (tokens[None, :] < rows))
        first += num_steps if SHARES else 1


@triton.jit
def _place(tile, rows, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_N: tl.constexpr):
    """The outputs and the rows of a tile. Neighbours share a group of weight tiles."""
    per_group = GROUP_N * tl.cdiv(rows, BLOCK_M)
    first_n = tile // per_group * GROUP_N
    num_in_group = tl.minimum(tl.cdiv(n, BLOCK_N) - first_n, GROUP_N)
    place = tile % per_group
    outputs = (first_n + place % num_in_group) * BLOCK_N + tl.arange(0, BLOCK_N)
    return outputs, place // num_in_group * BLOCK_M + tl.arange(0, BLOCK_M)


@triton.jit
def _part_at(partial, program, is_first, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    slot = (program * 2 + tl.where(is_first, 1, 0)).to(tl.int64)
    in_tile = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    return partial + slot * (BLOCK_N * BLOCK_M) + in_tile


@triton.jit
def _factor(w, dtype: tl.constexpr, BY_PAIRS: tl.constexpr, AS_MANTISSAS: tl.constexpr):
    """Eight bits as a factor of a product with `dtype`, without loss. With BY_PAIRS integers become bfloat16
    two at a time: seven bits under the exponent of 128, less 128 for positive and 256 for negative ones."""
    # One return: Triton 3.6 requires the same type of two, even in branches that are not compiled.
    if not BY_PAIRS or dtype != tl.bfloat16 or w.dtype.is_floating():
        # By way of float32: the direct conversions are slow instructions.
        factor = _widened(w, AS_MANTISSAS).to(dtype)
    else:
        factor = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 wide, low, less;
            cvt.u32.u16 wide, $1;
            prmt.b32 wide, wide, 0x43434343, 0x4140;
            and.b32 low, wide, 0xFF7FFF7F;
            and.b32 less, wide, 0xFF80FF80;
            sub.rn.bf16x2 $0, low, less;
            }
            """,
            "=r,h",
            [w],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    return factor

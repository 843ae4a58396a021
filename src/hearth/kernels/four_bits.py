"""Products of 4-bit weight matrices and activations of 16 bits or more (W4A16).

    weight[j, i] = value(code[j, i]) * scale[group, j] + minimum[group, j]      group = i // group size

A value is the code itself where there are minimums, `code - 8` where there are none, or that of a codebook of
16 entries. Codes are packed by chunks of 128 inputs. Eight codes share a word, 16 inputs apart, so that one
shift of 16 words gives 16 consecutive inputs:

    codes [chunk][output][word]      bits 4 * p to 4 * p + 3 of word j: input 128 * chunk + 16 * p + j
    scale, minimum [group][output]

Few rows: the codes become factors of tensor cores in registers; sums are float32 and are scaled by group.
The work is shared as in `quantized.py`. Many rows: some outputs at a time are dequantised into memory that is
idle, for the library's product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hearth.core.sizes import CODE_CHUNK as CHUNK
from hearth.core.sizes import CODE_WORDS as WORDS
from hearth.kernels.jit import capability, cdiv, launch, runs_triton, tl, triton
from hearth.kernels.packed_products import packed_linear
from hearth.kernels.quantized import GROUP_N, ProductScratch, Tile, _part_at, _place

_PLANES = CHUNK // WORDS

#: The value of a code is so much less where there are neither minimums nor a codebook.
ZERO_CODE = 8


@dataclass(frozen=True, slots=True)
class FourBitWeight:
    codes: torch.Tensor  #: [chunks, n, WORDS] in int32
    scale: torch.Tensor  #: [groups, n] in float32 or 16 bits
    minimum: torch.Tensor | None  #: the same
    codebook: torch.Tensor | None  #: [16] in float32

    @property
    def outputs(self) -> int:
        return self.codes.shape[1]

    def rows(self, begin: int, end: int) -> FourBitWeight:
        minimum = None if self.minimum is None else self.minimum[:, begin:end]
        return FourBitWeight(self.codes[:, begin:end], self.scale[:, begin:end], minimum, self.codebook)


def num_chunks(k: int) -> int:
    return cdiv(k, CHUNK)


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes [n, k] of any integer type to int32 [chunks, n, WORDS]. Missing inputs have the code 0."""
    n, k = codes.shape
    padded = torch.nn.functional.pad(codes.to(torch.int32), (0, num_chunks(k) * CHUNK - k))
    planes = padded.view(n, -1, _PLANES, WORDS)
    words = torch.zeros(n, planes.shape[1], WORDS, dtype=torch.int32)
    for plane in range(_PLANES):
        words |= planes[:, :, plane] << 4 * plane
    return words.transpose(0, 1).contiguous()


def unpack_codes(words: torch.Tensor, k: int) -> torch.Tensor:
    """Return the codes as int32 [n, k]."""
    shifts = 4 * torch.arange(_PLANES, dtype=torch.int32, device=words.device)[:, None]
    codes = (words.transpose(0, 1).unsqueeze(2) >> shifts) & 15
    return codes.reshape(words.shape[1], -1)[:, :k]


def dequantize_reference(weight: FourBitWeight, k: int) -> torch.Tensor:
    """Return the weight [n, k] in float32."""
    codes = unpack_codes(weight.codes, k)
    if weight.codebook is not None:
        values = weight.codebook[codes]
    elif weight.minimum is None:
        values = (codes - ZERO_CODE).float()
    else:
        values = codes.float()
    group = k // weight.scale.shape[0]
    values = values.view(len(values), -1, group) * weight.scale.t().float().unsqueeze(2)
    if weight.minimum is not None:
        values += weight.minimum.t().float().unsqueeze(2)
    return values.view(-1, k)


def four_bit_linear(
    x: torch.Tensor,
    weight: FourBitWeight,
    bias: torch.Tensor | None,
    *,
    out: torch.Tensor,
    scratch: ProductScratch | None = None,
    room: torch.Tensor | None = None,
) -> None:
    """Compute `out = x @ weight.T + bias` for x [rows, k].

    `room`: idle memory, in which some rows of the weight are dequantised at a time. Without it, or with too
    little, products of many rows are slower.
    """
    if not runs_triton(x):
        lookup = {"minimum": weight.minimum, "codebook": weight.codebook}
        if not packed_linear(x, weight.codes, weight.scale, bias, out=out, **lookup):
            four_bit_reference(x, weight, bias, out=out)
        return
    wide = None if room is None else _wide_rows(room, x)
    if wide is None or (x.shape[0] <= MAX_TILED_ROWS and x.dtype != torch.float32):
        four_bit_tiled_triton(x, weight, bias, out=out, scratch=scratch)
    else:
        four_bit_widened_triton(x, weight, bias, out=out, wide=wide)


#: Outputs that are dequantised at a time on a CPU.
_CPU_OUTPUTS = 512


def four_bit_reference(
    x: torch.Tensor, weight: FourBitWeight, bias: torch.Tensor | None, *, out: torch.Tensor
) -> None:
    for begin in range(0, weight.outputs, _CPU_OUTPUTS):
        end = begin + _CPU_OUTPUTS
        wide = dequantize_reference(weight.rows(begin, end), x.shape[1])
        product = torch.mm(x.float(), wide.t())
        out[:, begin:end] = product if bias is None else product.add_(bias[begin:end])


# Many rows.


#: Bytes of weights that are dequantised at a time: they stay in the L2 cache until they are used.
WIDE_BYTES = 32 << 20


def _wide_rows(room: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
    """Return room for rows of a weight in the dtype of x; None: not even one multiple of 16 fits."""
    k = x.shape[1]
    flat = room.view(-1).view(torch.uint8)
    count = min(len(flat), WIDE_BYTES) // (k * x.itemsize) // 16 * 16
    return flat[: count * k * x.itemsize].view(x.dtype).view(count, k) if count else None


def four_bit_widened_triton(
    x: torch.Tensor,
    weight: FourBitWeight,
    bias: torch.Tensor | None,
    *,
    out: torch.Tensor,
    wide: torch.Tensor,
) -> None:
    """Dequantise as many rows as `wide` has, let the library multiply by them, and so on."""
    for begin in range(0, weight.outputs, len(wide)):
        end = min(begin + len(wide), weight.outputs)
        rows = wide[: end - begin]
        dequantize_triton(weight, begin, out=rows)
        if bias is None:
            torch.mm(x, rows.t(), out=out[:, begin:end])
        else:
            torch.addmm(bias[begin:end], x, rows.t(), out=out[:, begin:end])


def dequantize_triton(weight: FourBitWeight, begin: int, *, out: torch.Tensor, block_n: int = 32) -> None:
    """Write the weight's rows from `begin` on to `out` [rows, k]."""
    rows, k = out.shape
    group = _ScaleGroups.of(weight, k)
    launch(
        _dequantize_kernel,
        (cdiv(rows, block_n), num_chunks(k)),
        out,
        weight.codes,
        weight.scale,
        weight.minimum,
        weight.codebook,
        begin,
        rows,
        weight.outputs,
        k,
        group.count,
        group.chunks,
        PLANES=group.planes,
        BLOCK_N=block_n,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["begin", "rows"])
def _dequantize_kernel(
    out,
    codes,
    scale,
    minimum,
    codebook,
    begin,
    rows,
    n,
    k,
    num_groups,
    chunks_per_group,
    PLANES: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    chunk = tl.program_id(1)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = outputs < rows
    source = (begin + outputs).to(tl.int64)
    words_at = codes + (chunk.to(tl.int64) * n + source[:, None]) * 16 + tl.arange(0, 16)[None, :]
    words = tl.load(words_at, valid[:, None], other=0)
    out_at = out + outputs.to(tl.int64)[:, None] * k + chunk * 128 + tl.arange(0, 16)[None, :]
    first = chunk // chunks_per_group * (8 // PLANES)
    for plane in tl.static_range(8):
        group = tl.minimum(first + plane // PLANES, num_groups - 1)
        s = tl.load(scale + group * n + source, valid, other=0.0).to(tl.float32)
        values = _values(words, plane, minimum, codebook) * s[:, None]
        if minimum is not None:
            m = tl.load(minimum + group * n + source, valid, other=0.0).to(tl.float32)
            values += m[:, None]
        in_k = chunk * 128 + plane * 16 + tl.arange(0, 16) < k
        tl.store(out_at + plane * 16, values.to(out.dtype.element_ty), valid[:, None] & in_k[None, :])


@triton.jit
def _values(words, plane: tl.constexpr, minimum, codebook):
    code = (words >> (4 * plane)) & 15
    if codebook is not None:
        return tl.load(codebook + code)
    if minimum is None:
        code = code - 8
    return code.to(tl.float32)


# Few rows.


@dataclass(frozen=True, slots=True)
class _ScaleGroups:
    """How scales are found: group `chunk // chunks * (8 // planes) + plane // planes`."""

    count: int
    planes: int  #: of a chunk, in a group
    chunks: int  #: in a group that is larger

    @staticmethod
    def of(weight: FourBitWeight, k: int) -> _ScaleGroups:
        count = weight.scale.shape[0]
        size = k // count
        if count > 1 and size < CHUNK:
            return _ScaleGroups(count, size // WORDS, 1)
        return _ScaleGroups(count, _PLANES, num_chunks(size))


#: Tiles by their largest number of rows; the last serves all larger ones. BLOCK_K is one chunk.
TILES = {
    8: Tile(8, 64, CHUNK, num_warps=2, num_stages=4, per_processor=4),
    16: Tile(16, 64, CHUNK, num_warps=2, num_stages=4, per_processor=4),
    32: Tile(32, 64, CHUNK, num_warps=4, num_stages=4, per_processor=3),
    1 << 31: Tile(64, 64, CHUNK, num_warps=4, num_stages=3, per_processor=2),
}

#: The tile for float32, which tensor cores would round.
FLOAT32_TILE = Tile(16, 32, CHUNK, num_warps=4, num_stages=2)

#: Up to so many rows the weight is not dequantised into memory.
MAX_TILED_ROWS = 64


def tile_for(rows: int, dtype: torch.dtype) -> Tile:
    if dtype == torch.float32:
        return FLOAT32_TILE
    return next(tile for max_rows, tile in TILES.items() if rows <= max_rows)


def four_bit_tiled_triton(
    x: torch.Tensor,
    weight: FourBitWeight,
    bias: torch.Tensor | None,
    *,
    out: torch.Tensor,
    scratch: ProductScratch | None = None,
    tile: Tile | None = None,
) -> None:
    (rows, k), n = x.shape, weight.outputs
    tile = tile_for(rows, x.dtype) if tile is None else tile
    if scratch is not None and not scratch.num_programs(tile):
        scratch = None
    num_tiles = cdiv(rows, tile.block_m) * cdiv(n, tile.block_n)
    group = _ScaleGroups.of(weight, k)
    # The interpreter knows no assembly.
    by_pairs = x.dtype in _MAGIC and weight.codebook is None and not x.is_cpu and capability() >= 80
    launch(
        _tiled_kernel,
        (num_tiles if scratch is None else scratch.num_programs(tile),),
        out,
        x,
        weight.codes,
        weight.scale,
        weight.minimum,
        weight.codebook,
        bias,
        None if scratch is None else scratch.partial,
        None if scratch is None else scratch.counters,
        rows,
        n,
        k,
        group.count,
        group.chunks,
        PLANES=group.planes,
        HAS_BIAS=bias is not None,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        EVEN_K=k % CHUNK == 0,
        GROUP_N=GROUP_N,
        SHARES=scratch is not None,
        BY_PAIRS=by_pairs,
        OFFSET=_MAGIC[x.dtype] if by_pairs and weight.minimum is not None else 0,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@triton.jit(do_not_specialize=["rows"])
def _tiled_kernel(
    out,
    x,
    codes,
    scale,
    minimum,
    codebook,
    bias,
    partial,
    counters,
    rows,
    n,
    k,
    num_groups,
    chunks_per_group,
    PLANES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    GROUP_N: tl.constexpr,
    SHARES: tl.constexpr,
    BY_PAIRS: tl.constexpr,
    OFFSET: tl.constexpr,
):
    # A step is a chunk of a tile; how programs share steps is in `quantized.py`.
    num_k = tl.cdiv(k, 128)
    first, end, share = tl.program_id(0), tl.program_id(0) + 1, 1
    if SHARES:
        total = tl.cdiv(rows, BLOCK_M) * tl.cdiv(n, BLOCK_N) * num_k
        share = tl.cdiv(total, tl.num_programs(0))
        first = tl.program_id(0) * share
        end = tl.minimum(first + share, total)
    words_of_chunk = tl.full([], 16, tl.int64) * n
    inputs, in_plane = tl.arange(0, 16), tl.arange(0, 16)[:, None]
    ones = tl.full([BLOCK_N, 16], 1.0, x.dtype.element_ty)
    while first < end:
        tile, begin, num_steps = first, 0, num_k
        if SHARES:  # this program's steps of the tile, from `begin` on
            tile, begin = first // num_k, first % num_k
            num_steps = tl.minimum(num_k - begin, end - first)
        outputs, tokens = _place(tile, rows, n, BLOCK_M, BLOCK_N, GROUP_N)
        # Beyond the last output, that one is computed again and dropped: loads need no mask.
        sources = tl.minimum(outputs, n - 1).to(tl.int64)
        words_at = codes + sources[:, None] * 16 + inputs[None, :]
        x_at = x + tokens.to(tl.int64)[None, :] * k + in_plane
        in_rows = tokens[None, :] < rows
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        # Scales are loaded a step ahead: they are no factors, so that the compiler does not pipeline them.
        scales = _scales(scale, sources, begin, n, num_groups, chunks_per_group, PLANES)
        minimums = scales
        if minimum is not None:
            minimums = _scales(minimum, sources, begin, n, num_groups, chunks_per_group, PLANES)
        for chunk in range(begin, begin + num_steps):
            words = tl.load(words_at + chunk * words_of_chunk)
            next_scales = _scales(scale, sources, chunk + 1, n, num_groups, chunks_per_group, PLANES)
            next_minimums = next_scales
            if minimum is not None:
                next_minimums = _scales(minimum, sources, chunk + 1, n, num_groups, chunks_per_group, PLANES)
            factors = _factors(words, minimum, codebook, x.dtype.element_ty, BY_PAIRS)
            part = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for plane in tl.static_range(8):
                at = chunk * 128 + plane * 16
                if EVEN_K:
                    a = tl.load(x_at + at, in_rows, other=0.0)
                else:
                    a = tl.load(x_at + at, in_rows & (at + in_plane < k), other=0.0)
                if plane % PLANES == 0:
                    part = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                part = tl.dot(factors[plane], a, part, input_precision="ieee")
                if minimum is not None:  # sums of x by group, in the place of `part`
                    sums = tl.dot(ones, a, sums, input_precision="ieee")
                if plane % PLANES == PLANES - 1:
                    s = scales[plane // PLANES]
                    acc += part * s[:, None]
                    if minimum is not None:
                        acc += sums * (minimums[plane // PLANES] - OFFSET * s)[:, None]
            scales, minimums = next_scales, next_minimums
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
                    for index in range(num_parts):
                        part_at = _part_at(partial, opens + index, index == 0, BLOCK_M, BLOCK_N)
                        acc += tl.load(part_at, cache_modifier=".cg")
                    tl.store(counters + opens, 0)
        if is_whole:
            if HAS_BIAS:
                acc += tl.load(bias + outputs, outputs < n, other=0.0).to(tl.float32)[:, None]
            out_at = out + tokens.to(tl.int64)[None, :] * n + outputs[:, None]
            tl.store(out_at, acc.to(out.dtype.element_ty), (outputs[:, None] < n) & (tokens[None, :] < rows))
        first += num_steps if SHARES else 1


@triton.jit
def _scales(scale, sources, chunk, n, num_groups, chunks_per_group, PLANES: tl.constexpr):
    """Load the scales of a chunk as float32; beyond the last chunk, any."""
    first = chunk // chunks_per_group * (8 // PLANES)
    s0 = _scale(scale, sources, first, n, num_groups)
    s1, s2, s3, s4, s5, s6, s7 = s0, s0, s0, s0, s0, s0, s0
    if PLANES <= 4:
        s1 = _scale(scale, sources, first + 1, n, num_groups)
    if PLANES <= 2:
        s2 = _scale(scale, sources, first + 2, n, num_groups)
        s3 = _scale(scale, sources, first + 3, n, num_groups)
    if PLANES == 1:
        s4 = _scale(scale, sources, first + 4, n, num_groups)
        s5 = _scale(scale, sources, first + 5, n, num_groups)
        s6 = _scale(scale, sources, first + 6, n, num_groups)
        s7 = _scale(scale, sources, first + 7, n, num_groups)
    return s0, s1, s2, s3, s4, s5, s6, s7


@triton.jit
def _scale(scale, sources, group, n, num_groups):
    return tl.load(scale + tl.minimum(group, num_groups - 1) * n + sources).to(tl.float32)


#: Powers of 2 that leave room for a code under their exponent, so that their sum with it takes no conversion.
_MAGIC = {torch.bfloat16: 128, torch.float16: 1024}


def _unpack(subtract: str, magic: int) -> str:
    """Return assembly that turns two words into eight pairs of floats: of each plane, its codes and a power
    of 2, which `subtract` may take away."""
    lines = ["{", ".reg .b32 half, code, less, one;", subtract]
    for half, selector in enumerate(("0x5410", "0x7632")):
        lines.append(f"prmt.b32 half, $8, $9, {selector};")
        for shift in range(4):
            target = f"${4 * half + shift}"
            lines.append(f"shr.u32 code, half, {4 * shift};")
            lines.append(f"lop3.b32 {target}, code, 0x000F000F, {magic:#010x}, 0xEA;")
            if "bf16" in subtract:
                lines.append(f"fma.rn.bf16x2 {target}, {target}, one, less;")
            elif subtract:
                lines.append(f"add.f16x2 {target}, {target}, less;")
    return "\n".join([*lines, "}"])


_BF16_CODES = tl and tl.constexpr(_unpack("", 0x43004300))
_BF16_SIGNED = tl and tl.constexpr(
    _unpack("mov.b32 one, 0x3F803F80; mov.b32 less, 0xC308C308; // bf16", 0x43004300)
)
_F16_CODES = tl and tl.constexpr(_unpack("", 0x64006400))
_F16_SIGNED = tl and tl.constexpr(_unpack("mov.b32 less, 0xE408E408;", 0x64006400))
_REGISTERS = tl and tl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r,r")


@triton.jit
def _factors(words, minimum, codebook, dtype: tl.constexpr, BY_PAIRS: tl.constexpr):
    """The eight planes of words as factors, without loss but for that of a codebook."""
    if not BY_PAIRS:
        factors = (
            _values(words, 0, minimum, codebook).to(dtype),
            _values(words, 1, minimum, codebook).to(dtype),
            _values(words, 2, minimum, codebook).to(dtype),
            _values(words, 3, minimum, codebook).to(dtype),
            _values(words, 4, minimum, codebook).to(dtype),
            _values(words, 5, minimum, codebook).to(dtype),
            _values(words, 6, minimum, codebook).to(dtype),
            _values(words, 7, minimum, codebook).to(dtype),
        )
    elif dtype == tl.bfloat16:
        pairs: tl.constexpr = _BF16_SIGNED if minimum is None else _BF16_CODES
        factors = tl.inline_asm_elementwise(
            pairs,
            _REGISTERS,
            [words],
            dtype=(
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
            ),
            is_pure=True,
            pack=2,
        )
    else:
        halves: tl.constexpr = _F16_SIGNED if minimum is None else _F16_CODES
        factors = tl.inline_asm_elementwise(
            halves,
            _REGISTERS,
            [words],
            dtype=(
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
            ),
            is_pure=True,
            pack=2,
        )
    return factors

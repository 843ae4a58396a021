"""How fast are products with weights of four bits, beside those of sixteen and beside what memory allows?

    python -m bench.engine.four_bit_products [--candidates] [--products NAME ...] [--rows N ...] [--save]

Each product of a layer of Llama-3.1-8B by rows, with random codes in groups of 32 with minimums: tiles with
4 bits in registers, the weight dequantised in parts for the library's product, and bf16. Prints a JSON line
for each measurement. Every time is of launches inside a CUDA graph, over weights that do not fit the cache;
`wrong` is in the place of a time if the numbers are. Bounds count each byte of weights once, at 4.2 TB/s.
"""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple
from functools import partial

import torch

from bench.engine.decode_kernels import LLAMA_8B, TB_PER_S, say
from bench.engine.kernels import BF16
from bench.engine.product_sizes import products_of
from bench.engine.timing import microseconds
from bench.report import arguments, emit
from hearth.kernels.four_bits import (
    FourBitWeight,
    dequantize_reference,
    four_bit_tiled_triton,
    four_bit_widened_triton,
    tile_for,
)
from hearth.kernels.jit import cdiv, num_processors
from hearth.kernels.quantized import ProductScratch, Tile

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048)
#: Tiles beside the one that is used, by the most rows that they are tried for.
CANDIDATES: dict[int, list[Tile]] = {
    8: [
        Tile(8, 64, 128, 2, 4, 4),
        Tile(8, 64, 128, 2, 4, 6),
        Tile(8, 64, 128, 2, 6, 4),
        Tile(8, 128, 128, 4, 4, 3),
        Tile(8, 32, 128, 1, 5, 8),
        Tile(8, 32, 128, 2, 4, 6),
    ],
    16: [Tile(16, 64, 128, 2, 4, 4), Tile(16, 32, 128, 2, 4, 5), Tile(16, 128, 128, 4, 4, 2)],
    32: [Tile(32, 64, 128, 2, 4, 4), Tile(32, 64, 128, 4, 4, 3), Tile(32, 128, 128, 4, 3, 2)],
    128: [Tile(64, 64, 128, 4, 3, 2), Tile(64, 128, 128, 4, 3, 1), Tile(64, 64, 128, 2, 3, 3)],
}
#: Bytes that are dequantised at a time.
WIDE_BYTES = (16 << 20, 32 << 20, 64 << 20)
GROUP = 32


def scratch_for() -> ProductScratch:
    """Scratch with room for any of the tiles."""
    return ProductScratch(
        num_processors(),
        torch.empty(8 * num_processors() * 2 * 64 * 128, device="cuda"),
        torch.zeros(8 * num_processors(), device="cuda", dtype=torch.int32),
    )


def cold(n: int, k: int) -> list[FourBitWeight]:
    """Return weights of several layers, more than the cache holds."""
    words = torch.empty(k // 128, n, 16, dtype=torch.int32, device="cuda")
    scale = torch.rand(k // GROUP, n, device="cuda").bfloat16() / 100
    minimum = -8 * scale
    count = max(3, cdiv(300_000_000, words.nbytes))
    return [
        FourBitWeight(words.clone().random_(-(2**31), 2**31 - 1), scale.clone(), minimum.clone(), None)
        for _ in range(count)
    ]


def tiles_for(rows: int, tries_all: bool) -> list[Tile]:
    tried = next((tiles for most, tiles in CANDIDATES.items() if rows <= most), []) if tries_all else []
    served = [tile_for(rows, torch.bfloat16)] if rows <= max(CANDIDATES) else []
    return list(dict.fromkeys([*served, *tried]))


def precompile(tries_all: bool) -> None:
    """Compile all tiles side by side, for that is most of the time."""
    jobs = {tile for rows in CANDIDATES for tile in tiles_for(rows, tries_all)}
    with ProcessPoolExecutor(14, multiprocessing.get_context("spawn")) as pool:
        for job in [pool.submit(_compile, tile) for tile in jobs]:
            job.result()


def _compile(tile: Tile) -> None:
    n, k = 4096, 4096
    x, out = (torch.empty(64, size, device="meta", dtype=torch.bfloat16) for size in (k, n))
    scale = torch.empty(k // GROUP, n, device="meta", dtype=torch.bfloat16)
    weight = FourBitWeight(
        torch.empty(k // 128, n, 16, device="meta", dtype=torch.int32), scale, scale.clone(), None
    )
    counters = torch.empty(4096, device="meta", dtype=torch.int32)
    scratch = ProductScratch(132, torch.empty(1 << 26, device="meta"), counters)
    four_bit_tiled_triton(x, weight, None, out=out, scratch=scratch, tile=tile)


def product(name: str, n: int, k: int, rows_asked: list[int], tries_all: bool) -> list[dict[str, object]]:
    scratch, packed = scratch_for(), cold(n, k)
    wide = [torch.empty(n, k, **BF16).normal_() for _ in range(max(3, cdiv(300_000_000, 2 * n * k)))]
    exact = dequantize_reference(packed[-1], k)
    stored_bytes = n * k * (0.5 + 4 / GROUP)
    found = []
    for rows in rows_asked:
        x, out = torch.randn(rows, k, **BF16), torch.empty(rows, n, **BF16)
        expected = x.float() @ exact.t()
        us: dict[str, object] = {
            "bf16": microseconds([partial(torch.mm, x, w.t(), out=out) for w in wide]),
            "bytes": stored_bytes / TB_PER_S / 1e6,
        }
        for tile in tiles_for(rows, tries_all):
            call = partial(four_bit_tiled_triton, x, bias=None, out=out, scratch=scratch, tile=tile)
            us[str(astuple(tile))] = _timed(call, packed, out, expected)
        for num_bytes in WIDE_BYTES if rows >= 16 else ():
            room = torch.empty(min(n, num_bytes // (2 * k)), k, **BF16)
            call = partial(four_bit_widened_triton, x, bias=None, out=out, wide=room)
            us[f"widened {num_bytes >> 20} MiB"] = _timed(call, packed, out, expected)
        row: dict[str, object] = {"product": name, "n": n, "k": k, "rows": rows, "us": us}
        say(**{**row, "us": {key: round(t, 2) if isinstance(t, float) else t for key, t in us.items()}})
        found.append(row)
    return found


def _timed(
    call: partial[None], weights: list[FourBitWeight], out: torch.Tensor, expected: torch.Tensor
) -> object:
    """Return microseconds, or why there are none: too large for the device, or wrong."""
    try:
        us = microseconds([partial(call, weight=weight) for weight in weights])
    except Exception as error:  # others are worth having
        return repr(error)[:80]
    worst = float((out.float() - expected).abs().max() / expected.abs().max())
    return us if worst < 0.02 else f"wrong by {worst:.3f}"


def main() -> None:
    shapes = products_of(LLAMA_8B)
    parser = arguments(__doc__)
    parser.add_argument("--candidates", action="store_true", help="also tiles that are not served")
    parser.add_argument("--products", nargs="+", choices=shapes, default=list(shapes))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    given = parser.parse_args()
    begin = time.monotonic()
    precompile(given.candidates)
    say(part="precompile", seconds=time.monotonic() - begin)
    rows = [
        row
        for name in given.products
        for row in product(name, *shapes[name], rows_asked=given.rows, tries_all=given.candidates)
    ]
    emit("four_bit_products", {"products": rows}, save=given.save)


if __name__ == "__main__":
    main()

"""How fast are products with weights of eight bits, beside those of sixteen and beside what memory allows?

    python -m bench.engine.eight_bit_products [--only products,chain,widen] [--candidates]

products     each product of a layer by rows
chain        all kernels of a decode step behind each other
widen        many rows: weights made wide in a slab of memory, for the library's product, beside our kernel

Shapes of Llama-2-7B and Llama-3.1-8B, random numbers. Prints a JSON line for each measurement. Every time is
of launches inside a CUDA graph, over weights that do not fit the cache. Bounds count each byte of weights
once, at 4.2 TB/s.
"""

from __future__ import annotations

import multiprocessing
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial

import torch

from bench.engine.decode_kernels import LLAMA_7B, LLAMA_8B, TB_PER_S, Chain, run, say, set_overlap
from bench.engine.kernels import BF16
from bench.engine.product_sizes import products_of
from bench.engine.timing import microseconds
from hearth.kernels.jit import cdiv, num_processors
from hearth.kernels.quantized import (
    ProductScratch,
    Tile,
    quantized_linear_reference,
    quantized_tiled_triton,
    quantized_widened_triton,
    tile_for,
)

STORED = (torch.int8, torch.float8_e4m3fn)
ROWS = (17, 32, 48, 64, 96, 128, 256)
#: Tiles beside the one that is used, by the most rows that they are tried for.
CANDIDATES: dict[int, list[Tile]] = {
    16: [
        Tile(16, 64, 128, 4, 5, 3),
        Tile(16, 64, 256, 4, 4, 2),
        Tile(16, 64, 128, 4, 4, 4, 128),
        Tile(16, 128, 128, 8, 4, 2, 128),
    ],
    32: [
        Tile(32, 64, 128, 4, 4, 3),
        Tile(32, 64, 128, 4, 4, 0),
        Tile(32, 128, 128, 8, 5, 2, 128),
        Tile(32, 128, 128, 8, 4, 2, 128),
        Tile(32, 128, 128, 8, 4, 2, 128, 3),
        Tile(32, 64, 128, 4, 4, 3, None, 3),
        Tile(32, 128, 64, 8, 6, 2, 128),
        Tile(32, 128, 128, 4, 4, 2),
    ],
    64: [
        Tile(64, 64, 128, 4, 4, 2),
        Tile(64, 64, 128, 4, 3, 3, 168),
        Tile(64, 64, 128, 4, 3, 0),
        Tile(64, 128, 128, 8, 3, 2, 128),
        Tile(64, 128, 64, 8, 5, 2, 128),
        Tile(64, 128, 128, 8, 3, 2, 128, 2),
        Tile(64, 128, 128, 8, 4, 2, 128),
        Tile(64, 128, 64, 4, 4, 2),
    ],
    128: [
        Tile(128, 64, 128, 4, 3, 0),
        Tile(128, 64, 128, 4, 3, 2),
        Tile(128, 128, 64, 8, 6, 1),
        Tile(128, 128, 128, 8, 4, 1),
        Tile(128, 128, 64, 8, 4, 1),
        Tile(128, 128, 64, 8, 4, 2, 128),
        Tile(128, 256, 64, 8, 4, 1),
    ],
    256: [
        Tile(128, 128, 64, 8, 4, 1),
        Tile(128, 256, 64, 8, 4, 1),
        Tile(256, 128, 64, 8, 4, 1),
        Tile(256, 128, 64, 8, 3, 0),
    ],
}

#: Which of the tiles for some rows are also tried without an early start.
ALONE = (0, 1)


def scratch_for() -> ProductScratch:
    """Room for any tile."""
    return ProductScratch(
        num_processors(),
        torch.empty(2 * 132 * 2 * 128 * 256, device="cuda"),
        torch.zeros(4 * num_processors(), device="cuda", dtype=torch.int32),
    )


def cold(n: int, k: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return weights of several layers, more than the cache holds."""
    count = max(3, cdiv(300_000_000, n * k * dtype.itemsize))
    one = torch.empty(n, k, **BF16).normal_(std=30).clamp_(-127, 127).round_().to(dtype)
    return [one.clone() for _ in range(count)]


def tiles_for(rows: int, tries_all: bool) -> list[Tile]:
    served = tile_for(rows, torch.bfloat16)
    tried = next(tiles for most, tiles in CANDIDATES.items() if rows <= most) if tries_all else []
    return [served, *(tile for tile in tried if tile != served)]


def precompile(tries_all: bool) -> None:
    """Compile all tiles side by side, for that is most of the time."""
    jobs = [
        (rows, stored, index, overlaps)
        for rows in (16, 32, 64, 128, 256)
        for stored in STORED
        for index in range(len(tiles_for(rows, tries_all)))
        for overlaps in ((True, False) if index in ALONE else (True,))
    ]
    with ProcessPoolExecutor(12, multiprocessing.get_context("spawn")) as pool:
        for job in [pool.submit(_compile, *job, tries_all) for job in jobs]:
            try:
                job.result()
            except Exception as error:
                say(part="precompile", error=repr(error)[:300])


def _compile(rows: int, stored: torch.dtype, index: int, overlaps: bool, tries_all: bool) -> None:
    tile, (n, k) = tiles_for(rows, tries_all)[index], (4096, 4096)
    x, out = (torch.empty(rows, size, device="meta", dtype=torch.bfloat16) for size in (k, n))
    scale = torch.empty(n, device="meta")
    weight = torch.empty(n, k, device="meta", dtype=torch.uint8).view(stored)
    counters = torch.empty(4096, device="meta", dtype=torch.int32)
    scratch = ProductScratch(132, torch.empty(1 << 26, device="meta"), counters)
    quantized_tiled_triton(x, weight, scale, None, out=out, scratch=scratch, tile=tile, overlaps=overlaps)


def products(tries_all: bool) -> None:
    """Time each product by rows."""
    scratch = scratch_for()
    for shape, name in (
        (LLAMA_8B, "qkv"),
        (LLAMA_8B, "o"),
        (LLAMA_8B, "up"),
        (LLAMA_8B, "down"),
        (LLAMA_7B, "qkv"),
        (LLAMA_7B, "down"),
    ):
        n, k = products_of(shape)[name]
        wide = cold(n, k, torch.bfloat16)
        narrow = {stored: cold(n, k, stored) for stored in STORED}
        scale = torch.full((n,), 0.01, device="cuda")
        for rows in (16, *ROWS) if not tries_all else (16, 32, 64, 128, 256):
            x, out = torch.randn(rows, k, **BF16), torch.empty(rows, n, **BF16)
            us = microseconds([lambda w=w: torch.mm(x, w.t(), out=out) for w in wide])
            found: dict[str, object] = {"bf16": round(us, 1), "bytes": round(n * k / TB_PER_S / 1e6, 1)}
            for stored, weights in narrow.items():
                expected = torch.empty_like(out)
                quantized_linear_reference(x, weights[0], scale, None, out=expected)
                for tile in tiles_for(rows, tries_all):
                    found[f"{str(stored)[6:10]} {_told(tile)}"] = _timed(
                        x, weights, scale, out, scratch, tile, True, expected
                    )
            say(part="products", shape=shape.name, product=name, rows=rows, us=found)
        del wide, narrow
        torch.cuda.empty_cache()


def _told(tile: Tile) -> str:
    return ",".join(
        str(x)
        for x in (
            tile.block_m,
            tile.block_n,
            tile.block_k,
            tile.num_warps,
            tile.num_stages,
            tile.per_processor,
            tile.ahead,
        )
    )


def _timed(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    scale: torch.Tensor,
    out: torch.Tensor,
    scratch: ProductScratch,
    tile: Tile,
    overlaps: bool,
    expected: torch.Tensor,
) -> object:
    def call(weight: torch.Tensor) -> None:
        quantized_tiled_triton(x, weight, scale, None, out=out, scratch=scratch, tile=tile, overlaps=overlaps)

    try:
        us = microseconds([partial(call, weight) for weight in weights])
        worst = float((out.float() - expected.float()).abs().max() / expected.float().abs().max())
        return round(us, 1) if worst < 0.01 else f"wrong by {worst:.3f}"
    except Exception as error:  # too large for the device; others are worth having
        return repr(error)[:80]


def chain(tries_all: bool) -> None:
    """Time a decode step of eight layers."""
    scratch = scratch_for()
    for shape in (replace(LLAMA_7B, num_layers=8), replace(LLAMA_8B, num_layers=8)):
        for rows in (16, 32, 64, 128, 256) if shape.name == "8B" else (32, 64, 128):
            found: dict[str, object] = {}
            set_overlap(True)
            wide = Chain(shape, rows, 192)
            found["bf16"] = round(wide.measure()[0], 3)
            del wide
            for stored in STORED:
                it = Chain(shape, rows, 192, stored)
                found["bytes"] = round(it.memory_ms, 3)
                for index, tile in enumerate(tiles_for(rows, tries_all)):
                    for overlaps in (True, False) if index in ALONE else (True,):
                        it.multiply = partial(_multiply, scratch, tile, overlaps)
                        try:
                            ms: object = round(it.measure()[0], 3)
                        except Exception as error:
                            ms = repr(error)[:80]
                        found[f"{str(stored)[6:10]} {_told(tile)}{'' if overlaps else ' alone'}"] = ms
                del it
            say(part="chain", shape=shape.name, rows=rows, ms=found)
            torch.cuda.empty_cache()


def _multiply(
    scratch: ProductScratch,
    tile: Tile,
    overlaps: bool,
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    out: torch.Tensor,
) -> None:
    quantized_tiled_triton(x, weight, scale, None, out=out, scratch=scratch, tile=tile, overlaps=overlaps)


#: Outputs whose weights are widened at a time.
SLABS = (1024, 2048, 4096, 8192, 1 << 20)


def widen(tries_all: bool) -> None:
    """Time products of many rows: weights widened for the library's product, and our kernel."""
    for name in ("up", "down", "o"):
        n, k = products_of(LLAMA_8B)[name]
        room, wide = torch.empty(n * k, **BF16), cold(n, k, torch.bfloat16)
        scale = torch.full((n,), 0.01, device="cuda")
        for stored in STORED:
            weights = cold(n, k, stored)
            for rows in (256, 384, 512, 1024, 2048, 8192):
                x, out = torch.randn(rows, k, **BF16), torch.empty(rows, n, **BF16)
                us = {"bf16": microseconds([lambda w=w: torch.mm(x, w.t(), out=out) for w in wide])}
                us["tiled"] = microseconds(
                    [lambda w=w: quantized_tiled_triton(x, w, scale, None, out=out) for w in weights]
                )
                for slab in [slab for slab in SLABS if slab < n] + [n]:
                    cut = room[: slab * k]
                    us[f"slabs of {slab}"] = microseconds(
                        [
                            lambda w=w, cut=cut: quantized_widened_triton(
                                x, w, scale, None, out=out, room=cut
                            )
                            for w in weights
                        ]
                    )
                told = {name: round(x, 1) for name, x in us.items()}
                say(part="widen", product=name, stored=str(stored)[6:10], rows=rows, us=told)
            del weights
        del room, wide


PARTS: dict[str, Callable[[bool], None]] = {part.__name__: part for part in (chain, widen, products)}


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run")
    parser.add_argument("--candidates", action="store_true", help="also tiles that are not served")
    options = parser.parse_args()
    begin = time.monotonic()
    precompile(options.candidates)
    say(part="precompile", seconds=time.monotonic() - begin)
    run([_named(PARTS[name], options.candidates) for name in options.only.split(",")])


def _named(part: Callable[[bool], None], tries_all: bool) -> Callable[[], None]:
    def call() -> None:
        part(tries_all)

    call.__name__ = part.__name__
    return call


if __name__ == "__main__":
    main()

"""How fast are products with weights of eight bits, beside those of sixteen and beside what memory allows?

    python -m bench.engine.eight_bit_products [--only chain,products] [--candidates]

chain        all kernels of a decode step of eight layers behind each other
products     each product of a layer by rows, and whether it is right

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
from dataclasses import astuple, replace
from functools import partial

import torch

from bench.engine.decode_kernels import LLAMA_7B, LLAMA_8B, TB_PER_S, Chain, say, set_overlap
from bench.engine.kernels import BF16
from bench.engine.product_sizes import products_of
from bench.engine.timing import microseconds
from hearth.kernels.jit import cdiv, num_processors
from hearth.kernels.quantized import (
    ProductScratch,
    Tile,
    quantized_linear_reference,
    quantized_tiled_triton,
    tile_for,
)

STORED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
ROWS = (2, 16, 17, 32, 48, 64, 96, 128, 256)
#: Tiles beside the one that is used, by the most rows that they are tried for.
CANDIDATES: dict[int, list[Tile]] = {
    16: [Tile(16, 64, 256, 4, 4, 2), Tile(16, 32, 256, 4, 4, 0)],
    32: [Tile(32, 128, 128, 4, 4, 2), Tile(32, 64, 128, 4, 4, 0)],
    64: [Tile(64, 64, 128, 4, 3, 2), Tile(64, 64, 128, 4, 3, 0)],
    256: [Tile(128, 128, 128, 8, 4, 1), Tile(128, 128, 64, 8, 4, 1), Tile(128, 64, 128, 4, 3, 0)],
}


def scratch_for() -> ProductScratch:
    """Scratch with room for any of the tiles."""
    return ProductScratch(
        num_processors(),
        torch.empty(4 * num_processors() * 128 * 256, device="cuda"),
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
    return [served, *tried]


def precompile(tries_all: bool) -> None:
    """Compile all tiles side by side, for that is most of the time."""
    jobs = [
        (tile, stored)
        for rows in CANDIDATES
        for stored in STORED.values()
        for tile in tiles_for(rows, tries_all)
    ]
    with ProcessPoolExecutor(12, multiprocessing.get_context("spawn")) as pool:
        for job in [pool.submit(_compile, *job) for job in jobs]:
            job.result()


def _compile(tile: Tile, stored: torch.dtype) -> None:
    n, k = 4096, 4096
    x, out = (torch.empty(64, size, device="meta", dtype=torch.bfloat16) for size in (k, n))
    weight = torch.empty(n, k, device="meta", dtype=torch.uint8).view(stored)
    counters = torch.empty(4096, device="meta", dtype=torch.int32)
    scratch = ProductScratch(132, torch.empty(1 << 26, device="meta"), counters)
    scale = torch.empty(n, device="meta")
    quantized_tiled_triton(x, weight, scale, None, out=out, scratch=scratch, tile=tile)


def products(tries_all: bool) -> None:
    """Time each product by rows."""
    scratch = scratch_for()
    for shape in (LLAMA_7B, LLAMA_8B):
        for name, (n, k) in products_of(shape).items():
            wide = cold(n, k, torch.bfloat16)
            narrow = {name: cold(n, k, stored) for name, stored in STORED.items()}
            for rows in ROWS:
                x, out = torch.randn(rows, k, **BF16), torch.empty(rows, n, **BF16)
                us = microseconds([partial(torch.mm, x, w.t(), out=out) for w in wide])
                found: dict[str, object] = {"bf16": us, "bytes": n * k / TB_PER_S / 1e6}
                for stored, weights in narrow.items():
                    for tile in tiles_for(rows, tries_all):
                        found[f"{stored} {astuple(tile)}"] = _timed(x, weights, out, scratch, tile)
                say(part="products", shape=shape.name, product=name, rows=rows, us=_rounded(found))
            del wide, narrow
            torch.cuda.empty_cache()


def _timed(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    out: torch.Tensor,
    scratch: ProductScratch,
    tile: Tile,
) -> object:
    """Return microseconds, or why there are none: too large for the device, or wrong."""
    scale, expected = torch.full((out.shape[1],), 0.01, device="cuda"), torch.empty_like(out)
    quantized_linear_reference(x, weights[-1], scale, None, out=expected)

    def call(weight: torch.Tensor) -> None:
        quantized_tiled_triton(x, weight, scale, None, out=out, scratch=scratch, tile=tile)

    try:
        us = microseconds([partial(call, weight) for weight in weights])
    except Exception as error:  # others are worth having
        return repr(error)[:80]
    worst = float((out.float() - expected.float()).abs().max() / expected.float().abs().max())
    return us if worst < 0.01 else f"wrong by {worst:.3f}"


def _rounded(found: dict[str, object]) -> dict[str, object]:
    return {name: round(x, 3) if isinstance(x, float) else x for name, x in found.items()}


def chain(tries_all: bool) -> None:
    """Time a decode step of eight layers."""
    scratch = scratch_for()
    set_overlap(True)
    for shape in (replace(LLAMA_7B, num_layers=8), replace(LLAMA_8B, num_layers=8)):
        for rows in (16, 32, 64, 128, 256):
            found: dict[str, object] = {"bf16": Chain(shape, rows, 192).measure()[0]}
            for name, stored in STORED.items():
                it = Chain(shape, rows, 192, stored)
                found["bytes"] = it.memory_ms
                for tile in tiles_for(rows, tries_all):
                    it.multiply = partial(_multiply, scratch, tile)
                    found[f"{name} {astuple(tile)}"] = it.measure()[0]
                del it
            say(part="chain", shape=shape.name, rows=rows, ms=_rounded(found))
            torch.cuda.empty_cache()


def _multiply(
    scratch: ProductScratch,
    tile: Tile,
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    out: torch.Tensor,
) -> None:
    quantized_tiled_triton(x, weight, scale, None, out=out, scratch=scratch, tile=tile)


PARTS: dict[str, Callable[[bool], None]] = {"chain": chain, "products": products}


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run")
    parser.add_argument("--candidates", action="store_true", help="also tiles that are not served")
    options = parser.parse_args()
    begin = time.monotonic()
    precompile(options.candidates)
    say(part="precompile", seconds=time.monotonic() - begin)
    for name in options.only.split(","):
        PARTS[name](options.candidates)


if __name__ == "__main__":
    main()

"""How fast are layers of small models with few rows, with products of the library and of ours?

    python -m bench.engine.small_products [--shapes 0.5B,1B] [--rows 2,64]

served       small matrices by `narrow_linear_triton`, as in a step; others by the library
o 64x16x128  one product, or two, by that kernel with so many rows, outputs and inputs at a time; all others
             by the library
scratch      products of eight bits with as much scratch as Qwen2.5-0.5B has in steps of so many tokens

All kernels of a decode step of eight layers behind each other in a CUDA graph, in bf16 or int8, random
numbers, each row behind 192 tokens. Prints microseconds of a layer, beside the same with the library's
products, and the bytes of weights and KV at 4.2 TB/s.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from argparse import ArgumentParser
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from statistics import median

import torch

from bench.engine.decode_kernels import TB_PER_S
from hearth.kernels.activation import activate
from hearth.kernels.decode_attention import SplitScratch, decode_attention_triton
from hearth.kernels.jit import cdiv
from hearth.kernels.linear import NarrowTile, add_linear, linear, linear_reference, narrow_linear_triton
from hearth.kernels.norm import add_norm
from hearth.kernels.paged import Heads, PagedRows
from hearth.kernels.quantized import ProductScratch, quantized_linear
from hearth.kernels.rotary import rotate_and_store
from hearth.kernels.variants import Variant, recording

NUM_LAYERS, CONTEXT, BLOCK_TOKENS, NUM_PROCESSORS = 8, 192, 16, 132
NUM_ROUNDS = 9


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's layers."""

    hidden: int
    intermediate: int
    heads: Heads
    is_gated: bool = True
    is_int8: bool = False

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of each product."""
        q_size = self.heads.num_q * self.heads.dim
        up_size = self.intermediate * (2 if self.is_gated else 1)
        return {
            "qkv": (q_size + 2 * self.heads.num_kv * self.heads.dim, self.hidden),
            "o": (self.hidden, q_size),
            "up": (up_size, self.hidden),
            "down": (self.hidden, self.intermediate),
        }


SHAPES = {
    "0.5B": Shape(896, 4864, Heads(14, 2, 64)),
    "1B": Shape(2048, 8192, Heads(32, 8, 64)),
    "256k": Shape(2048, 16384, Heads(8, 1, 256)),
    "falcon": Shape(4544, 18176, Heads(71, 1, 64), is_gated=False),
    "8B": Shape(4096, 14336, Heads(32, 8, 128)),
    "0.5B int8": Shape(896, 4864, Heads(14, 2, 64), is_int8=True),
    "1B int8": Shape(2048, 8192, Heads(32, 8, 64), is_int8=True),
    "8B int8": Shape(4096, 14336, Heads(32, 8, 128), is_int8=True),
}
ROWS = (64, 16, 128, 2)
#: Tiles by the most rows that they are tried for.
TILES = {
    16: [NarrowTile(16, 32, 256, 4), NarrowTile(16, 16, 128, 6), NarrowTile(64, 16, 128, 6)],
    64: [NarrowTile(64, 16, 128, 6)],
    128: [NarrowTile(128, 16, 128, 5)],
}


@dataclass(frozen=True, slots=True)
class Way:
    """How the products of a layer are computed."""

    name: str
    is_served: bool = False
    narrow: tuple[str, ...] = ()  #: products by the kernel for small matrices
    tile: NarrowTile | None = None
    scratch_numbers: int = -1  #: for products of eight bits; below 0: as many as they want


def ways(shape: Shape, rows: int) -> Iterator[Way]:
    yield Way("library")
    if shape.is_int8:
        for num_tokens in (0, 2048, 4096):
            yield Way(f"scratch of {num_tokens} tokens", scratch_numbers=num_tokens * 1152 // 2)
        return
    yield Way("served", is_served=True)
    for tile in next(tiles for most, tiles in TILES.items() if rows <= most):
        size = f"{tile.block_m}x{tile.block_n}x{tile.block_k}"
        for names in (("qkv",), ("o",), ("qkv", "o")):
            yield Way(f"{' and '.join(names)} {size}", narrow=names, tile=tile)


@dataclass
class Layers:
    """The kernels of a decode step, in their order, over weights of their own for each layer."""

    shape: Shape
    rows: int
    device: str = "cuda"
    num_layers: int = NUM_LAYERS
    weights: list[dict[str, torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        shape, rows, heads = self.shape, self.rows, self.shape.heads
        for _ in range(self.num_layers):
            layer = {name: self.new(n, k) for name, (n, k) in shape.products.items()}
            for name, weight in layer.items():
                weight.normal_(std=weight.shape[1] ** -0.5)
                if shape.is_int8:
                    layer[name] = (weight * 1000).clamp_(-127, 127).to(torch.int8)
            self.weights.append(layer)
        self.scale = self.new(max(n for n, _ in shape.products.values()), dtype=torch.float32).fill_(1e-3)
        per_row = cdiv(CONTEXT, BLOCK_TOKENS)
        self.kv = self.new(
            rows * per_row, self.num_layers, 2, BLOCK_TOKENS, heads.num_kv, heads.dim
        ).normal_()
        table = torch.arange(rows * per_row, device=self.device, dtype=torch.int32).view(rows, per_row)
        positions = self.new(rows, dtype=torch.int32).fill_(CONTEXT - 1)
        slots = torch.arange(rows, device=self.device, dtype=torch.int32)
        self.paged = PagedRows(positions, slots, table)
        self.x, self.norm = self.new(rows, shape.hidden).normal_(), self.new(shape.hidden).fill_(1.0)
        self.cos_sin = self.new(CONTEXT, 2, heads.dim // 2, dtype=torch.float32).normal_()
        num_programs = 4 * NUM_PROCESSORS
        partials = 2 * num_programs * heads.num_q // heads.num_kv
        self.attention_scratch = SplitScratch(
            num_programs,
            self.new(partials * heads.dim, dtype=torch.float32),
            self.new(partials * 2, dtype=torch.float32),
            self.new(rows * heads.num_kv, dtype=torch.int32).zero_(),
        )
        self.product_scratch = ProductScratch(
            NUM_PROCESSORS,
            self.new(4 * NUM_PROCESSORS * 128 * 128, dtype=torch.float32),
            self.new(4 * NUM_PROCESSORS, dtype=torch.int32).zero_(),
        )
        self.residual, self.normed = self.new(rows, shape.hidden), self.new(rows, shape.hidden)
        self.outs = {name: self.new(rows, n) for name, (n, _) in shape.products.items()}
        self.attended, self.activated = (self.new(rows, shape.products[name][1]) for name in ("o", "down"))

    def new(self, *size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*size, device=self.device, dtype=dtype)

    @property
    def bytes_us(self) -> float:
        weights = sum(weight.nbytes for weight in self.weights[0].values())
        return (weights + self.kv.nbytes / self.num_layers) / TB_PER_S / 1e6

    def step(self, way: Way) -> None:
        heads, residual = self.shape.heads, self.residual
        residual.copy_(self.x)
        for layer, weights in enumerate(self.weights):
            kv, qkv = self.kv[:, layer], self.outs["qkv"]
            self._norm()
            self._multiply(way, "qkv", self.normed, weights["qkv"])
            rotate_and_store(qkv, heads, self.paged, kv, cos_sin=self.cos_sin, norms=None)
            decode_attention_triton(
                *(qkv, heads, self.paged, kv),
                window=None,
                scratch=self.attention_scratch,
                out=self.attended,
            )
            self._add(way, "o", self.attended, weights["o"])
            self._norm()
            self._multiply(way, "up", self.normed, weights["up"])
            activate(self.outs["up"], "silu", gated=self.shape.is_gated, out=self.activated)
            self._add(way, "down", self.activated, weights["down"])

    def _norm(self) -> None:
        add_norm(None, self.residual, self.norm, None, 1e-5, is_rms=True, out=self.normed)

    def _multiply(self, way: Way, name: str, x: torch.Tensor, weight: torch.Tensor) -> None:
        out = self.outs[name]
        if self.shape.is_int8:
            scale, scratch = self.scale[: len(weight)], self.product_scratch
            if way.scratch_numbers >= 0:
                scratch = replace(scratch, partial=scratch.partial[: way.scratch_numbers])
            quantized_linear(x, weight, scale, None, out=out, scratch=scratch)
        elif name in way.narrow:
            narrow_linear_triton(x, weight, None, out=out, tile=way.tile)
        else:
            impl = linear if way.is_served else linear_reference
            impl(x, weight, None, out=out)

    def _add(self, way: Way, name: str, x: torch.Tensor, weight: torch.Tensor) -> None:
        if self.shape.is_int8:
            self._multiply(way, name, x, weight)
            self.residual.add_(self.outs[name])
        elif name in way.narrow:
            narrow_linear_triton(x, weight, None, out=self.residual, adds=True, tile=way.tile)
        elif way.is_served:
            add_linear(x, weight, out=self.residual)
        else:
            self.residual.addmm_(x, weight.t())


def measure(name: str, rows: int) -> None:
    """Time all ways in turns, and tell by how much their results differ."""
    layers = Layers(SHAPES[name], rows)
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    notes: dict[str, str] = {}
    expected = None
    for way in ways(layers.shape, rows):
        layers.step(way)
        torch.cuda.synchronize()
        graph = graphs[way.name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layers.step(way)
        graph.replay()
        found = layers.residual.clone()
        expected = found if expected is None else expected
        worst = (found - expected).float().abs().max() / expected.float().abs().max()
        notes[way.name] = f"differs by {float(worst):.4f}" if worst else ""
    times: dict[str, list[float]] = {way: [] for way in graphs}
    for _ in range(NUM_ROUNDS):
        for text, graph in graphs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[text].append(1e3 * begin.elapsed_time(end) / NUM_LAYERS)
    us = {text: median(found) for text, found in times.items()}
    first = us.pop("library")
    print(f"\n## {name}, {rows} rows: {first:.2f} us a layer, bytes {layers.bytes_us:.2f}", flush=True)
    for text, took in us.items():
        print(f"{text:28} {took:8.2f} {took / first:6.3f} {notes[text]}", flush=True)


def precompile(shapes: list[str], rows: list[int]) -> None:
    """Compile all kernels side by side, each once, for that is most of the time."""
    with recording() as variants:
        for name, count in ((name, count) for count in rows for name in shapes):
            layers = Layers(SHAPES[name], count, "meta", num_layers=1)
            for way in ways(SHAPES[name], count):
                layers.step(way)
    with ProcessPoolExecutor(12, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile, variants))
    print(f"{len(variants)} kernels", flush=True)


def _compile(variant: Variant) -> None:
    variant.compiled()


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    given = parser.parse_args()
    shapes, rows = given.shapes.split(","), [int(count) for count in given.rows.split(",")]
    torch.set_grad_enabled(False)
    began_s = time.monotonic()
    precompile(shapes, rows)
    print(f"compiled in {time.monotonic() - began_s:.1f} s", flush=True)
    for name, count in ((name, count) for count in rows for name in shapes):
        try:
            measure(name, count)
        except Exception:  # others are worth having
            traceback.print_exc()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

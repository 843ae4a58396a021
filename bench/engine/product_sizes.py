"""How fast are the library's products of a layer, by the number of rows, and with the residual added to them?

    python -m bench.engine.product_sizes [--only sizes,addend]

sizes        the four products of a layer at every number of rows that a step may be padded to
addend       the residual added by the product itself, beside one added by the norm behind it

Shapes of Llama-2-7B and Llama-3.1-8B in bf16, random numbers. Prints a JSON line for each measurement. Every
time is of launches inside a CUDA graph, over weights that do not fit the cache.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.engine.decode_kernels import LLAMA_7B, LLAMA_8B, Shape, run, say
from bench.engine.kernels import BF16
from bench.engine.timing import microseconds
from hearth.core.sizes import StepLimits, decode_sizes
from hearth.kernels.norm import add_norm

#: Sizes of mixed steps, twice as dense as those in use.
MIXED = (*range(576, 2048, 64), *range(2048, 8193, 128))
#: Layers in a row, so that the weights of the first are gone from the cache when it comes again.
NUM_LAYERS = 3


def products_of(shape: Shape) -> dict[str, tuple[int, int]]:
    """Return the outputs and inputs of each product."""
    heads, hidden, inter = shape.heads, shape.hidden, shape.intermediate
    q_size = heads.num_q * heads.dim
    qkv_size = q_size + 2 * heads.num_kv * heads.dim
    return {
        "qkv": (qkv_size, hidden),
        "o": (hidden, q_size),
        "up": (2 * inter, hidden),
        "down": (hidden, inter),
    }


@dataclass(frozen=True, slots=True)
class Product:
    """One product of a layer, with weights of several layers and room for the largest step."""

    weights: list[torch.Tensor]
    x: torch.Tensor
    out: torch.Tensor

    @staticmethod
    def of(n: int, k: int, max_rows: int) -> Product:
        weights = [torch.empty(n, k, **BF16).normal_(std=0.02) for _ in range(NUM_LAYERS)]
        return Product(weights, torch.randn(max_rows, k, **BF16), torch.empty(max_rows, n, **BF16))

    def by_torch(self, rows: int) -> list[Callable[[], object]]:
        x, out = self.x[:rows], self.out[:rows]
        return [lambda w=w: torch.mm(x, w.t(), out=out) for w in self.weights]

    def teraflops(self, rows: int, us: float) -> float:
        n, k = self.weights[0].shape
        return 2e-6 * rows * n * k / us


def sizes() -> None:
    """Time all products of a layer by rows; `us_per_row` says what a row costs, `step` what one more size."""
    for shape in (LLAMA_7B, LLAMA_8B):
        each = {name: Product.of(n, k, MIXED[-1]) for name, (n, k) in products_of(shape).items()}
        limits = StepLimits(MIXED[-1], 1024, 16)
        for rows in (*decode_sizes(limits)[1:], *MIXED):
            us = {}
            for name, product in each.items():
                us[name] = microseconds(product.by_torch(rows))
            rates = {name: round(product.teraflops(rows, us[name])) for name, product in each.items()}
            say(part="sizes", shape=shape.name, rows=rows, us=sum(us.values()), tflops=rates)
        del each
        torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class Summed:
    """A product whose result is added to a residual, which is normalised then."""

    product: Product
    residual: torch.Tensor
    normed: torch.Tensor
    norm_weight: torch.Tensor

    def behind(self, rows: int) -> list[Callable[[], object]]:
        """The sum is made by the norm."""
        product = self.product
        return [
            step
            for multiply in product.by_torch(rows)
            for step in (multiply, lambda: self._norm(product.out[:rows], rows))
        ]

    def within(self, rows: int) -> list[Callable[[], object]]:
        """The sum is made by the product."""
        x, residual = self.product.x[:rows], self.residual[:rows]
        return [
            step
            for w in self.product.weights
            for step in (lambda w=w: residual.addmm_(x, w.t()), lambda: self._norm(None, rows))
        ]

    def _norm(self, delta: torch.Tensor | None, rows: int) -> None:
        residual, normed = self.residual[:rows], self.normed[:rows]
        add_norm(delta, residual, self.norm_weight, None, 1e-5, is_rms=True, out=normed)


def addend() -> None:
    """Time product, sum and norm in both ways, each twice."""
    for shape in (LLAMA_7B, LLAMA_8B):
        for name in ("o", "down"):
            product = Product.of(*products_of(shape)[name], MIXED[-1])
            product.x.mul_(1e-3)  # or the residual would grow without bounds
            residual, weight = torch.randn_like(product.out), torch.ones(shape.hidden, **BF16)
            summed = Summed(product, residual, torch.empty_like(residual), weight)
            for rows in (16, 64, 208, 256, 512, 2048, 4096, 8192):
                ways = [summed.behind(rows), summed.within(rows)] * 2
                behind_and_within = [round(2 * microseconds(way), 1) for way in ways]
                say(part="addend", shape=shape.name, product=name, rows=rows, us=behind_and_within)
            del product, residual, summed
            torch.cuda.empty_cache()


PARTS = {part.__name__: part for part in (sizes, addend)}


def main() -> None:
    parser = ArgumentParser("python -m bench.engine.product_sizes")
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run")
    run([PARTS[name] for name in parser.parse_args().only.split(",")])


if __name__ == "__main__":
    main()

"""How fast are the library's products of a layer, by the number of rows, and is there anything faster?

    python -m bench.engine.product_sizes [--only sizes,candidates,addend]

sizes        the four products of a layer at every number of rows that a step may be padded to
candidates   each product by every kernel that cuBLASLt proposes for it, beside the one that torch takes
addend       the residual added by the product itself, beside one added by the norm behind it

Shapes of Llama-2-7B and Llama-3.1-8B in bf16, random numbers. Prints a JSON line for each measurement. Every
time is of launches inside a CUDA graph, over weights that do not fit the cache.
"""

from __future__ import annotations

import ctypes
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.engine.decode_kernels import LLAMA_7B, LLAMA_8B, Shape, run, say
from bench.engine.kernels import BF16
from hearth.kernels.norm import add_norm
from hearth.sizes import StepLimits, decode_sizes

#: Sizes of mixed steps, twice as dense as those in use.
MIXED = (*range(576, 2048, 64), *range(2048, 8193, 128))
#: Layers in a row, so that the weights of the first are gone from the cache when it comes again.
NUM_LAYERS = 3
WORKSPACE_BYTES = 32 << 20


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


def replayed_us(launches: list[Callable[[], object]], num_replays: int) -> float:
    """Return the mean time of a launch over replays of a graph of all of them."""
    launches[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(num_replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * begin.elapsed_time(end) / num_replays / len(launches)


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
                us[name] = replayed_us(product.by_torch(rows), 2 if rows > 1024 else 6)
            rates = {name: round(product.teraflops(rows, us[name])) for name, product in each.items()}
            say(part="sizes", shape=shape.name, rows=rows, us=sum(us.values()), tflops=rates)
        del each
        torch.cuda.empty_cache()


# What cuBLASLt proposes. Its numbers are those of cublasLt.h.

_COMPUTE_32F, _REAL_32F, _REAL_16BF = 68, 0, 14
_TRANS_A, _MAX_WORKSPACE, _TRANSPOSED = 3, 1, 1


class Heuristic(ctypes.Structure):
    """A kernel that cuBLASLt proposes, and what it says about it."""

    _fields_ = (
        ("algo", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class LtProducts:
    """Products by cuBLASLt itself."""

    def __init__(self) -> None:
        torch.mm(torch.ones(16, 16, **BF16), torch.ones(16, 16, **BF16))
        maps = Path("/proc/self/maps").read_text()
        paths = {line.split()[-1] for line in maps.splitlines() if "libcublasLt.so" in line}
        self._library = ctypes.CDLL(paths.pop())
        self._handle = ctypes.c_void_p()
        self._call("cublasLtCreate", ctypes.byref(self._handle))
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)

    def _call(self, name: str, *arguments: object) -> None:
        if status := getattr(self._library, name)(*arguments):
            raise RuntimeError(f"{name} returned {status}")

    @contextmanager
    def described(self, n: int, k: int, rows: int) -> Iterator[tuple[ctypes.c_void_p, list[ctypes.c_void_p]]]:
        """Describe `out = x @ weight.T` as cuBLASLt sees it: columns first, so the weight is transposed."""
        product, layouts = ctypes.c_void_p(), [ctypes.c_void_p() for _ in range(3)]
        self._call("cublasLtMatmulDescCreate", ctypes.byref(product), _COMPUTE_32F, _REAL_32F)
        transposed = ctypes.c_int32(_TRANSPOSED)
        self._call(
            "cublasLtMatmulDescSetAttribute", product, _TRANS_A, ctypes.byref(transposed), ctypes.c_size_t(4)
        )
        for layout, (first, second) in zip(layouts, [(k, n), (k, rows), (n, rows)], strict=True):
            self._call(
                "cublasLtMatrixLayoutCreate", ctypes.byref(layout), _REAL_16BF,
                ctypes.c_uint64(first), ctypes.c_uint64(second), ctypes.c_int64(first),
            )  # fmt: skip
        yield product, layouts
        for layout in layouts:
            self._call("cublasLtMatrixLayoutDestroy", layout)
        self._call("cublasLtMatmulDescDestroy", product)

    def proposed(self, n: int, k: int, rows: int, most: int) -> list[Heuristic]:
        """Return up to `most` kernels, the one that is thought to be the fastest first."""
        preference, found, count = ctypes.c_void_p(), (Heuristic * most)(), ctypes.c_int()
        self._call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        limit = ctypes.c_uint64(WORKSPACE_BYTES)
        self._call("cublasLtMatmulPreferenceSetAttribute", preference, _MAX_WORKSPACE, ctypes.byref(limit), 8)
        with self.described(n, k, rows) as (product, (weight, x, out)):
            self._call(
                "cublasLtMatmulAlgoGetHeuristic", self._handle, product, weight, x, out, out, preference,
                most, found, ctypes.byref(count),
            )  # fmt: skip
        self._call("cublasLtMatmulPreferenceDestroy", preference)
        return list(found[: count.value])

    def launches(self, product: Product, rows: int, by: Heuristic) -> list[Callable[[], object]]:
        n, k = product.weights[0].shape

        def launch(weight: torch.Tensor) -> None:
            with self.described(n, k, rows) as (description, layouts):
                self._call(
                    "cublasLtMatmul", self._handle, description, ctypes.byref(self._one),
                    ctypes.c_void_p(weight.data_ptr()), layouts[0],
                    ctypes.c_void_p(product.x.data_ptr()), layouts[1], ctypes.byref(self._zero),
                    ctypes.c_void_p(product.out.data_ptr()), layouts[2],
                    ctypes.c_void_p(product.out.data_ptr()), layouts[2],
                    ctypes.byref(by.algo), ctypes.c_void_p(self._workspace.data_ptr()),
                    ctypes.c_size_t(WORKSPACE_BYTES),
                    ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
                )  # fmt: skip

        return [lambda w=w: launch(w) for w in product.weights]


def candidates() -> None:
    """Time what cuBLASLt proposes."""
    library = LtProducts()
    for shape in (LLAMA_7B, LLAMA_8B):
        for name, (n, k) in products_of(shape).items():
            product = Product.of(n, k, MIXED[-1])
            for rows in (64, 128, 208, 256, 512, 2048, 4096, 8192):
                num_replays = 2 if rows > 1024 else 6
                chosen_us = replayed_us(product.by_torch(rows), num_replays)
                expected, found = product.out[:rows].clone(), []
                for at, one in enumerate(library.proposed(n, k, rows, 12)):
                    us = replayed_us(library.launches(product, rows, one), num_replays)
                    error = float((product.out[:rows] - expected).abs().max())
                    found.append((round(us, 1), at, one.workspace_bytes >> 10, round(error, 3)))
                say(
                    part="candidates", shape=shape.name, product=name, rows=rows, torch_us=chosen_us,
                    torch_tflops=product.teraflops(rows, chosen_us), best=sorted(found)[:4],
                    first=found[0] if found else None, count=len(found),
                )  # fmt: skip
            del product
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
                num_replays = 2 if rows > 1024 else 6
                ways = [summed.behind(rows), summed.within(rows)] * 2
                behind_and_within = [round(2 * replayed_us(way, num_replays), 1) for way in ways]
                say(part="addend", shape=shape.name, product=name, rows=rows, us=behind_and_within)
            del product, residual, summed
            torch.cuda.empty_cache()


PARTS = {part.__name__: part for part in (sizes, candidates, addend)}


def main() -> None:
    parser = ArgumentParser("python -m bench.engine.product_sizes")
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run")
    run([PARTS[name] for name in parser.parse_args().only.split(",")])


if __name__ == "__main__":
    main()

"""How much faster would steps be if each product had the best kernel that cuBLASLt has for its size?

    python -m bench.engine.product_choices [--shapes 7B 8B] [--seconds 40]

For each number of rows that steps of `bench.engine`'s traffic are padded to, and each of the four products of
a layer, all kernels that cuBLASLt proposes for it or for sizes near it are timed beside the one that torch
takes, in turns, on a device that was busy for a while and so has as little power to spare as under traffic.
Shapes of Llama-2-7B and Llama-3.1-8B in bf16, random numbers. Prints a JSON line for each number of rows, and
in the end for each kind of traffic how long all products of all its steps take by either choice. A size that
fails costs no other, and the exit status is 1 then.
"""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from bench.engine.decode_kernels import LLAMA_7B, LLAMA_8B, Shape, say
from bench.engine.lt_products import Algorithm, LtLibrary, LtProduct
from bench.engine.padding import count_steps
from bench.engine.product_sizes import Product, products_of
from bench.engine.scale import GPU
from hearth.engine.product_choice import cuda_times_us
from hearth.sizes import StepLimits

LIMITS = StepLimits(8192, 1024, 16)
#: Blocks of KV that an H200 has beside each, at a memory fraction of 0.8.
NUM_BLOCKS = {"7B": 12_484, "8B": 48_396}
#: Products that are added to the residual.
ADDED = ("o", "down")
NUM_ROUNDS, NUM_FINAL_ROUNDS, NUM_FINALISTS = 3, 9, 3
#: Sizes on either side whose proposals are tried as well.
NUM_NEIGHBOURS = 2


def times_us(ways: Sequence[Sequence[Callable[[], object]]], num_rounds: int) -> list[float]:
    """Return the median time of a launch of each way, in turns, while the device has no pause."""
    for way in ways:
        way[0]()  # libraries load a kernel with its first launch
    return cuda_times_us(ways, num_rounds)


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernels of one product, in microseconds a launch."""

    torch_us: float
    first_us: float  #: the one that cuBLASLt proposes first
    best_us: float
    error: float  #: largest difference of the best one's result and torch's
    num_tried: int
    best: Algorithm
    proposed_at: int  #: rows for which the best one was proposed


def choose(library: LtLibrary, product: Product, rows: int, near: Sequence[int], *, adds: bool) -> Choice:
    """Time all kernels for one product, then the best of them again."""
    n, k = product.weights[0].shape
    x, out = product.x[:rows], product.out[:rows]
    own = LtProduct(library, n, k, rows, adds=adds)
    found: dict[Algorithm, int] = {}
    for size in (rows, *near):
        at = own if size == rows else LtProduct(library, n, k, size, adds=adds)
        for one in (*at.proposed(32), *at.proposed(32, 0)):
            if one not in found and own.can_run(one):
                found[one] = size
    tried = {one: [own.launcher(one, w, x, out) for w in product.weights] for one in found}
    first = next(iter(tried))
    by_torch = product.added_by_torch(rows) if adds else product.by_torch(rows)
    rough = times_us([by_torch, *tried.values()], NUM_ROUNDS)
    best = sorted(zip(rough[1:], range(len(tried)), tried, strict=True))[:NUM_FINALISTS]
    finalists = [first, *(one for _, _, one in best)]
    exact = times_us([by_torch, *(tried[one] for one in finalists)], NUM_FINAL_ROUNDS)
    best_us, winner = min(zip(exact[1:], finalists, strict=True), key=lambda pair: pair[0])
    expected, result = (_result(way[0], out, adds=adds) for way in (by_torch, tried[winner]))
    error = float((expected - result).abs().max())
    return Choice(exact[0], exact[1], best_us, error, len(tried), winner, found[winner])


def _result(launch: Callable[[], object], out: torch.Tensor, *, adds: bool) -> torch.Tensor:
    if adds:
        out.zero_()
    launch()
    return out.float()


def measure(
    library: LtLibrary, shape: Shape, rows_wanted: Sequence[int], until_s: float
) -> Iterator[dict[str, object]]:
    """Yield the times of a layer's products by their rows, or why there are none."""
    each = {name: Product.of(n, k, LIMITS.max_batch_tokens) for name, (n, k) in products_of(shape).items()}
    for name in ADDED:
        each[name].x.mul_(1e-3)  # or what is added again and again would grow without bounds
    _warm(each)
    ordered = sorted(rows_wanted)
    for rows in rows_wanted:
        if time.monotonic() > until_s:
            say(part="choices", shape=shape.name, rows=rows, skipped="no time left")
            continue
        at = ordered.index(rows)
        near = ordered[max(0, at - NUM_NEIGHBOURS) : at] + ordered[at + 1 : at + 1 + NUM_NEIGHBOURS]
        try:
            chosen = {
                name: choose(library, one, rows, near, adds=name in ADDED) for name, one in each.items()
            }
        except Exception as error:  # one size that fails costs no other
            yield {"rows": rows, "error": repr(error)}
            continue
        yield {
            "rows": rows,
            "torch_us": sum(one.torch_us for one in chosen.values()),
            "best_us": sum(min(one.best_us, one.torch_us) for one in chosen.values()),
            "by_product": {
                name: [round(one.torch_us, 1), round(one.first_us, 1), round(one.best_us, 1), one.num_tried,
                       one.proposed_at, round(one.error, 3)]
                for name, one in chosen.items()
            },
            "kernels": {name: library.described(one.best) for name, one in chosen.items()},
        }  # fmt: skip


def _warm(each: Mapping[str, Product]) -> None:
    """Have the device busy for a second, so that it is as warm as under traffic."""
    until_s = time.monotonic() + 1.0
    while time.monotonic() < until_s:
        for product in each.values():
            for launch in product.by_torch(LIMITS.max_batch_tokens):
                launch()
        torch.cuda.synchronize()


def rows_by_traffic(shape: Shape) -> dict[str, Counter[int]]:
    """Return for each kind of traffic how many steps are padded to each number of rows."""
    found = {}
    for name, work in GPU.traffic.items():
        rows: Counter[int] = Counter()
        for (step, _), count in count_steps(LIMITS, work.requests, NUM_BLOCKS[shape.name]).items():
            rows[step.num_rows] += count
        found[name] = rows
    return found


def main() -> None:
    parser = ArgumentParser("python -m bench.engine.product_choices")
    parser.add_argument("--shapes", nargs="+", default=["7B", "8B"])
    parser.add_argument("--seconds", type=float, default=40.0, help="after which no more sizes are measured")
    given = parser.parse_args()
    began_s = time.monotonic()
    shapes = [shape for shape in (LLAMA_7B, LLAMA_8B) if shape.name in given.shapes]
    traffic = {shape.name: rows_by_traffic(shape) for shape in shapes}
    say(part="choices", counted_s=time.monotonic() - began_s)
    library, has_failed = LtLibrary(), False
    for number, shape in enumerate(shapes, start=1):
        # What costs most is measured first, and single prompts of these lengths in any case.
        weights = Counter(dict.fromkeys(GPU.prompts, 10_000))
        for rows in traffic[shape.name].values():
            for size, count in rows.items():
                weights[size] += count * size
        wanted = [size for size, _ in weights.most_common() if size > 1]
        until_s, by_rows = began_s + given.seconds * number / len(shapes), {}
        for line in measure(library, shape, wanted, until_s):
            say(part="choices", shape=shape.name, **line)
            if "error" in line:
                has_failed = True
            else:
                by_rows[line["rows"]] = line
        for name, counts in traffic[shape.name].items():
            known = {size: count for size, count in counts.items() if size in by_rows}
            sums = {
                way: sum(count * by_rows[size][f"{way}_us"] for size, count in known.items())
                * shape.num_layers / 1e6
                for way in ("torch", "best")
            }  # fmt: skip
            say(
                part="traffic", shape=shape.name, work=name, steps=counts.total(), known=sum(known.values()),
                torch_s=sums["torch"], best_s=sums["best"], saved_s=sums["torch"] - sums["best"],
            )  # fmt: skip
        torch.cuda.empty_cache()
    say(part="choices", seconds=time.monotonic() - began_s)
    if has_failed:
        sys.exit(1)


if __name__ == "__main__":
    main()

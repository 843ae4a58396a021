"""Finds the best kernel of the library for each product of a model, by trying what it proposes.

The steps that serve are run on padding, and tell which products there are: so no list of them has to be kept
beside the code. What is tried works on the model's own weights, in its workspace, so that it takes no memory.
Runs between requests, a product at a time; whoever calls says when.

Kernels are timed in turns with the one that torch takes, without a pause: a device under load has less power
for each, and it is then that they differ most. One that is not clearly faster is not taken.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from statistics import median

import torch

from hearth.engine.runner import Runner
from hearth.engine.step_shape import StepShape
from hearth.kernels.cublas_lt import CublasLt, Launch, is_plain, size_of
from hearth.kernels.linear import add_linear, linear
from hearth.kernels.product_table import ProductSize

#: Kernels that are asked for, for each number of rows, and those of all that are timed again.
NUM_PROPOSALS, NUM_FINALISTS = 24, 3
NUM_ROUNDS, NUM_FINAL_ROUNDS = 3, 9
#: Of the time that torch's kernel takes: who takes more than this share of it is not clearly faster.
MAX_SHARE = 0.99
#: Times as many rows: what is proposed for them is tried as well. With 7,168 rows that won most.
NEAR = (2.0, 0.5, 0.25, 0.125, 0.0625)
#: Layers whose weights are multiplied in turns, so that few rows find none of them in the device's cache.
#: More rows than that are bound by arithmetic, and one layer is enough.
NUM_LAYERS, MAX_CACHED_ROWS = 4, 512
#: By which results may differ, of the largest number: kernels sum up in another order, and round.
_TOLERANCE = 2.0**-6
#: Rows in which they are compared: all would take memory.
_NUM_COMPARED = 16
#: For which the device sleeps, so that the host is ahead from then on: a few milliseconds.
_SLEEP_CYCLES = 4_000_000

Way = Sequence[Callable[[], object]]
#: Returns for each way the microseconds that one of its calls takes on the device, in so many rounds.
TimesUs = Callable[[Sequence[Way], int], list[float]]


@dataclass(frozen=True, slots=True)
class AskedProduct:
    """A product of a step, with weights of several layers."""

    size: ProductSize
    x: torch.Tensor
    out: torch.Tensor
    weights: list[torch.Tensor]


@dataclass(slots=True)
class ProductRecorder:
    """Notes the products of steps, as `ProductKernels` that has none. Mutable."""

    asked: dict[ProductSize, AskedProduct] = field(default_factory=dict)

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, adds: bool) -> bool:
        size = size_of(x, weight, adds=adds)
        self.asked.setdefault(size, AskedProduct(size, x, out, [])).weights.append(weight)
        return False


def choose_all(
    runner: Runner, choose: Callable[[AskedProduct], bytes | None]
) -> Generator[ProductSize, None, dict[ProductSize, bytes]]:
    """Choose a kernel for every product of all steps, one each time it is asked for the next; return them.

    Between two of them others may use the device and the workspace.
    """
    chosen: dict[ProductSize, bytes] = {}
    known: set[ProductSize] = set()
    for shape in runner.sizes.all_shapes():
        # Asked anew for each: a model's memory may have moved meanwhile.
        while (asked := _next_asked(runner, shape, known)) is not None:
            known.add(asked.size)
            if (algorithm := choose(asked)) is not None:
                chosen[asked.size] = algorithm
            yield asked.size
    return chosen


def _next_asked(runner: Runner, shape: StepShape, known: set[ProductSize]) -> AskedProduct | None:
    recorder = ProductRecorder()
    runner.ask_products(shape, recorder, NUM_LAYERS)
    return next((one for size, one in recorder.asked.items() if size not in known), None)


@torch.inference_mode()
def choose(asked: AskedProduct, library: CublasLt, times_us: TimesUs) -> bytes | None:
    """Return the kernel for a product that is clearly faster than torch's; None: there is none."""
    x, out, size = asked.x, asked.out, asked.size
    if not is_plain(x, out, *asked.weights):
        return None
    generator = torch.Generator(x.device).manual_seed(0)
    x.normal_(std=1e-3 if size.adds else 1.0, generator=generator)  # sums must not grow without bounds
    launches = {word: library.launcher(size, word) for word in candidates(library, size)}
    # The first launch loads a kernel; one that the library does not take after all is none.
    launches = {word: launch for word, launch in launches.items() if not launch(x, asked.weights[0], out)}
    if not launches:
        return None
    weights = asked.weights[: NUM_LAYERS if size.rows <= MAX_CACHED_ROWS else 1]
    by_torch = [partial(_by_torch, asked, weight) for weight in weights]
    ways = {word: _way(asked, launch, weights) for word, launch in launches.items()}
    rough = times_us([by_torch, *ways.values()], NUM_ROUNDS)
    best = sorted(zip(rough[1:], ways, strict=True))[:NUM_FINALISTS]
    finalists = [word for _, word in best]
    torch_us, *exact = times_us([by_torch, *(ways[word] for word in finalists)], NUM_FINAL_ROUNDS)
    best_us, winner = min(zip(exact, finalists, strict=True))
    if best_us > MAX_SHARE * torch_us or not _agree(asked, by_torch[0], ways[winner][0]):
        return None
    return winner


def candidates(library: CublasLt, size: ProductSize) -> list[bytes]:
    """Return all kernels to try for a size, those that are proposed for it first."""
    found = dict.fromkeys(library.proposed(size, NUM_PROPOSALS))
    for share in NEAR:
        near = replace(size, rows=max(2, int(share * size.rows)))
        for word in library.proposed(near, NUM_PROPOSALS):
            if word not in found and library.can_run(size, word):
                found[word] = None
    return list(found)


def _way(asked: AskedProduct, launch: Launch, weights: Sequence[torch.Tensor]) -> Way:
    return [partial(launch, asked.x, weight, asked.out) for weight in weights]


def _by_torch(asked: AskedProduct, weight: torch.Tensor) -> None:
    if not asked.size.adds:
        linear(asked.x, weight, None, out=asked.out)
    else:
        add_linear(asked.x, weight, out=asked.out)


def _agree(asked: AskedProduct, *ways: Callable[[], object]) -> bool:
    """True if two ways have the same result but for rounding, in some rows from the first to the last."""
    every = max(1, asked.size.rows // _NUM_COMPARED)
    results = []
    for multiply in ways:
        asked.out.zero_()
        multiply()
        results.append(asked.out[::every].float())
    first, second = results
    limit = _TOLERANCE * float(first.abs().max())
    return float((first - second).abs().max()) <= limit


def cuda_times_us(ways: Sequence[Way], num_rounds: int) -> list[float]:
    """Time ways on the current stream, in turns, without a pause; `TimesUs` of a CUDA device."""
    marks = [[_mark() for _ in range(len(ways) + 1)] for _ in range(num_rounds)]
    torch.cuda._sleep(_SLEEP_CYCLES)  # type: ignore[no-untyped-call] # it has no public name either
    for events in marks:
        events[0].record()
        for way, end in zip(ways, events[1:], strict=True):
            for launch in way:
                launch()
            end.record()
    torch.cuda.current_stream().synchronize()
    each = [[1e3 * begin.elapsed_time(end) for begin, end in pairwise(events)] for events in marks]
    return [median(column) / len(way) for column, way in zip(zip(*each, strict=True), ways, strict=True)]


def _mark() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # torch leaves it untyped

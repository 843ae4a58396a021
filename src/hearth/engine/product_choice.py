"""Finds the best kernel of the library for each product of a model, by trying what it proposes.

The steps that serve are run on padding, and tell which products there are: so no list of them has to be kept
beside the code. What is tried works on the model's own weights, in its workspace, so that it takes no memory.
Runs between requests, a piece at a time, each shorter than somebody who asks would notice.

Kernels are timed in turns with the default, torch's or ours for small matrices, without a pause: a device
under load has less power for each, and it is then that they differ most. One that is not clearly faster is
not taken.

Products of few rows are over in some microseconds, and there it counts what surrounds them: how early a
kernel starts behind the one before it, and lets the next one start. So steps of few rows are captured, as
those that serve are, with default kernels and with the others: unless these make the step faster they are not
taken. One that does so alone is, though the others do not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from statistics import median

import torch

from hearth.engine.graphs import Capturer
from hearth.engine.runner import Runner
from hearth.engine.step_shape import StepShape
from hearth.kernels.cublas_lt import ChosenProducts, CublasLt, Launch, is_plain, size_of
from hearth.kernels.linear import add_linear, linear
from hearth.kernels.product_table import ProductSize, ProductTable

#: Kernels that are asked for, for each number of rows, and those of all that are timed again.
NUM_PROPOSALS, NUM_FINALISTS = 24, 3
NUM_ROUNDS, NUM_FINAL_ROUNDS = 3, 9
#: Of the time that the default takes: who takes more than this share of it is not clearly faster.
MAX_SHARE = 0.99
#: Times as many rows: what is proposed for them is tried as well. With 7,168 rows that won most.
NEAR = (2.0, 0.5, 0.25, 0.125, 0.0625)
#: Few rows find no weights in the device's cache, in a step: so those of several layers are multiplied in
#: turns, of as many as have so many bytes even in the smallest product. More rows than that are bound by
#: arithmetic: one layer is enough, and nothing around them matters.
MIN_LAYERS, COLD_BYTES, MAX_COLD_ROWS = 4, 128 << 20, 512
#: Layers of steps that are timed, rounds at least, and the share of the time with default kernels as above.
NUM_STEP_LAYERS, MIN_STEP_ROUNDS, MAX_STEP_ROUNDS, MAX_STEP_SHARE = 8, 5, 15, 0.995
#: For which the device is kept busy at a time: whoever asks meanwhile waits for that.
PIECE_US = 25_000.0
#: Kernels that are loaded at a time, for the same reason: the host takes some milliseconds for each.
NUM_LOADED = 8
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
    """Notes the products of steps, as `ProductKernels` that leaves out what it notes. Mutable."""

    asked: dict[ProductSize, AskedProduct] = field(default_factory=dict)

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, adds: bool) -> bool:
        size = size_of(x, weight, adds=adds)
        self.asked.setdefault(size, AskedProduct(size, x, out, [])).weights.append(weight)
        return True


@dataclass(frozen=True, slots=True)
class ProductChoice:
    """The kernel for a size, and the times that it was chosen by."""

    size: ProductSize
    algorithm: bytes | None = None  #: the kernel that is clearly faster than the default; None: there is none
    default_us: float = 0.0  #: that the default takes by itself
    #: Shares of the default's time that kernels took, in the order of their proposal; then of the best.
    shares: Mapping[bytes, float] = field(default_factory=dict)
    final_shares: Mapping[bytes, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepGain:
    """The time of a step of few rows with default kernels, and with those that were chosen for some sizes."""

    shape: StepShape
    sizes: tuple[ProductSize, ...]
    default_us: float
    chosen_us: float

    @property
    def is_faster(self) -> bool:
        return self.chosen_us <= MAX_STEP_SHARE * self.default_us


class ProductChooser:
    """Chooses kernels for all products of an engine's steps. Mutable in nothing but the engine's memory."""

    def __init__(
        self,
        runner: Runner,
        library: CublasLt,
        times_us: TimesUs,
        capturer: Capturer | None,
        tell: Callable[[ProductChoice | StepGain], None] = lambda _: None,
    ) -> None:
        """`capturer` captures steps, as those that serve are; None: they are launched kernel by kernel.

        `tell` is called with all that is found.
        """
        self._runner, self._library = runner, library
        self._times_us = torch.inference_mode()(times_us)
        self._capturer, self._tell = capturer, tell
        arch = runner.decoder.arch
        smallest_bytes = arch.hidden_size * arch.dimensions.q_size * runner.kv.itemsize
        self._num_layers = max(MIN_LAYERS, -(-COLD_BYTES // smallest_bytes))

    def choose_all(self) -> Generator[ProductSize, None, dict[ProductSize, bytes]]:
        """Choose a kernel for every product of all steps, a piece of one each time; return them.

        Between two pieces others may use the device and the workspace, and the model's memory may move.
        """
        chosen: dict[ProductSize, bytes] = {}
        known: set[ProductSize] = set()
        for shape in self._runner.sizes.all_shapes():
            of_step: dict[ProductSize, bytes] = {}
            for size in self._asked(shape):
                if size not in known:
                    known.add(size)
                    choice = yield from self.choose(shape, size)
                    self._tell(choice)
                    if choice.algorithm is not None:
                        of_step[size] = choice.algorithm
                    yield size
            if of_step and self._capturer is not None and max(of_step).rows <= MAX_COLD_ROWS:
                of_step = yield from self._proved(shape, of_step, self._capturer)
            chosen |= of_step
        return chosen

    def choose(self, shape: StepShape, size: ProductSize) -> Generator[ProductSize, None, ProductChoice]:
        """Choose a kernel for one product of a step of this shape, a piece each time."""
        asked, words = self._ask(shape, size), candidates(self._library, size)
        if not is_plain(asked.x, asked.out, *asked.weights) or not words:
            return ProductChoice(size)
        by_default = _default_way(asked)
        (default_us,) = self._times_us([by_default], NUM_ROUNDS)
        num_at_once = max(2, int(PIECE_US / (default_us * len(by_default))))
        launches = yield from self._load(shape, size, words, num_at_once)
        shares = yield from self._shares(shape, size, launches, NUM_ROUNDS, num_at_once)
        best = {word: launches[word] for word in _best(shares, NUM_FINALISTS)}
        if not best:
            return ProductChoice(size, None, default_us)
        final = yield from self._shares(shape, size, best, NUM_FINAL_ROUNDS, num_at_once)
        (winner,) = _best(final, 1)
        is_better = final[winner] <= MAX_SHARE and _agree(self._ask(shape, size), launches[winner])
        return ProductChoice(size, winner if is_better else None, default_us, shares, final)

    def _asked(self, shape: StepShape) -> dict[ProductSize, AskedProduct]:
        recorder = ProductRecorder()
        self._runner.padded_layers(shape, self._num_layers)(recorder)
        return recorder.asked

    @torch.inference_mode()
    def _ask(self, shape: StepShape, size: ProductSize) -> AskedProduct:
        """Return a product where its memory lies now, with random numbers to be multiplied."""
        asked = self._asked(shape)[size]
        generator = torch.Generator(asked.x.device).manual_seed(0)
        # Sums must not grow without bounds.
        asked.x.normal_(std=1e-3 if size.adds else 1.0, generator=generator)
        return asked

    def _load(
        self, shape: StepShape, size: ProductSize, words: Sequence[bytes], num_at_once: int
    ) -> Generator[ProductSize, None, dict[bytes, Launch]]:
        """Launch kernels for the first time, which loads them; return those that the library takes."""
        taken: dict[bytes, Launch] = {}
        for some in _batches(words, min(num_at_once, NUM_LOADED)):
            asked = self._ask(shape, size)
            for word in some:
                launch = self._library.launcher(size, word)
                if not launch(asked.x, asked.weights[0], asked.out):
                    taken[word] = launch
            self._runner.synchronize()
            yield size
        return taken

    def _shares(
        self,
        shape: StepShape,
        size: ProductSize,
        launches: Mapping[bytes, Launch],
        num_rounds: int,
        num_at_once: int,
    ) -> Generator[ProductSize, None, dict[bytes, float]]:
        """Time kernels by themselves beside the default, so many at a time; return the shares they take."""
        each: defaultdict[bytes, list[float]] = defaultdict(list)
        num_beside = max(1, min(len(launches), num_at_once - 1))
        rounds_at_once = max(1, min(num_rounds, num_at_once // (num_beside + 1)))
        for _ in range(0, num_rounds, rounds_at_once):
            for words in _batches(list(launches), num_beside):
                asked = self._ask(shape, size)
                ways = [_default_way(asked), *(_way(asked, launches[word]) for word in words)]
                default_us, *times = self._times_us(ways, rounds_at_once)
                for word, us in zip(words, times, strict=True):
                    each[word].append(us / default_us)
                yield size
        return {word: median(shares) for word, shares in each.items()}

    def _proved(
        self, shape: StepShape, algorithms: Mapping[ProductSize, bytes], capturer: Capturer
    ) -> Generator[ProductSize, None, dict[ProductSize, bytes]]:
        """Return those kernels that make a captured step faster: all, or those that do so by themselves.

        Of several that do so only by themselves, and not together, the best one.
        """
        gain = yield from self._told_gain(shape, algorithms, capturer)
        if gain.is_faster:
            return dict(algorithms)
        shares: dict[ProductSize, float] = {}
        for size, algorithm in algorithms.items() if len(algorithms) > 1 else ():
            gain = yield from self._told_gain(shape, {size: algorithm}, capturer)
            if gain.is_faster:
                shares[size] = gain.chosen_us / gain.default_us
        proved = {size: algorithms[size] for size in shares}
        if len(proved) > 1:
            gain = yield from self._told_gain(shape, proved, capturer)
            if not gain.is_faster:
                best = min(shares, key=lambda size: shares[size])
                return {best: algorithms[best]}
        return proved

    def _told_gain(
        self, shape: StepShape, algorithms: Mapping[ProductSize, bytes], capturer: Capturer
    ) -> Generator[ProductSize, None, StepGain]:
        gain = self._step_gain(shape, algorithms, capturer)
        self._tell(gain)
        yield max(algorithms)
        return gain

    def _step_gain(
        self, shape: StepShape, algorithms: Mapping[ProductSize, bytes], capturer: Capturer
    ) -> StepGain:
        """Time captured steps with default kernels and with others."""
        capturer.forget()  # the steps before are gone, and their memory with them
        queue = self._runner.padded_layers(shape, NUM_STEP_LAYERS)
        tables = [ProductTable("", self._library.version, one) for one in ({}, algorithms)]
        graphs = [capturer.capture(partial(queue, ChosenProducts(self._library, one))) for one in tables]
        for graph in graphs:
            graph.instantiate()
        ways = [[graph.replay] for graph in graphs]
        num_rounds = int(PIECE_US / sum(self._times_us(ways, 1)))  # the first one makes graphs ready
        num_rounds = min(MAX_STEP_ROUNDS, max(MIN_STEP_ROUNDS, num_rounds))
        return StepGain(shape, tuple(algorithms), *self._times_us(ways, num_rounds))


def candidates(library: CublasLt, size: ProductSize) -> list[bytes]:
    """Return all kernels to try for a size, those that are proposed for it first."""
    found = dict.fromkeys(library.proposed(size, NUM_PROPOSALS))
    for share in NEAR:
        near = replace(size, rows=max(2, int(share * size.rows)))
        for word in library.proposed(near, NUM_PROPOSALS):
            if word not in found and library.can_run(size, word):
                found[word] = None
    return list(found)


def _best(shares: Mapping[bytes, float], most: int) -> list[bytes]:
    return sorted(shares, key=lambda word: shares[word])[:most]


def _batches(words: Sequence[bytes], most: int) -> Iterator[Sequence[bytes]]:
    return (words[begin : begin + most] for begin in range(0, len(words), most))


def _timed_weights(asked: AskedProduct) -> list[torch.Tensor]:
    return asked.weights if asked.size.rows <= MAX_COLD_ROWS else asked.weights[:1]


def _way(asked: AskedProduct, launch: Launch) -> Way:
    return [partial(launch, asked.x, weight, asked.out) for weight in _timed_weights(asked)]


def _default_way(asked: AskedProduct) -> Way:
    return [partial(_by_default, asked, weight) for weight in _timed_weights(asked)]


def _by_default(asked: AskedProduct, weight: torch.Tensor) -> None:
    if not asked.size.adds:
        linear(asked.x, weight, None, out=asked.out)
    else:
        add_linear(asked.x, weight, out=asked.out)


@torch.inference_mode()
def _agree(asked: AskedProduct, launch: Launch) -> bool:
    """True if a kernel's result is the default's but for rounding, in rows from the first to the last."""
    every = max(1, asked.size.rows // _NUM_COMPARED)
    results = []
    for way in (_default_way(asked), _way(asked, launch)):
        asked.out.zero_()
        way[0]()
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

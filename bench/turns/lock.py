"""How long a thread that computes in Python is held up while bytes of a model cross, in the same process.

python -m bench.turns.lock [--save] [--small]

Two models, of which one fits, come to the device in turn, again and again, as they come for a turn: pages of
the other are unmapped and mapped, and chunks that a keeper lends are copied. Meanwhile a thread makes steps
of a millisecond in Python, as the thread of a worker's steps does while it prepares one. Takes a quarter of a
minute on a GPU. `--small` is to see that everything runs: tiny models on a CPU, whose numbers mean nothing.
"""

from __future__ import annotations

import hearth  # noqa: F401 - before torch, so that threads wait as a worker's do

# isort: split

import itertools
import sys
import tempfile
import threading
import time
from argparse import RawDescriptionHelpFormatter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import torch

from bench.profile.scale import GPU, TINY_CPU, Scale
from bench.random_model import write_random
from bench.report import Row, arguments, emit, percentiles, step
from bench.reuse.parts import device_pages, host_pages
from bench.reuse.worker import SWITCH_S, keeping
from hearth.core.types import Hold, ModelId
from hearth.memory.pool import EvictionTerms
from hearth.memory.pool import Shape as PoolShape
from hearth.memory.vmm import MappedPool
from hearth.store.transfer.destination import PageMapping
from hearth.store.transfer.lease import Lease
from hearth.store.transfer.lease_client import LeaseClient, OpenedModel
from hearth.store.transfer.transfer import Loader
from hearth.worker.weights_transfer import (
    LoadNews,
    ModelBroken,
    WeightsLoaded,
    WeightsTransfer,
    missing_chunks,
)

STEP_S = 0.001
SECONDS = 3.0  #: for each of alone and beside
MODELS = (ModelId("first"), ModelId("second"))
BLOCK_BYTES = 4096
PATIENCE_S = 60.0


def main() -> None:
    parser = arguments(__doc__)
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument("--small", action="store_true", help="tiny models on a CPU")
    options = parser.parse_args()
    if options.small and options.save:
        parser.error("numbers of a small run mean nothing: leave out --save")
    scale = TINY_CPU if options.small else replace(GPU, host_bytes=6 << 30)
    device = torch.device("cpu" if options.small else "cuda:0")
    with tempfile.TemporaryDirectory(prefix="hearth-lock-", dir=scale.memory_place) as place:
        with _Rig.of(scale, device, Path(place)) as rig:
            alone_steps, beside_steps, crossings_s = rig.measure(0.2 if options.small else SECONDS)
        weights_bytes = scale.shapes[0].weights_bytes
    alone, beside, crossing = map(percentiles, (alone_steps, beside_steps, crossings_s))
    means = [sum(steps) / len(steps) for steps in (alone_steps, beside_steps)]
    rows = [
        Row("step of Python, mean, beside over alone", "times", means[1] / means[0]),
        Row("step of Python, p50, beside over alone", "times", beside["p50"] / alone["p50"]),
        Row("step of Python, p99, beside over alone", "times", beside["p99"] / alone["p99"]),
        Row("bytes that come", "GB/s", weights_bytes / crossing["p50"] / 1e9),
    ]
    result = {"is_small": options.small, "alone_s": alone, "beside_s": beside, "crossings_s": crossing}
    emit("turns_lock", {"rows": [asdict(row) for row in rows], **result}, save=options.save)


class _Rig:
    """Two models of which one has room, and a thread that computes. Mutable in its pool alone."""

    def __init__(
        self, pool: MappedPool, lease_client: LeaseClient, model: OpenedModel, loader: Loader
    ) -> None:
        self._pool, self._lease_client, self._model, self._loader = pool, lease_client, model, loader
        self._numbers = itertools.count()
        self._steps: list[float] = []  #: how long each took, in seconds
        self._is_over = False

    @staticmethod
    @contextmanager
    def of(scale: Scale, device: torch.device, place: Path) -> Iterator[_Rig]:
        shape = scale.shapes[0]
        with step("writing a model"):
            directory = write_random(place / "model", shape.config, shape.dtype, 0, device)
        with ExitStack() as undo:
            socket = undo.enter_context(keeping(device, scale.host_bytes, place))
            lease_client = undo.enter_context(closing(LeaseClient(socket)))
            model = lease_client.open(directory)
            num_bytes = (-(-model.manifest.num_bytes // scale.page_bytes) + 3) * scale.page_bytes
            new_pages = device_pages if device.type == "cuda" else host_pages
            terms = EvictionTerms(Hold.RETAINED, 1.0, is_loading=False)
            pages = new_pages(num_bytes, scale.page_bytes)
            pool = undo.enter_context(closing(MappedPool(pages, lambda _: terms)))
            yield _Rig(pool, lease_client, model, Loader(device))

    def measure(self, seconds: float) -> tuple[list[float], list[float], list[float]]:
        """Return the steps alone, those beside loads, and how long each of the loads took."""
        with step("once each, and pinning"):
            for _ in MODELS:
                self._cross(next(self._numbers))
            self._lease_client.segment.wait_pinned()
        interval_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        computing = threading.Thread(target=self._compute, args=(_turns_of_a_step(),), daemon=True)
        computing.start()
        try:
            with step("alone, then beside"):
                time.sleep(seconds)
                num_alone = len(self._steps)
                crossings = list(self._crossings(seconds))
                num_both = len(self._steps)
        finally:
            self._is_over = True
            computing.join()
            sys.setswitchinterval(interval_s)
        return self._steps[:num_alone], self._steps[num_alone + 1 : num_both], crossings

    def _crossings(self, seconds: float) -> Iterator[float]:
        """Have models come in turn for so long, and yield how long each took."""
        until_s = time.perf_counter() + seconds
        while (began_s := time.perf_counter()) < until_s:
            self._cross(next(self._numbers))
            yield time.perf_counter() - began_s

    def _cross(self, number: int) -> None:
        """Have one of the models come, and make room again."""
        pool, manifest = self._pool, self._model.manifest
        name = MODELS[number % 2]
        shape = PoolShape(
            *(manifest.digest, manifest.layout, manifest.layout, manifest.chunk_bytes, manifest.chunk_ids),
            *(0, 0, BLOCK_BYTES, 2),
            slot=number % 2,  # each has addresses of its own
        )
        space = pool.place(name, shape)
        news: SimpleQueue[LoadNews] = SimpleQueue()
        lease = Lease(self._lease_client, self._model, missing_chunks(manifest, space.gaps), is_prefetch=True)
        map_pages = partial(PageMapping, partial(pool.prepare, name), space.parts, self._loader.threads)
        transfer = WeightsTransfer(lease, manifest, space, manifest.layout, map_pages, self._loader, news.put)
        transfer.start()
        while not isinstance(heard := news.get(timeout=PATIENCE_S), WeightsLoaded):
            if isinstance(heard, ModelBroken):
                raise RuntimeError(f"the load broke: {heard.failure.reason}")
        transfer.cancel()  # which waits for its threads
        pool.load_ended(name, is_whole=True)
        pool.drop(name)

    def _compute(self, num_turns: int) -> None:
        """Make steps of Python until it is over."""
        while not self._is_over:
            self._steps.append(_timed_step(num_turns))


def _turns_of_a_step() -> int:
    """Return how much of the same takes `STEP_S` alone."""
    num_turns = 1000
    while min(_timed_step(num_turns) for _ in range(5)) < STEP_S:
        num_turns += num_turns // 8
    return num_turns


def _timed_step(num_turns: int) -> float:
    began_s = time.perf_counter()
    total = 0
    for number in range(num_turns):
        total += number & 7
    return time.perf_counter() - began_s


if __name__ == "__main__":
    main()

"""How long does an adapter take from host memory to the device, and how much of that does it hold there?

python -m bench.lora.swap [--save] [--layers N]

    swap      an adapter of rank 16 of all projections of Llama-2-7B, looked up before, from a keeper's pinned
              memory: places, mapping and copies, until what is queued for the device may read it, beside
              one copy of as many bytes; and after how long each of what is done for it is done
    scattered the same where no two of its pieces lie one behind the other
    memory    128 adapters of mixed ranks in the pool, some of which have given way to others

Each answer is printed as a line of JSON as soon as it is there, and one that fails costs no other.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
import time
import traceback
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import SimpleQueue

import torch

from bench.llama7b import ARCH, SHAPE
from bench.lora import rows
from bench.lora.random_adapters import CUDA, RANKS, layout_of_rank, write_adapter
from bench.report import arguments, keep
from bench.reuse.worker import SWITCH_S, keeping
from hearth.core.config import EngineConfig
from hearth.core.messages import AdapterOrder
from hearth.core.types import AdapterId, Hold
from hearth.memory.cuda_pages import CudaPages
from hearth.memory.pool import EvictionTerms
from hearth.memory.vmm import MappedPool
from hearth.models.adapter import AdapterLayout
from hearth.store.format.adapter_manifest import stored_bytes
from hearth.store.transfer.copies import ChunkCopies
from hearth.store.transfer.lease_client import LeaseClient, OpenedAdapter
from hearth.store.transfer.transfer import Loader
from hearth.system.cuda.batches import ByteCopy
from hearth.worker.adapter_load import (
    AdapterArriving,
    AdapterFilled,
    AdapterNews,
    adapter_lease,
    load_adapter,
)
from hearth.worker.runtime import HostingResources

NUM_SWAPS, NUM_ADAPTERS, POOL_BYTES = 20, 128, 24 << 30
REST_S = 0.005  #: between two swaps

Answer = dict[str, object]


def new_pool() -> MappedPool:
    return MappedPool(CudaPages(CUDA, POOL_BYTES), lambda model: EvictionTerms(Hold.RETAINED, 1.0, False))


class TimedCopies:
    """The copies of a load, which note when the first and all were queued, and have passed."""

    def __init__(self, copies: ChunkCopies, noted_s: dict[str, float]) -> None:
        self._copies, self._noted_s = copies, noted_s
        self.max_batch, self.stop, self.close = copies.max_batch, copies.stop, copies.close
        self.has_passed, self.have_stream_wait = copies.has_passed, copies.have_stream_wait

    @property
    def num_queued(self) -> int:
        return self._copies.num_queued

    def queue(self, chunks: Sequence[Sequence[ByteCopy]]) -> None:
        self._noted_s.setdefault("lent", time.perf_counter())
        self._copies.queue(chunks)
        self._noted_s.setdefault("first queued", time.perf_counter())
        self._noted_s["queued"] = time.perf_counter()

    def wait(self, position: int) -> None:
        self._copies.wait(position)
        self._noted_s["passed"] = time.perf_counter()


class TimedLoader(Loader):
    """A loader of one adapter at a time, which notes when each step of its way was done."""

    def __init__(self, device: torch.device, make: Callable[[int], ChunkCopies] | None = None) -> None:
        """`make` returns the copies of so many chunks; None: they are the device's."""
        super().__init__(device)
        self.noted_s: dict[str, float] = {}
        self._make = make or super().new_copies

    def new_copies(self, num_chunks: int) -> ChunkCopies:
        return TimedCopies(self._make(num_chunks), self.noted_s)


@dataclass(frozen=True, slots=True)
class SwapSetting:
    """All that one adapter needs to come, again and again."""

    pool: MappedPool
    order: AdapterOrder
    layout: AdapterLayout
    opened: OpenedAdapter
    resources: HostingResources
    loader: TimedLoader  #: of the resources

    def swap(self) -> Mapping[str, float]:
        """Have it come and go. Returns after how many seconds each step of its way was done, in order."""
        news: SimpleQueue[AdapterNews] = SimpleQueue()
        noted_s = self.loader.noted_s
        noted_s.clear()
        time.sleep(REST_S)  # by then the one before has given its chunks back, and left its line
        begun = self._mark()
        began_s = time.perf_counter()
        lease = adapter_lease(self.opened, self.resources)
        lease.request()
        noted_s["asked"] = time.perf_counter()
        pieces = self.pool.pieces.place(self.order.adapter, self.layout.layer_sizes)
        assert pieces is not None, f"{self.pool.usage()}"
        noted_s["placed"] = time.perf_counter()

        def prepare() -> None:
            noted_s["taken up"] = time.perf_counter()
            self.pool.pieces.prepare(self.order.adapter)
            noted_s["prepared"] = time.perf_counter()

        load_adapter(
            self.order, self.opened, lease, pieces, prepare, self.resources, lambda _, told: news.put(told)
        )
        told = news.get(timeout=60)
        if isinstance(told, AdapterArriving):
            told.transfer.have_stream_wait()
        noted_s["told"] = time.perf_counter()
        there = self._mark(is_waited_for=False)
        if isinstance(told, AdapterArriving):
            told = news.get(timeout=60)
        assert isinstance(told, AdapterFilled), f"{told}"
        last_read = self.pool.pieces.mark()  # as of an adapter whose last request ended some steps ago
        noted_s["there"] = noted_s["told"]
        if begun is not None and there is not None:
            torch.cuda.synchronize()
            noted_s["there"] = began_s + begun.elapsed_time(there) / 1e3  # by the device's clock
        self.pool.pieces.drop(self.order.adapter, last_read)
        return {name: at_s - began_s for name, at_s in noted_s.items()}

    def _mark(self, *, is_waited_for: bool = True) -> torch.cuda.Event | None:
        """Return when the device comes to what is queued next, where there is one."""
        if self.loader.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        if is_waited_for:
            torch.cuda.synchronize()
        return event

    def answer(self, part: str, copy_s: float) -> Answer:
        interval_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        swaps = [self.swap() for _ in range(NUM_SWAPS)]
        sys.setswitchinterval(interval_s)
        warm_s = [one["there"] for one in swaps[2:]]
        return {
            "part": part,
            "num_bytes": self.layout.num_bytes,
            "first_s": swaps[0]["there"],
            "median_s": statistics.median(warm_s),
            "worst_s": max(warm_s),
            "until_s": {name: statistics.median(one[name] for one in swaps[2:]) for name in swaps[-1]},
            "copy_s": copy_s,
            "aim_s": 1.2 * copy_s + 0.0002,
        }


def swap(num_layers: int) -> Iterator[Answer]:
    arch = replace(SHAPE, config={**SHAPE.config, "num_hidden_layers": num_layers}).arch
    layout = layout_of_rank(arch.dimensions, 16)
    content = torch.randint(0, 255, (stored_bytes(layout),), dtype=torch.uint8).numpy()
    with tempfile.TemporaryDirectory(prefix="hearth-") as name, closing(new_pool()) as pool:
        root = Path(name)
        manifest = write_adapter(arch, layout, memoryview(content), root / "adapter")
        with keeping(CUDA, 1 << 30, root) as socket, closing(LeaseClient(socket)) as lease_client:
            lease_client.segment.wait_pinned()
            loader = TimedLoader(CUDA)
            resources = HostingResources(CUDA, EngineConfig(), lambda terms: pool, lease_client, loader)
            opened = lease_client.open_adapter(root / "adapter")
            order = AdapterOrder(AdapterId(manifest.digest), "adapter", str(root / "adapter"))
            setting = SwapSetting(pool, order, layout, opened, resources, loader)
            copy_s = _copy_s(layout.num_bytes)
            yield setting.answer("swap", copy_s)
            scatter(pool, layout)
            yield setting.answer("scattered", copy_s)


def scatter(pool: MappedPool, layout: AdapterLayout) -> None:
    """Leave holes for the pieces of an adapter, and no two of them side by side."""
    sizes = [size for size in layout.layer_sizes for _ in range(2)]
    owners = [AdapterId(f"{number:064x}") for number in range(len(sizes))]
    for owner, size in zip(owners, sizes, strict=True):
        assert pool.pieces.place(owner, [size]) is not None, f"{pool.usage()}"
    for owner in owners[::2]:
        pool.pieces.drop(owner)


def _copy_s(num_bytes: int) -> float:
    """Return how long one copy of pinned memory takes, the best of some."""
    source = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(num_bytes, dtype=torch.uint8, device=CUDA)
    best_s = float("inf")
    for _ in range(10):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        best_s = min(best_s, time.perf_counter() - began_s)
    return best_s


def memory(num_layers: int) -> Iterator[Answer]:
    dimensions = replace(ARCH.dimensions, num_layers=num_layers)
    layouts = {rank: layout_of_rank(dimensions, rank) for rank in RANKS["mixed"]}
    ranks = [RANKS["mixed"][number * 7 % 4] for number in range(NUM_ADAPTERS)]
    with closing(new_pool()) as pool:
        began_s = time.perf_counter()
        for number, rank in enumerate(ranks):
            _place(pool, number, layouts[rank])
        place_s = (time.perf_counter() - began_s) / NUM_ADAPTERS
        yield {"part": "memory", "place_s": place_s, **_taken(pool)}
        for number in range(0, NUM_ADAPTERS, 3):
            pool.pieces.drop(AdapterId(f"{number:064x}"))
            _place(pool, number, layouts[RANKS["mixed"][number % 4]])
        yield {"part": "memory after others came", **_taken(pool)}


def _place(pool: MappedPool, number: int, layout: AdapterLayout) -> None:
    assert pool.pieces.place(AdapterId(f"{number:064x}"), layout.layer_sizes) is not None, f"{pool.usage()}"


def _taken(pool: MappedPool) -> Answer:
    usage = pool.usage()
    adapter_bytes, taken_bytes = sum(usage.pieces_bytes.values()), usage.budget_bytes - usage.free_bytes
    return {"bytes": adapter_bytes, "taken_bytes": taken_bytes, "over": taken_bytes / adapter_bytes - 1}


def main() -> None:
    parser = arguments(__doc__)
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument("--layers", type=int, default=ARCH.num_layers)
    given = parser.parse_args()
    gc.freeze()  # as a worker's process does
    found: list[Answer] = []
    parts: list[Callable[[int], Iterator[Answer]]] = [swap, memory]
    for part in parts:
        try:
            for answer in part(given.layers):
                print(json.dumps(answer), flush=True)
                found.append(answer)
        except Exception as error:
            traceback.print_exc()
            found.append({"part": part.__name__, "error": repr(error)})
    if given.save:
        lines = [asdict(row) for row in rows.of_swaps(found)]
        keep("lora_swap", {"rows": lines, "answers": found})


if __name__ == "__main__":
    main()

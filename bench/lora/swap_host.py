"""What does the host do for an adapter that comes from host memory, besides copying it? Needs no GPU.

python -m bench.lora.swap_host [--save] [--layers N] [--swaps N]

The swap of `bench.lora.swap` with a keeper in a process of its own, but with pages of host memory, and copies
that are not made. Left are places, questions, threads and books, after each of which the time is noted.
Where others compute on the same cores, the 10th percentile says more than the median.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from argparse import RawDescriptionHelpFormatter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from bench.host_pages import HostPages
from bench.llama7b import ARCH, SHAPE
from bench.lora.random_adapters import layout_of_rank, write_adapter
from bench.lora.swap import SwapSetting, TimedLoader, scatter
from bench.report import arguments, keep
from bench.reuse.worker import SWITCH_S, own_keeper
from hearth.core.config import EngineConfig
from hearth.core.messages import AdapterOrder
from hearth.core.types import AdapterId, Hold
from hearth.memory.cuda_pages import PAGE_BYTES
from hearth.memory.pool import EvictionTerms
from hearth.memory.vmm import MappedPool
from hearth.store.format.adapter_manifest import stored_bytes
from hearth.store.transfer.lease_client import LeaseClient
from hearth.system.cuda.batches import BatchedCopies, ByteCopy
from hearth.worker.runtime import HostingResources

CPU = torch.device("cpu")
HOST_BYTES, NUM_PAGES = 256 << 20, 64
PERCENTILES = (10, 50, 90)

Answer = dict[str, object]


#: About what 80 MB take to cross the bus, so that threads fall asleep as they do beside a device.
COPY_S = 0.0015


class UnmadeCopies:
    """Copies that are not made. They pass after some time, as a device's do."""

    max_batch = BatchedCopies.max_batch

    def __init__(self) -> None:
        self.num_queued = 0
        self._passed_s = 0.0  #: when all of them will have

    def queue(self, chunks: Sequence[Sequence[ByteCopy]]) -> None:
        self.num_queued += len(chunks)
        self._passed_s = time.perf_counter() + COPY_S

    def wait(self, position: int) -> None:
        time.sleep(max(0.0, self._passed_s - time.perf_counter()))

    def has_passed(self, position: int) -> bool:
        return True

    def have_stream_wait(self, position: int) -> None: ...

    def stop(self) -> None: ...

    def close(self) -> None: ...


def swaps(num_layers: int, num_swaps: int) -> Iterator[Answer]:
    arch = replace(SHAPE, config={**SHAPE.config, "num_hidden_layers": num_layers}).arch
    layout = layout_of_rank(arch.dimensions, 16)
    content = torch.zeros(stored_bytes(layout), dtype=torch.uint8).numpy()
    with tempfile.TemporaryDirectory(prefix="hearth-") as name, closing(_new_pool()) as pool:
        root = Path(name)
        manifest = write_adapter(arch, layout, memoryview(content), root / "adapter")
        with own_keeper(HOST_BYTES, root) as socket, closing(LeaseClient(socket)) as lease_client:
            loader = TimedLoader(CPU, lambda _: UnmadeCopies())
            resources = HostingResources(CPU, EngineConfig(), lambda terms: pool, lease_client, loader)
            opened = lease_client.open_adapter(root / "adapter")
            order = AdapterOrder(AdapterId(manifest.digest), "adapter", str(root / "adapter"))
            setting = SwapSetting(pool, order, layout, opened, resources, loader)
            yield _answer("swap", setting, num_swaps)
            scatter(pool, layout)
            yield _answer("scattered", setting, num_swaps)


def _new_pool() -> MappedPool:
    pages = HostPages(NUM_PAGES, PAGE_BYTES)
    return MappedPool(pages, lambda model: EvictionTerms(Hold.RETAINED, 1.0, False))


def _answer(part: str, setting: SwapSetting, num_swaps: int) -> Answer:
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    made = [setting.swap() for _ in range(num_swaps)][2:]
    sys.setswitchinterval(interval_s)
    host_s = [one["told"] - (one["passed"] - one["first queued"]) for one in made]
    return {
        "part": part,
        "num_bytes": setting.layout.num_bytes,
        "num_swaps": len(made),
        "host_s": percentiles(host_s),
        "steps_s": {name: percentiles(_steps(made, name)) for name in made[-1]},
    }


def _steps(made: Sequence[Mapping[str, float]], name: str) -> list[float]:
    """Return how long each swap took from the step before one, in the order in which they are done."""
    names = list(made[-1])
    at = names.index(name)
    return [one[name] - (one[names[at - 1]] if at else 0.0) for one in made]


def percentiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{share}": ordered[min(len(ordered) - 1, len(ordered) * share // 100)] for share in PERCENTILES}


def main() -> None:
    parser = arguments(__doc__)
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument("--layers", type=int, default=ARCH.num_layers)
    parser.add_argument("--swaps", type=int, default=200)
    given = parser.parse_args()
    found: list[Answer] = []
    for answer in swaps(given.layers, given.swaps):
        print(json.dumps(answer), flush=True)
        found.append(answer)
    if given.save:
        keep("lora_swap_host", {"answers": found})


if __name__ == "__main__":
    main()

"""How long does an adapter take from host memory to the device, and how much of that does it hold there?

python -m bench.lora.swap [--save] [--layers N]

    swap      an adapter of rank 16 of all projections of Llama-2-7B, looked up before, from a lender's pinned
              memory: places, mapping and copies, beside one copy of as many bytes
    memory    128 adapters of mixed ranks in the pool, some of which have given way to others

Each answer is printed as a line of JSON as soon as it is there, and one that fails costs no other.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
import traceback
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import torch

from bench.llama7b import ARCH, SHAPE
from bench.lora.random_adapters import CUDA, RANKS, layout_of_rank, write_adapter
from bench.report import arguments, keep
from hearth.config import EngineConfig, StoreConfig
from hearth.memory.cuda_pages import CudaPages
from hearth.memory.pool import EvictionTerms
from hearth.memory.vmm import MappedPool
from hearth.messages import AdapterOrder
from hearth.models.adapter import AdapterLayout
from hearth.store.adapter_manifest import stored_bytes
from hearth.store.borrower import BorrowedAdapter, Borrower
from hearth.store.lender import Lender
from hearth.store.loader import Loader
from hearth.store.manifest import CHUNK_BYTES
from hearth.store.tiers import Tiers
from hearth.types import AdapterId, Hold
from hearth.worker.adapter_load import AdapterFilled, AdapterNews, load_adapter
from hearth.worker.runtime import HostingResources

NUM_SWAPS, NUM_ADAPTERS, POOL_BYTES = 20, 128, 24 << 30

Answer = dict[str, object]


def new_pool() -> MappedPool:
    return MappedPool(CudaPages(CUDA, POOL_BYTES), lambda model: EvictionTerms(Hold.RETAINED, 1.0, False))


def sizes_of(layout: AdapterLayout) -> list[int]:
    return [part.end - part.begin for _, part in layout.layers]


def swap(num_layers: int) -> Iterator[Answer]:
    arch = replace(SHAPE, config={**SHAPE.config, "num_hidden_layers": num_layers}).arch
    layout = layout_of_rank(arch.dimensions, 16)
    content = torch.randint(0, 255, (stored_bytes(layout),), dtype=torch.uint8).numpy()
    with tempfile.TemporaryDirectory(prefix="hearth-") as name, closing(new_pool()) as pool:
        root = Path(name)
        manifest = write_adapter(arch, layout, memoryview(content), root / "adapter")
        tiers = Tiers(StoreConfig(path=str(root / "store"), host_bytes=1 << 30), CHUNK_BYTES)
        with closing(tiers), closing(Lender(tiers, root / "s")), closing(Borrower(root / "s")) as borrower:
            resources = HostingResources(CUDA, EngineConfig(), lambda terms: pool, borrower, Loader(CUDA))
            borrowed = borrower.open_adapter(root / "adapter")
            order = AdapterOrder(AdapterId(manifest.digest), "adapter", str(root / "adapter"))
            seconds = [_swap_s(pool, order, layout, borrowed, resources) for _ in range(NUM_SWAPS)]
            copy_s = _copy_s(layout.num_bytes)
    warm = seconds[2:]
    yield {
        "part": "swap",
        "num_bytes": layout.num_bytes,
        "first_s": seconds[0],
        "median_s": statistics.median(warm),
        "worst_s": max(warm),
        "copy_s": copy_s,
        "aim_s": 1.2 * copy_s + 0.0002,
    }


def _swap_s(
    pool: MappedPool,
    order: AdapterOrder,
    layout: AdapterLayout,
    borrowed: BorrowedAdapter,
    resources: HostingResources,
) -> float:
    news: SimpleQueue[AdapterNews] = SimpleQueue()
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    pieces = pool.place_pieces(order.adapter, sizes_of(layout))
    assert pieces is not None, f"{pool.usage()}"
    load_adapter(
        *(order, borrowed, pieces, lambda: pool.prepare_pieces(order.adapter), resources),
        lambda _, told: news.put(told),
    )
    told = news.get(timeout=60)
    swap_s = time.perf_counter() - began_s
    assert isinstance(told, AdapterFilled), f"{told}"
    pool.drop_pieces(order.adapter)
    return swap_s


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
            pool.drop_pieces(AdapterId(f"{number:064x}"))
            _place(pool, number, layouts[RANKS["mixed"][number % 4]])
        yield {"part": "memory after others came", **_taken(pool)}


def _place(pool: MappedPool, number: int, layout: AdapterLayout) -> None:
    assert pool.place_pieces(AdapterId(f"{number:064x}"), sizes_of(layout)) is not None, f"{pool.usage()}"


def _taken(pool: MappedPool) -> Answer:
    usage = pool.usage()
    adapter_bytes, taken_bytes = sum(usage.pieces_bytes.values()), usage.budget_bytes - usage.free_bytes
    return {"bytes": adapter_bytes, "taken_bytes": taken_bytes, "over": taken_bytes / adapter_bytes - 1}


def main() -> None:
    parser = arguments(__doc__)
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument("--layers", type=int, default=ARCH.num_layers)
    given = parser.parse_args()
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
        keep("lora_swap", {"answers": found})


if __name__ == "__main__":
    main()

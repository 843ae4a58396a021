"""Variants of the swap, in turn. For one trial; not kept."""

from __future__ import annotations

import ctypes
import gc
import json
import select
import statistics
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import torch

from bench.llama7b import SHAPE
from bench.lora import swap as swaps
from bench.lora.random_adapters import CUDA, layout_of_rank, write_adapter
from bench.reuse.worker import SWITCH_S, keeping
from hearth.config import EngineConfig
from hearth.cuda_batches import ByteCopy
from hearth.messages import AdapterOrder
from hearth.store import short_load
from hearth.store.adapter_manifest import stored_bytes
from hearth.store.borrower import BorrowedAdapter, Borrower
from hearth.store.loader import Loader
from hearth.types import AdapterId
from hearth.worker.adapter_load import ask_for_adapter
from hearth.worker.runtime import HostingResources


def bus(num_bytes: int) -> None:
    source = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(num_bytes, dtype=torch.uint8, device=CUDA)
    loader = Loader(CUDA)
    for num_parts in (1, 2, 5, 1, 2, 5):
        part = -(-num_bytes // num_parts)
        took, queued, blocking = [], [], []
        for _ in range(12):
            time.sleep(0.005)
            torch.cuda.synchronize()
            copies = loader.new_copies(num_parts)
            began_s = time.perf_counter()
            copies.queue(
                [
                    [ByteCopy(target.data_ptr() + at, source.data_ptr() + at, min(part, num_bytes - at))]
                    for at in range(0, num_bytes, part)
                ]
            )
            queued.append(time.perf_counter() - began_s)
            copies.have_stream_wait(num_parts - 1)
            torch.cuda.current_stream().synchronize()
            took.append(time.perf_counter() - began_s)
            copies.wait(num_parts - 1)
            copies.close()
            copies = loader.new_copies(num_parts)
            began_s = time.perf_counter()
            copies.queue(
                [
                    [ByteCopy(target.data_ptr() + at, source.data_ptr() + at, min(part, num_bytes - at))]
                    for at in range(0, num_bytes, part)
                ]
            )
            copies.wait(num_parts - 1)
            blocking.append(time.perf_counter() - began_s)
            copies.close()
        print(
            json.dumps(
                {
                    "bus": num_parts,
                    "queued": statistics.median(queued),
                    "took": statistics.median(took),
                    "blocking": statistics.median(blocking),
                }
            ),
            flush=True,
        )


def lent(borrower: Borrower, borrowed: BorrowedAdapter, resources: HostingResources) -> None:
    """Print how long the keeper takes to answer whoever does nothing else meanwhile, and to be read."""
    asks, reads, fetches, batches_s = [], [], [], []
    for _ in range(40):
        time.sleep(0.005)
        began_s = time.perf_counter()
        asked = ask_for_adapter(borrowed, resources)
        assert asked is not None
        asked_s = time.perf_counter()
        select.select([asked.line._connection], [], [])
        came_s = time.perf_counter()
        loan = borrower.fetch(borrowed, range(len(borrowed.manifest.chunks)), asked)
        fetched_s = time.perf_counter()
        for chunks in loan.batches(8):
            taken_s = time.perf_counter()
            loan.release(*chunks)
        asks.append(asked_s - began_s)
        reads.append(came_s - began_s)
        fetches.append(fetched_s - came_s)
        batches_s.append(taken_s - fetched_s)
    answer = {"asked": asks, "came": reads, "fetched": fetches, "taken": batches_s}
    print({key: round(statistics.median(value) * 1e3, 3) for key, value in answer.items()}, flush=True)


def main() -> None:
    layout = layout_of_rank(SHAPE.arch.dimensions, 16)
    content = torch.randint(0, 255, (stored_bytes(layout),), dtype=torch.uint8).numpy()
    with tempfile.TemporaryDirectory(prefix="hearth-") as name, closing(swaps.new_pool()) as pool:
        root = Path(name)
        manifest = write_adapter(SHAPE.arch, layout, memoryview(content), root / "adapter")
        with keeping(CUDA, 1 << 30, root) as socket, closing(Borrower(socket)) as borrower:
            borrower.segment.wait_pinned()
            loader = swaps.TimedLoader(CUDA)
            resources = HostingResources(CUDA, EngineConfig(), lambda terms: pool, borrower, loader)
            borrowed = borrower.open_adapter(root / "adapter")
            order = AdapterOrder(AdapterId(manifest.digest), "adapter", str(root / "adapter"))
            setting = swaps.SwapSetting(pool, order, layout, borrowed, resources, loader)
            copy_s = swaps._copy_s(layout.num_bytes)
            gc.collect()
            gc.freeze()
            for round_ in range(3):
                for first in (1, 8):
                    short_load.NUM_FIRST = first
                    answer = setting.answer(f"swap first={first} round={round_}", copy_s)
                    until = {key: round(value * 1e3, 3) for key, value in answer["until_s"].items()}  # type: ignore[attr-defined]
                    print(answer["part"], answer["median_s"], answer["worst_s"], until, flush=True)
            lent(borrower, borrowed, resources)
            pieces = pool.place_pieces(order.adapter, layout.layer_sizes)
            assert pieces is not None
            print("runs", len(pieces), flush=True)
            pool.drop_pieces(order.adapter)
    bus(layout.num_bytes)


if __name__ == "__main__":
    sys.setswitchinterval(SWITCH_S)
    assert ctypes is not None
    main()

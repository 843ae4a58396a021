"""Times of the step thread's parts during `bench.lora.serving`'s zipf: printed to stderr after each."""

import functools
import sys
import time
from collections import defaultdict

import bench.lora.serving as serving
from hearth.memory.vmm import MappedPool
from hearth.policy.memory.adapter_residency import AdapterResidency
from hearth.store import short_load
from hearth.worker.adapter_pieces import AdapterPieces
from hearth.worker.adapters import WorkerAdapters
from hearth.worker.hosted_models import HostedModels
from hearth.worker.reclaimer import Reclaimer
from hearth.worker.worker_loop import WorkerLoop
from hearth.engine.runner import Runner

T = defaultdict(list)


def wrap(owner, name, label=None):
    inner = getattr(owner, name)
    label = label or f"{owner.__name__}.{name}"

    @functools.wraps(inner)
    def timed(*args, **kwargs):
        began = time.perf_counter()
        try:
            return inner(*args, **kwargs)
        finally:
            T[label].append(time.perf_counter() - began)

    setattr(owner, name, timed)


for owner, names in (
    (WorkerLoop, ("_serve_adapters", "_start_adapted", "_take_orders", "_tell_step", "_start", "_take_adapter_news", "_step")),
    (WorkerAdapters, ("asked", "_place", "_filled")),
    (AdapterPieces, ("bind", "drop", "place")),
    (Reclaimer, ("place_adapter", "before_step", "after_step")),
    (AdapterResidency, ("idle", "next", "startable")),
    (HostedModels, ("step",)),
    (MappedPool, ("prepare_pieces", "place_pieces", "drop_pieces")),
    (Runner, ("launch",)),
):
    for name in names:
        if hasattr(owner, name):
            wrap(owner, name)
        else:
            print("no", owner.__name__, name, file=sys.stderr)

import hearth.store.patient_loan as patient_loan
from hearth.store.borrower import Borrower

wrap(short_load, "_copy", "thread: copy and wait")
wrap(patient_loan, "borrow_chunks", "thread: borrow")
wrap(Borrower, "open_adapter", "thread: look up")
wrap(AdapterPieces, "rest")

import gc

GC = []


def collected(phase, info):
    if phase == "start":
        GC.append(time.perf_counter())
    else:
        took = time.perf_counter() - GC[-1]
        T[f"gc {info['generation']}"].append(took)


gc.callbacks.append(collected)


def show(inner):
    def timed(client, asks):
        T.clear()
        began = time.perf_counter()
        found = inner(client, asks)
        total = time.perf_counter() - began
        print(f"--- {total:.2f} s", file=sys.stderr)
        for label, values in sorted(T.items(), key=lambda item: -sum(item[1])):
            values = sorted(values)
            print(
                f"{label:40s} n={len(values):6d} sum={sum(values):7.3f}s {100 * sum(values) / total:5.1f}% "
                f"p50={values[len(values) // 2] * 1e3:7.3f}ms p90={values[len(values) * 9 // 10] * 1e3:7.3f}ms max={values[-1] * 1e3:7.2f}ms",
                file=sys.stderr,
            )
        return found

    return timed


serving.zipf = show(serving.zipf)


def trimmed(tiny):
    """Zipf with room for 100 alone, over the adapters that are asked for, all of which come to host memory first."""
    import json
    import tempfile
    from concurrent.futures import ThreadPoolExecutor
    from dataclasses import asdict, replace
    from itertools import accumulate
    from pathlib import Path
    import random

    from bench.lora import library as lib
    from bench.reuse.worker import keeping
    from bench.report import step

    scale = lib.TINY if tiny else lib.full(32, 1000)
    weights = list(accumulate(1 / rank for rank in range(1, scale.num_adapters + 1)))
    drawn = random.Random(2)
    numbers = drawn.choices(range(scale.num_adapters), cum_weights=weights, k=scale.num_requests)
    used = sorted(set(numbers))
    gc.freeze()
    with tempfile.TemporaryDirectory(prefix="hearth-lora-", dir=scale.place) as name:
        with step(f"writing the base and {len(used)} adapters"):
            library = lib.Library.write(replace(scale, num_adapters=len(used)), Path(name))
        place = {number: at for at, number in enumerate(used)}
        least = scale.new_tokens // 2
        asks = [
            serving.AdapterAsk(library.adapters[place[n]], drawn.randint(least, 2 * scale.new_tokens - least))
            for n in numbers
        ]
        with keeping(scale.device, library.host_bytes, Path(name)) as socket:
            with step("worker"), serving.asking(library, socket, scale.num_room) as client:
                with step("to host memory"):
                    borrower = Borrower(socket, is_pinned=False) if tiny else Borrower(socket, is_pinned=True, is_device_up=False)
                    opened = [borrower.open_adapter(one.where) for one in library.adapters]
                    with ThreadPoolExecutor(8) as pool:
                        list(pool.map(lambda one: borrower.prefetch(one).wait(), opened))
                    borrower.close()
                with step("warm"):
                    client.run(asks[: 3 * scale.batch])
                print(json.dumps(asdict(serving.zipf(client, asks))), flush=True)


if "--trim" in sys.argv:
    trimmed("--tiny" in sys.argv)
else:
    serving.main()

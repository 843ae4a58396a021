"""A worker's process: `python -m hearth.worker`, with a `WorkerSetup` as a line on standard input.

One that breaks says why in a `WorkerFarewell`, a line on standard output; it logs to standard error.
It ends at once, and leaves nothing behind, when its standard input or its connection to the gateway does.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import NoReturn

import msgspec
import torch

from hearth.core.beacon import Beacon
from hearth.core.config import EngineConfig
from hearth.core.errors import DeviceError, HearthError, SnapshotError
from hearth.core.messages import WorkerFarewell, WorkerSetup
from hearth.kernels.compilations import COMPILATIONS
from hearth.kernels.jit import HAS_TRITON
from hearth.kernels.kernel_cache import KernelCache, know_compiler
from hearth.policy.turns.turn_policy import TurnRules
from hearth.snapshot.directory import SnapshotDirectory
from hearth.store.transfer.lease_client import LeaseClient
from hearth.store.transfer.staging_buffers import StagingBuffers
from hearth.store.transfer.transfer import Loader
from hearth.system.cuda.batches import native_calls
from hearth.system.die_with_parent import die_with_parent
from hearth.system.garbage import collect_when_idle
from hearth.system.native_code import remedy_for
from hearth.worker.first_tokens import FirstTokens
from hearth.worker.gateway_link import GatewayLink, Introduction, connect, greet
from hearth.worker.heaps import grow_by_pieces
from hearth.worker.model_kernels import ModelKernels
from hearth.worker.model_marks import WorkerMarks
from hearth.worker.model_snapshots import ModelSnapshots, no_parts
from hearth.worker.open_files import close_all_but
from hearth.worker.predecessor import Predecessor
from hearth.worker.runtime import HostingResources, Runtime, start
from hearth.worker.snapshot_graphs import SnapshotGraphs
from hearth.worker.start_times import StartTimes
from hearth.worker.step_launches import StepLaunches
from hearth.worker.worker_loop import Inbox, WorkerLoop

#: How long a thread may keep the interpreter from the others. Models are put together while others step, and
#: the usual 5 ms would show between two tokens.
SWITCH_S = 0.0005
#: For so long a worker that is up pins no host memory that no load needs: those who waited for it come first.
#: If they wait for a first token then, it goes on until they have it, but not for longer than the second.
PINNING_DELAY_S, MAX_PINNING_DELAY_S = 1.0, 30.0
#: The longest reason that is said, in characters: more might wait for somebody to read.
MAX_FAREWELL = 2000

log = logging.getLogger("hearth.worker")


def main() -> NoReturn:
    line = sys.stdin.buffer.readline()
    if not line:
        os._exit(0)
    die_with_parent()  # not before: until then one that was forked has another parent (`template.py`)
    setup = msgspec.json.decode(line, type=WorkerSetup)
    close_all_but((0, 1, 2, setup.beacon))  # a loop that spawns may leave more: those of its own parent, too
    logging.basicConfig(
        level=setup.log_level.upper(),
        format=f"%(asctime)s %(levelname)s {setup.worker} %(name)s %(message)s",
    )
    farewell = os.dup(1)
    os.dup2(2, 1)  # whatever else is printed must not stand before it
    sys.setswitchinterval(SWITCH_S)
    if setup.kind == "cuda":  # whose host memory is pinned
        grow_by_pieces()
    threading.Thread(target=_end_with_input, name="hearth-lifeline", daemon=True).start()
    is_ready = False
    try:
        loop = _start(setup)
        is_ready = True
        with collect_when_idle():
            loop.run()
    except (HearthError, OSError) as error:
        log.error("worker_ended reason=%s", error)
        _say_farewell(farewell, error, str(error))
        os._exit(1)
    except BaseException as error:  # the process's top: it is replaced, which is all that can be done for it
        log.exception("worker_broke")
        # Everybody sees it: nothing of a request may be in it.
        _say_farewell(farewell, error, type(error).__name__ if is_ready else repr(error))
        os._exit(1)
    os._exit(0)


def _say_farewell(fd: int, error: BaseException, reason: str) -> None:
    label = error.label if isinstance(error, HearthError) else HearthError.label
    text = reason.encode(errors="backslashreplace").decode()
    with suppress(OSError):  # nobody listens any more
        os.write(fd, msgspec.json.encode(WorkerFarewell(label, text[:MAX_FAREWELL])) + b"\n")


def _start(setup: WorkerSetup) -> WorkerLoop:
    """Return the loop of a worker that has everything it needs and has been welcomed by the gateway."""
    config = EngineConfig(**setup.engine)  # type: ignore[arg-type] # checked by the class itself
    predecessor = Predecessor(setup.predecessor)
    times = StartTimes()
    is_cuda = setup.kind == "cuda"
    lease_client = LeaseClient(Path(setup.keeper_socket), is_pinned=is_cuda, is_device_up=False)
    times.note("keeper")
    cache = KernelCache.open(Path(setup.kernels_path)) if is_cuda and HAS_TRITON else None
    if cache is not None:
        know_compiler(cache)
        native_calls(cache.path)  # before whoever uses the driver first compiles it, and keeps it nowhere
    runtime = start(setup, config, times)
    first_tokens, launches = FirstTokens(), StepLaunches()
    graphs = _snapshot_graphs(setup, runtime, first_tokens, launches, cache)
    resources = HostingResources(
        *(runtime.device, config, runtime.new_pool, lease_client, Loader(runtime.device)),
        kernels=None if cache is None else _kernels(cache, runtime, lease_client, first_tokens, graphs),
        snapshots=_snapshots(setup, config, runtime, graphs),
        torch_limit=runtime.torch_limit,
        turns=TurnRules() if setup.turns else None,
        marks=WorkerMarks(None if setup.beacon is None else Beacon.at(setup.beacon), launches),
        first_tokens=first_tokens,
    )
    times.note("kernels")
    staging = _staging(setup, lease_client)
    if staging is not None and not predecessor.is_gone:
        staging.touch()  # there is time; not to pin, which makes the other one's end take longer
    predecessor.wait()
    times.note("predecessor")
    inbox: Inbox = SimpleQueue()
    # First: it takes its memory, and a worker that cannot have that is not ready. It may have to wait for it,
    # and the gateway hangs up on whoever connects and says nothing.
    loop = WorkerLoop(resources, inbox, lambda fact: link.send(fact))
    times.note("memory")
    # Not before: beside the pinning of host memory all of a start takes longer, and all that comes first.
    # Of one that replaces another the model is in host memory most likely, and somebody waits for it.
    lease_client.device_is_up(
        staging, wait=partial(_wait_for_calm, first_tokens), pins_first=setup.predecessor is None
    )
    times.note("pinning")
    link = connect(setup.host, setup.port)
    greet(link, _introduction(setup, runtime), bytes.fromhex(setup.secret))
    times.note("gateway")
    log.info("worker_started %s", times)
    threading.Thread(target=_read, args=(link, inbox), name="hearth-reader", daemon=True).start()
    return loop


def _wait_for_calm(first_tokens: FirstTokens) -> None:
    """Return when those who waited for this worker have come, and have their first tokens."""
    time.sleep(PINNING_DELAY_S)
    first_tokens.give_way(MAX_PINNING_DELAY_S)()


def _staging(setup: WorkerSetup, lease_client: LeaseClient) -> StagingBuffers | None:
    """Return slots for loads that come before host memory is pinned, if it is to be; None: they pin it."""
    if setup.kind != "cuda":
        return None
    libraries = KernelCache.directory(Path(setup.kernels_path)) if HAS_TRITON else None
    try:
        return StagingBuffers(lease_client.segment.cell_bytes, libraries=libraries)
    except (OSError, DeviceError) as error:
        log.warning("fallback staging=off reason=`%s` remedy=`%s`", error, remedy_for(error))
        return None


def _kernels(
    cache: KernelCache,
    runtime: Runtime,
    lease_client: LeaseClient,
    first_tokens: FirstTokens,
    graphs: SnapshotGraphs | None,
) -> ModelKernels:
    COMPILATIONS.watch()
    give_way = first_tokens.give_way if graphs is None else graphs.give_way
    learn = None if graphs is None else graphs.learn
    return ModelKernels(cache, runtime.device, lease_client.describe, give_way, learn)


def _snapshots(
    setup: WorkerSetup, config: EngineConfig, runtime: Runtime, graphs: SnapshotGraphs | None
) -> ModelSnapshots | None:
    if setup.snapshots_path is None:
        return None
    name, device = runtime.name, runtime.device
    if device.type == "cpu":  # how fast it is follows from that, too
        name = f"{name}, {torch.get_num_threads()} threads"
    try:
        directory = SnapshotDirectory.open(Path(setup.snapshots_path), setup.snapshot_bytes)
    except SnapshotError as error:  # which the gateway has met as well, and tells of
        log.warning("fallback snapshots=off reason=`%s`", str(error).replace("`", ""))
        return None
    parts_of = no_parts if graphs is None else graphs.parts_of
    return ModelSnapshots(directory, config, device, name, runtime.device_bytes, parts_of)


def _snapshot_graphs(
    setup: WorkerSetup,
    runtime: Runtime,
    first_tokens: FirstTokens,
    launches: StepLaunches,
    cache: KernelCache | None,
) -> SnapshotGraphs | None:
    """Return what keeps the graphs of engines, where another process could use them."""
    if setup.snapshots_path is None or not runtime.has_fixed_addresses:
        return None
    try:
        kernel_cache = None if cache is None else cache.path
        return SnapshotGraphs(runtime.device, first_tokens, kernel_cache, launches)
    except DeviceError as error:
        log.warning("fallback snapshots=without_graphs reason=`%s`", error)
        return None


def _introduction(setup: WorkerSetup, runtime: Runtime) -> Introduction:
    return Introduction(
        *(setup.worker, os.getpid(), setup.kind, runtime.name, runtime.budget_bytes),
        shares_workspace=runtime.shares_workspace,
    )


def _read(link: GatewayLink, inbox: Inbox) -> None:
    try:
        while (order := link.receive()) is not None:
            inbox.put(order)
        log.info("worker_ended reason=`the gateway is gone`")
        os._exit(0)
    except (HearthError, OSError) as error:
        log.error("worker_ended reason=%s", error)
        os._exit(1)


def _end_with_input() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    main()

"""A worker's process: `python -m hearth.worker`, with a `WorkerSetup` as a line on standard input.

A worker that fails says why in a `WorkerFarewell`, a line on standard output. It logs to standard error. It
ends at once when its standard input or its connection to the gateway closes.
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
from typing import NoReturn

import msgspec
import torch

from hearth.core.beacon import Beacon
from hearth.core.config import EngineConfig
from hearth.core.errors import DeviceError, HearthError, SnapshotError
from hearth.core.messages import WorkerFarewell, WorkerSetup
from hearth.kernels.compilations import COMPILATIONS
from hearth.kernels.jit import HAS_TRITON
from hearth.kernels.kernel_cache import KernelCache, hash_compiler
from hearth.policy.turns.turn_policy import TurnRules
from hearth.snapshot.directory import SnapshotDirectory
from hearth.store.format.manifest import Manifest
from hearth.store.transfer.lease_client import LeaseClient
from hearth.store.transfer.staging_buffers import StagingBuffers
from hearth.store.transfer.transfer import Loader
from hearth.system.cuda.batches import native_calls
from hearth.system.die_with_parent import die_with_parent
from hearth.system.garbage import collect_when_idle
from hearth.system.native_code import remedy_for
from hearth.system.spin import SpinningQueue
from hearth.worker.background import FirstTokens, StepLaunches
from hearth.worker.gateway_link import GatewayLink, Introduction, connect, greet
from hearth.worker.model_kernels import ModelKernels
from hearth.worker.model_marks import WorkerMarks
from hearth.worker.model_snapshots import ModelSnapshots, no_parts
from hearth.worker.process import Predecessor, close_all_but, grow_by_pieces
from hearth.worker.runtime import HostingResources, Runtime, StartTimes, start
from hearth.worker.snapshot_graphs import SnapshotGraphs
from hearth.worker.stage_connections import StageConnections
from hearth.worker.stage_sockets import StageListener, connect_to_worker
from hearth.worker.worker_loop import Inbox, WorkerLoop

#: How long a thread may hold the interpreter. Engines are assembled while other models step, and the default
#: of 5 ms would show between two tokens.
SWITCH_S = 0.0005
#: A started worker waits so long before it pins host memory, as requests waited for it, and until these have
#: first tokens, but at most for the second time.
PINNING_DELAY_S, MAX_PINNING_DELAY_S = 1.0, 30.0
#: The longest reason in characters: a longer write could block.
MAX_FAREWELL = 2000

log = logging.getLogger("hearth.worker")


def main() -> NoReturn:
    line = sys.stdin.buffer.readline()
    if not line:
        os._exit(0)
    die_with_parent()  # not before: a forked process has another parent until then (`template.py`)
    setup = msgspec.json.decode(line, type=WorkerSetup)
    close_all_but(
        (0, 1, 2, setup.beacon)
    )  # an event loop that spawns may leak descriptors, even its parent's
    logging.basicConfig(
        level=setup.log_level.upper(),
        format=f"%(asctime)s %(levelname)s {setup.worker} %(name)s %(message)s",
    )
    farewell = os.dup(1)
    os.dup2(2, 1)  # other output must not precede it
    sys.setswitchinterval(SWITCH_S)
    if setup.kind == "cuda":  # host memory is pinned
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
    except BaseException as error:  # the process's top: it is replaced
        log.exception("worker_broke")
        # Shown to all users: it must contain nothing of a request.
        _say_farewell(farewell, error, type(error).__name__ if is_ready else repr(error))
        os._exit(1)
    os._exit(0)


def _say_farewell(fd: int, error: BaseException, reason: str) -> None:
    label = error.label if isinstance(error, HearthError) else HearthError.label
    text = reason.encode(errors="backslashreplace").decode()
    with suppress(OSError):  # the reader is gone
        os.write(fd, msgspec.json.encode(WorkerFarewell(label, text[:MAX_FAREWELL])) + b"\n")


def _start(setup: WorkerSetup) -> WorkerLoop:
    config = EngineConfig(**setup.engine)  # type: ignore[arg-type] # checked by the class itself
    predecessor = Predecessor(setup.predecessor)
    times = StartTimes()
    is_cuda = setup.kind == "cuda"
    lease_client = LeaseClient(Path(setup.keeper_socket), is_pinned=is_cuda, is_device_up=False)
    times.note("keeper")
    cache = KernelCache.open(Path(setup.kernels_path)) if is_cuda and HAS_TRITON else None
    if cache is not None:
        # While the device starts.
        threading.Thread(target=hash_compiler, name="hearth-hash", daemon=True).start()
        native_calls(cache.path)  # before the first use of the driver compiles it without a cache
    runtime = start(setup, config, times)
    first_tokens, launches = FirstTokens(), StepLaunches()
    graphs = _snapshot_graphs(setup, runtime, first_tokens, launches, cache)
    own, credentials = setup.worker, None if setup.credentials is None else Path(setup.credentials)
    agent_socket = None if setup.agent_socket is None else Path(setup.agent_socket)
    connections = StageConnections(
        own,
        lambda worker: connect_to_worker(worker, own, Path(setup.stages_path), agent_socket, credentials),
    )
    StageListener(Path(setup.stages_path), own, credentials, connections.accept)  # until the process ends
    resources = HostingResources(
        runtime.device,
        config,
        runtime.new_pool,
        lease_client,
        Loader(runtime.device),
        kernels=None if cache is None else _kernels(cache, runtime, lease_client, first_tokens, graphs),
        snapshots=_snapshots(setup, config, runtime, graphs),
        torch_limit=runtime.torch_limit,
        turns=TurnRules() if setup.turns else None,
        marks=WorkerMarks(None if setup.beacon is None else Beacon.at(setup.beacon), launches),
        first_tokens=first_tokens,
        connections=connections,
    )
    times.note("kernels")
    staging = _staging(setup, lease_client)
    if staging is not None and not predecessor.is_gone:
        staging.touch()  # while there is time; pinning would delay the predecessor's end
    predecessor.wait()
    times.note("predecessor")
    inbox: Inbox = SpinningQueue()
    # First: this takes the pool's memory and may wait for it, and a worker without it is not ready. The
    # gateway drops connections that stay silent.
    loop = WorkerLoop(resources, inbox, lambda fact: link.send(fact))
    times.note("memory")
    # Not before: pinning slows down everything else. A worker that replaces another one has its model in host
    # memory most likely, and requests wait for it.
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
    time.sleep(PINNING_DELAY_S)
    first_tokens.give_way(MAX_PINNING_DELAY_S)()


def _staging(setup: WorkerSetup, lease_client: LeaseClient) -> StagingBuffers | None:
    """Return buffers for loads that start before host memory is pinned; None: loads pin it themselves."""
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
    descriptions = lease_client.descriptions
    give_way = first_tokens.give_way if graphs is None else graphs.give_way
    learn = None if graphs is None else graphs.learn

    def describe(where: str) -> Manifest:
        is_elsewhere = "://" in where  # the keeper fetches the description
        return lease_client.open(where).manifest if is_elsewhere else descriptions.of_model(Path(where))

    return ModelKernels(cache, runtime.device, describe, give_way, learn)


def _snapshots(
    setup: WorkerSetup, config: EngineConfig, runtime: Runtime, graphs: SnapshotGraphs | None
) -> ModelSnapshots | None:
    if setup.snapshots_path is None:
        return None
    name, device = runtime.name, runtime.device
    if device.type == "cpu":  # speed depends on it
        name = f"{name}, {torch.get_num_threads()} threads"
    try:
        directory = SnapshotDirectory.open(Path(setup.snapshots_path), setup.snapshot_bytes)
    except SnapshotError as error:  # the gateway reports it
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
        setup.worker,
        os.getpid(),
        setup.kind,
        runtime.name,
        runtime.budget_bytes,
        shares_workspace=runtime.shares_workspace,
        gpu=setup.device_index if setup.kind == "cuda" else None,
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

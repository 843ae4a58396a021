"""A host segment that processes share: one owns it and lends, others borrow, and any of them may die."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.random_model import TINY, write_random
from hearth.core.config import StoreConfig
from hearth.core.errors import (
    BadCheckpoint,
    ChunkCorrupt,
    ChunkMissing,
    KeeperGone,
    LoadCancelled,
    StoreError,
)
from hearth.core.types import Rung
from hearth.policy.memory.reload_cost import PRIOR_BYTES_PER_S
from hearth.store.format.convert import convert
from hearth.store.format.manifest import TOKENIZER, WEIGHTS, Manifest, read_manifest
from hearth.store.keeper_client import KeeperClient
from hearth.store.tiers.segment import Segment
from hearth.store.tiers.tiers import Tiers
from hearth.store.transfer import lease_server as server_module
from hearth.store.transfer.destination import whole
from hearth.store.transfer.fetch import WINDOW, Fetch, HostChunk
from hearth.store.transfer.lease import Lease
from hearth.store.transfer.lease_client import LeaseClient
from hearth.store.transfer.lease_connection import Grant, LeaseConnection
from hearth.store.transfer.lease_messages import (
    CancelLease,
    ChunkLeased,
    LeaseGranted,
    Message,
    Refused,
    ReleaseChunks,
    ServerHello,
    encode,
    received,
    send,
)
from hearth.store.transfer.lease_server import LeaseServer
from hearth.store.transfer.transfer import Loader
from hearth.system.standing_threads import ThreadTask
from tests.models.zoo import build
from tests.store.stored import PATIENCE_S, GatedTiers, gated_tiers
from tests.store.transfer.noted_driver import note_pins, places

CELL_BYTES = 8 << 10
NUM_CELLS = 2048  # the least that a configuration allows: 16 MiB


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("lending") / "model"
    convert(build("llama-gqa").directory, directory, chunk_bytes=CELL_BYTES)
    return directory


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hearth-") as folder:  # a socket's name must be short
        yield Path(folder) / "host.sock"


@contextmanager
def serving(root: Path, path: Path, *, keeps_chunks: bool = True) -> Iterator[tuple[Tiers, LeaseServer]]:
    config = StoreConfig(path=str(root), host_bytes=NUM_CELLS * CELL_BYTES)
    tiers = Tiers(config, CELL_BYTES, is_pinned=keeps_chunks, keeps_chunks=keeps_chunks)
    try:
        with closing(LeaseServer(tiers, path)) as server:
            yield tiers, server
    finally:
        tiers.close()


def eventually(is_so: Callable[[], bool], within_s: float = PATIENCE_S) -> bool:
    """Whether a condition comes true soon: the other side acts on a thread of its own."""
    deadline_s = time.monotonic() + within_s
    while not is_so() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return is_so()


def stays_leased(tiers: Tiers) -> bool:
    """Whether one chunk is leased, and still is when a server that wants it back would have taken it."""
    book = tiers.fetcher.book
    return eventually(lambda: book.num_leased == 1) and not eventually(lambda: book.num_leased != 1, 0.3)


def load(lease_client: LeaseClient, where: Path) -> tuple[Manifest, torch.Tensor]:
    opened = lease_client.open(where)
    base = torch.zeros(opened.manifest.num_bytes, dtype=torch.uint8)
    loader = Loader(torch.device("cpu"))
    loader.load(
        "opened",
        opened.manifest,
        whole(opened.manifest, base),
        lambda chunks: Lease(lease_client, opened, chunks),
    ).wait()
    return opened.manifest, base


def test_a_client_loads_what_the_server_reads(model: Path, tmp_path: Path, path: Path) -> None:
    with serving(tmp_path, path) as (tiers, _):
        lease_client = LeaseClient(path)

        _, base = load(lease_client, model)

        lease_client.close()
        assert base.numpy().tobytes() == (model / WEIGHTS).read_bytes()
        assert eventually(lambda: tiers.fetcher.book.num_leased == 0)


def test_closing_a_client_ends_leases_whose_chunks_nobody_released(
    model: Path, tmp_path: Path, path: Path
) -> None:
    with serving(tmp_path, path) as (tiers, server):
        lease_client = LeaseClient(path)
        grant = lease_client.grant(lease_client.open(model), range(2))
        next(iter(grant))
        assert server.num_sessions > 0
        lease_client.close()
        assert eventually(lambda: server.num_sessions == 0)
        assert tiers.fetcher.book.num_leased == 0


def test_two_clients_cost_one_read(model: Path, tmp_path: Path, path: Path) -> None:
    with serving(tmp_path, path) as (tiers, _):
        first, second = LeaseClient(path), LeaseClient(path)

        manifest, _ = load(first, model)
        load(second, model)

        first.close()
        second.close()
        assert tiers.fetcher.counters.num_fills == len({chunk.digest for chunk in manifest.chunks})


def test_what_is_leased_for_a_cpu_is_not_pinned_for_the_gpu_beside_it(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path, path):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        with closing(LeaseClient(path, is_pinned=False)) as lease_client:
            assert lease_client.segment._pinning is None


def test_a_lease_has_its_cells_pinned_and_until_it_ends_no_others(
    model: Path, tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = note_pins(monkeypatch, 16 * CELL_BYTES)
    config = StoreConfig(path=str(tmp_path), host_bytes=NUM_CELLS * CELL_BYTES)
    with (
        closing(Tiers(config, CELL_BYTES, is_pinned=False)) as tiers,
        closing(LeaseServer(tiers, path)),
        closing(LeaseClient(path, is_device_up=False)) as lease_client,
    ):
        segment, opened = lease_client.segment, lease_client.open(model)
        lease = lease_client.grant(opened, range(10))
        lease_client.device_is_up()
        leased = list(lease)
        assert set(places(driver, segment, 16 * CELL_BYTES)) == {chunk.cell // 16 for chunk in leased}
        lease.release(*leased)
        segment.wait_pinned()
        assert segment.pinned_bytes == segment.num_bytes > sum(len(chunk.data) for chunk in leased)
    assert driver.registered == {}


def test_pages_that_are_given_back_are_not_leased_to_be_pinned(
    model: Path, tmp_path: Path, path: Path
) -> None:
    """A device would go on reading what lay there before."""
    with serving(tmp_path, path, keeps_chunks=False):
        num_open = len(os.listdir("/proc/self/fd"))
        with pytest.raises(
            StoreError, match=r"cannot be pinned for a CUDA device; start the keeper for `cuda`"
        ):
            LeaseClient(path, is_pinned=True)
        assert eventually(lambda: len(os.listdir("/proc/self/fd")) <= num_open)

        with closing(LeaseClient(path, is_pinned=False)) as lease_client:
            assert lease_client.open(model).manifest == read_manifest(model)


@pytest.mark.e2e
def test_another_process_sees_the_bytes_of_a_path_of_its_own_until_it_is_killed(
    model: Path, tmp_path: Path, path: Path
) -> None:
    """One process for all of it, because it imports torch."""
    with serving(tmp_path, path) as (tiers, server):
        process = subprocess.Popen(
            [sys.executable, "-c", BORROWS, str(path), model.name],
            cwd=model.parent,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline().strip() == str(sum((model / WEIGHTS).read_bytes()))
        assert eventually(lambda: tiers.fetcher.book.num_leased == 3)

        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()

        assert eventually(lambda: tiers.fetcher.book.num_leased == 0 and server.num_sessions == 0)
        tiers.fetcher.book.check()


#: A process that borrows a model, prints the sum of its bytes, and sleeps while it holds three chunks.
BORROWS = """
import sys, time
from pathlib import Path
from hearth.store.transfer.lease import Lease
from hearth.store.transfer.lease_client import LeaseClient
path, model = sys.argv[1:]
lease_client = LeaseClient(Path(path))
opened = lease_client.open(model)
lease = lease_client.grant(opened, range(len(opened.manifest.chunks)))
total = 0
for number, chunk in enumerate(lease):
    total += sum(chunk.data)
    if number >= 3:
        lease.release(chunk)
print(total, flush=True)
time.sleep(600)
"""


def test_a_client_is_told_what_the_server_met(model: Path, tmp_path: Path, path: Path) -> None:
    broken = tmp_path / "broken"
    convert(build("llama-gqa").directory, broken, chunk_bytes=CELL_BYTES)
    os.truncate(broken / WEIGHTS, 2 * CELL_BYTES)
    with serving(tmp_path / "root", path):
        lease_client = LeaseClient(path)

        with pytest.raises(ChunkMissing, match=r"chunk \d+ of `broken`"):
            load(lease_client, broken)

        lease_client.close()


def test_a_client_cannot_open_what_is_no_model(tmp_path: Path, path: Path) -> None:
    with serving(tmp_path, path):
        lease_client = LeaseClient(path)

        with pytest.raises(BadCheckpoint, match=r"no manifest.json"):
            lease_client.open(tmp_path)

        lease_client.close()


def first_of(
    lease_client: LeaseClient, model: Path, gated: GatedTiers
) -> tuple[Grant, Iterator[HostChunk], HostChunk]:
    """A lease whose first chunk was let through and taken."""
    opened = lease_client.open(model)
    lease = lease_client.grant(opened, range(len(opened.manifest.chunks)))
    chunks = iter(lease)
    gated.gate.next().allow()
    return lease, chunks, next(chunks)


def test_what_a_failed_load_was_given_stays_leased_until_it_is_released(
    model: Path, tmp_path: Path, path: Path
) -> None:
    with gated_tiers(tmp_path) as gated, closing(LeaseServer(gated.tiers, path)) as server:
        lease_client = LeaseClient(path)
        lease, chunks, held = first_of(lease_client, model, gated)

        gated.gate.next().refuse(ChunkMissing("the second is gone"))

        with pytest.raises(ChunkMissing, match="the second is gone"):
            next(chunks)
        assert stays_leased(gated.tiers)
        lease.release(held)
        assert eventually(lambda: gated.tiers.fetcher.book.num_leased == 0 and server.num_sessions == 0)
        lease_client.close()


def test_what_a_load_was_given_before_it_was_called_off_stays_leased_until_it_is_released(
    model: Path, tmp_path: Path, path: Path
) -> None:
    with gated_tiers(tmp_path) as gated, closing(LeaseServer(gated.tiers, path)) as server:
        lease_client = LeaseClient(path)
        lease, chunks, held = first_of(lease_client, model, gated)

        lease.cancel()

        with pytest.raises(LoadCancelled):
            next(chunks)
        assert stays_leased(gated.tiers)
        lease.release(held)
        assert eventually(lambda: gated.tiers.fetcher.book.num_leased == 0 and server.num_sessions == 0)
        lease_client.close()


def test_a_load_that_is_called_off_is_read_no_further(model: Path, tmp_path: Path, path: Path) -> None:
    with gated_tiers(tmp_path) as gated, closing(LeaseServer(gated.tiers, path)):
        lease_client = LeaseClient(path)
        opened = lease_client.open(model)
        lease = lease_client.grant(opened, range(len(opened.manifest.chunks)))
        gated.gate.next().allow()
        held = next(iter(lease))
        second = gated.gate.next()  # it is being read

        lease.cancel()

        book = gated.tiers.fetcher.book
        assert eventually(lambda: not second.is_wanted())
        assert book.num_leased == 1
        gated.gate.open()
        assert eventually(lambda: book.num_filling == 0)
        assert gated.tiers.fetcher.counters.num_fills == 2
        lease.release(held)
        lease_client.close()


def test_calling_off_wakes_who_waits_and_ends_a_lease_that_gave_nothing(
    model: Path, tmp_path: Path, path: Path
) -> None:
    with (
        gated_tiers(tmp_path) as gated,
        closing(LeaseServer(gated.tiers, path)) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        lease_client = LeaseClient(path)
        lease = lease_client.grant(lease_client.open(model), [0, 1])
        waiting = pool.submit(list, lease)
        gated.gate.next()

        lease.cancel()

        assert isinstance(waiting.exception(timeout=PATIENCE_S), LoadCancelled)
        assert eventually(lambda: server.num_sessions == 0)
        lease_client.close()


def test_calling_off_needs_no_answer_and_hangs_up_after_the_last_release() -> None:
    ours, theirs = socket.socketpair()
    with closing(Segment.create(1, CELL_BYTES)) as segment, theirs, ThreadPoolExecutor(1) as pool:
        line = LeaseConnection(ours, segment)
        lease = Grant(
            line, "m", 2, lambda line: pytest.fail("it was called off"), LeaseGranted(is_in_host=True)
        )
        chunks = iter(lease)
        send(theirs, ChunkLeased(0, 0, CELL_BYTES, None, is_shared=False))
        held = next(chunks)
        waiting = pool.submit(next, chunks)

        lease.cancel()

        assert isinstance(waiting.exception(timeout=PATIENCE_S), LoadCancelled)
        heard = received(theirs)
        assert next(heard) == CancelLease()
        lease.release(held)
        assert list(heard) == [ReleaseChunks((0,))]


def test_chunks_that_have_come_are_taken_together_as_far_as_they_are_pinned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = socket.socketpair()
    with closing(Segment.create(6, CELL_BYTES)) as segment, theirs:
        pinned: list[int] = []
        monkeypatch.setattr(segment, "can_copy", lambda cell: cell != 1)
        monkeypatch.setattr(segment, "pin", pinned.append)
        lease = Grant(
            LeaseConnection(ours, segment), "m", 7, lambda line: None, LeaseGranted(is_in_host=True)
        )
        leased = [ChunkLeased(at, at, CELL_BYTES, None, is_shared=False) for at in range(6)]
        send(theirs, *leased, Refused("chunk_missing", "the last one is gone"))

        taken = [lease.take_pinned(3) for _ in range(3)]

        assert [[chunk.index for chunk in batch] for batch in taken] == [[0], [1, 2, 3], [4, 5]]
        assert pinned == [0, 1, 4]
        with pytest.raises(ChunkMissing, match="the last one is gone"):
            lease.take_pinned(3)
        for batch in taken:
            lease.release(*batch)
        assert list(received(theirs)) == [
            ReleaseChunks((0,)),
            ReleaseChunks((1, 2, 3)),
            ReleaseChunks((4, 5)),
        ]


def test_a_client_that_gives_back_what_it_does_not_have_is_dropped_and_leaves_nothing_leased(
    model: Path, tmp_path: Path, path: Path
) -> None:
    with serving(tmp_path, path) as (tiers, server):
        lease_client = LeaseClient(path)
        opened = lease_client.open(model)
        lease = lease_client.grant(opened, range(len(opened.manifest.chunks)))
        next(iter(lease))

        lease.connection.send(ReleaseChunks((0, 0)))

        assert eventually(lambda: server.num_sessions == 0 and tiers.fetcher.book.num_leased == 0)
        lease.connection.close()
        lease_client.close()


def test_a_lease_that_was_called_off_before_it_began_says_so(model: Path, tmp_path: Path, path: Path) -> None:
    with serving(tmp_path, path):
        lease_client = LeaseClient(path)
        lease = lease_client.grant(lease_client.open(model), [0, 1])

        lease.cancel()

        with pytest.raises(LoadCancelled):
            list(lease)
        lease_client.close()


def test_a_lease_of_nothing_is_over_at_once(model: Path, tmp_path: Path, path: Path) -> None:
    with serving(tmp_path, path) as (_, server):
        lease_client = LeaseClient(path)

        lease = lease_client.grant(lease_client.open(model), [])

        assert lease.is_finished
        assert list(lease) == []
        lease_client.close()
        assert eventually(lambda: server.num_sessions == 0)


@pytest.mark.parametrize("chunks", [[0, 0], [-1], [1 << 20]])
def test_chunks_that_are_there_twice_or_not_at_all_are_refused(
    model: Path, tmp_path: Path, path: Path, chunks: list[int]
) -> None:
    with serving(tmp_path, path):
        lease_client = LeaseClient(path)
        opened = lease_client.open(model)

        with pytest.raises(StoreError, match="must be distinct, and below"):
            lease_client.grant(opened, chunks)

        lease_client.close()


def test_a_client_learns_that_another_load_was_reading_its_chunk(
    model: Path, tmp_path: Path, path: Path
) -> None:
    with gated_tiers(tmp_path) as gated, closing(LeaseServer(gated.tiers, path)):
        lease_client = LeaseClient(path)
        opened = lease_client.open(model)
        other = gated.tiers.fetch(gated.tiers.open(model), [0])
        gated.gate.next()

        lease = lease_client.grant(opened, [0, 1])

        assert eventually(lambda: gated.tiers.fetcher.book.num_filling == 2)
        gated.gate.open()
        leased, read = list(lease), list(other)
        lease.release(*leased)
        other.release(*read)
        assert [chunk.is_shared for chunk in leased + read] == [True, False, False]
        lease_client.close()


def test_a_model_is_brought_to_host_memory_and_nothing_of_it_is_leased(
    model: Path, tmp_path: Path, path: Path
) -> None:
    with serving(tmp_path, path) as (tiers, server), closing(LeaseClient(path)) as lease_client:
        opened = lease_client.open(model)
        assert not opened.is_in_host

        assert lease_client.prefetch(opened).wait()
        assert lease_client.prefetch(opened).wait(), "nothing is to come any more"

        assert lease_client.open(model).is_in_host
        assert eventually(lambda: server.num_sessions == 1), "the line of questions stands"
        book = tiers.fetcher.book
        assert (book.num_leased, book.num_resident) == (0, tiers.fetcher.counters.num_fills)


@pytest.mark.parametrize(("num_cells", "keeps_chunks"), [(1, True), (NUM_CELLS, False)])
def test_nothing_is_read_for_a_model_that_would_not_stay_in_host_memory(
    num_cells: int, keeps_chunks: bool, model: Path, tmp_path: Path, path: Path
) -> None:
    config = StoreConfig(path=str(tmp_path), host_bytes=NUM_CELLS * CELL_BYTES)
    cell_bytes = config.host_bytes // num_cells
    with (
        closing(Tiers(config, cell_bytes, is_pinned=False, keeps_chunks=keeps_chunks)) as tiers,
        closing(LeaseServer(tiers, path)),
        closing(LeaseClient(path, is_pinned=False)) as lease_client,
    ):
        assert not lease_client.prefetch(lease_client.open(model)).wait()
        assert tiers.fetcher.counters.num_fills == 0


def test_a_prefetch_that_is_called_off_is_read_no_further(model: Path, tmp_path: Path, path: Path) -> None:
    with (
        gated_tiers(tmp_path) as gated,
        closing(LeaseServer(gated.tiers, path)) as server,
        closing(LeaseClient(path)) as lease_client,
        ThreadPoolExecutor(1) as pool,
    ):
        prefetch = lease_client.prefetch(lease_client.open(model))
        waiting = pool.submit(prefetch.wait)
        reading = gated.gate.next()

        prefetch.cancel()

        assert isinstance(waiting.exception(timeout=PATIENCE_S), LoadCancelled)
        assert eventually(lambda: not reading.is_wanted())
        gated.gate.open()
        assert eventually(lambda: server.num_sessions == 1), "the line of questions stands"
        assert eventually(lambda: gated.tiers.fetcher.book.num_filling == 0)
        assert gated.tiers.fetcher.counters.num_fills <= 1


def test_who_waits_for_a_prefetch_is_told_what_the_server_met(
    model: Path, tmp_path: Path, path: Path
) -> None:
    with (
        gated_tiers(tmp_path) as gated,
        closing(LeaseServer(gated.tiers, path)) as server,
        closing(LeaseClient(path)) as lease_client,
    ):
        opened = lease_client.open(model)
        unknown = replace(opened, directory="/nowhere")
        with pytest.raises(StoreError, match="open it again"):
            lease_client.prefetch(unknown).wait()
        prefetch = lease_client.prefetch(opened)
        gated.gate.next()  # held back
        server.close()
        with pytest.raises(StoreError, match=r"gone|called off"):
            prefetch.wait()


def test_the_server_learns_how_fast_its_disk_is(model: Path, tmp_path: Path, path: Path) -> None:
    with serving(tmp_path, path) as (tiers, _):
        lease_client = LeaseClient(path)

        load(lease_client, model)

        lease_client.close()
        assert eventually(lambda: tiers.prices.bytes_per_s(Rung.DISK) != PRIOR_BYTES_PER_S[Rung.DISK])
        assert tiers.prices.bytes_per_s(Rung.HOST) == PRIOR_BYTES_PER_S[Rung.HOST]


def test_a_path_that_no_file_can_have_is_refused(tmp_path: Path, path: Path) -> None:
    with serving(tmp_path, path):
        lease_client = LeaseClient(path)

        with pytest.raises(StoreError, match="cannot be opened"):
            lease_client.open("a\0b")

        lease_client.close()


def test_a_model_that_is_replaced_while_it_is_opened_is_not_leased(
    model: Path, tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(read_manifest(model), files=())
    monkeypatch.setattr("hearth.store.format.description.read_description", lambda _: other)
    with serving(tmp_path, path):
        lease_client = LeaseClient(path)

        with pytest.raises(StoreError, match="was replaced while it was opened"):
            lease_client.open(model)

        lease_client.close()


def test_a_server_that_is_closed_has_taken_everything_back(
    model: Path, tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancel = Fetch.cancel

    def cancel_slowly(fetch: Fetch) -> None:
        time.sleep(0.2)
        cancel(fetch)

    monkeypatch.setattr(Fetch, "cancel", cancel_slowly)
    with serving(tmp_path, path) as (tiers, server):
        lease_client = LeaseClient(path)
        lease = lease_client.grant(lease_client.open(model), [0, 1])
        held = list(lease)

        server.close()

        assert (tiers.fetcher.book.num_leased, server.num_sessions) == (0, 0)
        assert not path.exists()
        lease.release(*held)
        lease_client.close()


def test_a_server_leaves_a_file_that_is_no_socket_alone(tmp_path: Path, path: Path) -> None:
    path.write_text("precious")
    with pytest.raises(StoreError, match="cannot listen at"), serving(tmp_path, path):
        pass
    assert path.read_text() == "precious"


def test_a_server_takes_the_place_of_one_that_is_gone(tmp_path: Path, path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as gone:
        gone.bind(str(path))
    with serving(tmp_path, path):
        LeaseClient(path).close()


def test_a_server_cannot_lend_where_there_is_no_directory(tmp_path: Path, path: Path) -> None:
    with (
        pytest.raises(StoreError, match="cannot listen at"),
        serving(tmp_path, path / "absent" / "host.sock"),
    ):
        pass


def test_a_server_without_room_for_a_connection_serves_on(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accept = socket.socket.accept
    failures = [OSError(errno.EMFILE, "too many open files")] * 2

    def accept_later(listener: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise failures.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accept_later)
    with serving(tmp_path, path):
        LeaseClient(path).close()
    assert [record.msg.split()[0] for record in caplog.records] == ["connection_not_taken"]


def test_a_server_without_a_thread_for_a_client_or_a_load_serves_on(
    model: Path, tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start
    #: Threads of the server in the order of their start: of a client, of the same again, of what opens a
    #: model and begins a load, and the load's own.
    can_start = iter([False, True, True, False])

    def start_if_possible(thread: threading.Thread) -> None:
        if thread.name == "hearth-lease" and not next(can_start, True):
            raise RuntimeError("can't start new thread")
        start(thread)

    with serving(tmp_path, path) as (tiers, _):
        monkeypatch.setattr(threading.Thread, "start", start_if_possible)
        with pytest.raises(KeeperGone):
            LeaseClient(path)
        with closing(LeaseClient(path)) as lease_client:
            opened = lease_client.open(model)
            with pytest.raises(StoreError, match="cannot start a thread for this load"):
                list(lease_client.grant(opened, [0, 1]))
            assert eventually(lambda: tiers.fetcher.book.num_leased == 0)
            _, base = load(lease_client, model)
        assert base.numpy().tobytes() == (model / WEIGHTS).read_bytes()


def test_what_is_in_host_memory_is_leased_at_once_and_by_no_thread_of_its_own(
    model: Path, tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path, path) as (tiers, server), closing(LeaseClient(path)) as lease_client:
        opened = lease_client.open(model)
        for chunk in (lease := lease_client.grant(opened, [0, 1])):
            lease.release(chunk)

        def start(act: Callable[[], None]) -> ThreadTask:
            pytest.fail("a thread was asked for")

        monkeypatch.setattr(server._senders, "start", start)
        for _ in range(3):  # on the line of the load before
            lease = lease_client.grant(opened, [1, 0])
            batch = lease.take_pinned(2)
            assert lease.is_in_host
            assert [bytes(chunk.data) for chunk in batch] == [_chunk_bytes(model, index) for index in (1, 0)]
            assert tiers.fetcher.book.num_leased == 2
            lease.release(*batch)
        assert eventually(lambda: tiers.fetcher.book.num_leased == 0)

        held = lease_client.grant(opened, [0])
        next(iter(held))
        held.connection.close()  # as if it had died
        assert eventually(lambda: tiers.fetcher.book.num_leased == 0)


def test_a_load_that_was_asked_for_ahead_is_leased_before_it_is_fetched(
    model: Path, tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path, path) as (tiers, server), closing(LeaseClient(path)) as lease_client:
        opened = lease_client.open(model)
        assert eventually(lambda: server.num_sessions == 1), "the line of the introduction has not ended"
        for _ in range(2):  # from disk, and from host memory
            asked = lease_client.request(opened, [1, 0])
            assert asked is not None, "a line stands since the model was opened"
            assert eventually(lambda: tiers.fetcher.book.num_leased == 2)

            with monkeypatch.context() as silent:
                silent.setattr(LeaseConnection, "send", lambda *_: pytest.fail("it was asked for already"))
                lease = lease_client.grant(opened, [1, 0], asked)
                chunks = list(lease)

            assert [bytes(chunk.data) for chunk in chunks] == [_chunk_bytes(model, index) for index in (1, 0)]
            lease.release(*chunks)
            assert eventually(lambda: tiers.fetcher.book.num_leased == 0)
        assert server.num_sessions == 1


def test_a_load_that_was_asked_for_and_is_not_wanted_is_taken_back(
    model: Path, tmp_path: Path, path: Path
) -> None:
    with serving(tmp_path, path) as (tiers, _), closing(LeaseClient(path)) as lease_client:
        opened = lease_client.open(model)
        asked = lease_client.request(opened, [0, 1])
        assert asked is not None
        assert lease_client.request(opened, [2]) is None, "no other line stands"
        assert eventually(lambda: tiers.fetcher.book.num_leased == 2)

        asked.close()

        assert eventually(lambda: tiers.fetcher.book.num_leased == 0)
        (chunk,) = (lease := lease_client.grant(opened, [2]))
        lease.release(chunk)
        asked = lease_client.request(opened, [0, 1])
        (chunk,) = (lease := lease_client.grant(opened, [2], asked))  # of other chunks than were asked for
        assert bytes(chunk.data) == _chunk_bytes(model, 2)
        lease.release(chunk)
        assert eventually(lambda: tiers.fetcher.book.num_leased == 0)


def test_a_load_that_was_asked_of_a_server_that_is_gone_begins_with_the_next(
    model: Path, tmp_path: Path, path: Path
) -> None:
    with serving(tmp_path / "first", path) as (tiers, _):
        lease_client = LeaseClient(path)
        opened = lease_client.open(model)
        for chunk in (lease := lease_client.grant(opened, [0])):
            lease.release(chunk)
        asked = lease_client.request(opened, [0])
        assert eventually(lambda: tiers.fetcher.book.num_leased == 1), "its answer has come"
    with serving(tmp_path / "second", path), closing(lease_client):
        lease_client.open(model)  # by which the first one's memory is closed
        (chunk,) = (lease := lease_client.grant(opened, [0], asked))
        assert bytes(chunk.data) == _chunk_bytes(model, 0)
        lease.release(chunk)


@pytest.mark.parametrize("is_at_once", [False, True])
def test_a_client_that_dies_before_its_load_begins_leaves_nothing_leased_of_what_is_in_host_memory(
    is_at_once: bool, model: Path, tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path, path) as (tiers, _), closing(LeaseClient(path)) as lease_client:
        opened = lease_client.open(model)
        chunks = range(2 if is_at_once else len(opened.manifest.chunks))
        assert (len(chunks) <= WINDOW) == is_at_once
        for chunk in (lease := lease_client.grant(opened, chunks)):
            lease.release(chunk)

        def send_until_it_begins(connection: socket.socket, *messages: Message) -> None:
            if isinstance(messages[0], LeaseGranted):
                raise BrokenPipeError
            send(connection, *messages)

        with monkeypatch.context() as dying:
            dying.setattr(server_module, "send", send_until_it_begins)
            with pytest.raises(KeeperGone):
                lease_client.grant(opened, chunks)
        assert eventually(lambda: tiers.fetcher.book.num_leased == 0)


def _chunk_bytes(model: Path, index: int) -> bytes:
    part = read_manifest(model).chunk_range(index)
    return (model / WEIGHTS).read_bytes()[part.begin : part.end]


@pytest.mark.parametrize(
    "line", [b"what?\n", encode(ReleaseChunks((0,))), encode(ServerHello(1 << 40, 1 << 20, keeps_pages=True))]
)
def test_a_client_leaves_nothing_open_after_a_greeting_that_is_none(path: Path, line: bytes) -> None:
    def greet(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            socket.send_fds(connection, [line], [listener.fileno()])

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, ThreadPoolExecutor(1) as pool:
        listener.bind(str(path))
        listener.listen()
        num_open = len(os.listdir("/proc/self/fd"))
        greeted = pool.submit(greet, listener)

        with pytest.raises(StoreError):
            LeaseClient(path)

        greeted.result(PATIENCE_S)
        assert len(os.listdir("/proc/self/fd")) <= num_open


def test_a_client_notices_that_the_server_is_gone(model: Path, tmp_path: Path, path: Path) -> None:
    with serving(tmp_path, path) as (_, server):
        lease_client = LeaseClient(path)
        opened = lease_client.open(model)
        lease = lease_client.grant(opened, range(len(opened.manifest.chunks)))
        chunks = iter(lease)
        held = [next(chunks)]

        server.close()

        with pytest.raises(StoreError, match="is gone"):
            held.extend(chunks)
        lease.release(*held)
        lease_client.close()


def test_nobody_lends_at_a_path_without_a_socket(path: Path) -> None:
    with pytest.raises(StoreError, match="no keeper listens"):
        LeaseClient(path)


def test_a_client_that_talks_nonsense_is_dropped_and_others_are_not(
    model: Path, tmp_path: Path, path: Path
) -> None:
    with serving(tmp_path, path) as (_, server):
        lease_client = LeaseClient(path)
        rude, _ = lease_client._connect()

        rude.sendall(b"what?\n")

        assert eventually(lambda: server.num_sessions == 0)
        rude.close()
        load(lease_client, model)
        lease_client.close()


def test_a_server_that_was_started_again_lends_from_its_new_segment(
    model: Path, tmp_path: Path, path: Path
) -> None:
    with serving(tmp_path, path):
        lease_client = LeaseClient(path)
        load(lease_client, model)
    with serving(tmp_path, path):
        _, base = load(lease_client, model)
        assert lease_client._old == []  # nobody copies from it any more
        lease_client.close()

    assert base.numpy().tobytes() == (model / WEIGHTS).read_bytes()


def test_a_load_of_what_is_in_host_memory_is_demand_as_any_other(
    model: Path, tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path, path) as (tiers, _), closing(LeaseClient(path)) as lease_client:
        opened = lease_client.open(model)
        began: list[str] = []
        monkeypatch.setattr(tiers.prices, "load_began", lambda one: began.append(one.manifest.digest))
        for _ in range(2):  # from disk, and from host memory
            for chunk in (lease := lease_client.grant(opened, [0, 1])):
                lease.release(chunk)
        assert lease.is_in_host
        assert eventually(lambda: began == [opened.manifest.digest] * 2)


def test_the_weight_of_a_model_reaches_the_prices(model: Path, tmp_path: Path, path: Path) -> None:
    with serving(tmp_path, path) as (tiers, _), closing(LeaseClient(path)) as lease_client:
        lease_client.open(model, weight=3.0)

        assert tiers._opened[model.resolve()].model.weight == 3.0


@pytest.mark.parametrize("removed", ["first", "last"])
def test_a_copy_of_a_model_that_is_removed_leaves_the_other_loadable_and_counted(
    model: Path, tmp_path: Path, path: Path, removed: str
) -> None:
    copies = {name: shutil.copytree(model, tmp_path / name) for name in ("first", "last")}
    (kept,) = copies.keys() - {removed}
    with serving(tmp_path / "store", path):
        lease_client, keeper = LeaseClient(path), KeeperClient(path)
        opened = {name: lease_client.open(copy) for name, copy in copies.items()}
        digest, num_chunks = opened[kept].manifest.digest, len(opened[kept].manifest.chunks)
        asyncio.run(keeper.forget(str(copies[removed])))
        shutil.rmtree(copies[removed])

        lease = lease_client.grant(opened[kept], range(num_chunks))
        for chunk in lease:
            lease.release(chunk)
        held = {one.model: one.host for one in asyncio.run(keeper.report()).models}
        with pytest.raises(BadCheckpoint, match=r"no manifest\.json"):
            lease_client.grant(opened[removed], [0])
        assert int.from_bytes(held[digest]).bit_count() == num_chunks
        lease_client.close()


def test_a_model_that_was_described_is_opened_without_reading_a_file(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first start has no time for that. A file that has changed since is read again."""

    def reads(*_: object) -> None:
        raise AssertionError("a file is read")

    monkeypatch.setattr("bench.random_model.CHUNK_BYTES", CELL_BYTES)
    source = write_random(tmp_path / "source", TINY, "float32", 0, torch.device("cpu"))
    with serving(tmp_path, path), closing(LeaseClient(path)) as lease_client:
        described = lease_client.descriptions.of_model(source)
        assert described.files, "it has no tokenizer to check"
        with monkeypatch.context() as patch:
            patch.setattr("hearth.store.format.description.read_description", reads)
            patch.setattr("hearth.store.format.description.damage_of", reads)
            assert lease_client.open(source).manifest is described
            tokenizer = lease_client.descriptions.text_file(described, source, TOKENIZER)
        assert tokenizer == source / TOKENIZER
        tokenizer.write_bytes(tokenizer.read_bytes().replace(b"{", b"[", 1))
        with pytest.raises(ChunkCorrupt, match=r"tokenizer\.json` "):
            lease_client.descriptions.text_file(described, source, TOKENIZER)


def test_questions_and_loads_leave_their_line_to_the_next(model: Path, tmp_path: Path, path: Path) -> None:
    with serving(tmp_path, path) as (tiers, server), closing(LeaseClient(path)) as lease_client:
        opened = lease_client.open(model)
        assert len(lease_client._idle) == 1
        assert eventually(lambda: server.num_sessions == 1), "the line of the introduction has not ended"
        for _ in range(3):
            lease_client.open(model)
            lease = lease_client.grant(opened, range(len(opened.manifest.chunks)))
            for chunk in lease:
                lease.release(chunk)
            assert server.num_sessions == 1
        assert lease.is_in_host, "the first one has brought it there"
        assert eventually(lambda: tiers.fetcher.book.num_leased == 0)


def test_a_client_that_is_closed_leaves_no_line_behind(model: Path, tmp_path: Path, path: Path) -> None:
    """As when a worker ends while one of its threads begins a load."""
    with serving(tmp_path, path) as (_, server):
        lease_client = LeaseClient(path)
        lease_client.close()
        with pytest.raises(KeeperGone):
            lease_client.open(model)
        assert eventually(lambda: server.num_sessions == 0)


def test_a_load_begins_though_the_server_was_started_anew_since_the_model_was_opened(
    model: Path, tmp_path: Path, path: Path
) -> None:
    with serving(tmp_path / "old", path):
        lease_client = LeaseClient(path)
        opened = lease_client.open(model)
        lease = lease_client.grant(opened, [0])
        lease.release(*lease)  # its line stands, and breaks with this server
    with serving(tmp_path / "new", path) as (tiers, _), closing(lease_client):
        lease = lease_client.grant(opened, [0, 1])
        (first, second) = lease
        assert bytes(first.data) + bytes(second.data) == (model / WEIGHTS).read_bytes()[: 2 * CELL_BYTES]
        lease.release(first, second)
        assert eventually(lambda: tiers.fetcher.book.num_leased == 0)


def test_a_load_of_a_model_that_is_another_by_now_says_so(model: Path, tmp_path: Path, path: Path) -> None:
    place = shutil.copytree(model, tmp_path / "model")
    with serving(tmp_path / "old", path):
        lease_client = LeaseClient(path)
        opened = lease_client.open(place)
    shutil.rmtree(place)
    convert(build("opt-pre").directory, place, chunk_bytes=CELL_BYTES)
    with (
        serving(tmp_path / "new", path),
        closing(lease_client),
        pytest.raises(StoreError, match="is another model by now"),
    ):
        lease_client.grant(opened, [0])


def test_a_server_that_hangs_up_before_its_greeting_is_gone(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(LeaseClient, path)
            listener.accept()[0].close()

            with pytest.raises(KeeperGone, match="closed the connection at once"):
                asked.result(PATIENCE_S)


def test_a_message_that_its_sender_died_over_is_none() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            theirs.sendall(encode(CancelLease()) + encode(CancelLease())[:-3])

        assert list(received(ours)) == [CancelLease()]

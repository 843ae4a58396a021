"""The keeper's process and what the gateway asks of it, over its socket."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from hearth.core.errors import StoreError
from hearth.core.messages import KeeperSetup
from hearth.core.types import Digest
from hearth.store import keeper
from hearth.store.format.manifest import CHUNK_BYTES, read_manifest
from hearth.store.keeper_client import KeeperClient
from hearth.store.transfer.lease_client import LeaseClient
from hearth.system.garbage import MAX_YOUNG
from tests.store.stored import converted
from tests.worker.harness import folder, keeper_setup, keeping, process

pytestmark = pytest.mark.e2e

#: Starts a keeper that it never ends, says its number, and dies at the next line.
STARTS = """
import subprocess, sys
keeper = subprocess.Popen([sys.executable, "-m", "hearth.store.keeper"], stdin=subprocess.PIPE)
keeper.stdin.write(sys.stdin.buffer.readline())
keeper.stdin.flush()
print(keeper.pid, flush=True)
sys.stdin.buffer.readline()
"""


@pytest.fixture(scope="module")
def setup() -> Iterator[KeeperSetup]:
    with folder() as place, keeping(setup := keeper_setup(place)):
        yield setup


@pytest.fixture(scope="module")
def lease_client(setup: KeeperSetup) -> Iterator[LeaseClient]:
    lease_client = LeaseClient(Path(setup.socket), is_pinned=False)
    yield lease_client
    lease_client.close()


async def held(client: KeeperClient, digest: str) -> tuple[bytes, bytes] | None:
    """Return the chunks of a model in host memory and on disk; None: the keeper does not know it."""
    models = {one.model: one for one in (await client.report()).models}
    one = models.get(Digest(digest))
    return None if one is None else (one.host, one.disk)


def test_tells_which_chunks_of_a_model_lie_where(setup: KeeperSetup, lease_client: LeaseClient) -> None:
    client, where = KeeperClient(Path(setup.socket)), converted("llama-gqa")
    digest = read_manifest(where).digest

    async def ask() -> None:
        assert await held(client, digest) is None
        model = lease_client.open(where, weight=2.0)
        all_chunks = ((1 << len(model.manifest.chunks)) - 1).to_bytes(1, "little")
        assert await held(client, digest) == (b"\0", all_chunks)
        lease = lease_client.grant(model, [0])
        (chunk,) = lease
        assert await held(client, digest) == (b"\1", all_chunks)
        report = await client.report()
        assert (report.used_bytes, report.capacity_bytes) == (CHUNK_BYTES, 2 * CHUNK_BYTES)
        lease.release(chunk)

    asyncio.run(ask())


def test_what_it_was_told_to_forget_it_does_not_know(setup: KeeperSetup, lease_client: LeaseClient) -> None:
    client, where = KeeperClient(Path(setup.socket)), converted("opt-pre")

    async def ask() -> None:
        model = lease_client.open(where)
        await client.forget(str(where))
        await client.forget(str(where))  # again is harmless
        assert await held(client, model.digest) is None
        with pytest.raises(StoreError, match="open it again"):
            lease_client.prefetch(model).wait()
        lease_client.open(where)
        assert await held(client, model.digest) is not None

    asyncio.run(ask())


def test_a_keeper_that_is_not_there_is_named(tmp_path: Path) -> None:
    client = KeeperClient(tmp_path / "nobody.sock")

    with pytest.raises(StoreError, match=r"no keeper answers at .*nobody\.sock"):
        asyncio.run(client.report())


def test_what_keeps_it_from_starting_is_said(setup: KeeperSetup) -> None:
    nowhere = msgspec.structs.replace(setup, socket=f"{setup.socket}/keeper.sock")
    with process("hearth.store.keeper", nowhere) as second:
        assert second.stdout is not None
        answer = json.loads(second.stdout.readline())
        assert second.wait() == 1

    assert answer["error"] == "store"
    assert "cannot listen at" in answer["reason"]


def test_ends_with_its_input_and_leaves_no_socket() -> None:
    with folder() as place:
        setup = keeper_setup(place)
        with keeping(setup) as keeper:
            assert keeper.stdin is not None
            keeper.stdin.close()
            assert keeper.wait() == 0
            assert not Path(setup.socket).exists()


def test_puts_collections_of_garbage_off(monkeypatch: pytest.MonkeyPatch) -> None:
    found, given = [], gc.get_threshold()
    with folder() as place:
        lines = msgspec.json.encode(keeper_setup(place)) + b"\n\n"
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
        monkeypatch.setattr(keeper, "die_with_parent", lambda: None)
        monkeypatch.setattr(keeper, "_say", lambda line: found.append(gc.get_threshold()[0]))
        assert keeper.main() == 0
    assert (found[1:], gc.get_threshold()) == ([MAX_YOUNG], given)


def test_dies_with_whoever_started_it_even_when_it_does_not_listen() -> None:
    """It is stopped, so it can notice nothing itself: the kernel ends it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    with (
        folder() as place,
        subprocess.Popen(
            [sys.executable, "-c", STARTS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        ) as parent,
    ):
        assert parent.stdin is not None
        assert parent.stdout is not None
        setup = keeper_setup(place)
        parent.stdin.write(
            json.dumps({name: getattr(setup, name) for name in setup.__struct_fields__}).encode()
        )
        parent.stdin.write(b"\n")
        parent.stdin.flush()
        keeper = int(parent.stdout.readline())
        assert json.loads(parent.stdout.readline())["error"] is None
        os.kill(keeper, signal.SIGSTOP)

        parent.kill()
        parent.wait()

        assert parent.stdout.read() == b""  # the other end of the pipe is the keeper's too: it is gone


def test_keeper_and_client_do_without_torch() -> None:
    code = "import sys, hearth.store.keeper, hearth.store.keeper_client; print('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    ).stdout

    assert printed.strip() == "False"

"""What a worker sees to before its first load: buffers, and that nothing else is in its way."""

from __future__ import annotations

import tempfile
import threading
from contextlib import closing
from pathlib import Path

import pytest

from hearth.core.config import StoreConfig
from hearth.core.messages import WorkerSetup
from hearth.core.types import WorkerId
from hearth.store.tiers.tiers import Tiers
from hearth.store.transfer import staging_buffers
from hearth.store.transfer.lease_client import LeaseClient
from hearth.store.transfer.lease_server import LeaseServer
from hearth.system.native_code import NativeCodeUnavailable
from hearth.worker import __main__ as worker
from hearth.worker.background import FirstTokens
from tests.store.stored import PATIENCE_S

CELL_BYTES = 1 << 16


def setup_of(kind: str, kernels: Path) -> WorkerSetup:
    return WorkerSetup(WorkerId("w0"), "", 1, "", kind, 0, 1, None, "", str(kernels), {}, None, "info", "")


@pytest.mark.parametrize(
    ("obstacle", "told"),
    [
        (None, ""),
        (NativeCodeUnavailable("no cc", "install it"), "reason=`no cc` remedy=`install it`"),
        (OSError("it broke"), "reason=`it broke` remedy=`fix the cause given in the reason`"),
    ],
)
def test_a_worker_on_a_gpu_has_buffers_or_tells_why_loads_have_to_pin(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    obstacle: OSError | None,
    told: str,
) -> None:
    if obstacle is not None:

        def refuse(libraries: Path | None) -> None:
            raise obstacle

        monkeypatch.setattr(staging_buffers, "_fill_threads", refuse)
    (tmp_path / "kernels").mkdir(mode=0o700)
    config = StoreConfig(path=str(tmp_path), host_bytes=1 << 24)
    with (
        tempfile.TemporaryDirectory(prefix="hearth-") as folder,  # a socket's name must be short
        closing(Tiers(config, CELL_BYTES, is_pinned=False)) as tiers,
        closing(LeaseServer(tiers, Path(folder) / "host.sock")),
        closing(LeaseClient(Path(folder) / "host.sock", is_device_up=False)) as lease_client,
    ):
        staging = worker._staging(setup_of("cuda", tmp_path / "kernels"), lease_client)
        assert not lease_client.is_unstaged
        lease_client.device_is_up(staging)
        assert (staging is not None, lease_client.is_unstaged) == (obstacle is None, obstacle is not None)
        assert staging is None or staging.slot_bytes == CELL_BYTES
        assert worker._staging(setup_of("cpu", tmp_path / "kernels"), lease_client) is None
    assert caplog.text.count(f"fallback staging=off {told}") == (obstacle is not None)


def test_host_memory_is_pinned_when_those_who_waited_have_their_first_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker, "PINNING_DELAY_S", 0.0)
    first_tokens = FirstTokens()
    worker._wait_for_calm(first_tokens)  # nobody waits
    first_tokens.awaited(1)
    waiting = threading.Thread(target=worker._wait_for_calm, args=(first_tokens,))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    first_tokens.served(1)
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()

"""How a worker prepares for loads that come before host memory is pinned."""

from __future__ import annotations

import tempfile
from contextlib import closing
from pathlib import Path

import pytest

from hearth.config import StoreConfig
from hearth.messages import WorkerSetup
from hearth.store import staging_buffers
from hearth.store.borrower import Borrower
from hearth.store.lender import Lender
from hearth.store.tiers import Tiers
from hearth.types import WorkerId
from hearth.worker.__main__ import _staging

CELL_BYTES = 1 << 16


def setup_of(kind: str, kernels: Path) -> WorkerSetup:
    return WorkerSetup(*(WorkerId("w0"), "", 1, "", kind, 0, 1, None, "", str(kernels), {}, None, "info"))


@pytest.mark.parametrize("has_compiler", [True, False])
def test_a_worker_on_a_gpu_has_buffers_or_tells_why_loads_have_to_pin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, has_compiler: bool
) -> None:
    if not has_compiler:

        def refuse(libraries: Path | None) -> None:
            raise OSError("cc failed")

        monkeypatch.setattr(staging_buffers, "_fill_threads", refuse)
    (tmp_path / "kernels").mkdir(mode=0o700)
    config = StoreConfig(path=str(tmp_path), host_bytes=1 << 24)
    with (
        tempfile.TemporaryDirectory(prefix="hearth-") as folder,  # a socket's name must be short
        closing(Tiers(config, CELL_BYTES, is_pinned=False)) as tiers,
        closing(Lender(tiers, Path(folder) / "host.sock")),
        closing(Borrower(Path(folder) / "host.sock", is_device_up=False)) as borrower,
    ):
        staging = _staging(setup_of("cuda", tmp_path / "kernels"), borrower)
        assert not borrower.is_unstaged
        borrower.device_is_up(staging)
        assert (staging is not None, borrower.is_unstaged) == (has_compiler, not has_compiler)
        assert staging is None or staging.slot_bytes == CELL_BYTES
        assert _staging(setup_of("cpu", tmp_path / "kernels"), borrower) is None
    told = "fallback staging=off reason=`cc failed` remedy=`install a C compiler (cc)`"
    assert caplog.text.count(told) == (not has_compiler)

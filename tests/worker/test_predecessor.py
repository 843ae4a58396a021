from __future__ import annotations

import subprocess
import threading
from pathlib import Path
from typing import Any

import msgspec

from hearth.messages import PrepareModel, WorkerSetup
from hearth.sizes import StepLimits
from hearth.store.manifest import Manifest, read_manifest
from hearth.types import ModelId, WorkerId
from hearth.worker.__main__ import _load_kernels
from hearth.worker.predecessor import Predecessor
from tests.control.test_supervisor import setup_of
from tests.store.stored import converted


def test_the_end_of_a_process_is_waited_for_and_seen() -> None:
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    predecessor = Predecessor(process.pid)
    assert not predecessor.is_gone
    waiting = threading.Thread(target=predecessor.wait, daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    assert process.stdin is not None
    process.stdin.close()
    waiting.join(60.0)
    assert not waiting.is_alive()
    assert predecessor.is_gone
    process.wait()
    assert Predecessor(process.pid).is_gone, "it was reaped before"


def test_nobody_is_waited_for_where_there_was_nobody() -> None:
    assert Predecessor(None).is_gone
    Predecessor(None).wait()


class LoadedKernels:
    """Notes whose kernels were asked for; the predecessor is gone with the first of them. Mutable."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.digests: list[str] = []
        self._process = process

    def load(self, manifest: Manifest, limits: StepLimits) -> bool:
        self.digests.append(manifest.digest)
        self._process.kill()
        self._process.wait()
        return True


def test_kernels_come_while_a_predecessor_ends_and_no_longer(tmp_path: Path) -> None:
    """Of a model that is not there they do not, and the gateway will tell."""
    stored = converted("llama-gqa")
    orders = tuple(
        PrepareModel(ModelId("m"), directory, StepLimits(16, 4, 16))
        for directory in (str(tmp_path / "nowhere"), str(stored), str(stored))
    )
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    kernels = LoadedKernels(process)
    setup = msgspec.structs.replace(setup_of(0, WorkerId("w0")), prepare=orders)
    setup = msgspec.json.decode(msgspec.json.encode(setup), type=WorkerSetup)
    asked: Any = kernels  # as much of `ModelKernels` as is asked
    _load_kernels(setup, Predecessor(process.pid), asked, read_manifest)
    assert kernels.digests == [read_manifest(stored).digest]
    assert process.stdin is not None
    process.stdin.close()

"""How long does `hearth serve` take to be ready and to a first text, with kernels to compile and without?

Part of `python -m bench.engine.start`. The model is deployed while nothing runs, so that the first service
has all of its kernels to compile, for which its first request waits. The next one finds them. Snapshots are
neither made nor used.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path

from bench.service.gpu import one
from bench.service.process import deploy, serving
from hearth.control.datadir import DataDir

_NAME = "model"
_PROMPT = [1] * 100
_NEW_TOKENS = 2


def deploy_cold(model: Path, data_dir: Path) -> None:
    """Deploy a model to a data directory in which no kernel is compiled."""
    deploy(data_dir, model, _NAME)
    shutil.rmtree(DataDir(data_dir).kernels_path, ignore_errors=True)


def service_start(data_dir: Path, kind: str) -> dict[str, float]:
    """Start a service, ask it as soon as it is ready, and stop it."""
    began_s = time.perf_counter()
    flags = ["--device", kind, "--workers", "1", "--set", "store.snapshot_bytes=0"]
    with serving(data_dir, flags) as service:
        ready_s = time.perf_counter() - began_s
        asked = asyncio.run(one(service, _NAME, _PROMPT, _NEW_TOKENS))
    return {"ready_s": ready_s, "first_text_s": ready_s + asked.answer.first_s}

"""Restored graphs touch no memory but what is there, as compute-sanitizer sees it, on a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Where toolkits put it that are not in the path.
TOOLKITS = "/usr/local/cuda/bin"
WATCH = ("--tool", "memcheck", "--error-exitcode", "1", "--report-api-errors", "no")

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def sanitizer() -> str:
    """Where compute-sanitizer is; without it there is nothing to test."""
    path = os.pathsep.join([os.environ.get("PATH", ""), TOOLKITS])
    if (found := shutil.which("compute-sanitizer", path=path)) is None:
        pytest.skip("compute-sanitizer is not installed: it comes with the CUDA toolkit")
    return found


def replayed(action: str, directory: Path, watch: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    paths = [str(ROOT / "src"), str(ROOT), environment.get("PYTHONPATH", "")]
    return subprocess.run(
        [*watch, sys.executable, str(ROOT / "tests/snapshot/replayed_step.py"), action, str(directory)],
        capture_output=True,
        text=True,
        env={**environment, "PYTHONPATH": os.pathsep.join(paths)},
    )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A snapshot of another process."""
    run = replayed("save", tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    return tmp_path


def test_restored_graphs_compute_what_was_captured_with_adapters_and_without(saved: Path) -> None:
    run = replayed("load", saved)
    assert (run.returncode, run.stdout.split()) == (0, ["equal"]), run.stdout + run.stderr


def test_a_restored_replay_touches_nothing_but_its_memory(saved: Path) -> None:
    run = replayed("load", saved, [sanitizer(), *WATCH])
    told = run.stdout + run.stderr
    assert run.returncode == 0, told
    assert "equal" in told.split()
    assert "ERROR SUMMARY: 0 errors" in told, told


def test_a_replay_on_memory_that_is_gone_does_not_pass(saved: Path) -> None:
    run = replayed("stray", saved, [sanitizer(), *WATCH])
    told = run.stdout + run.stderr
    assert run.returncode != 0, told
    assert "Invalid __global__ read" in told, told
    assert "equal" not in told.split()

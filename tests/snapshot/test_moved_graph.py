"""A graph of one process that runs in another, on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


def moved(action: str, directory: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    paths = [str(ROOT / "src"), str(ROOT), environment.get("PYTHONPATH", "")]
    run = subprocess.run(
        [sys.executable, str(ROOT / "tests/snapshot/moved_graph.py"), action, str(directory)],
        capture_output=True,
        text=True,
        env={**environment, "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_a_restored_graph_has_the_bits_of_the_captured_one_and_of_eager_work(tmp_path: Path) -> None:
    moved("save", tmp_path)
    assert moved("load", tmp_path).split() == ["equal"]

"""The guide for newcomers: all its commands succeed in their order, with SmolLM2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "first_ten_minutes"

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(900)]


def test_every_command_of_the_guide_succeeds(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEARTH_")}
    walked = subprocess.run(
        [sys.executable, str(SCRIPT)],
        capture_output=True,
        text=True,
        env=kept | {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)},
        check=False,
    )

    assert walked.returncode == 0, walked.stdout + walked.stderr
    shown = walked.stdout
    for text in ("deployed mine", '"content":"', "prefill", "deployed small", "created brief", "ada   user"):
        assert text in shown, shown
    assert walked.stderr.count("tokens/s, first after") == 5
    assert "removed mine, brief" in shown

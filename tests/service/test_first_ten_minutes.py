"""The guide for newcomers: all its commands succeed in their order, with a tiny model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.speaking import save_speaking

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "first_ten_minutes"

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(900)]


def test_every_command_of_the_guide_succeeds(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEARTH_")}
    (tmp_path / "model").mkdir()
    model = save_speaking(tmp_path / "model")
    walked = subprocess.run(
        [sys.executable, str(SCRIPT), str(model)],
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

from __future__ import annotations

import subprocess
import sys

#: A supervisor that cannot say what a worker should be told, which is a bug.
BROKEN = """
import asyncio, tempfile
from hearth.control.supervisor import Supervisor, Vigilance
from hearth.messages import KeeperSetup

async def main(path):
    keeper = KeeperSetup(f"{path}/keeper.sock", "cpu", path, None, 16 << 20, "info")
    supervisor = Supervisor(None, keeper, 1, Vigilance(60.0, 60.0, 3), None)
    await supervisor.start()
    await asyncio.Event().wait()

with tempfile.TemporaryDirectory() as path:
    asyncio.run(main(path))
"""


def test_a_supervisor_that_breaks_takes_the_process_along() -> None:
    ended = subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "service_broken part=supervisor error=TypeError" in ended.stderr

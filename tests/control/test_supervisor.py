from __future__ import annotations

import subprocess
import sys

import pytest

from hearth.control.supervisor import Silence

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


@pytest.mark.parametrize(
    ("waits_s", "num_missed"),
    [
        pytest.param([0.0, 0.0, 0.0], 3.0, id="it could run and hangs"),
        pytest.param([2.0, 2.0, 2.0], 0.0, id="it never had a core"),
        pytest.param([1.0, 1.5, 0.0], 1.75, id="it had one now and then"),
        pytest.param([9.0, 0.0, 0.0], 2.0, id="the heartbeat itself came late"),
    ],
)
def test_a_silent_worker_misses_only_the_heartbeats_that_it_had_a_core_for(
    waits_s: list[float], num_missed: float
) -> None:
    silence, queued_s = Silence(heartbeat_s=2.0, queued_s=40.0), 40.0
    for wait_s in waits_s:
        queued_s += wait_s
        silence.beat(queued_s, was_heard=False)
    assert silence.num_missed == num_missed
    silence.beat(queued_s, was_heard=True)
    assert silence.num_missed == 0.0

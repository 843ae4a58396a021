from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

from hearth.beacon import StepSigns
from hearth.control.supervisor import Supervisor, Vigilance
from hearth.control.worker_link import WorkerLink
from hearth.messages import KeeperSetup, WorkerHello
from hearth.types import ModelId

#: How long a test waits for a process before it says that nothing will happen.
PATIENCE_S = 60.0

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


HEARTBEAT_S, MAX_MISSED = 0.01, 3
KEEPER = KeeperSetup("", "cpu", "", None, 16 << 20, "info")


def test_a_worker_whose_long_step_advances_lives_and_one_that_hangs_is_killed() -> None:
    """It says nothing at all, as in a step; a process that sleeps stands in for it."""

    async def scene() -> None:
        vigilance = Vigilance(PATIENCE_S, HEARTBEAT_S, MAX_MISSED)
        supervisor = Supervisor(lambda *_: NotImplemented, KEEPER, 1, vigilance, None)
        (seat,) = supervisor.seats
        process = seat.process = await asyncio.create_subprocess_exec("sleep", str(PATIENCE_S))
        link = WorkerLink(b"", supervisor.expects, supervisor)  # type: ignore[arg-type] # nothing comes by it
        supervisor.joined(link, WorkerHello(1, seat.worker, b"", b"", process.pid, "cpu", "", 0, False))
        beacon = seat.beacon
        beacon.show(ModelId("large"), longest_s=1e-6)
        watch = asyncio.create_task(supervisor._watch(seat, process))
        for _ in range(10 * MAX_MISSED):
            beacon.mark()
            await asyncio.sleep(HEARTBEAT_S / 2)
        assert (watch.done(), link.why_killed) == (False, None)
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == -signal.SIGKILL
        await watch
        assert link.why_killed == "did not advance for 0.03 s, limit: 0.03 s,"
        assert link.beacon is beacon
        assert beacon.read().model == "large", "of a worker that is gone it is still known what it did"

    asyncio.run(scene())


def test_a_step_has_as_long_as_slow_steps_of_its_model_tell() -> None:
    vigilance = Vigilance(60.0, 1.0, 30)
    assert vigilance.limit_s(StepSigns(5, None, None)) == 30.0
    assert vigilance.limit_s(StepSigns(5, ModelId("large"), 20.0)) == 200.0
    assert vigilance.limit_s(StepSigns(5, ModelId("large"), None)) == 300.0

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from hearth.control import supervisor as supervision
from hearth.control.supervisor import MAX_FAILED_STARTS, Silence, Supervisor, Vigilance
from hearth.control.worker_ending import MAX_REASON, ending_of
from hearth.errors import NoWorkers
from hearth.messages import KeeperSetup, WorkerFarewell, WorkerSetup
from hearth.types import WorkerId
from tests.worker.harness import folder, keeper_setup

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


PATIENCE_S = 120.0
#: A worker that says why it ends.
BREAKS = "import sys; print(sys.argv[1]); sys.exit(1)"
FAREWELL = msgspec.json.encode(WorkerFarewell("device", "cpu has\n no memory")).decode()


class BreakingWorkers(Supervisor):
    """A supervisor of real processes that end as soon as they are started. Mutable, as any."""

    farewell = FAREWELL

    async def _spawn(self, module: str, setup: WorkerSetup | KeeperSetup) -> Process:
        if isinstance(setup, KeeperSetup):
            return await super()._spawn(module, setup)
        command = (sys.executable, "-S", "-c", BREAKS, self.farewell)
        return await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)


def setup_of(index: int, worker: WorkerId) -> WorkerSetup:
    """A worker whose engine takes no sequences, which no engine can."""
    engine: dict[str, int | float | str | None] = {"max_seqs": 0}
    return WorkerSetup(
        *(worker, "127.0.0.1", 1, "", "cpu", index, 1, 1 << 24, "", "", engine, 1, "info"), turns=True
    )


def supervised(
    kind: type[Supervisor], num_workers: int, scene: Callable[[Supervisor, list[NoWorkers]], Awaitable[None]]
) -> None:
    async def run(place: Path) -> None:
        told: list[NoWorkers] = []
        keeper = keeper_setup(place)
        supervisor = kind(setup_of, keeper, num_workers, Vigilance(60.0, 60.0, 3), None, told.append)
        await supervisor.start()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await scene(supervisor, told)
        finally:
            await supervisor.close()

    with folder() as place:
        asyncio.run(run(place))


def test_when_no_worker_comes_up_who_waits_is_told_why_and_when_the_next_try_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervision, "FIRST_DELAY_S", 0.01)

    async def scene(supervisor: Supervisor, told: list[NoWorkers]) -> None:
        assert supervisor.outage() is None
        assert supervisor.trouble() is None, "they start for the first time"
        while not told:
            await asyncio.sleep(0.01)
        assert [seat.num_failed_starts for seat in supervisor.seats] >= [MAX_FAILED_STARTS] * 2
        why = r"worker 0 ended \d+ times before it was ready: cpu has no memory; next try .*; 1 more workers"
        with pytest.raises(NoWorkers, match=f"no worker is up: {why}"):
            raise told[0]
        assert told[0].retry_s is not None

    supervised(BreakingWorkers, 2, scene)


def test_a_keeper_that_does_not_return_is_the_reason_when_no_worker_is_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervision, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(supervision, "MAX_FAILED_STARTS", 2)

    async def scene(supervisor: Supervisor, told: list[NoWorkers]) -> None:
        supervisor._keeper_setup = msgspec.structs.replace(supervisor._keeper_setup, host_bytes=1)
        assert supervisor._keeper is not None
        supervisor._keeper.kill()
        while not any(
            "the keeper of the store is not up: `store.host_bytes` must" in str(one) for one in told
        ):
            await asyncio.sleep(0.01)

    supervised(BreakingWorkers, 1, scene)


def test_a_worker_whose_settings_no_restart_cures_is_not_started_again() -> None:
    async def scene(supervisor: Supervisor, told: list[NoWorkers]) -> None:
        await supervisor.refused.wait()
        assert "`engine.max_seqs` must be at least 1, given: 0" in str(supervisor.refusal)
        assert supervisor.seats[0].num_restarts == 0
        assert told == []

    supervised(Supervisor, 1, scene)


@pytest.mark.parametrize(
    ("code", "farewell", "killed_for", "reason"),
    [
        pytest.param(1, FAREWELL, None, "cpu has no memory", id="it said why"),
        pytest.param(-signal.SIGKILL, "", None, "SIGKILL, as if memory was short", id="by the kernel"),
        pytest.param(-signal.SIGSEGV, "", None, "SIGSEGV", id="by itself"),
        pytest.param(-signal.SIGKILL, "", "it hung", "it hung", id="by the supervisor"),
        pytest.param(3, "nonsense", None, "exit code 3, the log says more", id="without a word"),
    ],
)
def test_the_end_of_a_worker_has_a_reason(
    code: int, farewell: str, killed_for: str | None, reason: str
) -> None:
    assert ending_of(code, farewell.encode(), killed_for).reason == reason


def test_only_a_wrong_setting_is_final_and_long_reasons_are_cut() -> None:
    def ending(label: str) -> tuple[bool, int]:
        found = ending_of(1, msgspec.json.encode(WorkerFarewell(label, "x" * 9999)), None)
        return found.is_final, len(found.reason)

    assert ending("config") == (True, MAX_REASON + 4)
    assert ending("device") == (False, MAX_REASON + 4)

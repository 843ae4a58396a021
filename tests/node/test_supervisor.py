from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from asyncio.subprocess import PIPE
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
import uvloop

from hearth.core.beacon import Beacon, StepSigns
from hearth.core.errors import NoWorkers
from hearth.core.messages import KeeperSetup, WorkerFarewell, WorkerHello, WorkerSetup
from hearth.core.types import ModelId, WorkerId
from hearth.node import keeper_process, processes
from hearth.node import supervisor as supervision
from hearth.node.link import WorkerLink
from hearth.node.processes import MAX_REASON, Vigilance, WorkerEnding, WorkerProcess, ending_of
from hearth.node.supervisor import MAX_FAILED_STARTS, Supervisor
from hearth.node.worker_seat import Killed, Starting, Waiting, WorkerSeat
from tests.worker.harness import folder, keeper_setup

#: How long a test waits for a process before it says that nothing will happen.
PATIENCE_S = 120.0

#: A supervisor that cannot say what a worker should be told, which is a bug.
BROKEN = """
import asyncio, tempfile
from hearth.core.messages import KeeperSetup
from hearth.node.processes import Vigilance
from hearth.node.supervisor import Supervisor

async def main(path):
    keeper = KeeperSetup(f"{path}/keeper.sock", "cpu", path, None, 16 << 20, "info")
    supervisor = Supervisor(None, keeper, 1, Vigilance(60.0, 60.0, 3), None)
    await supervisor.start_keeper()
    supervisor.start_workers("")
    await asyncio.Event().wait()

with tempfile.TemporaryDirectory() as path:
    asyncio.run(main(path))
"""


def test_a_supervisor_that_breaks_takes_the_process_along() -> None:
    ended = subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, text=True, timeout=240)
    assert ended.returncode == 1
    assert "service_broken part=supervisor error=TypeError" in ended.stderr


HEARTBEAT_S, MAX_MISSED = 0.01, 3
KEEPER = KeeperSetup("", "cpu", "", None, 16 << 20, "info")


def test_a_worker_whose_long_step_advances_lives_and_one_that_hangs_is_killed() -> None:
    """It says nothing at all, as in a step; a process that sleeps stands in for it."""

    async def scene() -> None:
        vigilance = Vigilance(PATIENCE_S, HEARTBEAT_S, MAX_MISSED)
        supervisor = Supervisor(lambda *_: NotImplemented, KEEPER, 1, vigilance, None, lambda _: None)
        (seat,) = supervisor.seats
        process, beacon = await asyncio.create_subprocess_exec("sleep", str(PATIENCE_S)), Beacon()
        seat.state = Starting(process, beacon)
        link = WorkerLink(b"", supervisor.expects, supervisor)  # type: ignore[arg-type] # nothing comes by it
        supervisor.joined(link, WorkerHello(1, seat.worker, b"", b"", process.pid, "cpu", "", 0, False))
        beacon.show(ModelId("large"), longest_s=1e-6)
        watch = asyncio.create_task(seat._watch(process))
        for _ in range(10 * MAX_MISSED):
            beacon.mark()
            await asyncio.sleep(HEARTBEAT_S / 2)
        assert (watch.done(), link.why_killed) == (False, None)
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == -signal.SIGKILL
        await watch
        assert isinstance(seat.state, Killed)
        assert link.why_killed is not None
        # A beat counts less in which the process waited for a core, so that there may be one more.
        assert re.fullmatch(r"did not advance for 0\.0[34]\d* s, limit: 0\.03 s,", link.why_killed)
        assert link.beacon is beacon
        assert beacon.read().model == "large", "of a worker that is gone it is still known what it did"

    asyncio.run(scene())


def test_a_worker_that_is_replaced_is_to_have_the_memory_that_the_first_one_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is free is not yet what it will be: that of the one that was killed comes back bit by bit."""
    asked: list[int | None] = []

    async def launch(supervisor: Supervisor, setup: WorkerSetup, beacon: int) -> None:
        asked.append(setup.budget_bytes)

    async def scene() -> None:
        def unlimited(index: int, worker: WorkerId) -> WorkerSetup:
            return msgspec.structs.replace(setup_of(index, worker), budget_bytes=None)

        supervisor = Supervisor(unlimited, KEEPER, 1, Vigilance(PATIENCE_S, HEARTBEAT_S, MAX_MISSED), None)
        (seat,) = supervisor.seats
        await seat._start()
        link = WorkerLink(b"", supervisor.expects, supervisor)  # type: ignore[arg-type] # nothing comes by it
        supervisor.joined(link, WorkerHello(1, seat.worker, b"", b"", 1, "cpu", "", 1 << 30, False))
        await seat._start()
        seat.num_failed_starts = 1  # perhaps it cannot be had any more
        await seat._start()

    monkeypatch.setattr(Supervisor, "_launch", launch)
    asyncio.run(scene())
    assert asked == [None, 1 << 30, None]


class Gone:
    """A process of a worker that has been killed already."""

    pid = 0

    def __init__(self) -> None:
        self.stdout = asyncio.StreamReader()
        self.stdout.feed_eof()

    async def wait(self) -> int:
        return -signal.SIGKILL


@pytest.mark.parametrize(
    ("are_ready", "expected"),
    [
        ([True] * 4, [0.0, 0.5, 1.0, 2.0]),
        ([False] * 3, [0.5, 1.0, 2.0]),
        ([True, False, True], [0.0, 1.0, 1.0]),
    ],
)
def test_a_worker_that_was_ready_is_replaced_at_once_and_if_that_comes_again_ever_later(
    monkeypatch: pytest.MonkeyPatch, are_ready: list[bool], expected: list[float]
) -> None:
    delays: list[float] = []

    async def start(seat: WorkerSeat) -> Gone:
        if are_ready[len(delays)]:
            seat._greeted.set()
        return Gone()

    async def back_off(seat: WorkerSeat, ending: WorkerEnding, delay_s: float) -> None:
        delays.append(delay_s)
        if len(delays) == len(are_ready):
            raise asyncio.CancelledError

    async def scene() -> None:
        vigilance = Vigilance(PATIENCE_S, HEARTBEAT_S, MAX_MISSED)
        supervisor = Supervisor(setup_of, KEEPER, 1, vigilance, None)
        supervisor.keeper.is_ready.set()
        with pytest.raises(asyncio.CancelledError):
            await supervisor.seats[0].keep()

    monkeypatch.setattr(WorkerSeat, "_start", start)
    monkeypatch.setattr(WorkerSeat, "_back_off", back_off)
    asyncio.run(scene())
    assert delays == expected


class Leaving:
    """A process of a worker that takes a while to be gone, though it is killed. Mutable."""

    def __init__(self, pid: int) -> None:
        self.pid, self.stdin, self.stdout = pid, None, asyncio.StreamReader()
        self.stdout.feed_eof()
        self.is_gone = asyncio.Event()

    def kill(self) -> None:
        pass

    async def wait(self) -> int:
        await self.is_gone.wait()
        return -signal.SIGKILL


class LeavingWorkers(Supervisor):
    """A supervisor whose workers are none, to see which are started when. Mutable, as any."""

    started: list[tuple[WorkerSetup, Leaving]]

    async def _launch(self, setup: WorkerSetup, beacon: int) -> WorkerProcess:
        process = Leaving(1 << 30 | len(self.started))  # a number that no process has
        self.started.append((setup, process))
        return process  # type: ignore[return-value] # as much of one as is asked

    async def until_started(self, number: int) -> Leaving:
        while len(self.started) < number:
            await asyncio.sleep(0)
        return self.started[number - 1][1]

    def join(self) -> WorkerLink:
        (seat,) = self.seats
        link = WorkerLink(b"", self.expects, self)  # type: ignore[arg-type] # nothing comes by it
        hello = WorkerHello(1, seat.worker, b"", b"", 0, "cpu", "", 1 << 20, False)
        link.worker = hello.worker
        self.joined(link, hello)
        return link


def leaving(scene: Callable[[LeavingWorkers], Awaitable[None]]) -> None:
    async def run() -> None:
        supervisor = LeavingWorkers(setup_of, KEEPER, 1, Vigilance(PATIENCE_S, PATIENCE_S, 1), None)
        supervisor.started = []
        supervisor.keeper.is_ready.set()
        supervisor._tasks.append(asyncio.create_task(supervisor._keep(supervisor.seats[0])))
        try:
            async with asyncio.timeout(PATIENCE_S):
                await scene(supervisor)
        finally:
            for _, process in supervisor.started:
                process.is_gone.set()
            await supervisor.close()

    asyncio.run(run())


def test_a_worker_is_replaced_while_the_one_before_is_still_on_its_way_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scene(supervisor: LeavingWorkers) -> None:
        (seat,) = supervisor.seats
        first = await supervisor.until_started(1)
        supervisor.left(supervisor.join())
        await supervisor.until_started(2)
        assert [setup.worker for setup, _ in supervisor.started] == ["w0", "w0.1"]
        assert [setup.predecessor for setup, _ in supervisor.started] == [None, first.pid]
        assert seat.trouble() == "worker 0 ended: it is ending; next try under way"
        assert "worker_ended" not in caplog.text
        supervisor.join()
        first.is_gone.set()
        assert seat.predecessor is not None
        await seat.predecessor.gone
        assert "worker_ended worker=w0 code=-9" in caplog.text
        assert (seat.status().state, seat.trouble()) == ("ready", None)

    leaving(scene)


def test_a_worker_that_fails_beside_the_one_before_is_tried_again_when_that_is_gone() -> None:
    async def scene(supervisor: LeavingWorkers) -> None:
        (seat,) = supervisor.seats
        first = await supervisor.until_started(1)
        supervisor.left(supervisor.join())
        second = await supervisor.until_started(2)
        second.is_gone.set()
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(supervisor.started) == 2
        first.is_gone.set()
        await supervisor.until_started(3)
        assert supervisor.started[2][0].predecessor is None
        assert (seat.worker, seat.num_failed_starts) == ("w0.2", 0)

    leaving(scene)


def test_a_step_has_as_long_as_slow_steps_of_its_model_tell() -> None:
    vigilance = Vigilance(60.0, 1.0, 30)
    assert vigilance.limit_s(StepSigns(5, None, None)) == 30.0
    assert vigilance.limit_s(StepSigns(5, ModelId("large"), 20.0)) == 200.0
    assert vigilance.limit_s(StepSigns(5, ModelId("large"), None)) == 300.0


#: A worker that says why it ends.
BREAKS = "import sys; print(sys.argv[1]); sys.exit(1)"
FAREWELL = msgspec.json.encode(WorkerFarewell("device", "cpu has\n no memory")).decode()


class BreakingWorkers(Supervisor):
    """A supervisor of real processes that end as soon as they are started. Mutable, as any."""

    farewell = FAREWELL

    async def _launch(self, setup: WorkerSetup, beacon: int) -> WorkerProcess:
        command = (sys.executable, "-S", "-c", BREAKS, self.farewell)
        return await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)


def setup_of(index: int, worker: WorkerId) -> WorkerSetup:
    """A worker whose engine takes no sequences, which no engine can."""
    engine: dict[str, int | float | str | None] = {"max_seqs": 0}
    return WorkerSetup(
        worker, "127.0.0.1", 1, "", "cpu", index, 1, 1 << 24, "", "", engine, 1, "info", "", turns=True
    )


def supervised(
    kind: type[Supervisor],
    num_workers: int,
    scene: Callable[[Supervisor, list[NoWorkers]], Awaitable[None]],
    heartbeat_s: float = 60.0,
) -> None:
    async def run(place: Path) -> None:
        told: list[NoWorkers] = []

        def note_outage() -> None:
            if (outage := supervisor.outage()) is not None:
                told.append(outage)

        vigilance = Vigilance(60.0, heartbeat_s, MAX_MISSED)
        supervisor = kind(setup_of, keeper_setup(place), num_workers, vigilance, None, note_outage)
        await supervisor.start_keeper()
        supervisor.start_workers("")
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
    monkeypatch.setattr(processes, "FIRST_DELAY_S", 0.01)

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
    monkeypatch.setattr(processes, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(supervision, "MAX_FAILED_STARTS", 2)

    async def scene(supervisor: Supervisor, told: list[NoWorkers]) -> None:
        keeper = supervisor.keeper
        keeper._setup = msgspec.structs.replace(keeper._setup, host_bytes=1)
        assert keeper._process is not None
        keeper._process.kill()
        while not any(
            "the keeper of the store is not up: `store.host_bytes` must" in str(one) for one in told
        ):
            await asyncio.sleep(0.01)

    supervised(BreakingWorkers, 1, scene)


def test_a_keeper_that_hangs_is_killed_and_replaced_and_one_that_answers_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(processes, "FIRST_DELAY_S", 0.01)
    pulses: list[bool] = []
    ask = keeper_process._has_answered

    async def counted(answers: asyncio.StreamReader, patience_s: float) -> bool:
        pulses.append(await ask(answers, patience_s))
        return pulses[-1]

    monkeypatch.setattr(keeper_process, "_has_answered", counted)

    async def scene(supervisor: Supervisor, told: list[NoWorkers]) -> None:
        async def answers() -> None:
            pulses.clear()
            while True not in pulses:
                await asyncio.sleep(0.01)

        await answers()
        first = supervisor.keeper._process
        assert first is not None
        assert first.returncode is None
        first.send_signal(signal.SIGSTOP)
        assert await first.wait() == -signal.SIGKILL
        await supervisor.keeper.is_ready.wait()
        await answers()
        assert supervisor.keeper._process is not first
        assert supervisor.trouble() is None

    supervised(Supervisor, 0, scene, heartbeat_s=0.6)
    assert "keeper_killed reason=hangs" in caplog.text
    assert "keeper_ended code=-9" in caplog.text
    assert "reason=`it hung: it did not answer for" in caplog.text


@pytest.mark.parametrize("is_beside_another", [False, True], ids=["that_died_again", "beside_the_one_before"])
def test_a_worker_on_its_way_out_is_waited_for_when_all_ends(is_beside_another: bool) -> None:
    """Until it is gone it has the memory of its device, which whoever comes next would miss."""

    async def scene(supervisor: LeavingWorkers) -> None:
        first = await supervisor.until_started(1)
        supervisor.left(supervisor.join())
        second = await supervisor.until_started(2)
        if not is_beside_another:
            first.is_gone.set()
        supervisor.left(supervisor.join())
        while not isinstance(supervisor.seats[0].state, Waiting):
            await asyncio.sleep(0)
        closing = asyncio.create_task(supervisor.close())
        first.is_gone.set()
        await asyncio.sleep(0.01)
        assert not closing.done()
        second.is_gone.set()
        await closing

    leaving(scene)


def test_a_keeper_that_has_ended_when_it_is_asked_breaks_nothing() -> None:
    async def scene() -> None:
        keeper = await asyncio.create_subprocess_exec("true", stdin=PIPE, stdout=PIPE)
        await keeper.wait()
        hang = await keeper_process.hang_of(keeper, HEARTBEAT_S, MAX_MISSED * HEARTBEAT_S)
        assert hang == "did not answer for 0.03 s, limit: 0.03 s"

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scene())


def test_a_worker_whose_settings_no_restart_cures_is_not_started_again() -> None:
    async def scene(supervisor: Supervisor, told: list[NoWorkers]) -> None:
        assert "`engine.max_seqs` must be at least 1, given: 0" in str(await supervisor.refusal)
        assert supervisor.seats[0].num_restarts == 0
        assert told == []

    supervised(Supervisor, 1, scene)


@pytest.mark.parametrize(
    ("code", "farewell", "killed_for", "reason"),
    [
        pytest.param(1, FAREWELL, None, "cpu has no memory", id="it said why"),
        pytest.param(
            -signal.SIGKILL,
            "",
            None,
            "SIGKILL, from outside Hearth or because memory was short",
            id="by the kernel",
        ),
        pytest.param(-signal.SIGSEGV, "", None, "SIGSEGV", id="by itself"),
        pytest.param(-signal.SIGKILL, "", "it hung", "it hung", id="by the supervisor"),
        pytest.param(3, "nonsense", None, "exit code 3, the log says more", id="without a word"),
        pytest.param(3, '{"error": "\udcff"}', None, "exit code 3, the log says more", id="no text"),
    ],
)
def test_the_end_of_a_worker_has_a_reason(
    code: int, farewell: str, killed_for: str | None, reason: str
) -> None:
    assert ending_of(code, os.fsencode(farewell), killed_for).reason == reason


def test_only_a_wrong_setting_is_final_and_long_reasons_are_cut() -> None:
    def ending(label: str) -> tuple[bool, int]:
        found = ending_of(1, msgspec.json.encode(WorkerFarewell(label, "x" * 9999)), None)
        return found.is_final, len(found.reason)

    assert ending("config") == (True, MAX_REASON + 4)
    assert ending("device") == (False, MAX_REASON + 4)

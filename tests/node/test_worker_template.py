"""Workers that are forked from a template: real processes, and one template for most of the tests."""

from __future__ import annotations

import asyncio
import os
import resource
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from hearth.core.beacon import new_beacon_file
from hearth.core.types import WorkerId
from hearth.node import processes, template_process, worker_template
from hearth.node.processes import ending_of
from hearth.node.template_process import TemplateProcess, start_template
from hearth.node.worker_template import ForkedWorker, WorkerTemplate
from hearth.worker import template
from tests.node.test_supervisor import PATIENCE_S, setup_of

#: Templates that are of no use: one says so, one ends at once, one forks nothing.
UNFIT = """
import socket
gateway = socket.socket(fileno=0)
gateway.send(b'{"pid": 0, "obstacle": "it must have one thread, and has 2"}')
gateway.recv(1)
"""
ENDS = "raise SystemExit(3)"
HANGS = """
import socket, time
gateway = socket.socket(fileno=0)
gateway.send(b'{"pid": 0}')
time.sleep(600)
"""


#: A template whose workers are nothing, which is ready at once.
EMPTY = """
from hearth.worker import template
template.import_worker = lambda: lambda: None
template.obstacle = lambda: None
template.reseed = lambda: None
template.main()
"""

#: One that says when it imports, and does so until the socket closes.
IMPORTS = """
import os, select, socket
from hearth.worker import template

def import_worker():
    gateway = socket.socket(fileno=os.dup(0))
    gateway.send(b"imports")
    select.select([gateway], [], [])

template.import_worker = import_worker
template.obstacle = lambda: None
template.main()
"""

LOG, OTHERS = "service.log", "somebody-elses"


@dataclass(frozen=True, slots=True)
class Rig:
    """A template on an event loop that runs while a test asks it to."""

    runner: asyncio.Runner
    template: WorkerTemplate
    fallbacks: list[None]
    first: int | None = None  #: the template that was started before

    def fork(self, but_of: int | None = None) -> ForkedWorker:
        """Return a worker that waits for its setup, once there is a template, and another than `but_of`."""

        async def fork() -> ForkedWorker:
            async with asyncio.timeout(PATIENCE_S):
                while self.template.pid in (None, but_of):
                    await asyncio.sleep(0.01)
            assert self.template._socket is not None
            beacon = new_beacon_file()
            try:
                return await self.template._fork(self.template._socket, beacon)
            finally:
                os.close(beacon)

        return self.runner.run(fork())

    def start(self) -> ForkedWorker | None:
        """Return a worker that was sent its setup; None: the template could not fork it."""

        async def start() -> ForkedWorker | None:
            beacon = new_beacon_file()
            try:
                async with asyncio.timeout(PATIENCE_S):
                    return await self.template.fork(setup_of(0, WorkerId("w0")), beacon)
            finally:
                os.close(beacon)

        return self.runner.run(start())

    def code(self, worker: ForkedWorker) -> int:
        async def code() -> int:
            return await asyncio.wait_for(worker.wait(), PATIENCE_S)

        return self.runner.run(code())


@contextmanager
def a_template(errors: int | None = None, first: TemplateProcess | None = None) -> Iterator[Rig]:
    fallbacks: list[None] = []
    with asyncio.Runner() as runner:

        async def keep() -> tuple[WorkerTemplate, asyncio.Task[None]]:
            template = WorkerTemplate(errors, PATIENCE_S, lambda: fallbacks.append(None), first)
            return template, asyncio.create_task(template.keep())

        async def end(task: asyncio.Task[None]) -> None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        template, task = runner.run(keep())
        yield Rig(runner, template, fallbacks)
        runner.run(end(task))


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """One whose first template is older than itself."""
    place = tmp_path_factory.mktemp("first")
    with (place / OTHERS).open("wb") as inherited:
        os.set_inheritable(inherited.fileno(), True)
        first = start_template(errors=2)
    with (place / LOG).open("wb") as log, a_template(log.fileno(), first) as rig:
        yield replace(rig, first=first.pid)


@pytest.fixture
def unfit_rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """One whose templates run a script."""
    monkeypatch.setattr(template_process, "COMMAND", ("-S", "-c", request.param))
    monkeypatch.setattr(processes, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(worker_template, "FORK_S", 0.1)
    with a_template() as rig:
        yield rig


def command(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")


def opened(worker: ForkedWorker) -> dict[int, str]:
    """Return what a worker has open, by number, once it has become one."""
    deadline_s = time.monotonic() + PATIENCE_S
    while "hearth.worker" not in command(worker.pid):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    place = Path(f"/proc/{worker.pid}/fd")
    return {int(one.name): str(one.readlink()) for one in place.iterdir()}


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_template_that_was_started_before_the_service_is_its_first_and_logs_with_it(rig: Rig) -> None:
    worker = rig.fork()
    assert rig.template.pid == rig.first, "which has heard where to log before it forked"
    found = {int(one.name): one.readlink().name for one in Path(f"/proc/{rig.first}/fd").iterdir()}
    assert (found[1], found[2]) == (LOG, LOG)
    assert OTHERS not in found.values()
    worker.kill()
    assert rig.code(worker) == -signal.SIGKILL


def test_a_forked_worker_looks_like_a_spawned_one_and_has_no_descriptors_of_others(rig: Rig) -> None:
    workers = [rig.fork() for _ in range(2)]
    first, second = (opened(worker) for worker in workers)
    for worker, found in zip(workers, (first, second), strict=True):
        assert set(found) == {0, 1, 2, worker_template.TEMPLATE_BEACON}
        assert "hearth-beacon" in found[worker_template.TEMPLATE_BEACON]
        assert parent(worker.pid) == os.getpid()
        assert command(worker.pid)[1:] == ["-P", "-m", "hearth.worker"]
    assert {number for number in first if first[number] == second[number]} <= {2, 3}, "a log and a name"
    for worker in workers:
        worker.stdin.close()
    assert [rig.code(worker) for worker in workers] == [0, 0]
    assert all(not Path(f"/proc/{worker.pid}").exists() for worker in workers), "they were reaped"


def test_the_end_of_a_forked_worker_is_told_as_that_of_any(rig: Rig) -> None:
    worker = rig.start()
    assert worker is not None
    code = rig.code(worker)
    ending = ending_of(code, rig.runner.run(worker.stdout.read()), None)
    assert (code, ending.is_final) == (1, True)
    assert ending.reason == "`engine.max_seqs` must be at least 1, given: 0"
    assert worker.stdin.closed
    assert rig.fallbacks == []


@pytest.mark.parametrize("stopped", [False, True], ids=["waiting", "stopped"])
def test_a_forked_worker_is_killed(rig: Rig, stopped: bool) -> None:
    worker = rig.fork()
    if stopped:
        os.kill(worker.pid, signal.SIGSTOP)
    worker.kill()
    assert rig.code(worker) == -signal.SIGKILL
    worker.kill()  # for a second time, when nobody is there


def test_a_worker_that_is_given_up_while_it_is_forked_is_not_taken_for_the_next(rig: Rig) -> None:
    rig.fork().kill()  # there is a template

    async def give_up() -> None:
        forking = asyncio.create_task(rig.template.fork(setup_of(0, WorkerId("w0")), beacon))
        await asyncio.sleep(0)  # it has sent its order
        assert rig.template._num_unanswered == 1
        forking.cancel()
        await asyncio.gather(forking, return_exceptions=True)

    beacon, before = new_beacon_file(), rig.template.pid
    try:
        rig.runner.run(give_up())
    finally:
        os.close(beacon)
    worker = rig.fork()
    assert opened(worker)[0] == os.readlink(f"/proc/self/fd/{worker.stdin.fileno()}")
    assert rig.template.pid == before
    worker.kill()
    assert rig.code(worker) == -signal.SIGKILL


def test_a_killed_template_harms_no_worker_and_is_replaced(rig: Rig) -> None:
    worker, before = rig.fork(), rig.template.pid
    opened(worker)
    assert before is not None
    os.kill(before, signal.SIGKILL)
    heir = rig.fork(but_of=before)
    assert rig.template.note is None
    for one in (worker, heir):
        assert parent(one.pid) == os.getpid()
        one.kill()
        assert rig.code(one) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("unfit_rig", "reason"),
    [
        pytest.param(UNFIT, "it must have one thread, and has 2", id="two threads"),
        pytest.param(ENDS, "exit code 3, the log says more", id="ends at once"),
    ],
    indirect=["unfit_rig"],
)
def test_without_a_template_workers_are_spawned_which_is_logged_counted_and_noted(
    unfit_rig: Rig, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert [unfit_rig.start(), unfit_rig.start()] == [None, None]
    assert unfit_rig.fallbacks == [None, None]
    assert caplog.text.count(f"fallback workers=spawned reason=`{reason}`") == 1
    assert unfit_rig.template.note is not None
    assert reason in unfit_rig.template.note


def test_a_first_template_of_which_nothing_is_left_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it ended before there was a service, in a process whose children the kernel reaps."""
    monkeypatch.setattr(template_process, "COMMAND", ("-S", "-c", ENDS))
    monkeypatch.setattr(processes, "FIRST_DELAY_S", 0.01)
    gone = subprocess.Popen(["true"])
    gone.wait()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, a_template(first=TemplateProcess(gone.pid, ours)) as rig:
        deadline_s = time.monotonic() + PATIENCE_S
        while "exit code 3" not in (rig.template.note or ""):
            assert time.monotonic() < deadline_s
            rig.runner.run(asyncio.sleep(0.01))


@pytest.mark.parametrize("unfit_rig", [HANGS], indirect=True, ids=["hangs"])
def test_a_template_that_does_not_answer_is_killed_and_the_worker_spawned(unfit_rig: Rig) -> None:
    assert unfit_rig.start() is None
    assert unfit_rig.template.note is not None
    assert "it cannot fork: it did not answer within 0.1 s" in unfit_rig.template.note


@pytest.fixture
def empty_rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(template_process, "COMMAND", ("-c", EMPTY))
    monkeypatch.setattr(processes, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(worker_template, "FORK_S", PATIENCE_S)
    with a_template() as rig:
        assert rig.code(rig.fork()) == 1, "there is a template"
        yield rig


def test_templates_that_were_ready_are_replaced_however_often_they_are_killed(empty_rig: Rig) -> None:
    for _ in range(worker_template.MAX_FAILURES + 1):
        before = empty_rig.template.pid
        assert before is not None
        os.kill(before, signal.SIGKILL)
        assert empty_rig.code(empty_rig.fork(but_of=before)) == 1, "of another template"
    assert empty_rig.template.note is None


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def leave_no_descriptors(pid: int) -> None:
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (5, resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]))


@pytest.mark.parametrize(
    ("hurt", "reason"),
    [
        (stop, "it cannot fork: it did not answer within 1 s"),
        (leave_no_descriptors, "it can open only 2 of a worker's descriptors"),
    ],
    ids=["stopped", "out of descriptors"],
)
def test_a_template_that_cannot_fork_is_replaced_and_the_worker_spawned_meanwhile(
    empty_rig: Rig,
    hurt: Callable[[int], None],
    reason: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = empty_rig.template.pid
    assert before is not None
    hurt(before)
    with monkeypatch.context() as patch:
        if hurt is stop:
            patch.setattr(worker_template, "FORK_S", 1.0)
        assert empty_rig.start() is None
    assert len(empty_rig.fallbacks) == 1
    assert f"fallback workers=spawned reason=`{reason}`" in caplog.text
    assert empty_rig.code(empty_rig.fork(but_of=before)) == 1, "of another template"
    assert not Path(f"/proc/{before}").exists()
    assert empty_rig.template.note is None


def test_a_process_with_a_second_thread_or_an_open_device_must_not_fork(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    thread = threading.Thread(target=(is_over := threading.Event()).wait)
    thread.start()
    try:
        assert "it must have one thread, and has " in str(template.obstacle())
    finally:
        is_over.set()
        thread.join()
    monkeypatch.setattr(template, "DEVICES", (str(tmp_path),))
    with (tmp_path / "nvidia0").open("w"):
        assert template.obstacle() == f"it must touch no device, and has opened {tmp_path}/nvidia0"


def test_random_numbers_are_seeded_anew_in_a_worker() -> None:
    before = torch.get_rng_state()
    try:
        seeds = set()
        for _ in range(2):
            torch.manual_seed(1)  # as two workers find it that are forked one after the other
            template.reseed()
            seeds.add(torch.initial_seed())
        assert len(seeds | {1}) == 3
    finally:
        torch.set_rng_state(before)


def test_a_template_takes_no_notice_of_ctrl_c_from_its_beginning(tmp_path: Path) -> None:
    with (tmp_path / "errors").open("w") as errors:
        started = start_template(errors.fileno())
        os.kill(started.pid, signal.SIGINT)
        started.socket.close()
        assert os.waitstatus_to_exitcode(os.waitpid(started.pid, 0)[1]) == 0
    assert (tmp_path / "errors").read_text() == ""


def test_a_template_whose_command_has_ended_before_it_ends_without_a_word(tmp_path: Path) -> None:
    """As where the command was wrong: the kernel is asked to end it too late, and it would import torch."""
    with (tmp_path / "errors").open("w") as errors:
        started = start_template(errors.fileno())
        started.socket.close()
        assert os.waitstatus_to_exitcode(os.waitpid(started.pid, 0)[1]) == 0
    assert (tmp_path / "errors").read_text() == ""


@pytest.mark.parametrize("script", [IMPORTS, EMPTY], ids=["importing", "ready"])
def test_a_template_whose_command_ends_without_reading_its_answer_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str
) -> None:
    monkeypatch.setattr(template_process, "COMMAND", ("-c", script))
    with (tmp_path / "errors").open("w") as errors:
        started = start_template(errors.fileno())
        assert select.select([started.socket], [], [], PATIENCE_S)[0]
        started.socket.close()
        assert os.waitstatus_to_exitcode(os.waitpid(started.pid, 0)[1]) == 0
    assert (tmp_path / "errors").read_text() == ""

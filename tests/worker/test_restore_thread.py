"""The thread that restores graphs: it has native code before the first of them, or does without visibly."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hearth.engine.graphs import StepGraphs
from hearth.snapshot.restored_graphs import RestoredGraphs
from hearth.snapshot.trial_mark import TrialMark
from hearth.worker import background, snapshot_graphs
from hearth.worker.background import FirstTokens, StepLaunches
from hearth.worker.snapshot_graphs import SnapshotGraphs
from tests.engine.test_graphs import Captures
from tests.snapshot.fake_library import FakeLibrary, LibraryDriver
from tests.snapshot.test_restored_graphs import Machine, sections_of
from tests.store.stored import PATIENCE_S

NAMES = ["decode-8", "decode-64"]


class Rehearsals:
    """A runner whose library has the kernels of a machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def rehearse(self, name: str, capturer: object, give_way: Callable[[], None]) -> SimpleNamespace:
        graph = self._machine.capture(int(name.rpartition("-")[2]))
        return SimpleNamespace(raw_cuda_graph=lambda: graph)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine whose driver native code can call as well, in place of that of a device."""
    machine = Machine([8, 64])
    machine.driver.driver = LibraryDriver(FakeLibrary(machine.driver))
    monkeypatch.setattr(snapshot_graphs, "CudaDriver", lambda _: None)
    monkeypatch.setattr(snapshot_graphs, "CudaGraphs", lambda _: machine.driver)
    monkeypatch.setattr(snapshot_graphs, "GraphCapture", lambda: None)
    monkeypatch.setattr(snapshot_graphs, "loaded_functions", dict)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    return machine


def restored(machine: Machine, cache: Path) -> RestoredGraphs:
    """All graphs of a snapshot, restored by the thread of a new worker."""
    worker = SnapshotGraphs(torch.device("cpu"), FirstTokens(), cache)
    sections = {name: memoryview(packed) for name, packed in sections_of(NAMES).items()}
    runner = Rehearsals(machine)
    graphs = worker.restored(sections, TrialMark(Path("nowhere.snapshot")), machine.reasons.append, runner)
    worker.start(graphs, runner)
    worker._thread.shutdown(wait=True)
    assert not machine.reasons
    return graphs


def test_native_code_is_compiled_once_for_all_workers_and_restores_all_graphs(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    assert all(map(restored(machine, tmp_path).find, NAMES))
    (kept,) = tmp_path.iterdir()
    assert kept.name.startswith("native_rebuild-")

    monkeypatch.setattr("subprocess.run", None)  # no compiler is asked a second time
    assert all(map(restored(machine, tmp_path).find, NAMES))


def test_without_a_compiler_no_graph_is_restored_which_is_logged_once_and_counted(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("CC", "/nowhere/cc")
    graphs = restored(machine, tmp_path)
    assert not any(graphs.find(name) or graphs.is_coming(name) for name in NAMES)
    assert graphs.num_failed == len(NAMES)
    (message,) = [text for text in caplog.messages if text.startswith("fallback graphs=captured reason=")]
    assert message.endswith("remedy=`install a C compiler (cc)`")


@pytest.mark.parametrize("is_engine_there", [True, False])
def test_graphs_of_steps_with_adapters_are_restored_when_they_are_wanted(
    machine: Machine, is_engine_there: bool
) -> None:
    """By the same thread, for an engine that is there: graphs that are left keep none alive."""
    worker, names = SnapshotGraphs(torch.device("cpu"), FirstTokens(), None), [*NAMES, "decode-adapters-8"]
    sections = {name: memoryview(packed) for name, packed in sections_of(names).items()}
    runner = Rehearsals(machine)
    graphs = worker.restored(sections, TrialMark(Path("nowhere.snapshot")), machine.reasons.append, runner)
    worker.start(graphs, runner)
    worker._thread.submit(int).result()  # behind all that was to do
    assert graphs.find("decode-64")
    assert not graphs.find("decode-adapters-8")
    if not is_engine_there:
        del runner
    graphs.want_adapters()
    worker._thread.shutdown(wait=True)

    assert bool(graphs.find("decode-adapters-8")) is is_engine_there


def start(worker: SnapshotGraphs, machine: Machine, runner: Rehearsals) -> RestoredGraphs:
    sections = {name: memoryview(packed) for name, packed in sections_of(NAMES).items()}
    graphs = worker.restored(sections, TrialMark(Path("nowhere.snapshot")), machine.reasons.append, runner)
    worker.start(graphs, runner)
    return graphs


def test_whoever_rehearses_for_later_gives_way_to_graphs_and_first_tokens_but_not_for_ever(
    machine: Machine,
) -> None:
    may_go, tokens = threading.Event(), FirstTokens()

    class Held(Rehearsals):
        def rehearse(self, name: str, capturer: object, give_way: Callable[[], None]) -> SimpleNamespace:
            assert may_go.wait(PATIENCE_S)
            return super().rehearse(name, capturer, give_way)

    worker = SnapshotGraphs(torch.device("cpu"), tokens, None)
    graphs = start(worker, machine, Held(machine))
    worker.give_way(0.01)()  # which is over before the graphs are there
    assert not graphs.find("decode-8")

    waiting = threading.Thread(target=worker.give_way(PATIENCE_S))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    may_go.set()
    waiting.join(PATIENCE_S)
    assert all(graphs.find(name) for name in NAMES)

    tokens.awaited(1)
    waiting = threading.Thread(target=worker.give_way(PATIENCE_S))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    tokens.served(1)
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()


def test_graphs_of_a_model_that_goes_are_destroyed_by_the_thread_that_restores(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one it takes the driver longer than others' steps should be held up."""
    threads = list[str]()
    monkeypatch.setattr(
        machine.driver, "destroy_executable", lambda _: threads.append(threading.current_thread().name)
    )
    worker, steps = SnapshotGraphs(torch.device("cpu"), FirstTokens(), None), StepGraphs(Captures())
    runner = Rehearsals(machine)
    graphs = start(worker, machine, runner)
    steps.restore_from(graphs)
    worker._thread.submit(int).result()
    steps.drop_restored()
    worker._thread.shutdown(wait=True)

    assert len(threads) == len(NAMES)
    assert all(name.startswith("hearth-graphs") for name in threads)
    assert not any(graphs.find(name) for name in NAMES)


@pytest.mark.parametrize("is_wanted", [True, False])
def test_graphs_give_way_to_the_launch_of_a_step_unless_it_lacks_them(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, is_wanted: bool
) -> None:
    monkeypatch.setattr(background, "MAX_LAUNCH_S", PATIENCE_S)
    launches, is_one_there = StepLaunches(), threading.Event()
    worker = SnapshotGraphs(torch.device("cpu"), FirstTokens(), None, launches)
    runner = Rehearsals(machine)
    sections = {name: memoryview(packed) for name, packed in sections_of(NAMES).items()}
    graphs = worker.restored(sections, TrialMark(Path("nowhere.snapshot")), machine.reasons.append, runner)
    want, rehearse = graphs.want, runner.rehearse

    def note(name: str, capturer: object, give_way: Callable[[], None]) -> SimpleNamespace:
        is_one_there.set()
        give_way()  # as between layers, which returns at once where the graph is wanted
        return rehearse(name, capturer, give_way)

    monkeypatch.setattr(runner, "rehearse", note)
    launches.begun()
    if is_wanted:
        want("decode-64")
    worker.start(graphs, runner)
    assert is_one_there.wait(PATIENCE_S if is_wanted else 0.05) is is_wanted
    assert not graphs.find("decode-8"), "nobody wants it"
    launches.ended()
    worker._thread.shutdown(wait=True)
    assert all(graphs.find(name) for name in NAMES)


def test_nobody_gives_way_to_a_launch_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "MAX_LAUNCH_S", 0.01)
    launches = StepLaunches()
    launches.begun()
    launches.give_way()
    assert launches.is_launching
    # It is the launch that has lasted for too long: whoever asks again, as between layers, does not wait.
    monkeypatch.setattr(launches._changed, "wait_for", lambda *_: pytest.fail("it is waited for again"))
    launches.give_way()
    launches.get_behind()


@pytest.mark.parametrize("is_launching", [True, False])
def test_what_keeps_the_driver_busy_waits_for_the_end_of_the_next_launch(
    monkeypatch: pytest.MonkeyPatch, is_launching: bool
) -> None:
    for name in ("MAX_LAUNCH_S", "RECENT_S"):
        monkeypatch.setattr(background, name, PATIENCE_S)
    monkeypatch.setattr(background, "BEHIND_S", 0.0)
    launches = StepLaunches()
    launches.get_behind()  # no step was ever launched
    launches.begun()
    launches.ended()
    if is_launching:
        launches.begun()
    waiting = threading.Thread(target=launches.get_behind)
    waiting.start()
    waiting.join(0.02)
    assert waiting.is_alive()
    if not is_launching:
        launches.begun()
    monkeypatch.setattr(background, "BEHIND_S", PATIENCE_S)  # before it looks how long the end is past
    launches.ended()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
    launches.get_behind()  # right behind it

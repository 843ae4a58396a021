"""The bench that tells what holds steps up: by what every thread did in those that were long."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from bench.coldstart.held_up import OTHER, Beside, tell_steps
from bench.coldstart.ring import Ring
from tests.snapshot.fake_library import FakeLibrary, graphs_over
from tests.snapshot.test_restored_graphs import Machine, sections_of

NAMES = ["decode-8", "decode-64"]


def test_a_long_step_is_told_with_what_each_thread_did_in_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ring, clock = Ring(), iter([0.011, 0.014, 0.0225, 0.0235])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))

    def restore() -> None:
        with ring.span("instantiate"):
            pass
        with ring.span("destroy"):
            pass

    thread = threading.Thread(target=restore, name="restores")
    thread.start()
    thread.join()
    tell_steps(ring, "steps", [0.000, 0.005, 0.010, 0.022, 0.027])

    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith("steps: ms p50=5.00")
    assert "over_twice=1 " in told[0]
    assert told[1].strip() == "step 2: 12.0 ms, in which"
    (line,) = told[2:]  # and nothing of the step behind it
    assert " ".join(line.split()) == "restores instantiate 3.00 ms in 1, from +1.00, longest 3.00"


def test_each_part_of_restoring_can_be_had_alone() -> None:
    machine = Machine([8, 64])
    for size in (8, 64):
        machine.handles.learn(machine.capture(size))
    library, ring = FakeLibrary(machine.driver), Ring()
    rig = SimpleNamespace(ring=ring, hosted={OTHER: SimpleNamespace(runner=SimpleNamespace(graphs=None))})
    sections = {name: memoryview(packed) for name, packed in sections_of(NAMES).items()}
    beside = Beside(rig, graphs_over(library), machine.handles, sections)  # type: ignore[arg-type] # as far as it is used

    beside.nodes_only()
    assert library.num_calls["cuGraphAddKernelNode_v2"] == len(NAMES)
    assert library.num_calls["cuGraphInstantiateWithFlags"] == 0
    for act in (beside.graphs, beside.graphs_between_launches):
        library.num_calls.clear()
        act()
        assert library.num_calls["cuGraphInstantiateWithFlags"] == len(NAMES)
        assert library.num_calls["cuGraphExecDestroy"] == len(NAMES)
    assert not library.errors

"""The bench that looks into the processes of a service: how they are traced, and how gaps are told apart."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import signal
import sys
from pathlib import Path

import pytest

from bench.coldstart import gateway_trace, service_trace
from bench.coldstart.in_service import Notes, client_steps, tell_client
from bench.coldstart.ring import Noted, Ring
from bench.coldstart.service_trace import Owner
from bench.service.client import Answer, Event, Reply


def test_a_process_is_traced_once_when_what_owns_it_is_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "some_loop.py").write_text(
        "class SomeLoop:\n    def __init__(self, inbox, *, is_new=True):\n        self.inbox = inbox\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    traced = list[str]()
    owners = [Owner("some_loop", "SomeLoop", lambda: traced.append("loop"))]
    owners.append(Owner("some_driver", "Driver", lambda: traced.append("driver")))
    monkeypatch.setattr(service_trace, "OWNERS", owners)
    finders = list(sys.meta_path)
    try:
        service_trace.await_owners()
        module = importlib.import_module("some_loop")
        assert len(sys.meta_path) == len(finders) + 1  # which waits for the other
        assert traced == []  # a template imports it, too
        assert [module.SomeLoop(at, is_new=False).inbox for at in (1, 2)] == [1, 2]
        assert traced == ["loop"]
    finally:
        sys.meta_path[:] = finders


def test_what_owns_a_worker_and_a_gateway_is_there() -> None:
    for owner in service_trace.OWNERS:
        assert inspect.isclass(getattr(importlib.import_module(owner.module), owner.name))


def test_all_that_is_traced_of_a_gateway_is_a_function_or_a_coroutine() -> None:
    for owner, name, _ in gateway_trace.TRACED:
        assert inspect.isfunction(inspect.getattr_static(owner, name)), name
        assert not inspect.iscoroutinefunction(getattr(owner, name)), name
    for owner, name, _ in gateway_trace.TRACED_SLICES:
        assert inspect.iscoroutinefunction(getattr(owner, name)), name


def test_slices_of_a_coroutine_are_noted_and_it_ends_as_it_would_without() -> None:
    class Worked:
        async def work(self, how: str) -> str:
            try:
                await asyncio.sleep(0)
                if how == "fails":
                    raise ValueError(how)
                await asyncio.sleep(0 if how == "ends" else 60)
            except asyncio.CancelledError:
                await asyncio.sleep(0)
                return "called off"
            return how

    ring = Ring()
    ring.trace_slices(Worked, "work", "work")

    async def scene(how: str) -> str:
        task = asyncio.create_task(Worked().work(how))
        for _ in range(4):
            await asyncio.sleep(0)
        task.cancel()
        return await task

    assert asyncio.run(scene("ends")) == "ends"
    assert [one.what for one in ring.all()] == ["work"] * 3
    with pytest.raises(ValueError, match="fails"):
        asyncio.run(scene("fails"))
    assert len(ring.all()) == 3 + 2
    assert asyncio.run(scene("waits")) == "called off"
    assert len(ring.all()) == 5 + 4


def test_a_client_is_told_which_process_did_what_in_its_longest_gaps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def answer(*at_s: float) -> Answer:
        return Answer(Reply(0.0), [Event(one, "x", None) for one in at_s], len(at_s), None, None)

    answers = [answer(1.0, 1.010, 1.020, 1.045), answer(1.002, 1.012, 1.023, 1.040)]
    steps = client_steps(answers)
    assert [one.token for one in steps] == [1, 2, 3]
    assert [round(one.longest.seconds, 3) for one in steps] == [0.01, 0.011, 0.025]
    noted = {
        "worker": [Noted("MainThread", "step", 1.021, 1.024)],
        "gateway": [Noted("MainThread", "deliver", 1.030, 1.034), Noted("MainThread", "old", 0.5, 0.6)],
    }
    tell_client("burst", answers, noted)
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith("burst, client, token 3 of 3: 25.0 ms at most, 21.0 in the median")
    assert [" ".join(line.split()[:3]) for line in told[1:3]] == [
        "worker MainThread step",
        "gateway MainThread deliver",
    ]
    assert sum(line.startswith("burst") for line in told) == 3


def test_all_processes_of_a_traced_service_import_what_traces(tmp_path: Path) -> None:
    variables = service_trace.environment(tmp_path / "trace")
    first, *others = variables["PYTHONPATH"].split(os.pathsep)
    assert "service_trace.await_owners()" in (Path(first) / "sitecustomize.py").read_text()
    assert str(service_trace.ROOT) in others
    assert "" not in others


def test_a_process_writes_its_notes_when_it_is_told_to(tmp_path: Path) -> None:
    notes = [Noted("MainThread", "tell 7B", 0.25, 0.5)]
    before = signal.getsignal(signal.SIGUSR1)
    try:
        service_trace.write_when_told(lambda: notes, tmp_path)
        assert service_trace.notes_of(os.getpid(), tmp_path) == notes
        notes.append(Noted("hearth-graphs", "rehearse", 0.5, 0.75))
        assert service_trace.notes_of(os.getpid(), tmp_path) == notes
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_gaps_of_the_worker_are_told_apart_by_what_they_met() -> None:
    tells = [
        Noted("MainThread", "tell 7B", at_s, at_s + 0.001) for at_s in (0.0, 0.01, 0.02, 0.03, 0.04, 9.0)
    ]
    notes = Notes(
        [
            *tells,
            Noted("hearth-graphs", "native graph", -5.0, 0.005),
            Noted("MainThread", "tell 4B", 0.015, 0.016),
            Noted("MainThread", "handle WeightsLoaded", 8.96, 8.97),
            Noted("MainThread", "tell 7B", 8.98, 8.98),
            Noted("MainThread", "tell 4B", 8.99, 8.995),
            Noted("hearth-graphs", "rehearse", 0.015, 0.035),
        ]
    )
    found = notes.gaps_by_kind()
    begins_s = {kind: [round(gap.begin_s, 3) for gap in gaps] for kind, gaps in found.items()}
    assert begins_s == {
        "graphs": [0.001],
        "a token of the other": [0.011],
        "rehearsals": [0.021, 0.031],
        "the first token of the other": [8.98],
    }
    (gap,) = found["graphs"]
    assert [one.what for one in notes.during(gap)] == ["native graph", "tell 7B"]

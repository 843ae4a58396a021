"""The bench that looks into the worker of a service: how it is traced, and how gaps are told apart."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path

import pytest

from bench.coldstart import worker_trace
from bench.coldstart.held_up import Noted
from bench.coldstart.in_service import WorkerNotes


def test_a_worker_is_traced_once_when_its_loop_is_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "some_loop.py").write_text(
        "class WorkerLoop:\n    def __init__(self, inbox):\n        self.inbox = inbox\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(worker_trace, "_LOOP", "some_loop")
    monkeypatch.setenv(worker_trace._PLACE, str(tmp_path))
    traced = list[Path]()
    monkeypatch.setattr(worker_trace, "_trace", traced.append)
    finders = list(sys.meta_path)
    worker_trace.await_loop()
    module = importlib.import_module("some_loop")
    assert sys.meta_path == finders
    assert traced == []  # a template imports it, too
    assert [module.WorkerLoop(at).inbox for at in (1, 2)] == [1, 2]
    assert traced == [tmp_path]


def test_all_processes_of_a_traced_service_import_what_traces(tmp_path: Path) -> None:
    variables = worker_trace.environment(tmp_path / "trace")
    first, *others = variables["PYTHONPATH"].split(os.pathsep)
    assert "worker_trace.await_loop()" in (Path(first) / "sitecustomize.py").read_text()
    assert str(worker_trace.ROOT) in others
    assert "" not in others


def test_a_process_writes_its_notes_when_it_is_told_to(tmp_path: Path) -> None:
    notes = [Noted("MainThread", "tell 7B", 0.25, 0.5)]
    before = signal.getsignal(signal.SIGUSR1)
    try:
        worker_trace.write_when_told(lambda: notes, tmp_path)
        assert worker_trace.notes_of(os.getpid(), tmp_path) == notes
        notes.append(Noted("hearth-graphs", "rehearse", 0.5, 0.75))
        assert worker_trace.notes_of(os.getpid(), tmp_path) == notes
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_gaps_of_the_worker_are_told_apart_by_what_they_met() -> None:
    tells = [
        Noted("MainThread", "tell 7B", at_s, at_s + 0.001) for at_s in (0.0, 0.01, 0.02, 0.03, 0.04, 9.0)
    ]
    notes = WorkerNotes(
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

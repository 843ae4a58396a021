"""The bench that looks at a worker's step thread: what it traces and leaves out is there."""

from __future__ import annotations

import gc
import inspect
import threading
import time
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from bench.coldstart import in_worker
from bench.coldstart.ring import Ring
from hearth.core.types import ModelId
from hearth.engine.runner import Runner

A, B = ModelId("a"), ModelId("b")


def test_all_that_is_traced_is_a_function_of_its_class() -> None:
    assert [one for one in in_worker._TRACED if not callable(inspect.getattr_static(one[0], one[1]))] == []


@pytest.mark.parametrize("part", in_worker.PARTS)
def test_a_part_that_is_left_out_takes_what_the_part_takes(part: str) -> None:
    owner, name, without = in_worker.PARTS[part]
    usual = inspect.signature(getattr(owner, name))
    inspect.signature(without).bind(*usual.parameters)


def test_without_it_a_model_that_goes_waits_for_all() -> None:
    runner, waits = Runner.__new__(Runner), list[str]()
    runner.layers, runner._trial = SimpleNamespace(graphs=None), None  # type: ignore[assignment]
    runner.synchronize = lambda: waits.append("all")  # type: ignore[method-assign]
    runner._end = object()  # type: ignore[assignment] # which has nothing to wait for
    with patch.object(*in_worker.PARTS["own end"]):
        runner.close()
    assert waits == ["all"]


def test_garbage_that_takes_long_to_collect_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.coldstart.ring._LONG_GARBAGE_S", 0.0)
    callbacks, ring, began_s = list(gc.callbacks), Ring(), time.perf_counter()
    try:
        ring.trace_garbage()
        gc.collect()
    finally:
        gc.callbacks[:] = callbacks
    found = ring.during(began_s, time.perf_counter())
    assert (threading.current_thread().name, "garbage 2") in {(one.thread, one.what) for one in found}

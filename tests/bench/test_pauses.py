"""The bench that tells which steps beside adapters take far too long: what is said of each is of it alone."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest

from bench.lora import pauses
from bench.lora.pauses import Look, Watcher, watched
from bench.lora.serving import AdapterAsk
from hearth.core.messages import Fact, StepDone
from hearth.core.types import ModelId


def test_threads_go_on_while_it_is_told_what_was_seen_of_them() -> None:
    watcher = Watcher()

    class Begin(float):
        def __le__(self, other: float) -> bool:
            watcher.looks.append(Look(9.0, ()))
            watcher.collections.append((9.0, 9.5, 0))
            return super().__le__(other)

    watcher.looks += [Look(1.0, ("a: here",)), Look(1.25, ("a: here",)), Look(4.0, ("a: there",))]
    watcher.collections += [(0.0, 0.5, 2), (1.5, 1.75, 1), (5.0, 6.0, 0)]

    seen = watcher.seen(Begin(1.0), 3.0)

    assert seen["threads"] == {"a: here": 2}
    assert seen["collections"] == [{"generation": 1, "s": 0.25}]
    assert seen["longest_without_interpreter_s"] == 1.75


def test_a_long_step_is_told_with_what_was_compiled_in_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = SimpleNamespace(num_ahead=0, num_while_serving=0, num_loads_while_serving=0, num_watched=0)

    def watch() -> None:
        counts.num_watched += 1

    counts.watch = watch
    monkeypatch.setattr(pauses, "COMPILATIONS", counts)
    monkeypatch.setattr(pauses, "LONG_S", 100.0)

    def rolling(asks: Sequence[AdapterAsk]) -> Iterator[tuple[float, Fact, int]]:
        done, at_s = StepDone(ModelId("base"), [1], [7]), time.perf_counter()
        counts.num_while_serving += 3
        yield at_s, done, 0
        counts.num_loads_while_serving += 1
        yield at_s + 200.0, done, 0
        yield at_s + 201.0, done, 0

    *long, _ = watched("part", SimpleNamespace(rolling=rolling), ())  # type: ignore[arg-type] # all it asks

    assert counts.num_watched
    assert [one["compilations"] for one in long] == [[0, 0, 1]]

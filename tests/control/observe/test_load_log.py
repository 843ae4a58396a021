"""Which load a request has to wait for, also where nobody has ordered one."""

from __future__ import annotations

from hearth.control.observe.load_log import LoadLogs
from hearth.core.messages import ModelLoaded
from hearth.core.types import ModelId, WorkerId

A, B = ModelId("a"), ModelId("b")
W0, W1 = WorkerId("w0"), WorkerId("w1")


def loaded(loads: LoadLogs, model: ModelId, now_s: float) -> None:
    log = loads.get(W0, model)
    assert log is not None
    log.succeed(now_s, ModelLoaded(model, 7, (), 0, 0, 0.0, 0.0, 0.0, 0.0))
    loads.mark_whole(W0, model)


def hosted(whole_bytes: int = 100) -> LoadLogs:
    loads = LoadLogs()
    loads.begin(W0, A, 1.0)
    loads.reported(W0, {A: whole_bytes})
    loaded(loads, A, 2.0)
    return loads


def test_the_load_under_way_is_awaited_and_one_that_has_ended_is_not() -> None:
    loads = LoadLogs()
    loads.begin(W0, A, 1.0)
    assert loads.awaited(W0, A, 1.5) is loads.get(W0, A)
    loads.reported(W0, {A: 100})
    loaded(loads, A, 2.0)
    assert loads.awaited(W0, A, 3.0) is None


def test_a_model_that_has_lost_weights_will_be_loaded_again() -> None:
    loads = hosted()
    loads.reported(W0, {A: 60})
    again = loads.awaited(W0, A, 3.0)
    assert again is not None
    assert (again.began_s, again.is_again, again.was_ready) == (3.0, True, True)
    assert loads.awaited(W0, A, 3.5) is again
    loads.reported(W0, {A: 100})
    loaded(loads, A, 4.0)
    assert loads.awaited(W0, A, 5.0) is None


def test_a_load_that_was_expected_of_a_model_that_is_whole_ends_and_was_none() -> None:
    loads = hosted()
    loads.reported(W0, {A: 60})
    expected = loads.awaited(W0, A, 3.0)
    assert expected is not None
    loads.reported(W0, {A: 100})
    assert (expected.ended_s, expected.is_void) == (3.0, True)
    assert loads.awaited(W0, A, 4.0) is None
    loads.reported(W0, {A: 60})
    again = loads.awaited(W0, A, 5.0)
    assert again is not None
    assert (again.began_s, again.is_void) == (5.0, False)


def test_a_load_of_which_layers_were_heard_is_no_guess() -> None:
    loads = hosted()
    loads.reported(W0, {A: 60})
    again = loads.awaited(W0, A, 3.0)
    assert again is not None
    again.progressed(3.5, 2)
    loads.reported(W0, {A: 100})
    assert again.ended_s is None


def test_a_model_is_whole_when_its_load_has_ended_also_before_its_worker_says_so() -> None:
    loads = hosted()
    loads.reported(W0, {A: 60})
    assert loads.awaited(W0, A, 3.0) is not None
    loaded(loads, A, 4.0)
    assert loads.awaited(W0, A, 4.5) is None


def test_a_model_that_is_not_named_any_more_has_nothing_there() -> None:
    loads = hosted()
    loads.reported(W0, {B: 50})
    assert loads.awaited(W0, A, 3.0) is not None


def test_how_large_a_model_is_may_be_told_after_the_load() -> None:
    loads = LoadLogs()
    loads.begin(W0, A, 1.0)
    loaded(loads, A, 2.0)
    assert loads.awaited(W0, A, 2.5) is None
    loads.reported(W0, {A: 100})
    assert loads.awaited(W0, A, 3.0) is None
    loads.reported(W0, {A: 99})
    assert loads.awaited(W0, A, 4.0) is not None


def test_a_model_that_comes_back_whole_needs_no_new_word_of_the_worker() -> None:
    loads = hosted()
    assert loads.end(W0, A) is not None
    assert loads.end(W0, A) is None
    loads.begin(W0, A, 3.0)
    loaded(loads, A, 3.1)
    loads.reported(W0, {A: 40})
    assert loads.awaited(W0, A, 4.0) is not None


def test_a_lost_worker_has_no_loads() -> None:
    loads = hosted()
    loads.begin(W1, A, 1.0)
    loads.lose(W0)
    assert loads.get(W0, A) is None
    assert loads.get(W1, A) is not None

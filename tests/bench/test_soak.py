"""The soak bench judges a service by what that has counted."""

from __future__ import annotations

from collections import Counter

from bench.soak.__main__ import books
from bench.soak.load import Tally

IDLE = {"hearth_requests_running": 0.0, "hearth_requests_waiting": 0.0}


def finished(model: str, outcome: str) -> str:
    return f'hearth_requests_total{{model="{model}",outcome="{outcome}"}}'


def test_every_answer_is_one_that_the_service_finished() -> None:
    began = IDLE | {finished("m1", "stop"): 5.0}
    ended = IDLE | {finished("m1", "stop"): 7.0, finished("m2", "length"): 2.0, finished("m2", "bad"): 9.0}
    assert books(began, ended, Tally(of_lasting=Counter(answered=4)), ()) == []
    assert books(began, ended, Tally(of_lasting=Counter(answered=3, left=1)), ()) == []
    (told,) = books(began, ended, Tally(of_lasting=Counter(answered=5)), ())
    assert "the service finished 4 requests, clients have 5 answers" in told


def test_what_was_counted_of_a_model_that_was_removed_is_not_missed() -> None:
    began = IDLE | {finished("m1", "stop"): 5.0, finished("gone", "stop"): 8.0}
    ended = IDLE | {finished("m1", "stop"): 6.0, finished("gone", "stop"): 1.0}
    assert books(began, ended, Tally(of_lasting=Counter(answered=1)), {"gone"}) == []

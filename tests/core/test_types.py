from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Mapping
from dataclasses import asdict, replace

import pytest

from hearth.core.errors import BadSampling
from hearth.core.types import SamplingParams

WRONG: list[tuple[Mapping[str, object], str]] = [
    ({"temperature": -0.1}, "`temperature` must be at least 0, given: -0.1"),
    ({"temperature": math.nan}, "`temperature` must be at least 0, given: nan"),
    ({"temperature": math.inf}, "`temperature` must be at least 0, given: inf"),
    ({"temperature": "hot"}, "`temperature` must be a number, given: 'hot'"),
    ({"temperature": True}, "`temperature` must be a number, given: True"),
    ({"temperature": None}, "`temperature` must be a number, given: None"),
    ({"top_k": -2}, "`top_k` must be at least 0, given: -2"),
    ({"top_p": 0.0}, "`top_p` must be above 0 and at most 1, given: 0.0"),
    ({"top_p": 1.1}, "`top_p` must be above 0 and at most 1, given: 1.1"),
    ({"min_p": -0.5}, "`min_p` must be at least 0 and at most 1, given: -0.5"),
    ({"min_p": 2}, "`min_p` must be at least 0 and at most 1, given: 2"),
    (
        {"repetition_penalty": 0.0},
        "`repetition_penalty` must be at least 1e-06 and at most 1e+06, given: 0.0",
    ),
    (
        {"repetition_penalty": 5e-324},
        "`repetition_penalty` must be at least 1e-06 and at most 1e+06, given: 5",
    ),
    ({"presence_penalty": 2.5}, "`presence_penalty` must be at least -2 and at most 2, given: 2.5"),
    ({"frequency_penalty": -3}, "`frequency_penalty` must be at least -2 and at most 2, given: -3"),
    ({"min_tokens": -1}, "`min_tokens` must be at least 0, given: -1"),
    ({"max_tokens": -1}, "`max_tokens` must be at least 0, given: -1"),
    ({"prompt_logprobs": 21}, "`prompt_logprobs` must be at least 0 and at most 20, given: 21"),
    ({"seed": 2**63}, "`seed` must be at least"),
    ({"seed": "lucky"}, "`seed` must be a number, given: 'lucky'"),
    ({"logprobs": -1}, "`logprobs` must be at least 0 and at most 20, given: -1"),
    ({"logprobs": 21}, "`logprobs` must be at least 0 and at most 20, given: 21"),
    ({"max_tokens": 2.5}, "`max_tokens` must be a whole number, given: 2.5"),
    ({"min_tokens": 0.5}, "`min_tokens` must be a whole number, given: 0.5"),
    ({"top_k": 1.5}, "`top_k` must be a whole number, given: 1.5"),
    ({"seed": 1.5}, "`seed` must be a whole number, given: 1.5"),
    ({"logprobs": 1.5}, "`logprobs` must be a whole number, given: 1.5"),
    ({"stop": [1]}, "`stop` must hold strings, given: 1"),
    ({"stop": b"ab"}, "`stop` must hold strings, given: 97"),
    ({"stop": ""}, "`stop` holds an empty string; every stop string needs a character"),
    ({"stop": ["end", ""]}, "`stop` holds an empty string"),
    ({"allowed_token_ids": []}, "`allowed_token_ids` is empty, so no token could follow; name one"),
    ({"logit_bias": {7: 101.0}}, "`logit_bias[7]` must be at least -100 and at most 100, given: 101.0"),
    ({"logit_bias": {7: -math.inf}}, "`logit_bias[7]` must be at least -100 and at most 100, given: -inf"),
    (
        {"min_tokens": 9, "max_tokens": 8},
        "`min_tokens` must not exceed `max_tokens`: 9 > 8; raise `max_tokens` or lower `min_tokens`",
    ),
]


@pytest.mark.parametrize(("given", "message"), WRONG, ids=[str(given) for given, _ in WRONG])
def test_a_wrong_value_is_refused_by_name_limit_and_value(given: Mapping[str, object], message: str) -> None:
    with pytest.raises(BadSampling) as refusal:
        SamplingParams(**given)  # type: ignore[arg-type] # wrong values are the point

    assert str(refusal.value).startswith(message)


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0},
        {"top_p": 1},
        {"min_p": 1.0},
        {"logprobs": 0},
        {"logprobs": 20},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"max_tokens": None, "min_tokens": 10_000},
        {"max_tokens": 5, "min_tokens": 5},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0},
    ],
    ids=str,
)
def test_values_at_the_limits_are_kept(given: Mapping[str, object]) -> None:
    params = SamplingParams(**given)  # type: ignore[arg-type] # of several types

    assert {name: getattr(params, name) for name in given} == given


@pytest.mark.parametrize("name", ["tempreature", "n", "best_of"])
def test_an_unknown_name_is_an_error(name: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        SamplingParams(**{name: 1})  # type: ignore[arg-type] # the point


def test_values_are_given_by_name_only() -> None:
    with pytest.raises(TypeError, match="positional argument"):
        SamplingParams(0.5)  # type: ignore[call-arg] # the point


def test_both_ways_to_keep_every_token_are_one() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)


def test_one_stop_string_and_a_list_of_it_are_one() -> None:
    assert SamplingParams(stop="end").stop_strings == SamplingParams(stop=["end"]).stop_strings == ("end",)


def test_later_changes_to_what_was_given_do_not_reach_it() -> None:
    stop, stop_token_ids, allowed, bias = ["a"], [1], [2], {3: 1.0}
    params = SamplingParams(
        stop=stop, stop_token_ids=stop_token_ids, allowed_token_ids=allowed, logit_bias=bias
    )

    stop.append("b")
    stop_token_ids.append(9)
    allowed.append(9)
    bias[9] = 9.0

    assert (params.stop, params.stop_token_ids, params.allowed_token_ids) == (("a",), (1,), (2,))
    assert dict(params.logit_bias) == {3: 1.0}


def test_it_can_be_hashed_copied_and_sent() -> None:
    params = SamplingParams(logit_bias={3: 1.0}, stop="end")

    copies = [copy.deepcopy(params), pickle.loads(pickle.dumps(params)), SamplingParams(**asdict(params))]

    assert all(each == params and hash(each) == hash(params) for each in copies)


def test_what_is_resolved_is_the_same_but_for_its_stops_and_seed() -> None:
    given = SamplingParams(temperature=0.3, stop_token_ids=[7], stop="end", logit_bias={4: 1.5}, max_tokens=3)
    found = given.resolved(stop=("x",), stop_token_ids=(5, 7), seed=11)
    assert found == replace(given, stop=("x",), stop_token_ids=(5, 7), seed=11)
    assert (given.stop_ids, given.seed) == ((7,), None)


def test_only_temperature_zero_is_greedy() -> None:
    assert SamplingParams(temperature=0.0).is_greedy
    assert not SamplingParams(temperature=1e-9).is_greedy


def test_none_means_absent_where_other_apis_send_null() -> None:
    assert SamplingParams(stop=None, stop_token_ids=None, logit_bias=None) == SamplingParams()

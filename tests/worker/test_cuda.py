"""A worker's process on a GPU: the same answers, and memory that really comes back."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hearth import LLM
from hearth.beacon import Beacon, new_beacon_file
from hearth.messages import ModelLoaded, ModelTurn, RetireModel
from hearth.types import ModelId, SamplingParams
from tests.store.stored import converted
from tests.worker.harness import CONFIG, Gateway, folder, greedy, host_order, keeper_setup, keeping, working

PROMPT = (3, 14, 15, 92, 65, 35)
BUDGET_BYTES = 4 << 30

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with (
        folder() as place,
        keeping(setup := keeper_setup(place, kind="cuda")),
        working(setup.socket, kind="cuda", budget_bytes=BUDGET_BYTES) as rig,
    ):
        yield rig.gateway


def is_empty(gateway: Gateway) -> bool:
    pong = gateway.ping()
    return pong.free_bytes == pong.budget_bytes


def answer(where: Path, num_tokens: int) -> list[int]:
    with LLM(where, device="cuda", max_context=64, engine=CONFIG, skip_tokenizer=True) as llm:
        llm.wait_loaded()
        (completion,) = llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=num_tokens))
        return completion.token_ids


def test_models_answer_as_they_do_offline(gateway: Gateway) -> None:
    places = {name: converted(name) for name in ("llama-gqa", "opt-pre", "qwen3")}
    gateway.send(*(host_order(name, where) for name, where in places.items()))
    runs = {name: gateway.start(name, PROMPT, greedy(20)) for name in places}
    gateway.until_ended(*runs.values())
    gateway.drop(*places)

    assert {name: gateway.runs[run].tokens for name, run in runs.items()} == {
        name: answer(where, 20) for name, where in places.items()
    }
    assert is_empty(gateway)


def test_room_that_was_given_back_is_there_for_others(gateway: Gateway) -> None:
    where = converted("llama-gqa")
    for kv_bytes in (3 << 30, (3 << 30) - (100 << 20), 1 << 30, (3 << 30) + (200 << 20)):
        loaded = gateway.host("a", where, kv_floor_bytes=kv_bytes, max_kv_bytes=kv_bytes)
        assert isinstance(loaded, ModelLoaded)
        (run,) = gateway.until_ended(gateway.start("a", PROMPT, greedy(4)))
        assert len(run.tokens) == 4
        gateway.drop("a")
    assert is_empty(gateway)


def test_a_retired_model_comes_back_with_all_its_bytes_and_its_graphs(gateway: Gateway) -> None:
    where = converted("llama-gqa")
    gateway.host("a", where)
    (first,) = gateway.until_ended(gateway.start("a", PROMPT, greedy(20)))
    gateway.send(RetireModel(ModelId("a")))
    again = gateway.host("a", where)
    assert isinstance(again, ModelLoaded)
    (second,) = gateway.until_ended(gateway.start("a", PROMPT, greedy(20)))
    gateway.drop("a")

    assert again.rungs == ()
    assert second.tokens == first.tokens
    assert is_empty(gateway)


def test_models_that_do_not_fit_together_take_turns_and_answer_as_they_do_offline() -> None:
    places = {name: converted(name) for name in ("llama-gqa", "opt-pre")}
    with (
        folder() as place,
        keeping(setup := keeper_setup(place, kind="cuda")),
        working(setup.socket, kind="cuda", budget_bytes=BUDGET_BYTES, turns=True) as rig,
    ):
        gateway, own_bytes = rig.gateway, BUDGET_BYTES * 3 // 4
        gateway.send(*(host_order(name, where, own_bytes=own_bytes) for name, where in places.items()))
        runs = {name: gateway.start(name, PROMPT, greedy(40)) for name in places}
        gateway.until_ended(*runs.values())
        turns = [fact for fact in gateway.facts if isinstance(fact, ModelTurn)]
        gateway.drop(*places)

        assert {name: gateway.runs[run].tokens for name, run in runs.items()} == {
            name: answer(where, 40) for name, where in places.items()
        }
        assert {turn.model for turn in turns} == set(places)
        for turn, following in itertools.pairwise(turns):
            assert turn.ended is not None or following.ended is not None, "two in turn do not fit"
        assert is_empty(gateway)


def test_whose_step_is_under_way_is_shown_until_the_device_is_done_with_it() -> None:
    """Steps of two models are in flight at once, by graphs: marks are passed as they are done."""
    places = {name: converted(name) for name in ("llama-gqa", "opt-pre")}
    descriptor = new_beacon_file()
    try:
        seen = Beacon.at(descriptor)
        with (
            folder() as place,
            keeping(setup := keeper_setup(place, kind="cuda")),
            working(setup.socket, descriptor, kind="cuda", budget_bytes=BUDGET_BYTES) as rig,
        ):
            gateway = rig.gateway
            gateway.send(*(host_order(name, where) for name, where in places.items()))
            runs = [gateway.start(name, PROMPT, greedy(40)) for name in places]
            gateway.until_ended(*runs)
            num_marks = seen.read().num_marks
            gateway.until_ended(*(gateway.start(name, PROMPT, greedy(40)) for name in places))
            gateway.ping()
            assert seen.read().num_marks >= num_marks + 2 * 40
            assert seen.read().model is None
    finally:
        os.close(descriptor)

"""A worker's process on a GPU: the same answers, and memory that really comes back."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from hearth import LLM
from hearth.core.beacon import Beacon, new_beacon_file
from hearth.core.messages import (
    MakeSnapshot,
    ModelLoaded,
    ModelTurn,
    RetireModel,
    SnapshotLooked,
    SnapshotMade,
)
from hearth.core.types import ModelId, SamplingParams, SnapshotOutcome
from hearth.sim.profile import Profile
from hearth.snapshot.cost_profile import cost_profile_of
from hearth.snapshot.directory import SnapshotDirectory
from hearth.snapshot.memory_profile import MemoryProfile
from hearth.store.format.manifest import read_manifest
from hearth.worker.runtime import SPARE_BYTES
from tests.completions import completions
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
    with LLM(where, device="cuda", max_model_len=64, engine=CONFIG, skip_tokenizer_init=True) as llm:
        llm.wait_loaded()
        (completion,) = completions(llm, [PROMPT], SamplingParams(temperature=0.0, max_tokens=num_tokens))
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


def test_a_snapshot_of_one_process_is_used_by_the_next(tmp_path: Path) -> None:
    where, directory = converted("llama-gqa"), SnapshotDirectory.open(tmp_path / "snapshots", 1 << 30)
    settings: dict[str, object] = {
        **{"kind": "cuda", "budget_bytes": BUDGET_BYTES},
        **{"snapshots_path": str(directory.path), "snapshot_bytes": 1 << 30},
    }
    with folder() as place, keeping(setup := keeper_setup(place, kind="cuda")):
        with working(setup.socket, **settings) as first:
            gateway = first.gateway
            gateway.host("a", where)
            (looked,) = (fact for fact in gateway.facts if isinstance(fact, SnapshotLooked))
            assert looked.outcome is SnapshotOutcome.MISSING
            assert not gateway.ping().is_torch_limit_measured
            (before,) = gateway.until_ended(gateway.start("a", PROMPT, greedy(20)))
            gateway.send(MakeSnapshot(ModelId("a"), looked.hosting))
            made = gateway.until_kind(SnapshotMade)
            assert (made.failure, made.seconds < 60) == (None, True)
            assert gateway.ping().is_torch_limit_measured
            (after,) = gateway.until_ended(gateway.start("a", PROMPT, greedy(20)))
            assert after.tokens == before.tokens
        opened = directory.newest(read_manifest(where).digest)
        assert opened is not None
        with opened:
            fingerprint, memory = opened.fingerprint, MemoryProfile.of(opened)
            profile = Profile.of(cost_profile_of(opened), "the snapshot")
        assert [name for name, value in asdict(fingerprint).items() if not value] == []
        print(fingerprint, memory, profile.measured)  # for whoever looks whether that is so
        assert memory.torch_bytes > 0
        assert profile.shape("a").step_s(1, 1, 10) > 0.0
        with working(setup.socket, **settings) as second:
            gateway = second.gateway
            gateway.host("a", where)
            (looked,) = (fact for fact in gateway.facts if isinstance(fact, SnapshotLooked))
            assert (looked.outcome, looked.reason) == (SnapshotOutcome.USED, None)
            pong = gateway.ping()
            assert pong.is_torch_limit_measured
            assert pong.torch_limit_bytes == memory.torch_bytes + SPARE_BYTES
            (again,) = gateway.until_ended(gateway.start("a", PROMPT, greedy(20)))
            assert again.tokens == before.tokens
            for _ in range(3):  # its first steps may be captured beside the load
                gateway.drop("a")
                gateway.send(host_order("a", where))
                (waited,) = gateway.until_ended(gateway.start("a", PROMPT, greedy(20)))
                assert waited.tokens == before.tokens

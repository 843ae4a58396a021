"""A model in stages on workers that are processes of their own, on one device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from hearth.core.messages import (
    HostingFailed,
    HostModel,
    MakeSnapshot,
    ModelLoaded,
    ModelUse,
    SnapshotLooked,
    SnapshotMade,
)
from hearth.core.types import Member, ModelId, Pipeline, SnapshotOutcome, WorkerId
from hearth.policy.fleet.footprint import PAGE_BYTES
from hearth.snapshot.directory import SnapshotDirectory
from hearth.store.format.manifest import read_manifest
from tests.engine.harness import prompts_for
from tests.store.stored import converted
from tests.worker.harness import (
    CONFIG,
    PATIENCE_S,
    Rig,
    folder,
    greedy,
    host_order,
    keeper_setup,
    keeping,
    working,
)

NAME, CONTEXT = "llama-gqa", 64
PROMPTS = prompts_for(160, (3, 40, 7, 21, 1, 12))
NUM_BLOCKS = 4 * CONTEXT // CONFIG.block_tokens
KINDS = [pytest.param("cpu", marks=pytest.mark.e2e), pytest.param("cuda", marks=pytest.mark.gpu)]


@contextmanager
def workers(kind: str, num_workers: int, **settings: object) -> Iterator[list[Rig]]:
    budget_bytes = 2 << 30 if kind == "cuda" else 64 << 20
    with ExitStack() as stack:
        place = stack.enter_context(folder())
        setup = keeper_setup(place, kind=kind)  # type: ignore[arg-type] # one of its two
        stack.enter_context(keeping(setup))
        yield [
            stack.enter_context(
                working(
                    setup.socket,
                    worker=WorkerId(f"w{number}"),
                    kind=kind,
                    num_sharing=num_workers,
                    budget_bytes=budget_bytes,
                    stages_path=str(place),
                    **settings,
                )
            )
            for number in range(num_workers)
        ]


def orders(num_workers: int, name: str = "p", gpu: int | None = None) -> list[HostModel]:
    """`gpu`: the index of the one that all workers share; None: hidden states go through host memory."""
    where = converted(NAME)
    num_layers = read_manifest(where).arch.num_layers
    ends = [*range(num_workers), num_layers]
    members = tuple(Member(WorkerId(f"w{at}"), ends[at], ends[at + 1], gpu) for at in range(num_workers))
    pipeline = Pipeline(name, members, NUM_BLOCKS)
    return [
        host_order(
            NAME,
            where,
            pipeline=pipeline,
            member=number,
            slot=7,
            kv_floor_bytes=4 * PAGE_BYTES,
            max_kv_bytes=4 * PAGE_BYTES,
        )
        for number in range(num_workers)
    ]


def ask(rig: Rig) -> list[list[int]]:
    gateway = rig.gateway
    runs = [gateway.start(NAME, prompt, greedy(20)) for prompt in PROMPTS]
    return [run.tokens for run in gateway.until_ended(*runs)]


@pytest.mark.parametrize(
    ("kind", "gpu"),
    [
        pytest.param("cpu", None, marks=pytest.mark.e2e),
        pytest.param("cuda", None, marks=pytest.mark.gpu),
        pytest.param("cuda", 0, marks=pytest.mark.gpu),
    ],
)
def test_processes_say_together_what_one_says_and_come_back_without_one(kind: str, gpu: int | None) -> None:
    with workers(kind, 1) as (one,):
        assert isinstance(one.gateway.host(NAME, converted(NAME)), ModelLoaded)
        alone = ask(one)
    with workers(kind, 3) as three:
        for rig, order in zip(three, orders(3, gpu=gpu), strict=True):
            rig.gateway.send(order)
        assert [ask(three[0]) for _ in range(2)] == [alone, alone]
        assert not any(rig.gateway.ping().fallbacks["stage_memory"] for rig in three)
        three[0].gateway.start(NAME, PROMPTS[0], greedy(40))
        three[2].worker.kill()
        failed = three[0].gateway.until_kind(HostingFailed)
        assert failed.is_cut_off, f"{failed}"
        three[1].gateway.drop(NAME)
        for rig, order in zip(three[:2], orders(2, "q", gpu), strict=True):
            rig.gateway.send(order)
        assert ask(three[0]) == alone


def state_of(rig: Rig) -> ModelUse:
    (use,) = rig.gateway.ping().models
    return use


def look_of(rig: Rig) -> SnapshotLooked:
    found = [fact for fact in rig.gateway.facts if isinstance(fact, SnapshotLooked)]
    return found[0] if found else rig.gateway.until_kind(SnapshotLooked)


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_workers_use_the_snapshots_of_each_stage(kind: str, tmp_path: Path) -> None:
    settings: dict[str, object] = {"snapshots_path": str(tmp_path), "snapshot_bytes": 1 << 30}
    with workers(kind, 2, **settings) as two:
        for rig, order in zip(two, orders(2), strict=True):
            rig.gateway.send(order)
        expected = ask(two[0])
        for rig in two:
            looked = look_of(rig)
            assert looked.outcome is SnapshotOutcome.MISSING, f"{looked}"
            rig.gateway.send(MakeSnapshot(ModelId(NAME), looked.hosting))
            assert rig.gateway.until_kind(SnapshotMade).failure is None
        assert ask(two[0]) == expected
    assert len(SnapshotDirectory.open(tmp_path, 1 << 30).entries()) == 2
    with workers(kind, 2, **settings) as two:
        for rig, order in zip(two, orders(2, "q"), strict=True):
            rig.gateway.send(order)
        assert ask(two[0]) == expected
        assert [look_of(rig).outcome for rig in two] == [SnapshotOutcome.USED] * 2
        if kind == "cuda":
            give_up_s = time.monotonic() + PATIENCE_S
            while not all(state_of(rig).num_restored_graphs for rig in two) and time.monotonic() < give_up_s:
                assert ask(two[0]) == expected
            uses = [state_of(rig) for rig in two]
            assert all(use.num_restored_graphs and not use.num_captured_graphs for use in uses), f"{uses}"
        assert ask(two[0]) == expected

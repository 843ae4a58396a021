"""What comes ahead while a model waits for its turn: to host memory, and its first bytes to the device."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest

from hearth.core.messages import ModelLoaded, ModelUse
from hearth.core.types import Hold, ModelId, Rung
from hearth.memory.vmm import MappedPool
from hearth.models.layout import ByteRange
from hearth.store.format.manifest import read_manifest
from hearth.store.tiers.tiers import Tiers
from hearth.store.transfer.lease_client import HostPrefetch
from tests.engine.harness import assert_greedy
from tests.store.stored import PATIENCE_S, gated_tiers, resident_bytes, tiers_at
from tests.worker.in_process import LoopGateway, working_in_process
from tests.worker.test_disturbed import CONFIG, CONTEXT, SETTINGS, source
from tests.worker.test_turns import LONG, PATIENT, assert_empty_when_dropped, host, least_bytes

SETTING = SETTINGS["mapped"]
FIRST, SECOND, THIRD = SETTING.names[:3]
#: Only two pages at a time, so that a model is not whole before its turn.
RULES = replace(PATIENT, front_bytes=2 * SETTING.page_bytes)


def until(is_so: Callable[[], bool]) -> None:
    """For what other threads do, which nothing announces."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline_s, "what should come has not"
        time.sleep(0.001)


@dataclass(slots=True)
class Ahead:
    """A worker whose first model has its turn for as long as it is pinned. Mutable, as the gateway is."""

    gateway: LoopGateway
    tiers: Tiers
    runs: dict[str, list[int]] = field(default_factory=dict)

    def start(self, name: str) -> None:
        self.runs.setdefault(name, []).append(self.gateway.start(name, [4, 5, 6], LONG))

    def end_first_turn(self) -> None:
        self.gateway.set_hold(FIRST, Hold.WARM)

    def use(self, name: str) -> ModelUse:
        return {one.model: one for one in self.gateway.ping().models}[ModelId(name)]

    def until_resident(self, name: str, num_bytes: int) -> None:
        """Until so many bytes of a model are there, and none on their way."""

        def is_resident() -> bool:
            use = self.use(name)
            return use.weights_bytes >= num_bytes and not use.coming_bytes

        until(is_resident)

    def check_answers(self) -> None:
        for name, runs in self.runs.items():
            for answer in self.gateway.until_ended(*runs):
                assert_greedy(source(name), [4, 5, 6], answer.tokens)


@contextmanager
def waiting(root: Path, kind: str = "mapped", *, spare_pages: int = 2) -> Iterator[Ahead]:
    """The second model waits for the first, which is pinned and has nothing to do yet."""
    setting = SETTINGS[kind]
    budget_bytes = least_bytes(setting, setting.names[:3]) + spare_pages * setting.page_bytes
    with (
        tiers_at(root, num_cells=(16 << 20) // max(setting.page_bytes, 256 << 10)) as tiers,
        working_in_process(
            tiers, partial(setting.new_pool, setting, budget_bytes), config=CONFIG, turns=RULES
        ) as gateway,
    ):
        host(gateway, setting, *setting.names[:3])
        gateway.set_hold(setting.names[0], Hold.PINNED)
        ahead = Ahead(gateway, tiers)
        gateway.until(ModelLoaded)
        ahead.start(setting.names[1])
        yield ahead
        gateway.ping()
        if isinstance(gateway.pool, MappedPool):
            gateway.pool.check()  # the worker sleeps


class HeldBack:
    """Keeps the bytes of one model from being written. Any thread may call it."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_begun, self._is_over = threading.Event(), threading.Event()
        prepare = MappedPool.prepare

        def held_back(pool: MappedPool, model: ModelId, part: ByteRange) -> None:
            if model == name:
                self.has_begun.set()
                assert self._is_over.wait(PATIENCE_S)
            prepare(pool, model, part)

        monkeypatch.setattr(MappedPool, "prepare", held_back)

    def let_go(self) -> None:
        self._is_over.set()


@pytest.mark.parametrize("kind", ["arena", "mapped"])
def test_a_model_comes_to_host_memory_while_it_waits(kind: str, tmp_path: Path) -> None:
    with waiting(tmp_path, kind, spare_pages=0) as ahead:
        second = SETTINGS[kind].names[1]
        stored = ahead.tiers.open(SETTINGS[kind].where(second))
        distinct_bytes = sum({one.id: one.num_bytes for one in stored.manifest.chunks}.values())
        until(lambda: resident_bytes(ahead.tiers, stored)[Rung.HOST] == distinct_bytes)

        ahead.gateway.ping()
        assert ModelId(second) not in ahead.gateway.in_turn
        assert [load.model for load in ahead.gateway.loads] == [SETTINGS[kind].names[0]]
        ahead.gateway.set_hold(SETTINGS[kind].names[0], Hold.WARM)
        ahead.check_answers()
        assert [use.rung for use in ahead.gateway.loads[-1].rungs] == [Rung.HOST]


def test_what_comes_to_host_memory_is_called_off_when_the_model_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled = threading.Event()
    cancel = HostPrefetch.cancel

    def noted(prefetch: HostPrefetch) -> None:
        cancel(prefetch)
        cancelled.set()

    monkeypatch.setattr(HostPrefetch, "cancel", noted)
    budget_bytes = least_bytes(SETTING, [FIRST, SECOND])
    new_pool = partial(SETTING.new_pool, SETTING, budget_bytes)
    with (
        gated_tiers(tmp_path) as gated,
        working_in_process(gated.tiers, new_pool, config=CONFIG, turns=RULES) as gateway,
    ):
        host(gateway, SETTING, FIRST, SECOND)
        gateway.set_hold(FIRST, Hold.PINNED)
        for _ in set(read_manifest(SETTING.where(FIRST)).chunk_ids):
            gated.gate.next().allow()
        gateway.until(ModelLoaded)
        gateway.start(SECOND, [4, 5, 6], LONG)
        gated.gate.next()  # held back
        gateway.drop(SECOND)
        gateway.ping()
        assert cancelled.wait(PATIENCE_S)
        gated.gate.open()
        assert_empty_when_dropped(gateway, FIRST)


def test_first_bytes_of_the_next_in_line_cross_while_another_has_its_turn(tmp_path: Path) -> None:
    with waiting(tmp_path) as ahead:
        ahead.start(FIRST)
        ahead.until_resident(SECOND, RULES.front_bytes)

        use = ahead.use(SECOND)
        assert (use.hold, use.is_in_turn) == (Hold.PAUSED, False)
        assert [load.model for load in ahead.gateway.loads] == [FIRST]
        ahead.end_first_turn()
        ahead.check_answers()

        load = next(load for load in ahead.gateway.loads if load.model == SECOND)
        (moved,) = load.rungs
        assert moved.rung is Rung.HOST
        assert moved.num_bytes >= read_manifest(SETTING.where(SECOND)).num_bytes, "some of it was not told"
        assert load.reused_bytes == 0
        assert_empty_when_dropped(ahead.gateway, FIRST, SECOND, THIRD)


def test_bytes_that_came_ahead_make_room_for_the_kv_of_the_model_in_turn(tmp_path: Path) -> None:
    with waiting(tmp_path, spare_pages=0) as ahead:
        ahead.until_resident(SECOND, SETTING.page_bytes)
        for _ in range(8):
            ahead.start(FIRST)
        first, second = ahead.runs[FIRST], ahead.runs.pop(SECOND)
        ahead.check_answers()

        assert [ahead.gateway.answers[run].num_admissions for run in first] == [1] * len(first)
        ahead.end_first_turn()
        ahead.runs[SECOND] = second
        ahead.check_answers()


@pytest.mark.parametrize("how", ["drop", "retire", "cancel"])
def test_a_model_may_go_while_its_bytes_come_ahead(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_back = HeldBack(SECOND, monkeypatch)
    with waiting(tmp_path) as ahead:
        assert held_back.has_begun.wait(PATIENCE_S)
        (run,) = ahead.runs.pop(SECOND)
        if how == "cancel":
            ahead.gateway.cancel(run)
        else:
            (ahead.gateway.drop if how == "drop" else ahead.gateway.retire)(SECOND)
        held_back.let_go()

        assert ahead.use(FIRST).hold is Hold.PINNED
        if how != "cancel":
            host(ahead.gateway, SETTING, SECOND)
        ahead.start(SECOND)
        ahead.end_first_turn()
        ahead.check_answers()
        assert_empty_when_dropped(ahead.gateway, FIRST, SECOND, THIRD)


def test_a_load_goes_on_to_the_whole_if_the_turn_begins_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_back = HeldBack(SECOND, monkeypatch)
    with waiting(tmp_path) as ahead:
        assert held_back.has_begun.wait(PATIENCE_S)
        ahead.end_first_turn()
        while ModelId(SECOND) not in ahead.gateway.in_turn:
            ahead.gateway.hear()
        assert ahead.use(SECOND).coming_bytes > 0
        held_back.let_go()
        ahead.check_answers()


def test_another_whose_turn_begins_waits_for_bytes_that_came_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They can be taken only when they are there."""
    held_back = HeldBack(SECOND, monkeypatch)
    with waiting(tmp_path, spare_pages=0) as ahead:
        assert held_back.has_begun.wait(PATIENCE_S)
        (run,) = ahead.runs.pop(SECOND)
        ahead.start(THIRD)
        ahead.gateway.cancel(run)
        ahead.end_first_turn()
        while ModelId(THIRD) not in ahead.gateway.in_turn:
            ahead.gateway.hear()
        held_back.let_go()
        ahead.check_answers()


def test_a_prefetch_that_fails_is_left_to_the_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed = threading.Event()
    prepare = MappedPool.prepare

    def refuses_once(pool: MappedPool, model: ModelId, part: ByteRange) -> None:
        if model == SECOND and not failed.is_set():
            failed.set()
            raise OSError("not now")
        prepare(pool, model, part)

    monkeypatch.setattr(MappedPool, "prepare", refuses_once)
    with waiting(tmp_path) as ahead:
        assert failed.wait(PATIENCE_S)
        until(lambda: "prefetch_failed" in caplog.text)
        ahead.end_first_turn()
        ahead.check_answers()
    assert CONTEXT > len(ahead.gateway.answers[1].tokens) > 0

"""Keepers that are killed in the middle of a load: it goes on with the next one, and answers are right."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from subprocess import Popen

import pytest

from hearth.core.messages import HostingFailed, KeeperSetup, ModelLoaded
from hearth.core.types import Hold, ModelId
from hearth.policy.turns.turn_policy import TurnRules
from hearth.store.format.manifest import CHUNK_BYTES
from hearth.store.transfer import lease as leases
from hearth.store.transfer.fetch import HostChunk
from hearth.store.transfer.lease_connection import Grant
from tests.engine.harness import assert_greedy
from tests.store.stored import PATIENCE_S
from tests.worker.harness import folder, greedy, keeper_setup, keeping
from tests.worker.in_process import LoopGateway, working_beside
from tests.worker.test_disturbed import CONFIG, SETTINGS, source
from tests.worker.test_turns import LONG, PATIENT, assert_empty_when_dropped, host, least_bytes

pytestmark = pytest.mark.e2e

FIRST, SECOND = SETTINGS["mapped"].names[:2]
PROMPT = [4, 5, 6]
SHORT = greedy(8, ignore_eos=True)
#: Two cells: for the chunk that is held, and for one that was lent ahead.
FEW_BYTES, MANY_BYTES = 2 * CHUNK_BYTES, 10 * CHUNK_BYTES


class HeldLoads:
    """Holds the thread that takes chunks, at the given ones, counted over all loads. Any thread may call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *held: int) -> None:
        self._gates = {number: threading.Event() for number in held}
        self._reached = {number: threading.Event() for number in held}
        self._num_taken = 0
        take_pinned = Grant.take_pinned

        def held_back(grant: Grant, most: int) -> list[HostChunk]:
            chunk = take_pinned(grant, most)
            self._num_taken += 1  # loads of these tests follow each other
            if self._num_taken in self._gates:
                self._reached[self._num_taken].set()
                assert self._gates[self._num_taken].wait(PATIENCE_S)
            return chunk

        monkeypatch.setattr(Grant, "take_pinned", held_back)

    def wait_at(self, number: int) -> None:
        assert self._reached[number].wait(PATIENCE_S), "no load has come so far"

    def let_go(self, number: int) -> None:
        self._gates[number].set()

    def is_past(self, number: int) -> bool:
        return self._gates[number].is_set()


@dataclass(slots=True)
class Keepers:
    """One keeper after the other at the same socket. Mutable."""

    setup: KeeperSetup
    _stack: ExitStack
    _process: Popen[bytes] | None = field(default=None)

    def start(self) -> None:
        self._process = self._stack.enter_context(keeping(self.setup))

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()


@dataclass(frozen=True, slots=True)
class Rig:
    gateway: LoopGateway
    keepers: Keepers

    def check_answer(self, name: str, run: int) -> None:
        (answer,) = self.gateway.until_ended(run)
        assert_greedy(source(name), PROMPT, answer.tokens)

    def until_loaded(self, num_loads: int) -> None:
        """Hear of so many loads in all. Steps follow the bytes, and may end before a load is told of.

        Who is retired before that gives back what it was loading.
        """
        while len(self.gateway.loads) < num_loads:
            self.gateway.hear()


@contextmanager
def working(
    kind: str, budget_bytes: int = 16 << 20, turns: TurnRules | None = None, *, keeps_chunks: bool = False
) -> Iterator[Rig]:
    """A worker beside a keeper's process, through which chunks only pass, unless it keeps them."""
    setting = SETTINGS[kind]
    with folder() as place, ExitStack() as stack:
        setup = keeper_setup(place, MANY_BYTES, "cuda") if keeps_chunks else keeper_setup(place, FEW_BYTES)
        keepers = Keepers(setup, stack)
        keepers.start()
        new_pool = partial(setting.new_pool, setting, budget_bytes)
        with working_beside(Path(keepers.setup.socket), new_pool, config=CONFIG, turns=turns) as gateway:
            yield Rig(gateway, keepers)


@pytest.mark.parametrize("kind", ["arena", "mapped"])
def test_a_load_under_way_goes_on_with_the_next_keeper_and_the_one_after(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldLoads(monkeypatch, 2, 5)
    with working(kind) as rig:
        host(rig.gateway, SETTINGS[kind], FIRST)
        run = rig.gateway.start(FIRST, PROMPT, SHORT)
        for number in (2, 5):
            held.wait_at(number)
            rig.keepers.kill()
            held.let_go(number)
            rig.keepers.start()

        rig.check_answer(FIRST, run)
        assert_empty_when_dropped(rig.gateway, FIRST)


def test_a_load_whose_keeper_never_returns_ends_and_others_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leases, "KEEPER_WAIT_S", 0.5)
    with working("mapped") as rig:
        host(rig.gateway, SETTINGS["mapped"], FIRST)
        rig.gateway.until(ModelLoaded)
        held = HeldLoads(monkeypatch, 2)
        host(rig.gateway, SETTINGS["mapped"], SECOND)
        rig.gateway.start(SECOND, PROMPT, SHORT)
        held.wait_at(2)
        rig.keepers.kill()
        held.let_go(2)

        failed = rig.gateway.until(HostingFailed)
        assert (failed.model, failed.label) == (SECOND, "lender_gone")
        assert "no keeper listens" in failed.reason
        rig.check_answer(FIRST, rig.gateway.start(FIRST, PROMPT, SHORT))


def test_a_load_that_waits_for_a_keeper_can_be_called_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "KEEPER_RETRY_S", PATIENCE_S)  # it is woken, or the test is late
    held = HeldLoads(monkeypatch, 2)
    waits = threading.Event()
    await_keeper = leases.await_keeper

    def noted(*args: object, **options: object) -> object:
        if held.is_past(2):
            waits.set()
        return await_keeper(*args, **options)  # type: ignore[arg-type] # as it was called

    monkeypatch.setattr(leases, "await_keeper", noted)
    with working("mapped") as rig:
        host(rig.gateway, SETTINGS["mapped"], FIRST)
        held.wait_at(2)
        rig.keepers.kill()
        held.let_go(2)
        assert waits.wait(PATIENCE_S)

        assert_empty_when_dropped(rig.gateway, FIRST)


def test_of_a_model_that_is_partly_there_the_rest_comes_from_the_next_keeper(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setting = SETTINGS["mapped"]
    names = (FIRST, SECOND)
    with working("mapped", max(map(setting.promise_bytes, names)) + 4 * setting.page_bytes) as rig:
        for num_before, name in enumerate(names):
            host(rig.gateway, setting, name)
            rig.check_answer(name, rig.gateway.start(name, PROMPT, SHORT))
            rig.until_loaded(num_before + 1)
            rig.gateway.retire(name)

        held = HeldLoads(monkeypatch, 2)
        host(rig.gateway, setting, FIRST)
        run = rig.gateway.start(FIRST, PROMPT, SHORT)
        held.wait_at(2)
        rig.keepers.kill()
        held.let_go(2)
        rig.keepers.start()

        rig.check_answer(FIRST, run)
        rig.until_loaded(3)
        load = rig.gateway.loads[-1]
        assert load.model == FIRST
        assert 0 < load.reused_bytes < sum(use.num_bytes for use in rig.gateway.loads[0].rungs)


def test_bytes_that_came_ahead_of_a_turn_do_not_depend_on_their_keeper(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setting = SETTINGS["mapped"]
    budget_bytes = least_bytes(setting, [FIRST, SECOND]) + 4 * setting.page_bytes
    rules = replace(PATIENT, front_bytes=4 * setting.page_bytes)
    with working("mapped", budget_bytes, rules, keeps_chunks=True) as rig:
        host(rig.gateway, setting, FIRST, SECOND)
        rig.gateway.set_hold(FIRST, Hold.PINNED)
        rig.gateway.until(ModelLoaded)
        held = HeldLoads(monkeypatch, 2)
        run = rig.gateway.start(SECOND, PROMPT, LONG)
        held.wait_at(2)
        assert ModelId(SECOND) not in rig.gateway.in_turn
        rig.keepers.kill()
        rig.gateway.set_hold(FIRST, Hold.WARM)
        held.let_go(2)
        rig.keepers.start()

        rig.check_answer(SECOND, run)

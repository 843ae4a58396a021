"""Adapters come to a live worker, serve beside their base, give way and come back, against transformers.

Whatever comes free is overwritten with 0xFF.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from hearth.core.errors import DeviceError
from hearth.core.messages import AdapterLoaded, HostingFailed, ModelLoaded, Pong, RunFailed, StepDone
from hearth.core.types import AdapterId, Hold, ModelId, Rung
from hearth.engine.engine import Engine
from hearth.policy.batch.step_sharing import StepReadiness
from hearth.policy.turns.turn_policy import TurnRules
from hearth.store.transfer.copies import SingleCopies
from hearth.store.transfer.lease_client import LeaseClient, LeaseRequest, OpenedAdapter
from hearth.store.transfer.transfer import Loader
from hearth.system.cuda.batches import ByteCopy
from hearth.worker.adapter_pieces import AdapterPieces
from hearth.worker.failure import ModelBroke
from hearth.worker.reclaimer import Reclaimer
from tests.engine.harness import assert_best, assert_greedy, prompts_for
from tests.store.stored import PATIENCE_S, tiers_at
from tests.worker.harness import greedy
from tests.worker.in_process import LoopGateway, working_in_process
from tests.worker.stored_adapters import StoredAdapter, stored_adapter
from tests.worker.test_disturbed import CONFIG, KINDS, SETTINGS, TWIN, VOCABULARY, Setting, source
from tests.worker.test_turns import RESTLESS, host, least_bytes

pytestmark = pytest.mark.slow

BASE, OTHER = "llama-gqa", "qwen3"
ROOMY = 16 << 20


@dataclass(frozen=True, slots=True)
class Asked:
    model: str
    adapter: StoredAdapter | None
    prompt: Sequence[int]
    run: int


@dataclass(slots=True)
class AdapterRig:
    """A worker with its models hosted. Mutable."""

    gateway: LoopGateway
    setting: Setting
    asked: list[Asked] = field(default_factory=list)

    def ask(
        self, wanted: StoredAdapter | None, max_tokens: int = 8, model: str = "", **changes: object
    ) -> int:
        """Start a request with a prompt of its own; `changes` are of the adapter's order."""
        model = model or base_of(self.setting)
        (prompt,) = prompts_for(VOCABULARY, [3 + len(self.asked) % 20], seed=len(self.asked))
        order = None if wanted is None else replace(wanted.order, **changes)
        run = self.gateway.start(model, prompt, greedy(max_tokens, ignore_eos=True), adapter=order)
        self.asked.append(Asked(model, wanted, prompt, run))
        return run

    def check(self, *runs: int) -> None:
        """All of these requests, or all that were asked, end and say what the reference says."""
        asked = [one for one in self.asked if not runs or one.run in runs]
        answers = self.gateway.until_ended(*(one.run for one in asked))
        for one, answer in zip(asked, answers, strict=True):
            assert answer.tokens, one
            if one.adapter is None:
                assert_greedy(one.model, one.prompt, answer.tokens)
            else:
                logits = one.adapter.reference.logits((*one.prompt, *answer.tokens))
                assert_best(logits, one.prompt, answer.tokens)

    def there(self) -> dict[str, int]:
        """The bytes of each adapter that has memory, by its name."""
        return {use.name: use.num_bytes for use in self.ping().adapters if use.num_bytes}

    def ping(self) -> Pong:
        return self.gateway.ping()


def base_of(setting: Setting) -> str:
    """The model that is asked unless a test says otherwise."""
    return setting.names[0]


@contextmanager
def serving(
    kind: str,
    root: Path,
    *models: str,
    budget_bytes: int | None = None,
    spare_bytes: int = ROOMY,
    turns: TurnRules | None = None,
) -> Iterator[AdapterRig]:
    """A worker that hosts these models, with so many bytes beyond what they are promised."""
    setting, models = SETTINGS[kind], models or (base_of(SETTINGS[kind]),)
    promised_bytes = sum(map(setting.promise_bytes, models)) if budget_bytes is None else budget_bytes
    budget = (promised_bytes + spare_bytes) // setting.page_bytes * setting.page_bytes
    with (
        tiers_at(root, num_cells=(16 << 20) // max(setting.page_bytes, 256 << 10)) as tiers,
        working_in_process(
            tiers,
            lambda terms: setting.new_pool(setting, budget, terms),
            setting.device,
            CONFIG,
            turns=turns,
        ) as gateway,
    ):
        host(gateway, setting, *models)
        yield AdapterRig(gateway, setting)


@pytest.mark.parametrize("kind", KINDS)
def test_many_adapters_and_their_base_serve_at_once(kind: str, tmp_path: Path) -> None:
    """Also those that were asked for before their base was there."""
    adapters = [stored_adapter(base_of(SETTINGS[kind]), seed) for seed in range(3)]
    with serving(kind, tmp_path) as rig:
        for adapter in (*adapters, None, *adapters, None):
            rig.ask(adapter)
        rig.check()

        loads = {one.adapter: one for one in rig.gateway.adapter_loads}
        assert loads.keys() == {one.order.adapter for one in adapters}
        for one in adapters:
            (use,) = loads[one.order.adapter].rungs
            assert (use.rung, len(loads[one.order.adapter].runs)) == (Rung.DISK, 2)
        sizes = {one.order.name: one.layout.num_bytes for one in adapters}
        assert rig.there() == sizes

        rig.ask(adapters[1])
        rig.check()
        assert len(rig.gateway.adapter_loads) == 3, "it was there"


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_outlive_the_stay_of_their_base(kind: str, tmp_path: Path) -> None:
    base = base_of(SETTINGS[kind])
    adapter = stored_adapter(base)
    with serving(kind, tmp_path) as rig:
        rig.ask(adapter)
        rig.check()

        rig.gateway.retire(base)
        assert rig.there() == {adapter.order.name: adapter.layout.num_bytes}
        host(rig.gateway, rig.setting, base)
        rig.ask(adapter)
        rig.check()
        rig.gateway.drop(base)
        host(rig.gateway, rig.setting, base)
        rig.ask(adapter)
        rig.ask(None)
        rig.check()

        assert len(rig.gateway.adapter_loads) == 1


def test_another_version_under_the_same_name_is_another_adapter(tmp_path: Path) -> None:
    """Prompts are the same, so that what was cached of the first must not be found for the second."""
    first, second = stored_adapter(BASE, 0), stored_adapter(BASE, 1)
    with serving("mapped", tmp_path) as rig:
        (prompt,) = prompts_for(VOCABULARY, [24])
        for adapter in (first, second):
            order = replace(adapter.order, name="mine")
            run = rig.gateway.start(BASE, prompt, greedy(8, ignore_eos=True), adapter=order)
            rig.asked.append(Asked(BASE, adapter, prompt, run))
            rig.check(run)


@pytest.mark.parametrize("is_changed", [False, True])
def test_an_adapter_that_cannot_be_loaded_fails_its_requests_alone(is_changed: bool, tmp_path: Path) -> None:
    adapter, other = stored_adapter(BASE, 0), stored_adapter(BASE, 1)
    wrong = {"adapter": other.order.adapter} if is_changed else {"where": str(tmp_path / "nowhere")}
    with serving("mapped", tmp_path / "store") as rig:
        fine = [rig.ask(None), rig.ask(other if not is_changed else None)]
        broken = rig.ask(adapter, **wrong)
        failed = rig.gateway.until(RunFailed)

        assert failed.run == broken
        assert ("was changed" if is_changed else "nowhere") in failed.reason
        rig.check(*fine)
        rig.check(rig.ask(adapter))


def test_a_model_that_breaks_when_it_is_told_of_an_adapter_leaves_and_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no memory for lists of rows")

    with serving("mapped", tmp_path, BASE, OTHER) as rig:
        beside = rig.ask(None, max_tokens=30, model=OTHER)
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "add_adapter", broken)
            rig.ask(stored_adapter(BASE))
            failed = rig.gateway.until(HostingFailed)

        assert (failed.model, "no memory for lists" in failed.reason) == (BASE, True)
        rig.check(beside)
        host(rig.gateway, rig.setting, BASE)
        rig.check(rig.ask(stored_adapter(BASE)))


def test_a_retired_model_that_breaks_when_its_adapter_goes_leaves_and_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody hosts it, so nobody is told; when it comes back it is put together anew."""

    def broken(*_: object) -> None:
        raise RuntimeError("no such adapter")

    adapter = stored_adapter(BASE)
    with serving("mapped", tmp_path, BASE, OTHER) as rig:
        rig.check(rig.ask(adapter))
        rig.gateway.retire(BASE)
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "remove_adapter", broken)
            rig.gateway.forget_adapter(adapter.order.adapter)
            assert BASE not in {use.model for use in rig.ping().models if use.weights_bytes}
        assert rig.there() == {}
        rig.check(rig.ask(None, model=OTHER))
        host(rig.gateway, rig.setting, BASE)
        rig.check(rig.ask(adapter))


def test_a_model_that_breaks_when_an_adapter_in_use_is_given_up_leaves_and_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No model can step for want of KV, and one that is idle has still to forget the adapter."""

    def broken(*_: object) -> None:
        raise RuntimeError("no such adapter")

    adapter, twin = stored_adapter(BASE), BASE + TWIN
    shortages = [ModelId(BASE)] * 2  # as it is before the other one leaves, and after
    ready = StepReadiness.ready
    with serving("mapped", tmp_path, BASE, twin) as rig:
        rig.check(rig.ask(adapter, model=twin))
        run = rig.ask(adapter, max_tokens=500)
        rig.gateway.until(StepDone)
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "remove_adapter", broken)
            patch.setattr(StepReadiness, "hopeless", lambda *_: shortages.pop() if shortages else None)
            patch.setattr(StepReadiness, "ready", lambda *of: [] if shortages else ready(*of))
            failed, ended = rig.gateway.until(HostingFailed), rig.gateway.until(RunFailed)

        assert (failed.model, "no such adapter" in failed.reason) == (twin, True)
        assert (ended.run, "was evicted while it was in use" in ended.reason) == (run, True)
        assert rig.there() == {}
        rig.check(rig.ask(adapter), rig.ask(None))


def test_a_request_may_be_cancelled_while_it_waits_for_its_adapter(tmp_path: Path) -> None:
    adapter = stored_adapter(BASE)
    with serving("mapped", tmp_path) as rig:
        rig.gateway.cancel(rig.ask(adapter))
        assert [use.num_waiting for use in rig.ping().adapters] in ([], [0])
        rig.check(rig.ask(adapter))


def test_an_adapter_larger_than_all_that_is_not_promised_is_refused_with_the_numbers(tmp_path: Path) -> None:
    adapter = stored_adapter(BASE)
    with serving("mapped", tmp_path, spare_bytes=0) as rig:
        rig.ask(adapter)
        failed = rig.gateway.until(RunFailed)

        assert f"needs {adapter.layout.num_bytes} bytes of device memory" in failed.reason
        rig.check(rig.ask(None))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[LeaseRequest]:
    """All that the keeper is asked for ahead."""
    asked: list[LeaseRequest] = []
    ask = LeaseClient.request

    def note(lease_client: LeaseClient, model: OpenedAdapter, chunks: Sequence[int]) -> LeaseRequest | None:
        if (one := ask(lease_client, model, chunks)) is not None:
            asked.append(one)
        return one

    monkeypatch.setattr(LeaseClient, "request", note)
    return asked


def test_what_the_keeper_was_asked_for_goes_back_if_there_is_no_place_after_all(
    tmp_path: Path, asked: list[LeaseRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = stored_adapter(BASE)
    with serving("mapped", tmp_path) as rig:
        with monkeypatch.context() as full:
            full.setattr(Reclaimer, "place_adapter", lambda *_, **__: False)
            rig.ask(adapter)
            rig.gateway.until(RunFailed)
        assert asked, "there was room for it"
        assert all(one.connection.read() is None for one in asked), "a line stands over which it is lent"

        rig.check(rig.ask(adapter))


def test_what_the_keeper_was_asked_for_goes_back_if_a_model_breaks_that_was_to_give_way(
    tmp_path: Path, asked: list[LeaseRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base is loaded by then: a load may have the one line that stands, and nothing is asked ahead."""

    def breaks(*_: object, **__: object) -> bool:
        raise ModelBroke(ModelId(BASE), DeviceError("it does not give way"))

    with serving("mapped", tmp_path) as rig:
        rig.gateway.until(ModelLoaded)
        monkeypatch.setattr(Reclaimer, "place_adapter", breaks)
        rig.ask(stored_adapter(BASE))
        rig.gateway.until(HostingFailed)

        assert asked, "there was room for it"
        assert all(one.connection.read() is None for one in asked), "a line stands over which it is lent"


def test_what_fits_on_a_page_of_others_takes_nothing_that_models_are_promised(tmp_path: Path) -> None:
    """All that is free is what their base is still owed of its KV, and its first page has room for all."""
    adapters = [stored_adapter(BASE, seed, "attention") for seed in range(4)]
    page_bytes = SETTINGS["mapped"].page_bytes
    assert sum(one.layout.num_bytes for one in adapters) <= page_bytes
    with serving("mapped", tmp_path, spare_bytes=page_bytes) as rig:
        for adapter in adapters:
            rig.ask(adapter, is_pinned=True)
        rig.check()

        assert len(rig.there()) == len(adapters)
        assert rig.ping().num_adapter_evictions == 0


@pytest.mark.parametrize("kind", KINDS)
def test_where_not_all_fit_they_take_each_other_s_place_and_nobody_starves(kind: str, tmp_path: Path) -> None:
    """Room for half of them, and one is asked for all the time."""
    setting = SETTINGS[kind]
    base = base_of(setting)
    adapter_bytes = stored_adapter(base).layout.num_bytes
    spare_bytes = 2 * max(setting.page_bytes, adapter_bytes)
    num_there = (spare_bytes + setting.unused_bytes(base)) // adapter_bytes
    adapters = [stored_adapter(base, seed) for seed in range(2 * num_there)]
    with serving(kind, tmp_path, spare_bytes=spare_bytes) as rig:
        for at in range(max(24, 2 * len(adapters))):
            rig.ask(adapters[0 if at % 2 else at // 2 % len(adapters)], max_tokens=4 + at % 5)
        rig.ask(None)
        rig.check()

        pong = rig.ping()
        assert pong.num_adapter_evictions > 0
        assert sum(use.num_bytes > 0 for use in pong.adapters) < len(adapters)
        assert not any(use.num_waiting or use.num_running for use in pong.adapters)


def test_idle_adapters_give_way_before_weights_of_idle_models(tmp_path: Path) -> None:
    adapter = stored_adapter(BASE)
    with serving("mapped", tmp_path, BASE, OTHER, spare_bytes=adapter.layout.num_bytes + (64 << 10)) as rig:
        rig.ask(adapter)
        rig.ask(None, model=OTHER)
        rig.check()
        rig.gateway.set_hold(OTHER, Hold.RETAINED)
        assert rig.there()
        before = {use.model: use.weights_bytes for use in rig.ping().models}

        runs = [rig.ask(None, max_tokens=40) for _ in range(8)]  # more KV than is promised
        rig.check(*runs)

        assert not rig.there()
        assert {use.model: use.weights_bytes for use in rig.ping().models}[BASE] == before[BASE]


def test_a_pinned_adapter_stays(tmp_path: Path) -> None:
    adapter = stored_adapter(BASE)
    with serving("mapped", tmp_path, spare_bytes=2 * SETTINGS["mapped"].page_bytes) as rig:
        rig.ask(adapter, is_pinned=True)
        rig.check()
        rig.check(*(rig.ask(None, max_tokens=40) for _ in range(8)))

        assert rig.there() == {adapter.order.name: adapter.layout.num_bytes}


def test_an_adapter_that_was_removed_leaves_with_its_last_request_also_if_it_is_pinned(
    tmp_path: Path,
) -> None:
    removed, kept = stored_adapter(BASE, 0), stored_adapter(BASE, 1)
    with serving("mapped", tmp_path) as rig:
        rig.check(rig.ask(kept), rig.ask(removed, is_pinned=True))
        running = rig.ask(removed, max_tokens=30, is_pinned=True)
        for adapter in (removed, stored_adapter(BASE, 2)):
            rig.gateway.forget_adapter(adapter.order.adapter)
        rig.check(running)
        assert rig.there() == {kept.order.name: kept.layout.num_bytes}

        rig.check(rig.ask(removed))
        assert rig.there().keys() == {kept.order.name, removed.order.name}, "it was deployed again"
        rig.gateway.forget_adapter(removed.order.adapter)
        assert rig.there().keys() == {kept.order.name}


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_of_models_that_take_turns_come_back_with_them(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests pause with their adapter, whose room others need meanwhile."""
    monkeypatch.setattr("hearth.worker.turns.SETTLED_S", 0.0)
    setting = SETTINGS[kind]
    models = (setting.names[0], setting.names[2])
    adapters = {model: stored_adapter(model) for model in models}
    spare_bytes = max(one.layout.num_bytes for one in adapters.values()) + 2 * setting.page_bytes
    budget_bytes = least_bytes(setting, models)
    with serving(
        kind, tmp_path, *models, budget_bytes=budget_bytes, spare_bytes=spare_bytes, turns=RESTLESS
    ) as rig:
        for model in (*models, *models):
            rig.ask(adapters[model], max_tokens=20, model=model)
            rig.ask(None, max_tokens=20, model=model)
        rig.check()

        assert any(turn.ended for turn in rig.gateway.turns)


def test_a_model_that_breaks_when_its_adapter_is_back_leaves_and_another_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of two models pause with the same adapter, whose room a third needs meanwhile."""
    monkeypatch.setattr("hearth.worker.turns.SETTLED_S", 0.0)
    num_moves, num_drops = itertools.count(), itertools.count()
    move, drop = Engine.move_adapter, AdapterPieces.drop

    def breaks_once(engine: Engine, *of: Any) -> None:
        if not next(num_moves):
            raise RuntimeError("no memory for lists of rows")
        move(engine, *of)

    def leaves_another_place(pieces: AdapterPieces, adapter: AdapterId) -> int:
        num_bytes = drop(pieces, adapter)
        if not next(num_drops):  # else it would come back to where it was
            assert pieces.pool.pieces.place(AdapterId("nobody's"), [1024], 0) is not None
        return num_bytes

    monkeypatch.setattr(Engine, "move_adapter", breaks_once)
    monkeypatch.setattr(AdapterPieces, "drop", leaves_another_place)
    setting, models = SETTINGS["mapped"], (BASE, BASE + TWIN, OTHER)
    adapters = [stored_adapter(source(model)) for model in models]
    spare_bytes = max(one.layout.num_bytes for one in adapters) + 2 * setting.page_bytes
    budget_bytes = least_bytes(setting, models)
    with serving(
        "mapped", tmp_path, *models, budget_bytes=budget_bytes, spare_bytes=spare_bytes, turns=RESTLESS
    ) as rig:
        runs = [
            rig.ask(adapter, max_tokens=40, model=model)
            for model, adapter in zip(models, adapters, strict=True)
        ]
        failed = rig.gateway.until(HostingFailed)

        assert "no memory for lists" in failed.reason
        del runs[models.index(failed.model)]  # whichever came back first
        rig.check(*runs)


def test_a_model_that_breaks_when_it_gives_way_ahead_of_another_s_turn_leaves_and_that_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does that cannot forget an idle adapter, whose room first bytes of the next in line take."""
    monkeypatch.setattr("hearth.worker.turns.SETTLED_S", 0.0)

    def breaks(_: Reclaimer, model: ModelId, *__: object) -> None:
        raise ModelBroke(ModelId(BASE if model == OTHER else OTHER), RuntimeError("no such adapter"))

    budget_bytes = least_bytes(SETTINGS["mapped"], (BASE, OTHER))
    with serving(
        "mapped", tmp_path, BASE, OTHER, budget_bytes=budget_bytes, spare_bytes=0, turns=RESTLESS
    ) as rig:
        runs = {model: rig.ask(None, max_tokens=40, model=model) for model in (BASE, OTHER)}
        monkeypatch.setattr(Reclaimer, "place_front", breaks)
        failed = rig.gateway.until(HostingFailed)

        assert "no such adapter" in failed.reason
        rig.check(runs[OTHER if failed.model == BASE else BASE])


def test_an_adapter_is_told_of_with_its_rung_once(tmp_path: Path) -> None:
    adapter = stored_adapter(BASE)
    with serving("mapped", tmp_path) as rig:
        run = rig.ask(adapter)
        loaded = rig.gateway.until(AdapterLoaded)
        rig.check()

        assert (loaded.adapter, loaded.runs) == (adapter.order.adapter, (run,))
        assert loaded.num_bytes == adapter.layout.num_bytes
        assert loaded.total_s > 0


class LateCopies:
    """Copies whose last chunk is under way until `let_go`. A stream that waits for it finds it there."""

    let_go = threading.Event()
    max_batch = SingleCopies.max_batch

    def __init__(self, num_chunks: int) -> None:
        self._copies, self._num_chunks = SingleCopies(None), num_chunks
        self._late: list[Sequence[ByteCopy]] = []
        self._lock = threading.Lock()  #: else who asks second finds it neither late nor there
        self.stop, self.close = self._copies.stop, self._copies.close

    @property
    def num_queued(self) -> int:
        return self._copies.num_queued + len(self._late)

    def queue(self, chunks: Sequence[Sequence[ByteCopy]]) -> None:
        for chunk in chunks:
            if self.num_queued == self._num_chunks - 1:
                self._late.append(chunk)
            else:
                self._copies.queue([chunk])

    def wait(self, position: int) -> None:
        if position == self._num_chunks - 1:
            assert self.let_go.wait(PATIENCE_S)
            self.have_stream_wait(position)

    def has_passed(self, position: int) -> bool:
        return position < self._num_chunks - 1

    def have_stream_wait(self, position: int) -> None:
        with self._lock:
            late, self._late = self._late, []
            self._copies.queue(late)


@pytest.fixture
def late_copies(monkeypatch: pytest.MonkeyPatch) -> type[LateCopies]:
    LateCopies.let_go.set()  # for models
    monkeypatch.setattr(Loader, "new_copies", lambda loader, num_chunks: LateCopies(num_chunks))
    return LateCopies


@pytest.mark.parametrize("kind", ["mapped", "arena"])
def test_requests_start_while_the_last_bytes_of_their_adapter_are_under_way(
    kind: str, tmp_path: Path, late_copies: type[LateCopies]
) -> None:
    adapter = stored_adapter(base_of(SETTINGS[kind]))
    with serving(kind, tmp_path) as rig:
        rig.check(rig.ask(None))
        late_copies.let_go.clear()
        run = rig.ask(adapter)
        rig.check(run)
        assert not rig.gateway.adapter_loads, "how long it took is known when all of it is there"

        late_copies.let_go.set()
        loaded = rig.gateway.until(AdapterLoaded)
        assert (loaded.adapter, loaded.num_bytes) == (adapter.order.adapter, adapter.layout.num_bytes)
        rig.check(rig.ask(adapter))
        assert len(rig.gateway.adapter_loads) == 1


def _never_comes(copies: LateCopies, position: int) -> None:
    """Stand in for `LateCopies.wait` where the last chunk breaks on its way."""
    assert copies.let_go.wait(PATIENCE_S)
    raise DeviceError("out of order")


def test_an_adapter_whose_last_bytes_do_not_come_fails_its_requests_and_leaves_nothing(
    tmp_path: Path, late_copies: type[LateCopies], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = stored_adapter(BASE)
    with serving("mapped", tmp_path) as rig:
        rig.check(rig.ask(None))
        late_copies.let_go.clear()
        with monkeypatch.context() as broken:
            broken.setattr(LateCopies, "wait", _never_comes)
            run = rig.ask(adapter, max_tokens=500)
            rig.gateway.until(StepDone)
            late_copies.let_go.set()
            failed = rig.gateway.until(RunFailed)
        assert (failed.run, "out of order" in failed.reason) == (run, True)
        assert rig.there() == {}
        rig.check(rig.ask(None), rig.ask(adapter))


def test_requests_of_an_adapter_that_breaks_end_also_if_a_model_breaks_that_is_to_forget_it(
    tmp_path: Path, late_copies: type[LateCopies], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no such adapter")

    adapter, twin = stored_adapter(BASE), BASE + TWIN
    with serving("mapped", tmp_path, BASE, twin) as rig:
        rig.check(rig.ask(None))
        rig.gateway.ask(twin, [1, 2, 3], greedy(4))
        late_copies.let_go.clear()
        with monkeypatch.context() as patch:
            patch.setattr(LateCopies, "wait", _never_comes)
            patch.setattr(Engine, "remove_adapter", broken)
            run = rig.ask(adapter, max_tokens=500)
            rig.check(rig.ask(adapter, max_tokens=2, model=twin))
            late_copies.let_go.set()
            failed, ended = rig.gateway.until(HostingFailed), rig.gateway.until(RunFailed)

        assert (failed.model, "no such adapter" in failed.reason) == (twin, True)
        assert (ended.run, "out of order" in ended.reason) == (run, True)
        assert rig.there() == {}
        rig.check(rig.ask(None), rig.ask(adapter))


@pytest.mark.parametrize(
    ("kind", "is_pinned"),
    [
        ("arena", False),
        ("mapped", True),
        pytest.param("cuda-mapped", False, marks=pytest.mark.gpu),
        pytest.param("cuda-arena", True, marks=pytest.mark.gpu),
    ],
)
def test_a_model_that_comes_gets_what_it_is_promised_from_adapters(
    kind: str, is_pinned: bool, tmp_path: Path
) -> None:
    """They had its room before anybody knew of it, and are in use, or idle and pinned."""
    setting = SETTINGS[kind]
    base, other = setting.names[0], setting.names[2]
    promised_bytes = setting.promise_bytes(base) + setting.promise_bytes(other)
    adapter_bytes = stored_adapter(base).layout.num_bytes
    num_adapters = setting.promise_bytes(other) // adapter_bytes * 7 // 8
    adapters = [stored_adapter(base, seed) for seed in range(num_adapters)]
    spare_bytes = adapter_bytes + 2 * setting.page_bytes
    with serving(kind, tmp_path, base, budget_bytes=promised_bytes, spare_bytes=spare_bytes) as rig:
        for adapter in adapters:
            rig.ask(adapter, is_pinned=is_pinned)
        if is_pinned:
            rig.check()
        else:
            rig.gateway.until(AdapterLoaded)
        host(rig.gateway, setting, other)
        for _ in range(2):
            rig.ask(None, max_tokens=30, model=other)
            if not is_pinned:
                rig.ask(adapters[0])
        rig.check()


def test_a_copy_that_is_gone_fails_nobody_whose_adapter_was_found_elsewhere(tmp_path: Path) -> None:
    """Two names may mean the same bytes, whose digest is one."""
    adapter, gone = stored_adapter(BASE), str(tmp_path / "gone")
    with serving("mapped", tmp_path / "store") as rig:
        runs = [rig.ask(adapter, max_tokens=30), rig.ask(adapter, max_tokens=30)]
        rig.gateway.until(AdapterLoaded)
        runs += [rig.ask(adapter, where=gone, name="copy"), rig.ask(adapter)]
        rig.check(*runs)
        assert len(rig.gateway.adapter_loads) == 1


def test_an_adapter_that_is_replaced_is_pinned_no_more(tmp_path: Path) -> None:
    """There is not room for all of its versions, each of which is deployed under the same name."""
    versions = [stored_adapter(BASE, seed) for seed in range(6)]
    with serving("mapped", tmp_path, spare_bytes=2 * SETTINGS["mapped"].page_bytes) as rig:
        for version in versions:
            rig.check(rig.ask(version, name="mine", is_pinned=True))


def test_many_that_cannot_be_found_are_looked_up_few_at_once_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of them are cancelled before it is their turn."""
    monkeypatch.setattr("hearth.worker.adapters.MAX_FINDING", 2)
    adapter, gone = stored_adapter(BASE), str(tmp_path / "gone")
    with serving("mapped", tmp_path / "store") as rig:
        runs = [rig.ask(adapter, adapter=str(number), where=gone) for number in range(40)]
        for run in runs[1::2]:
            rig.gateway.cancel(run)
        failed: set[int] = set()
        while not failed >= set(runs[::2]):  # and of the others those that were looked up at once
            failed.add(rig.gateway.until(RunFailed).run)

        assert rig.ping().adapters == ()
        rig.check(rig.ask(adapter))

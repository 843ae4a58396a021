"""Adapters of several bases that come, go, are replaced and given up at random, in too little memory.

Every answer is that of transformers, and every request ends exactly once. Whatever comes free is overwritten
with 0xFF.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from msgspec.structs import replace as replace_struct

from hearth.core.messages import HostingFailed, RunFailed
from hearth.core.types import AdapterId, Hold
from tests.engine.harness import assert_best, assert_greedy, prompts_for
from tests.worker.harness import greedy
from tests.worker.in_process import LoopGateway
from tests.worker.stored_adapters import StoredAdapter, stored_adapter
from tests.worker.test_disturbed import SETTINGS, VOCABULARY, Setting, playing, source
from tests.worker.test_turns import RESTLESS, host, least_bytes

pytestmark = pytest.mark.slow

#: How many adapters each base has. The first two of every base have one name.
NUM_ADAPTERS = 4


@dataclass(frozen=True, slots=True)
class Asked:
    model: str
    adapter: StoredAdapter | None = field(repr=False)
    prompt: Sequence[int]
    run: int
    is_gone: bool  #: nobody can find its adapter


@dataclass(slots=True)
class Storm:
    """A gateway that deploys, removes, asks and cancels as it pleases. Mutable."""

    gateway: LoopGateway
    setting: Setting
    models: Sequence[str]
    random: random.Random
    copies: Path
    hosted: dict[str, None] = field(default_factory=dict)
    open: dict[int, Asked] = field(default_factory=dict)
    done: list[Asked] = field(default_factory=list)
    #: Where the files of an adapter lie, by digest; another place each time that it is deployed.
    places: dict[AdapterId, Path] = field(default_factory=dict)

    def blow(self, num_acts: int) -> None:
        acts = [self.ask] * 12 + [self.hear] * 4 + [self.remove] * 2 + [self.cancel] * 2
        acts += [self.change_hold, self.leave, self.ask_for_nothing]
        for _ in range(num_acts):
            self.random.choice(acts)()
        while self.open:
            self.hear()

    def ask(self) -> None:
        model, number = self.random.choice(self.models), self.random.randrange(NUM_ADAPTERS + 1)
        adapter = stored_adapter(source(model), number) if number < NUM_ADAPTERS else None
        self._ask(model, adapter)

    def ask_for_nothing(self) -> None:
        model = self.random.choice(self.models)
        self._ask(model, stored_adapter(source(model)), is_gone=True)

    def _ask(self, model: str, adapter: StoredAdapter | None, *, is_gone: bool = False) -> None:
        if model not in self.hosted:
            host(self.gateway, self.setting, model)
            self.hosted[model] = None
        # Few prompts, so that some find what another one has computed before.
        (prompt,) = prompts_for(VOCABULARY, [self.random.choice([1, 5, 21, 30])], self.random.randrange(2))
        order = None
        if adapter is not None:
            where = self.copies / "nowhere" if is_gone else self._place(adapter)
            order = replace_struct(
                adapter.order,
                adapter=AdapterId(f"gone-{len(self.done)}") if is_gone else adapter.order.adapter,
                name="mine" if int(adapter.order.name[-1]) < 2 else adapter.order.name,
                where=str(where),
            )
        max_tokens = self.random.randint(1, 30)
        run = self.gateway.start(model, prompt, greedy(max_tokens, ignore_eos=True), adapter=order)
        self.open[run] = Asked(model, adapter, prompt, run, is_gone)

    def _place(self, adapter: StoredAdapter) -> Path:
        """Return where an adapter is deployed, which may be just now."""
        digest = adapter.order.adapter
        if digest not in self.places:
            place = self.copies / f"{self.random.randrange(1 << 30):x}"
            shutil.copytree(adapter.order.where, place)
            self.places[digest] = place
        return self.places[digest]

    def remove(self) -> None:
        """Remove an adapter; its files go when the last request for it has ended."""
        used = {one.adapter.order.adapter for one in self.open.values() if one.adapter is not None}
        if self.places:
            digest = self.random.choice(list(self.places))
            self.gateway.forget_adapter(digest)
            place = self.places.pop(digest)
            if digest not in used:
                shutil.rmtree(place)

    def cancel(self) -> None:
        if self.open:
            self.gateway.cancel(self.open.pop(self.random.choice(list(self.open))).run)

    def change_hold(self) -> None:
        busy = {one.model for one in self.open.values()}
        for model in self.hosted.keys() - busy:
            self.gateway.set_hold(model, self.random.choice([Hold.RETAINED, Hold.WARM]))

    def leave(self) -> None:
        """Have a model go; requests of a busy one end with it, untold."""
        if self.hosted and self.random.random() < 0.5:
            model = self.random.choice(list(self.hosted))
            self.random.choice([self.gateway.drop, self.gateway.retire])(model)
            del self.hosted[model]
            self.open = {run: one for run, one in self.open.items() if one.model != model}

    def hear(self) -> None:
        """Wait until a request ends."""
        while self.open:
            fact = self.gateway.hear()
            assert not isinstance(fact, HostingFailed), f"{fact}"
            if isinstance(fact, RunFailed):
                failed = self.open.pop(fact.run, None)
                assert failed is None or failed.is_gone, f"{fact} {failed}"
                return
            ended = [run for run in self.open if self.gateway.answers[run].is_ended]
            if ended:
                self.done += [self.open.pop(run) for run in ended]
                return

    def check(self) -> None:
        """All that has ended says what the reference says, and nobody is left behind."""
        for one in self.done:
            assert not one.is_gone, f"{one}"
            tokens = self.gateway.answers[one.run].tokens
            if one.adapter is None:
                assert_greedy(source(one.model), one.prompt, tokens)
            else:
                logits = one.adapter.reference.logits((*one.prompt, *tokens))
                assert_best(logits, one.prompt, tokens)
        for adapter in list(self.places):
            self.gateway.forget_adapter(adapter)
        assert self.gateway.ping().adapters == (), "memory or requests of adapters that are removed"


@pytest.mark.parametrize(("kind", "seed"), [("arena", 2), ("mapped", 2), ("mapped", 3)])
def test_every_request_ends_once_and_is_right_whichever_adapters_come_and_go(
    kind: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of the bases are the same model, so that the bytes of an adapter are for both of them.

    They take turns, and beside two of them there is room for two or three adapters.
    """
    monkeypatch.setattr("hearth.worker.turns.SETTLED_S", 0.0)
    setting = SETTINGS[kind]
    models = [*setting.names[:3:2], *setting.names[4:]]
    adapter_bytes = max(stored_adapter(source(one)).layout.num_bytes for one in models)
    spare_bytes = 2 * (adapter_bytes + setting.page_bytes)
    workspace_bytes = sum(setting.promise(name).workspace_bytes for name in models)
    budget_bytes = least_bytes(setting, models) + workspace_bytes + spare_bytes
    rules = replace(RESTLESS, quantum_s=0.004, max_turn_s=0.008)
    (copies := tmp_path / "copies").mkdir()
    with playing(kind, budget_bytes, tmp_path / "store", seed, rules) as player:
        storm = Storm(player.gateway, setting, models, random.Random(seed), copies)
        storm.blow(60)
        storm.check()

        assert player.gateway.ping().num_adapter_evictions > 0
        assert storm.done

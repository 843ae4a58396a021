"""Answers under memory that is taken, moved, shared and given back all the time, against undisturbed ones.

Models start, idle, are retired, come back, give up tails, grow and shrink their KV and are preempted, within
budgets that force all of it, and whatever comes free is overwritten with 0xFF.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from bench.host_pages import HostPages
from hearth.core.config import EngineConfig
from hearth.core.messages import StepDone
from hearth.core.types import Hold, ModelId, SamplingTable
from hearth.engine.assemble import ModelSpec, block_bytes, tables_bytes, workspace_bytes
from hearth.engine.pending_step import PendingStep
from hearth.memory.arena import ArenaPool
from hearth.memory.cuda_pages import CudaPages
from hearth.memory.pool import EvictionTermsOf, Pool
from hearth.memory.vmm import MappedPool
from hearth.models.layout import ALIGNMENT_BYTES
from hearth.policy.fleet.profile import Promise
from hearth.policy.turns.turn_policy import TurnRules
from hearth.store.format.manifest import Manifest, read_manifest
from tests.engine.harness import assert_greedy, prompts_for
from tests.models.zoo import WIDE
from tests.store.stored import converted, tiers_at
from tests.worker.harness import greedy, limits_of
from tests.worker.in_process import Answer, LoopGateway, NewPool, working_in_process

pytestmark = pytest.mark.slow

PlaceTable = Callable[[ModelId, SamplingTable, int], torch.Tensor | None]
CONTEXT = 64
CONFIG = EngineConfig(max_batch_tokens=32, max_seqs=12, max_step=-1, block_tokens=4)
LIMITS = limits_of(CONFIG)
VOCABULARY = 160
TWIN = "-twin"
#: Penalties and biases that have a table and leave all logits as they are.
NO_EFFECT: dict[str, object] = {"frequency_penalty": 1e-30, "logit_bias": {3: 0.0}}
PENALISED_AND_BIASED = greedy(
    36, ignore_eos=True, frequency_penalty=0.7, repetition_penalty=1.3, logit_bias={7: 2.0}
)


def wiped(memory: torch.Tensor) -> None:
    memory.fill_(0xFF)


def source(name: str) -> str:
    """The same model may be deployed under several names."""
    return name.removesuffix(TWIN)


@cache
def _manifest(where: Path) -> Manifest:
    """A manifest that nobody changes, read once: promises ask for it again and again."""
    return read_manifest(where)


@dataclass(frozen=True, slots=True)
class Setting:
    """Models and a pool with room for a few pages more than they are promised."""

    names: tuple[str, ...]
    page_bytes: int
    device: torch.device
    new_pool: Callable[[Setting, int, EvictionTermsOf], Pool]

    @property
    def is_arena(self) -> bool:
        return self.new_pool is arena

    def where(self, name: str) -> Path:
        return converted(source(name), chunk_bytes=self.page_bytes)

    def manifest(self, name: str) -> Manifest:
        return _manifest(self.where(name))

    def spec(self, name: str) -> ModelSpec:
        return ModelSpec(self.manifest(name).arch, torch.float32, CONTEXT, LIMITS, frozenset())

    def block_bytes(self, name: str) -> int:
        return block_bytes(self.spec(name))

    def tables_bytes(self, name: str) -> int:
        """What its engine always has."""
        unit_bytes = ALIGNMENT_BYTES if self.is_arena else self.page_bytes
        return -(-tables_bytes(self.spec(name)) // unit_bytes) * unit_bytes

    def floor_bytes(self, name: str) -> int:
        """One full context, and the sink."""
        return (1 + CONTEXT // CONFIG.block_tokens) * self.block_bytes(name)

    def promise_bytes(self, name: str) -> int:
        """As the gateway would count it."""
        promise = self.promise(name)
        return promise.own_bytes + promise.workspace_bytes

    def promise(self, name: str) -> Promise:
        """With what the seams of KV extents may cost in an arena."""
        own_bytes = self._rounded(self.manifest(name).num_bytes)
        own_bytes += self._rounded(self.floor_bytes(name)) + self.tables_bytes(name)
        own_bytes += 16 * self.block_bytes(name) if self.is_arena else 0
        return Promise(
            own_bytes,
            workspace_bytes=self._rounded(workspace_bytes(self.spec(name), self.device)),
            standing_bytes=self._rounded(self.block_bytes(name)) + self.tables_bytes(name),
        )

    def unused_bytes(self, name: str) -> int:
        """What of a promise is for rounding and seams, and free for others in an arena."""
        if not self.is_arena:
            return 0
        used_bytes = self.manifest(name).num_bytes + self.floor_bytes(name)
        used_bytes += self.tables_bytes(name) + workspace_bytes(self.spec(name), self.device)
        return self.promise_bytes(name) - used_bytes

    def _rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self.page_bytes) * self.page_bytes


def arena(setting: Setting, budget_bytes: int, eviction_terms: EvictionTermsOf) -> Pool:
    return ArenaPool(setting.device, budget_bytes, eviction_terms, wipe=wiped)


def mapped(setting: Setting, budget_bytes: int, eviction_terms: EvictionTermsOf) -> Pool:
    page_bytes = setting.page_bytes
    if setting.device.type == "cuda":
        return MappedPool(CudaPages(setting.device, budget_bytes, page_bytes), eviction_terms, wipe=wiped)
    return MappedPool(HostPages(budget_bytes // page_bytes, page_bytes), eviction_terms, wipe=wiped)


CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SMALL = ("llama-gqa", "opt-pre", "qwen3", "neox-parallel", "llama-gqa" + TWIN)
SETTINGS = {
    "arena": Setting(SMALL, 64 << 10, CPU, arena),
    "mapped": Setting(SMALL, 64 << 10, CPU, mapped),
    "mapped-finely": Setting(SMALL, 16 << 10, CPU, mapped),
    "cuda-mapped": Setting(tuple(WIDE), 2 << 20, CUDA, mapped),
    "cuda-arena": Setting(tuple(WIDE), 2 << 20, CUDA, arena),
}
KINDS = [
    "arena",
    "mapped",
    *(pytest.param(kind, marks=pytest.mark.gpu) for kind in ("cuda-mapped", "cuda-arena")),
]


@dataclass(slots=True)
class Asked:
    name: str
    prompt: list[int]
    run: int


@dataclass(slots=True)
class Player:
    """A gateway that promises no more than there is, and otherwise does as it pleases. Mutable."""

    gateway: LoopGateway
    setting: Setting
    budget_bytes: int
    random: random.Random
    hosted: dict[str, None] = field(default_factory=dict)
    open: list[Asked] = field(default_factory=list)
    done: list[Asked] = field(default_factory=list)

    def play(self, num_acts: int) -> None:
        acts = [self.ask] * 6 + [self.wait] * 2
        acts += [self.lower_holds, self.retire, self.drop, self.cancel, self.change_its_mind]
        for _ in range(num_acts):
            self.random.choice(acts)()
        self.finish()

    def ask(self) -> None:
        name = self.random.choice(self.setting.names)
        self.host(name)
        (prompt,) = prompts_for(VOCABULARY, [self.random.randint(1, 24)], self.random.randrange(1 << 30))
        # Some have tables that change nothing, unless they hold what they should not.
        tables = {table: none for table, none in NO_EFFECT.items() if self.random.random() < 0.25}
        run = self.gateway.start(name, prompt, greedy(self.random.randint(4, 36), ignore_eos=True, **tables))
        self.open.append(Asked(name, prompt, run))

    def host(self, name: str) -> None:
        if name in self.hosted:
            return
        setting = self.setting
        while sum(map(setting.promise_bytes, [*self.hosted, name])) > self.budget_bytes:
            if not self.idle():
                self.wait()
            for other in self.idle()[:1]:
                self.gateway.retire(other)
                del self.hosted[other]
        floor_bytes = setting.floor_bytes(name)
        self.gateway.host(
            name,
            setting.where(name),
            kv_floor_bytes=floor_bytes,
            max_kv_bytes=12 * floor_bytes,
            max_context=CONTEXT,
        )
        self.hosted[name] = None

    def wait(self) -> None:
        """For one of them to end."""
        if self.open:
            self.gateway.until_ended(self.open[0].run)
        self.done += [one for one in self.open if self.gateway.answers[one.run].is_ended]
        self.open = [one for one in self.open if not self.gateway.answers[one.run].is_ended]

    def idle(self) -> list[str]:
        busy = {one.name for one in self.open}
        names = [name for name in self.hosted if name not in busy]
        self.random.shuffle(names)
        return names

    def lower_holds(self) -> None:
        for name in self.idle():
            self.gateway.set_hold(name, self.random.choice([Hold.RETAINED, Hold.WARM]))

    def retire(self) -> None:
        for name in self.idle()[:1]:
            self.gateway.retire(name)
            del self.hosted[name]

    def drop(self) -> None:
        if self.random.random() < 0.3:
            for name in self.idle()[:1]:
                self.gateway.drop(name)
                del self.hosted[name]

    def cancel(self) -> None:
        if self.open:
            one = self.open.pop(self.random.randrange(len(self.open)))
            self.gateway.cancel(one.run)

    def change_its_mind(self) -> None:
        """A model is retired while it is looked for, or loaded."""
        names = [name for name in self.setting.names if name not in self.hosted]
        if names:
            self.host(name := self.random.choice(names))
            if self.random.random() < 0.5:
                self.gateway.ping()
            self.gateway.retire(name)
            del self.hosted[name]

    def finish(self) -> None:
        while self.open:
            self.wait()


@contextmanager
def playing(
    kind: str, budget_bytes: int, root: Path, seed: int, turns: TurnRules | None = None
) -> Iterator[Player]:
    setting = SETTINGS[kind]
    new_pool: NewPool = partial(setting.new_pool, setting, budget_bytes)
    with (
        tiers_at(root, num_cells=(16 << 20) // max(setting.page_bytes, 256 << 10)) as tiers,
        working_in_process(tiers, new_pool, setting.device, CONFIG, turns=turns) as gateway,
    ):
        yield Player(gateway, setting, budget_bytes, random.Random(seed))
        gateway.ping()
        assert isinstance(gateway.pool, ArenaPool | MappedPool)
        gateway.pool.check()  # the worker sleeps


@pytest.mark.parametrize("kind", KINDS)
def test_every_answer_is_right_however_memory_is_shared_out(kind: str, tmp_path: Path) -> None:
    setting = SETTINGS[kind]
    budget_bytes = max(map(setting.promise_bytes, setting.names)) + 6 * setting.page_bytes
    with playing(kind, budget_bytes, tmp_path, seed=0) as player:
        player.play(60)
        gateway = player.gateway

        for one in player.done:
            assert_greedy(source(one.name), one.prompt, gateway.answers[one.run].tokens)
        assert any(load.reused_bytes and load.rungs for load in gateway.loads), "no tail was ever taken"


@pytest.mark.parametrize("kind", KINDS)
def test_several_models_compute_side_by_side_and_grow_into_each_others_spare_memory(
    kind: str, tmp_path: Path
) -> None:
    setting = SETTINGS[kind]
    names = setting.names[:2]
    budget_bytes = sum(map(setting.promise_bytes, names))
    with playing(kind, budget_bytes, tmp_path, seed=0) as player:
        for name in names:
            player.host(name)
        prompts = prompts_for(VOCABULARY, [20] * 6, seed=1)
        asked = []
        for name in (names[0], names[0], *names):
            for prompt in prompts:
                asked.append(
                    Asked(name, prompt, player.gateway.start(name, prompt, greedy(40, ignore_eos=True)))
                )
        player.gateway.until_ended(*(one.run for one in asked))

        for one in asked:
            assert_greedy(source(one.name), one.prompt, player.gateway.answers[one.run].tokens)
        if setting.device.type == "cpu":  # the workspace that models share on a GPU leaves room for all of it
            assert any(player.gateway.answers[one.run].num_admissions > 1 for one in asked), (
                "nobody was preempted"
            )


def test_a_model_tells_its_tokens_while_the_device_computes_the_first_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PendingStep, "is_done", False)  # as on a device that is slower than the host
    setting = SETTINGS["arena"]
    running, other = setting.names[:2]
    with playing("arena", sum(map(setting.promise_bytes, (running, other))), tmp_path, seed=0) as player:
        gateway = player.gateway
        for name in (running, other):
            player.host(name)
            gateway.ask(name, [5, 6, 7], greedy(4, ignore_eos=True))
        long = gateway.start(running, [5, 6, 7], greedy(50, ignore_eos=True))
        while not gateway.answers[long].tokens:
            gateway.hear()
        short = gateway.start(other, [7, 8, 9], greedy(4, ignore_eos=True))
        while not gateway.answers[short].num_admissions:
            gateway.hear()
        behind = gateway.until(StepDone)

        assert (behind.model, len(behind.tokens)) == (running, 1)
        gateway.until_ended(long, short)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_plans_give_the_same_bits_whatever_happens_to_the_memory(kind: str, tmp_path: Path) -> None:
    """One request at a time and no prefix twice: the plans are the same, only the memory is not."""
    setting = SETTINGS[kind]
    names, promises = setting.names, [setting.promise_bytes(name) for name in setting.names]
    order = [*names, *names[:2], names[0], *reversed(names), names[1]]
    prompts = prompts_for(VOCABULARY, [5 + at for at in range(len(order))], seed=2)
    told: list[list[Answer]] = []
    reused: list[int] = []
    for budget_bytes in (2 * sum(promises), max(promises) + 4 * setting.page_bytes):
        with playing(kind, budget_bytes, tmp_path / str(budget_bytes), seed=0) as player:
            answers = []
            for name, prompt in zip(order, prompts, strict=True):
                player.host(name)
                changes = {"frequency_penalty": 0.5, "logit_bias": {7: 1.0}} if len(prompt) % 2 else {}
                sampling = greedy(12, ignore_eos=True, logprobs=3, **changes)
                answers.append(player.gateway.ask(name, prompt, sampling))
            told.append(answers)
            reused.append(sum(load.reused_bytes > 0 for load in player.gateway.loads))

    undisturbed, disturbed = told
    assert reused[1] > 0, "nothing was ever left of a retired model"
    assert [one.tokens for one in disturbed] == [one.tokens for one in undisturbed]
    assert [one.logprobs for one in disturbed] == [one.logprobs for one in undisturbed]


@pytest.mark.parametrize("kind", KINDS)
def test_tables_grow_in_the_pool_with_those_who_need_them_and_keep_what_they_hold(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = SETTINGS[kind]
    name = setting.names[0]
    always_bytes = setting.tables_bytes(name)
    prompts = prompts_for(VOCABULARY, [4] * 10, seed=4)
    with playing(kind, 3 * setting.promise_bytes(name), tmp_path, seed=0) as player:
        gateway = player.gateway
        player.host(name)
        alone = [gateway.ask(name, prompt, PENALISED_AND_BIASED) for prompt in prompts]
        pool, placed_bytes = gateway.pool, dict[SamplingTable, list[int]]()
        assert pool is not None

        def watched(place: PlaceTable, model: ModelId, table: SamplingTable, num_bytes: int) -> object:
            placed_bytes.setdefault(table, []).append(num_bytes)
            return place(model, table, num_bytes)

        monkeypatch.setattr(pool.tables, "place", partial(watched, pool.tables.place))
        runs = [gateway.start(name, prompts[0], PENALISED_AND_BIASED)]
        gateway.until(StepDone)
        runs += [gateway.start(name, prompt, PENALISED_AND_BIASED) for prompt in prompts[1:]]
        together = gateway.until_ended(*runs)

        assert [one.tokens for one in together] == [one.tokens for one in alone]
        assert placed_bytes.keys() == set(SamplingTable)
        for few_bytes, *_, many_bytes in placed_bytes.values():
            assert few_bytes < many_bytes
        told = gateway.ping()
        assert (told.models[0].tables_bytes, told.fallbacks["tables"]) == (always_bytes, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_tables_are_the_pools_while_they_are_used_and_answer_as_they_do_outside_of_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = SETTINGS[kind]
    name = setting.names[0]
    always_bytes = setting.tables_bytes(name)
    (prompt,) = prompts_for(VOCABULARY, [20], seed=3)
    with playing(kind, 2 * setting.promise_bytes(name), tmp_path, seed=0) as player:
        gateway = player.gateway
        player.host(name)
        pool, held_bytes = gateway.pool, []
        assert pool is not None

        def watched(place: PlaceTable, model: ModelId, table: SamplingTable, num_bytes: int) -> object:
            memory = place(model, table, num_bytes)
            held_bytes.extend(holding.tables_bytes for holding in pool.usage().holdings)
            return memory

        monkeypatch.setattr(pool.tables, "place", partial(watched, pool.tables.place))
        inside = gateway.ask(name, prompt, PENALISED_AND_BIASED)
        first_bytes, both_bytes = held_bytes
        assert always_bytes < first_bytes < both_bytes
        told = gateway.ping()
        assert (told.models[0].tables_bytes, told.fallbacks["tables"]) == (always_bytes, 0)

        monkeypatch.setattr(pool.tables, "place", lambda model, table, num_bytes: None)
        outside = gateway.ask(name, prompt, PENALISED_AND_BIASED)

        assert inside.tokens == outside.tokens
        assert inside.tokens != gateway.ask(name, prompt, greedy(36, ignore_eos=True)).tokens
        told = gateway.ping()
        assert (told.models[0].tables_bytes, told.fallbacks["tables"]) == (always_bytes, 2)

"""Models that do not fit together take turns on a live worker, and nobody can tell by their answers.

The worker's own policy decides, by rules that have it switch as often as it can: then every step may be
followed by a pause. Whatever comes free is overwritten with 0xFF.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace as replace_struct
from tokenizers import Tokenizer as Backend

from bench.host_pages import HostPages
from hearth.core.errors import HearthError
from hearth.core.messages import HostingFailed, ModelLoaded, StartRequest
from hearth.core.types import GuideSpec, Hold, ModelId, SamplingParams, TurnEnd
from hearth.engine.engine import Engine, StepOutcome
from hearth.engine.intake import Intake
from hearth.memory.pool import EvictionTermsOf, Pool, Space
from hearth.memory.vmm import MappedPool
from hearth.policy.batch.plan import EngineRequest
from hearth.policy.fleet.profile import Promise
from hearth.policy.turns.turn_policy import TurnChange, TurnPolicy, TurnRules, WeightsView
from hearth.store.format.convert import convert
from hearth.store.format.manifest import read_manifest
from hearth.store.transfer.lease_client import LeaseClient, OpenedModel
from hearth.store.transfer.lease_server import LeaseServer
from hearth.store.transfer.transfer import Loader
from hearth.worker.hosted_model import HostedModel
from hearth.worker.hosting_spec import HostingSpec
from hearth.worker.prefetch import ModelPrefetch
from hearth.worker.reclaimer import Reclaimer
from hearth.worker.runs import _checked
from hearth.worker.runtime import HostingResources
from tests.engine.harness import assert_greedy, prompts_for
from tests.models.zoo import save, tiny
from tests.store.stored import PATIENCE_S, gated_tiers, tiers_at
from tests.text.conftest import byte_level
from tests.worker.harness import folder, greedy, host_order
from tests.worker.in_process import Answer, LoopGateway, working_in_process
from tests.worker.test_disturbed import (
    CONFIG,
    CONTEXT,
    KINDS,
    SETTINGS,
    VOCABULARY,
    Player,
    Setting,
    playing,
    source,
    wiped,
)

pytestmark = pytest.mark.slow

WeightsOf = Callable[[ModelId], WeightsView]
#: A turn may end after each step, whoever else waits.
RESTLESS = TurnRules(min_turn_s=0.0, quantum_s=0.0, max_turn_s=0.0, growth=1.0, slack_reloads=0.0, lead_s=1e9)


@pytest.fixture(autouse=True)
def _decide_after_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hearth.worker.turns.SETTLED_S", 0.0)


def promises_of(setting: Setting, names: Sequence[str]) -> dict[str, Promise]:
    """As the worker books them: with the workspace of each where the pool is an arena."""
    promises = {name: setting.promise(name) for name in names}
    return {name: one.unshared if setting.is_arena else one for name, one in promises.items()}


def least_bytes(setting: Setting, names: Sequence[str]) -> int:
    """What it takes to host these, and to have the largest of them in turn."""
    promises = promises_of(setting, names).values()
    own_bytes = max(one.own_bytes - one.standing_bytes for one in promises)
    own_bytes += sum(one.standing_bytes for one in promises)
    return own_bytes + max(one.workspace_bytes for one in promises)


def host(gateway: LoopGateway, setting: Setting, *names: str, is_ahead: bool = False) -> None:
    for name in names:
        promise = setting.promise(name)
        floor_bytes = setting.floor_bytes(name)
        gateway.host(
            name,
            setting.where(name),
            kv_floor_bytes=floor_bytes,
            max_kv_bytes=12 * floor_bytes,
            max_context=CONTEXT,
            own_bytes=promise.own_bytes,
            workspace_bytes=promise.workspace_bytes,
            standing_bytes=promise.standing_bytes,
            is_ahead=is_ahead,
        )


@contextmanager
def taking_turns(
    kind: str, root: Path, names: Sequence[str], spare_bytes: int = 0, rules: TurnRules = RESTLESS
) -> Iterator[LoopGateway]:
    """A worker that hosts all of these, with room for one of them in turn and something to spare."""
    setting = SETTINGS[kind]
    budget_bytes = least_bytes(setting, names) + spare_bytes
    with playing(kind, budget_bytes, root, seed=0, turns=rules) as player:
        host(player.gateway, setting, *names)
        yield player.gateway


def num_pauses(gateway: LoopGateway) -> int:
    return sum(turn.ended in (TurnEnd.AHEAD, TurnEnd.TIME) for turn in gateway.turns)


VARIED = [
    greedy(20, ignore_eos=True, logprobs=3),
    greedy(20, ignore_eos=True, logprobs=3, frequency_penalty=0.7, repetition_penalty=1.3),
    greedy(20, ignore_eos=True, logprobs=3, logit_bias={7: 2.0}, presence_penalty=0.4),
    SamplingParams(
        seed=11, temperature=0.9, top_k=40, top_p=0.95, max_tokens=20, ignore_eos=True, logprobs=3
    ),
]


@pytest.mark.parametrize("kind", KINDS)
def test_answers_of_paused_requests_whose_kv_survived_are_the_same_bits(kind: str, tmp_path: Path) -> None:
    """One request of each model at a time: the plans are the same, only the pauses are not."""
    setting = SETTINGS[kind]
    names = setting.names[:3]
    prompts = prompts_for(VOCABULARY, [5 + at for at in range(len(VARIED) * len(names))], seed=4)
    asked = list(zip(itertools.product(VARIED, names), prompts, strict=True))

    alone: list[Answer] = []
    with playing(kind, 4 * least_bytes(setting, names), tmp_path / "alone", seed=0) as player:
        for (sampling, name), prompt in asked:
            player.host(name)
            alone.append(player.gateway.ask(name, prompt, sampling))

    paused: list[Answer] = []
    # So that KV may stay, also beside tables.
    spare_bytes = sum(map(setting.floor_bytes, names)) + 8 * setting.page_bytes
    with taking_turns(kind, tmp_path / "turns", names, spare_bytes) as gateway:
        for _, group in itertools.groupby(asked, key=lambda one: one[0][0]):
            runs = [gateway.start(name, prompt, sampling) for (sampling, name), prompt in group]
            paused += gateway.until_ended(*runs)
        assert num_pauses(gateway) > len(asked), "hardly anybody was paused"
        assert any(load.reused_bytes and load.rungs for load in gateway.loads), "no tail was ever taken"

    assert [one.num_admissions for one in paused] == [1] * len(asked), "KV did not survive"
    assert [one.tokens for one in paused] == [one.tokens for one in alone]
    assert [one.logprobs for one in paused] == [one.logprobs for one in alone]


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_right_where_kv_was_taken_and_computed_again(kind: str, tmp_path: Path) -> None:
    """Several requests of each model, with as little memory as may be."""
    setting = SETTINGS[kind]
    names = setting.names[:3]
    # What models of large pages keep is far more than they use, and KV has to fill all of it.
    num_times = 3 if setting.page_bytes > 1 << 20 else 1
    prompts = prompts_for(VOCABULARY, [24, 9, 17, 30] * num_times, seed=6)
    with taking_turns(kind, tmp_path, names) as gateway:
        asked = [
            (name, prompt, gateway.start(name, prompt, greedy(24, ignore_eos=True)))
            for prompt, name in itertools.product(prompts, names)
        ]
        answers = gateway.until_ended(*(run for _, _, run in asked))

        assert max(answer.num_admissions for answer in answers) > 1, "no KV was ever taken"
        check_promises(gateway, setting, names)
    for name, prompt, run in asked:
        assert len(gateway.answers[run].tokens) == 24
        assert_greedy(source(name), prompt, gateway.answers[run].tokens)


def test_turns_are_not_decided_anew_for_every_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hearth.worker.turns.MAX_SETTLED_S", 1e6)
    name, times = SETTINGS["mapped"].names[0], list[float]()
    decide = TurnPolicy.decide

    def counted(policy: TurnPolicy, now_s: float, weights_of: WeightsOf) -> list[TurnChange]:
        times.append(now_s)
        return decide(policy, now_s, weights_of)

    monkeypatch.setattr(TurnPolicy, "decide", counted)
    with taking_turns("mapped", tmp_path, [name]) as gateway:
        gateway.ask(name, [1, 2, 3], greedy(4, ignore_eos=True))
        num_before = len(times)
        gateway.ask(name, [4, 5, 6], greedy(40, ignore_eos=True))

    assert len(times) - num_before < 20


def check_promises(gateway: LoopGateway, setting: Setting, names: Sequence[str]) -> None:
    """What was promised at any time, by what the worker told of turns, was within the budget."""
    promises, in_turn = promises_of(setting, names), set[str]()
    assert gateway.pool is not None
    for turn in gateway.turns:
        (in_turn.discard if turn.ended else in_turn.add)(turn.model)
        own_bytes = [
            one.own_bytes if name in in_turn else one.standing_bytes for name, one in promises.items()
        ]
        workspace_bytes = max(one.workspace_bytes for one in promises.values())
        assert sum(own_bytes) + workspace_bytes <= gateway.pool.budget_bytes, f"{in_turn=}"


@pytest.mark.parametrize("kind", ["arena", "mapped"])
def test_a_grammar_goes_on_after_each_pause(kind: str, tmp_path: Path) -> None:
    save(tiny("llama-gqa", vocab_size=640), tmp_path / "source")
    byte_level().save(str(tmp_path / "source" / "tokenizer.json"))
    convert(tmp_path / "source", tmp_path / "spoken", chunk_bytes=64 << 10)
    backend = Backend.from_file(str(tmp_path / "spoken" / "tokenizer.json"))
    setting, name = SETTINGS[kind], SETTINGS[kind].names[0]
    schema = json.dumps({"enum": ["a rather long word", "another one that is longer"]})
    with taking_turns(kind, tmp_path / "store", [name], 4 * setting.promise_bytes(name)) as gateway:
        budget_bytes = gateway.pool.budget_bytes if gateway.pool is not None else 0
        gateway.host(
            "spoken",
            tmp_path / "spoken",
            kv_floor_bytes=setting.floor_bytes(name),
            max_kv_bytes=setting.floor_bytes(name),
            eos_ids=(backend.token_to_id("</s>"),),
            own_bytes=budget_bytes
            - setting.promise(name).workspace_bytes
            - setting.promise(name).standing_bytes,
        )
        guided = gateway.start("spoken", [3, 14, 15], greedy(40), GuideSpec("json_schema", schema))
        gateway.until_ended(gateway.start(name, [1, 2, 3], greedy(40, ignore_eos=True)), guided)

        assert num_pauses(gateway) > 0
    assert backend.decode(gateway.answers[guided].tokens) in json.dumps(json.loads(schema)["enum"])


def test_nobody_waits_for_the_grammar_of_a_request_to_be_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It wants its turn when it can run."""
    is_compiled, setting = threading.Event(), SETTINGS["arena"]
    first, second = setting.names[:2]

    def slowly_checked(intake: Intake, order: StartRequest) -> EngineRequest | HearthError:
        if order.guide is not None:
            is_compiled.wait(PATIENCE_S)
        return _checked(intake, replace_struct(order, guide=None))

    monkeypatch.setattr("hearth.worker.runs._checked", slowly_checked)
    with taking_turns("arena", tmp_path, [first, second], rules=PATIENT) as gateway:
        guided = gateway.start(first, [1, 2, 3], greedy(8, ignore_eos=True), GuideSpec("regex", "x*"))
        while ModelId(first) not in gateway.in_turn:
            gateway.hear()
        gateway.ask(second, [4, 5, 6], LONG)
        assert not gateway.answers[guided].tokens

        is_compiled.set()
        gateway.until_ended(guided)
        assert_greedy(source(first), [1, 2, 3], gateway.answers[guided].tokens)


@dataclass(slots=True)
class TurnPlayer(Player):
    """A gateway that hosts more than there is room for. Mutable."""

    def host(self, name: str) -> None:
        if name not in self.hosted:
            host(self.gateway, self.setting, name)
            self.hosted[name] = None

    def lower_holds(self) -> None:
        """Some are pinned for a moment."""
        Player.lower_holds(self)
        if self.hosted:
            name = self.random.choice(list(self.hosted))
            self.gateway.set_hold(name, Hold.PINNED)
            self.gateway.ping()
            self.gateway.set_hold(name, Hold.WARM)

    def drop(self) -> None:
        """Also a busy one: its requests end with it, untold."""
        if self.hosted and self.random.random() < 0.3:
            name = self.random.choice(list(self.hosted))
            (self.gateway.drop if self.random.random() < 0.5 else self.gateway.retire)(name)
            del self.hosted[name]
            self.open = [one for one in self.open if one.name != name]


@pytest.mark.parametrize(
    ("kind", "quantum_s"),
    [
        ("arena", 0.0),
        ("mapped", 0.004),
        pytest.param("cuda-mapped", 0.0, marks=pytest.mark.gpu),
        pytest.param("cuda-arena", 0.004, marks=pytest.mark.gpu),
    ],
)
def test_every_answer_is_right_whoever_comes_goes_and_takes_turns(
    kind: str, quantum_s: float, tmp_path: Path
) -> None:
    setting, names = SETTINGS[kind], SETTINGS[kind].names
    budget_bytes = least_bytes(setting, names)
    rules = replace(RESTLESS, quantum_s=quantum_s, max_turn_s=2 * quantum_s)
    with playing(kind, budget_bytes, tmp_path, seed=0, turns=rules) as quiet:
        player = TurnPlayer(quiet.gateway, setting, budget_bytes, quiet.random)
        player.play(60)

        assert num_pauses(player.gateway) > 10
        for one in player.done:
            assert_greedy(source(one.name), one.prompt, player.gateway.answers[one.run].tokens)
        assert_empty_when_dropped(player.gateway, *names)


def until_paused(gateway: LoopGateway, name: str, run: int) -> None:
    """Until a request is in the midst of its answer, and its model is not in turn."""
    while ModelId(name) in gateway.in_turn or not gateway.answers[run].tokens:
        gateway.hear()
    assert not gateway.answers[run].is_ended


#: A turn lasts until its model is idle, unless another has waited for long.
PATIENT = replace(RESTLESS, quantum_s=1e9, max_turn_s=1e9, slack_reloads=1e9)
LONG = greedy(CONTEXT - 8, ignore_eos=True)


@pytest.mark.parametrize("kind", ["arena", "mapped"])
def test_a_paused_request_can_be_cancelled_and_leaves_nothing(kind: str, tmp_path: Path) -> None:
    first, second = SETTINGS[kind].names[:2]
    with taking_turns(kind, tmp_path, [first, second]) as gateway:
        sampling = greedy(CONTEXT - 8, ignore_eos=True, frequency_penalty=0.7)
        paused = gateway.start(first, [1, 2, 3], sampling)
        other = gateway.start(second, [4, 5, 6], LONG)
        until_paused(gateway, first, paused)
        gateway.cancel(paused)
        gateway.until_ended(other)

        use = {one.model: one for one in gateway.ping().models}[ModelId(first)]
        assert (use.num_running, use.num_waiting, use.kv_used_blocks) == (0, 0, 0)
        assert use.tables_bytes == SETTINGS[kind].tables_bytes(first), "its sampler has none any more"
        assert use.hold is Hold.WARM
        assert not gateway.answers[paused].is_ended
        assert_empty_when_dropped(gateway, first, second)


@pytest.mark.parametrize("kind", ["arena", "mapped"])
def test_a_model_that_is_always_busy_and_one_that_waits_hold_up_nobody(kind: str, tmp_path: Path) -> None:
    """Requests follow each other on one model, another has no room beside it, and a third has."""
    setting = SETTINGS[kind]
    turn_bytes = {
        name: one.own_bytes - one.standing_bytes for name, one in promises_of(setting, setting.names).items()
    }
    small, *_, busy, waiter = sorted(turn_bytes, key=lambda name: turn_bytes[name])
    assert turn_bytes[small] < turn_bytes[busy]
    rules = TurnRules(min_turn_s=0.01, quantum_s=0.02, max_turn_s=0.1)
    is_small_beside = False
    with taking_turns(kind, tmp_path, [waiter, busy, small], turn_bytes[small], rules) as gateway:
        gateway.ask(small, [4, 5, 6], greedy(1))  # from here on it keeps its tables and its sink
        stream = [gateway.start(busy, [1, 2, 3], LONG)]
        while not gateway.answers[stream[0]].tokens:
            gateway.hear()
        others = [gateway.start(name, [4, 5, 6], LONG) for name in (waiter, small)]
        while not all(gateway.answers[run].is_ended for run in others):
            if len(gateway.answers[stream[-1]].tokens) > 20:
                stream.append(gateway.start(busy, [1, 2, 3], LONG))
            gateway.hear()
            assert not {ModelId(busy), ModelId(waiter)} <= gateway.in_turn.keys()
            is_small_beside |= (
                len({ModelId(small), ModelId(busy), ModelId(waiter)} & gateway.in_turn.keys()) == 2
            )
        answers = gateway.until_ended(*stream, *others)
    assert is_small_beside
    assert all(len(answer.tokens) == LONG.max_tokens for answer in answers)


def assert_empty_when_dropped(gateway: LoopGateway, *names: str) -> None:
    for name in names:
        gateway.drop(name)
    pong = gateway.ping()
    assert (pong.free_bytes, pong.models) == (pong.budget_bytes, ())


@pytest.mark.parametrize(("kind", "how"), [("arena", "drop"), ("mapped", "retire")])
def test_a_paused_model_may_go_and_come_back(kind: str, how: str, tmp_path: Path) -> None:
    setting = SETTINGS[kind]
    first, second = setting.names[:2]
    with taking_turns(kind, tmp_path, [first, second]) as gateway:
        run = gateway.start(first, [1, 2, 3], LONG)
        other = gateway.start(second, [4, 5, 6], LONG)
        until_paused(gateway, first, run)
        (gateway.drop if how == "drop" else gateway.retire)(first)
        host(gateway, setting, first)
        again = gateway.start(first, [1, 2, 3], LONG)
        gateway.until_ended(other, again)

        assert_greedy(source(first), [1, 2, 3], gateway.answers[again].tokens)
        assert_greedy(source(second), [4, 5, 6], gateway.answers[other].tokens)
        assert_empty_when_dropped(gateway, first, second)


@pytest.mark.parametrize("kind", ["arena", "mapped"])
def test_a_model_that_breaks_at_the_end_of_its_turn_leaves_and_others_go_on(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = SETTINGS[kind]
    first, second = setting.names[:2]
    flush, broken = Engine.flush, read_manifest(setting.where(first)).arch

    def breaks(engine: Engine) -> StepOutcome:
        if engine.runner.layers.decoder.arch == broken:
            raise ValueError("something is off")
        return flush(engine)

    monkeypatch.setattr(Engine, "flush", breaks)
    with taking_turns(kind, tmp_path, [first, second]) as gateway:
        gateway.start(first, [1, 2, 3], LONG)
        other = gateway.start(second, [4, 5, 6], LONG)
        failed = gateway.until(HostingFailed)
        gateway.until_ended(other)

        assert (failed.model, failed.label) == (first, "engine_failed")
        assert_greedy(source(second), [4, 5, 6], gateway.answers[other].tokens)
        assert_empty_when_dropped(gateway, second)


@pytest.mark.parametrize("kind", ["arena", "mapped"])
def test_a_model_is_loaded_for_a_request_or_a_pin_and_not_when_it_is_hosted(
    kind: str, tmp_path: Path
) -> None:
    first, second = SETTINGS[kind].names[:2]
    with taking_turns(kind, tmp_path, [first, second], rules=PATIENT) as gateway:
        gateway.ask(first, [1, 2, 3], greedy(4, ignore_eos=True))
        assert [load.model for load in gateway.loads] == [first]
        while gateway.in_turn:  # which ends behind the last token
            gateway.hear()
        assert [use.is_in_turn for use in gateway.ping().models] == [False, False]

        gateway.set_hold(second, Hold.PINNED)
        gateway.until(ModelLoaded)

        uses = {use.model: use for use in gateway.ping().models}
        assert (uses[ModelId(second)].hold, uses[ModelId(second)].is_in_turn) == (Hold.PINNED, True)
        assert uses[ModelId(second)].due_s is None


@pytest.mark.parametrize("kind", ["arena", "mapped"])
def test_a_model_is_loaded_though_nobody_asks_if_its_order_or_a_new_hold_says_so(
    kind: str, tmp_path: Path
) -> None:
    first, second = SETTINGS[kind].names[:2]
    with taking_turns(kind, tmp_path, [first, second], rules=PATIENT) as gateway:
        for name in (first, second):  # which takes the weights of the first
            gateway.ask(name, [1, 2, 3], greedy(4, ignore_eos=True))
        while len(gateway.loads) < 2:  # An answer may end before its model is reported as loaded.
            gateway.hear()
        gateway.set_hold(first, Hold.RETAINED)
        gateway.set_hold(first, Hold.WARM)
        assert gateway.until(ModelLoaded).model == first
        gateway.retire(second)
        host(gateway, SETTINGS[kind], second, is_ahead=True)
        assert gateway.until(ModelLoaded).model == second


def test_a_load_begins_before_the_last_step_of_who_gives_way_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, story = SETTINGS["mapped"].names[:2], list[str]()
    flush, place = Engine.flush, Reclaimer.place

    def noted_flush(engine: Engine) -> StepOutcome:
        if engine.is_computing:
            story.append("wait")
        return flush(engine)

    def noted_place(reclaimer: Reclaimer, model: ModelId, spec: HostingSpec) -> Space:
        is_any_computing = any(one.is_computing for one in reclaimer._hosted.values())
        story.append("load beside a step" if is_any_computing else "load")
        return place(reclaimer, model, spec)

    monkeypatch.setattr(Engine, "flush", noted_flush)
    monkeypatch.setattr(Reclaimer, "place", noted_place)
    with taking_turns("mapped", tmp_path, names) as gateway:
        runs = [gateway.start(name, [1, 2, 3], greedy(8, ignore_eos=True)) for name in names]
        gateway.until_ended(*runs)
    assert "load beside a step" in story
    after = story[story.index("load beside a step") + 1]
    assert after == "wait"


def test_the_keeper_opens_a_model_once_however_often_it_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str | Path] = []
    open_model = LeaseClient.open

    def noted(lease_client: LeaseClient, where: str | Path, weight: float = 1.0) -> OpenedModel:
        opened.append(where)
        return open_model(lease_client, where, weight)

    monkeypatch.setattr(LeaseClient, "open", noted)
    monkeypatch.setattr(ModelPrefetch, "_bring_to_host", lambda ahead: False)  # which opens it as well
    names = SETTINGS["mapped"].names[:2]
    with taking_turns("mapped", tmp_path, names) as gateway:
        for _ in range(2):
            for name in names:
                gateway.ask(name, [1, 2, 3], greedy(4, ignore_eos=True))
        assert len(gateway.loads) == 4
    assert len(opened) == len(names)


@pytest.mark.parametrize("kind", ["arena", "mapped"])
def test_a_pinned_model_is_never_paused_and_others_wait_until_it_is_not(kind: str, tmp_path: Path) -> None:
    first, second = SETTINGS[kind].names[:2]
    with taking_turns(kind, tmp_path, [first, second]) as gateway:
        gateway.set_hold(first, Hold.PINNED)
        while ModelId(first) not in gateway.in_turn:  # else the other may be found first
            gateway.hear()
        waiting = gateway.start(second, [4, 5, 6], LONG)
        gateway.ask(first, [1, 2, 3], LONG)

        assert not any(turn.model == first and turn.ended for turn in gateway.turns)
        uses = {use.model: use for use in gateway.ping().models}
        assert (uses[ModelId(second)].hold, uses[ModelId(second)].num_waiting) == (Hold.PAUSED, 1)
        assert uses[ModelId(second)].due_s is not None
        gateway.set_hold(first, Hold.WARM)
        gateway.until_ended(waiting)
        assert gateway.turns[-1].model == second


@pytest.mark.parametrize("kind", ["arena", "mapped"])
def test_who_is_in_turn_waits_for_a_load_that_nobody_wants_any_more(kind: str, tmp_path: Path) -> None:
    """The load that was begun fills memory, which can neither be taken nor moved until it is there."""
    setting = SETTINGS[kind]
    first, second = setting.names[:2]
    new_pool = partial(setting.new_pool, setting, least_bytes(setting, [first, second]))
    with (
        gated_tiers(tmp_path) as gated,
        working_in_process(gated.tiers, new_pool, config=CONFIG, turns=RESTLESS) as gateway,
    ):
        host(gateway, setting, first, second)
        wanted = gateway.start(first, [1, 2, 3], LONG)
        gated.gate.next()  # held back
        gateway.cancel(wanted)
        run = gateway.start(second, [4, 5, 6], LONG)
        while ModelId(second) not in gateway.in_turn:
            gateway.hear()
        gateway.ping()
        gated.gate.open()
        gateway.until_ended(run)

        assert_greedy(source(second), [4, 5, 6], gateway.answers[run].tokens)


def test_a_retired_model_that_waits_for_its_turn_may_lose_its_addresses(tmp_path: Path) -> None:
    """Another gets them once it has nothing left, and its engine is put together anew."""
    setting = SETTINGS["mapped"]
    names = setting.names[:3]
    num_pages = least_bytes(setting, names) // setting.page_bytes

    def new_pool(eviction_terms: EvictionTermsOf) -> Pool:
        pages = HostPages(num_pages, setting.page_bytes, num_spaces=2)
        return MappedPool(pages, eviction_terms, wipe=wiped)

    with (
        tiers_at(tmp_path) as tiers,
        working_in_process(tiers, new_pool, config=CONFIG, turns=RESTLESS) as gateway,
    ):
        first, *others = names
        host(gateway, setting, first)
        gateway.ask(first, [1, 2, 3], LONG)
        gateway.retire(first)
        host(gateway, setting, *names)
        runs = [gateway.start(name, [4, 5, 6], LONG) for name in others]
        gateway.until_ended(*runs)
        again = gateway.ask(first, [1, 2, 3], LONG)

        assert_greedy(source(first), [1, 2, 3], again.tokens)
        assert gateway.loads[-1].open_s > 0, "it came back with the engine that it had"


def test_a_paused_model_is_held_less_than_a_busy_one_and_costs_the_less_the_later_it_is_due(
    tmp_path: Path,
) -> None:
    setting, name = SETTINGS["arena"], ModelId("a")
    order = host_order(name, setting.where(setting.names[0]))
    due_in_s, hosted = [1.0], dict[ModelId, HostedModel]()
    with (
        tiers_at(tmp_path / "store") as tiers,
        folder() as place,
        closing(LeaseServer(tiers, place / "s")),
        closing(LeaseClient(place / "s")) as lease_client,
    ):
        new_pool = partial(setting.new_pool, setting, 1 << 20)
        resources = HostingResources(setting.device, CONFIG, new_pool, lease_client, Loader(setting.device))
        reclaimer = Reclaimer(new_pool, hosted, lambda model: due_in_s[0])
        hosted[name] = model = HostedModel(order, resources, reclaimer.pool, lambda hosting, news: None)
        model.has_turn = False
        assert reclaimer.eviction_terms(name).hold is Hold.WARM

        model.pending.queued.append(StartRequest(1, name, (1,), (), greedy(1), b""))
        soon = reclaimer.eviction_terms(name)
        due_in_s[0] = 10.0
        late = reclaimer.eviction_terms(name)
        assert (soon.hold, late.hold) == (Hold.PAUSED, Hold.PAUSED)
        assert soon.cost_s_per_byte == pytest.approx(10 * late.cost_s_per_byte)

        model.has_turn = True
        assert reclaimer.eviction_terms(name).hold is Hold.BUSY
        model.pending.discard(1)
        model.hold, model.has_turn = Hold.PINNED, False
        assert reclaimer.eviction_terms(name).hold is Hold.PAUSED, "it waits for its turn as well"
        model.has_turn = True
        assert reclaimer.eviction_terms(name).hold is Hold.PINNED

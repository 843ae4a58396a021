"""Models that do not fit together take turns on a live worker, and nobody can tell by their answers.

The worker's own policy decides, by rules that have it switch as often as it can: then every step may be
followed by a pause. Whatever comes free is overwritten with 0xFF.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from hearth.messages import Sampling
from hearth.policy.fleet.events import Promise
from hearth.policy.turns.turn_policy import TurnRules
from hearth.types import TurnEnd
from tests.engine.harness import prompts_for
from tests.worker.harness import greedy
from tests.worker.in_process import Answer, LoopGateway
from tests.worker.test_disturbed import CONTEXT, KINDS, SETTINGS, VOCABULARY, Setting, playing

#: A turn may end after each step, whoever else waits.
RESTLESS = TurnRules(min_turn_s=0.0, quantum_s=0.0, max_turn_s=0.0, growth=1.0, slack_reloads=0.0, lead_s=1e9)


def promises_of(setting: Setting, names: Sequence[str]) -> dict[str, Promise]:
    """With one workspace for all of them, the first one's, which must be placed first in an arena."""
    promises = {name: setting.promise(name) for name in names}
    workspace_bytes = max(one.workspace_bytes for one in promises.values())
    return {
        name: replace(one, workspace_bytes=0 if at else workspace_bytes)
        for at, (name, one) in enumerate(promises.items())
    }


def least_bytes(setting: Setting, names: Sequence[str]) -> int:
    """What it takes to host these, and to have the largest of them in turn."""
    promises = promises_of(setting, names).values()
    own_bytes = max(one.own_bytes - one.standing_bytes for one in promises)
    return own_bytes + sum(one.standing_bytes + one.workspace_bytes for one in promises)


def host(gateway: LoopGateway, setting: Setting, *names: str) -> None:
    for name, promise in promises_of(setting, names).items():
        floor_bytes = setting.floor_bytes(name)
        gateway.host(
            *(name, setting.where(name)),
            kv_floor_bytes=floor_bytes,
            max_kv_bytes=12 * floor_bytes,
            max_context=CONTEXT,
            own_bytes=promise.own_bytes,
            workspace_bytes=promise.workspace_bytes,
            standing_bytes=promise.standing_bytes,
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
    Sampling(seed=11, temperature=0.9, top_k=40, top_p=0.95, max_tokens=20, ignore_eos=True, logprobs=3),
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

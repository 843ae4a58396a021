"""Graphs of one worker's process that serve in another: the same tokens, and nothing is captured there."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from hearth.config import StoreConfig
from hearth.messages import MakeSnapshot, ModelLoaded, ModelUse, RetireModel, SnapshotLooked, SnapshotMade
from hearth.types import ModelId, SnapshotOutcome
from tests.store.stored import PATIENCE_S, converted
from tests.worker.harness import KV_BYTES, Gateway, folder, greedy, keeper_setup, keeping, working

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

PROMPTS = [(3, 14, 15, 92, 65, 35), (7,), tuple(range(1, 40)), (8, 8, 8)]
BUDGET_BYTES = 4 << 30
#: How often a model is asked the same: prefixes are found again, so that not all rounds are alike.
NUM_ROUNDS = 3


@dataclass(frozen=True)
class Model:
    """A model of the zoo: every family, and every kind of weights."""

    zoo: str
    dtype: str = "bfloat16"
    quant: str = "none"

    @property
    def name(self) -> str:
        return f"{self.zoo}-{self.dtype}-{self.quant}"

    @property
    def where(self) -> Path:
        return converted(self.zoo, self.dtype, self.quant)

    @property
    def other_kv_bytes(self) -> int:
        """Another KV budget in the second process, where no tie is decided by what is cached."""
        return 3 * KV_BYTES if self.dtype == "float32" else KV_BYTES


#: Few models a test: kernels of each are compiled where nobody has done so.
GROUPS = {
    "first": [Model("llama-wide"), Model("qwen3", "float32"), Model("falcon-40b")],
    "families": [Model("qwen2"), Model("opt-350m"), Model("neox-parallel"), Model("mistral-window")],
    "weights": [Model("llama-wide", "float16"), *(Model("llama-wide", quant=one) for one in ("int8", "fp8"))],
}


def answers(gateway: Gateway, model: Model) -> list[list[int]]:
    """One request after the other; then all together, where no tie is decided by who shares a step."""
    alone = [gateway.until_ended(gateway.start(model.name, prompt, greedy(12))) for prompt in PROMPTS]
    runs = [run for runs in alone for run in runs]
    if model.dtype == "float32":
        runs += gateway.until_ended(*(gateway.start(model.name, prompt, greedy(12)) for prompt in PROMPTS))
    return [run.tokens for run in runs]


def use_of(gateway: Gateway, model: Model) -> ModelUse:
    (use,) = (use for use in gateway.ping().models if use.model == model.name)
    return use


def looks(gateway: Gateway, model: Model) -> list[SnapshotLooked]:
    return [fact for fact in gateway.facts if isinstance(fact, SnapshotLooked) and fact.model == model.name]


def host(gateway: Gateway, model: Model, slot: int, kv_bytes: int = KV_BYTES) -> None:
    budget = {"kv_floor_bytes": kv_bytes, "max_kv_bytes": kv_bytes}
    loaded = gateway.host(model.name, model.where, slot=slot, **budget)
    assert isinstance(loaded, ModelLoaded), loaded


def make_snapshot(gateway: Gateway, model: Model) -> None:
    (looked,) = looks(gateway, model)
    assert looked.outcome is SnapshotOutcome.MISSING
    gateway.send(MakeSnapshot(ModelId(model.name), looked.hosting))
    made = gateway.until_kind(SnapshotMade)
    assert (made.model, made.failure) == (model.name, None)


def serve_restored(gateway: Gateway, model: Model, expected: list[list[list[int]]]) -> None:
    """Ask as the process before was asked: graphs are restored beside that, tried, and serve at last."""
    give_up_s = time.monotonic() + PATIENCE_S
    for tokens in expected:
        assert answers(gateway, model) == tokens, model
    while (use := use_of(gateway, model)).num_restored_graphs < 3:
        # From the second round on all prefixes are found, so that all are alike.
        assert answers(gateway, model) == expected[-1], model
        assert time.monotonic() < give_up_s, use
    assert use.num_captured_graphs == 0, use
    assert [one.outcome for one in looks(gateway, model)] == [SnapshotOutcome.USED]


@pytest.mark.parametrize("group", GROUPS)
def test_restored_graphs_give_the_tokens_of_captured_ones(group: str, tmp_path: Path) -> None:
    """Also after another model was restored first, with another KV budget, and after all was taken away."""
    models, kernels = GROUPS[group], Path(StoreConfig().path).expanduser() / "kernels"
    settings: dict[str, object] = {
        **{"kind": "cuda", "budget_bytes": BUDGET_BYTES, "kernels_path": str(kernels)},
        **{"snapshots_path": str(tmp_path / "snapshots"), "snapshot_bytes": 1 << 30},
    }
    expected: dict[Model, list[list[list[int]]]] = {}
    with folder() as place, keeping(setup := keeper_setup(place, kind="cuda")):
        with working(setup.socket, **settings) as rig:
            for slot, model in enumerate(models):
                host(rig.gateway, model, slot)
                expected[model] = [answers(rig.gateway, model) for _ in range(NUM_ROUNDS)]
                assert use_of(rig.gateway, model).num_captured_graphs > 0
                make_snapshot(rig.gateway, model)
        with working(setup.socket, **settings) as rig:
            for slot, model in reversed(list(enumerate(models))):
                host(rig.gateway, model, slot, model.other_kv_bytes)
                serve_restored(rig.gateway, model, expected[model])
            for slot, model in enumerate(models):
                rig.gateway.send(RetireModel(ModelId(model.name)))
                host(rig.gateway, model, slot, model.other_kv_bytes)
                assert answers(rig.gateway, model) == expected[model][0], model  # its KV is gone as well

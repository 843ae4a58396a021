"""Graphs of one worker's process that serve in another: the same tokens, and nothing is captured there."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from hearth.config import StoreConfig
from hearth.engine.step_shape import PaddedSizes
from hearth.messages import (
    AdapterOrder,
    ForgetAdapter,
    MakeSnapshot,
    ModelLoaded,
    ModelUse,
    RetireModel,
    SnapshotLooked,
    SnapshotMade,
)
from hearth.types import ModelId, SnapshotOutcome
from tests.store.stored import PATIENCE_S, converted
from tests.worker.harness import (
    CONFIG,
    KV_BYTES,
    Gateway,
    folder,
    greedy,
    keeper_setup,
    keeping,
    limits_of,
    working,
)
from tests.worker.stored_adapters import stored_adapter

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

PROMPTS = [(3, 14, 15, 92, 65, 35), (7,), tuple(range(1, 40)), (8, 8, 8)]
BUDGET_BYTES = 4 << 30
#: How often a model is asked the same: prefixes are found again, so that not all rounds are alike.
NUM_ROUNDS = 3
#: Graphs of all sizes, with adapters and without: as many as a snapshot has.
NUM_GRAPHS = sum(len(PaddedSizes.of(limits_of(CONFIG)).all_names(has_adapters=one)) for one in (False, True))


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
    def adapters(self) -> list[AdapterOrder]:
        """One of every projection, and one of attention alone, of other ranks."""
        return [self._adapter(0, "all"), self._adapter(1, "attention")]

    @property
    def late_adapter(self) -> AdapterOrder:
        """One that comes when the graphs are there."""
        return self._adapter(2, "mlp")

    def _adapter(self, seed: int, kind: str) -> AdapterOrder:
        return stored_adapter(self.zoo, seed, kind, self.dtype).order

    @property
    def other_kv_bytes(self) -> int:
        """Another KV budget in the second process, where no tie is decided by what is cached."""
        return 3 * KV_BYTES if self.dtype == "float32" else KV_BYTES


#: Few models a test: kernels of each are compiled where nobody has done so.
GROUPS = {
    "llama": [Model("llama-wide"), Model("mistral-window")],
    "qwen": [Model("qwen3", "float32"), Model("qwen2")],
    "falcon": [Model("falcon-40b"), Model("falcon-7b")],
    "others": [Model("opt-350m"), Model("neox-parallel")],
    "weights": [Model("llama-wide", "float16"), *(Model("llama-wide", quant=one) for one in ("int8", "fp8"))],
}


def answers(gateway: Gateway, model: Model, salt: bytes = b"") -> list[list[int]]:
    """One request after the other; then all together, where no tie is decided by who shares a step.

    They find the prefixes of others with the same salt.
    """
    asked = [(prompt, adapter) for prompt in PROMPTS for adapter in (None, *model.adapters)]

    def start(prompt: tuple[int, ...], adapter: AdapterOrder | None) -> int:
        return gateway.start(model.name, prompt, greedy(12, ignore_eos=True), salt=salt, adapter=adapter)

    runs = [run for one in asked for run in gateway.until_ended(start(*one))]
    if model.dtype == "float32":
        runs += gateway.until_ended(*(start(*one) for one in asked))
    assert all(len(run.tokens) == 12 for run in runs), [run.failed for run in runs]
    return [run.tokens for run in runs]


def late_answer(gateway: Gateway, model: Model) -> list[int]:
    """The tokens of an adapter that was not there when the graphs were captured."""
    (run,) = gateway.until_ended(
        gateway.start(
            *(model.name, PROMPTS[0], greedy(12, ignore_eos=True)), salt=b"late", adapter=model.late_adapter
        )
    )
    return run.tokens


def crowd(gateway: Gateway, model: Model) -> None:
    """Have steps of all sizes made, with adapters and without: requests come together and end one by one."""
    for adapter in (None, model.adapters[0]):
        starts = [
            gateway.start(model.name, (number, *PROMPTS[0]), greedy(10 + 3 * number), adapter=adapter)
            for number in range(limits_of(CONFIG).max_seqs)
        ]
        assert not any(run.failed for run in gateway.until_ended(*starts))


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
    gateway.send(MakeSnapshot(ModelId(model.name), looked.hosting, has_adapters=True))
    made = gateway.until_kind(SnapshotMade)
    assert (made.model, made.failure, made.lacks_adapters) == (model.name, None, False)


def serve_restored(gateway: Gateway, model: Model, expected: list[list[list[int]]]) -> None:
    """Ask as the process before was asked: graphs are restored beside that, tried, and serve at last."""
    give_up_s = time.monotonic() + PATIENCE_S
    for tokens in expected:
        assert answers(gateway, model) == tokens, model
    while (use := use_of(gateway, model)).num_restored_graphs < NUM_GRAPHS:
        # One that was captured could not be restored, and never will be.
        assert use.num_captured_graphs == 0, (use, looks(gateway, model))
        crowd(gateway, model)
        # Nothing is found, as in the first round.
        assert answers(gateway, model, salt=os.urandom(8)) == expected[0], model
        assert time.monotonic() < give_up_s, (use, looks(gateway, model))
    assert use.num_captured_graphs == 0, use
    assert {(one.outcome, one.lacks_adapters) for one in looks(gateway, model)} == {
        (SnapshotOutcome.USED, False)
    }


@pytest.mark.parametrize("group", GROUPS)
def test_restored_graphs_give_the_tokens_of_captured_ones(group: str, tmp_path: Path) -> None:
    """Also after another model was restored first, with another KV budget, and after all was taken away.

    Adapters come and go meanwhile: those that graphs serve were never seen by whoever captured them.
    """
    models, kernels = GROUPS[group], Path(StoreConfig().path).expanduser() / "kernels"
    settings: dict[str, object] = {
        **{"kind": "cuda", "budget_bytes": BUDGET_BYTES, "kernels_path": str(kernels)},
        **{"snapshots_path": str(tmp_path / "snapshots"), "snapshot_bytes": 1 << 30},
    }
    expected: dict[Model, list[list[list[int]]]] = {}
    late: dict[Model, list[int]] = {}
    with folder() as place, keeping(setup := keeper_setup(place, kind="cuda")):
        with working(setup.socket, **settings) as rig:
            for slot, model in enumerate(models):
                host(rig.gateway, model, slot)
                # Before all answers: kernels of products are chosen for it, and others may round otherwise.
                make_snapshot(rig.gateway, model)
                expected[model] = [answers(rig.gateway, model) for _ in range(NUM_ROUNDS)]
                assert use_of(rig.gateway, model).num_captured_graphs > 0
                late[model] = late_answer(rig.gateway, model)
        with working(setup.socket, **settings) as rig:
            for slot, model in reversed(list(enumerate(models))):
                host(rig.gateway, model, slot, model.other_kv_bytes)
                serve_restored(rig.gateway, model, expected[model])
            for slot, model in enumerate(models):
                rig.gateway.send(RetireModel(ModelId(model.name)))
                host(rig.gateway, model, slot, model.other_kv_bytes)
                assert answers(rig.gateway, model, salt=b"back") == expected[model][0], model
                rig.gateway.send(ForgetAdapter(model.adapters[0].adapter))
                assert late_answer(rig.gateway, model) == late[model], model
                assert use_of(rig.gateway, model).num_captured_graphs == 0
            for slot, model in enumerate(models):
                rig.gateway.drop(model.name)  # with its engine: all is restored once more
                host(rig.gateway, model, slot, model.other_kv_bytes)
                serve_restored(rig.gateway, model, expected[model])

"""Graphs of one worker's process that serve in another: the same tokens, and nothing is captured there."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hearth.core.config import StoreConfig
from hearth.core.messages import (
    AdapterOrder,
    ForgetAdapter,
    MakeSnapshot,
    ModelLoaded,
    ModelUse,
    RetireModel,
    SnapshotLooked,
    SnapshotMade,
)
from hearth.core.types import ModelId, SnapshotOutcome
from hearth.engine.step_shape import PaddedSizes
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
#: Graphs of all sizes, with adapters and without: all that a snapshot has.
GRAPHS = {
    name for one in (False, True) for name in PaddedSizes.of(limits_of(CONFIG)).all_names(has_adapters=one)
}
#: Each round has steps of every size. After so many in which no graph has come to serve, none will.
MAX_IDLE_ROUNDS = 20


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


@dataclass(slots=True)
class Watch:
    """How far the test has come, printed as it goes: also who cuts it short sees it. Mutable."""

    log: Path  #: of all workers, one behind the other
    began_s: float = field(default_factory=time.monotonic)
    num_read: int = 0  #: characters of the log that are of models before the one at hand

    def tell(self, model: Model, what: str) -> None:
        print(f"{time.monotonic() - self.began_s:6.1f} s: {model.name} {what}", flush=True)

    def begin(self) -> None:
        """Note that a model comes, of which no graph serves yet."""
        self.num_read = len(self._text())

    def missing(self) -> list[str]:
        """Graphs of the model at hand that were never found to do what their step does."""
        accepted = re.findall(r"graphs_accepted graphs=(\S+)", self._text()[self.num_read :])
        return sorted(GRAPHS - {name for names in accepted for name in names.split(",")})

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Print what workers warned of if the test fails, and what they said last."""
        try:
            yield
        except BaseException:
            lines = self._text().splitlines()
            print("never accepted, of the model at hand:", *self.missing())
            print(
                "warnings:", *(one for one in lines if re.search(" (WARNING|ERROR|CRITICAL) ", one)), sep="\n"
            )
            print("last lines:", *lines[-40:], sep="\n", flush=True)
            raise

    def _text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


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
            model.name, PROMPTS[0], greedy(12, ignore_eos=True), salt=b"late", adapter=model.late_adapter
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


def state_of(gateway: Gateway, model: Model) -> str:
    """All that the worker says of a model's graphs, and what it does otherwise than it should."""
    pong = gateway.ping()
    fallbacks = {name: count for name, count in pong.fallbacks.items() if count}
    (use,) = (use for use in pong.models if use.model == model.name)
    graphs = f"{use.num_restored_graphs} of {len(GRAPHS)} restored, {use.num_captured_graphs} captured"
    return f"{model.name}: {graphs}, {fallbacks=}, looks={looks(gateway, model)}"


def use_of(gateway: Gateway, model: Model) -> ModelUse:
    (use,) = (use for use in gateway.ping().models if use.model == model.name)
    return use


def assert_same(
    gateway: Gateway, model: Model, when: str, found: Sequence[list[int]], expected: Sequence[list[int]]
) -> None:
    """Tokens of the same requests are the same; else say of which of them, and from where on."""
    wrong = []
    for number, (tokens, wanted) in enumerate(zip(found, expected, strict=True)):
        if tokens != wanted:
            first = next(at for at, pair in enumerate(zip(tokens, wanted, strict=True)) if len(set(pair)) > 1)
            wrong.append(f"request {number} from token {first} on: {tokens[first:]} for {wanted[first:]}")
    assert not wrong, f"{when}: {wrong}; {state_of(gateway, model)}"


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


def serve_restored(gateway: Gateway, model: Model, expected: list[list[list[int]]], watch: Watch) -> None:
    """Ask as the process before was asked: graphs are restored beside that, tried, and serve at last."""
    give_up_s = time.monotonic() + PATIENCE_S
    for number, tokens in enumerate(expected):
        assert_same(gateway, model, f"restored, round {number}", answers(gateway, model), tokens)
    watch.tell(model, "has answered as before")
    num_idle = num_serving = 0
    while (use := use_of(gateway, model)).num_restored_graphs < len(GRAPHS):
        # One that was captured, or could not be restored, never will be.
        assert use.num_captured_graphs == 0, state_of(gateway, model)
        assert not gateway.ping().fallbacks["graphs_not_restored"], state_of(gateway, model)
        num_idle = num_idle + 1 if use.num_restored_graphs == num_serving else 0
        num_serving = use.num_restored_graphs
        is_over = num_idle > MAX_IDLE_ROUNDS or time.monotonic() > give_up_s
        assert not is_over, f"missing {watch.missing()}; {state_of(gateway, model)}"
        crowd(gateway, model)
        # Nothing is found, as in the first round.
        found = answers(gateway, model, salt=os.urandom(8))
        assert_same(gateway, model, f"beside {num_serving} graphs", found, expected[0])
    assert use.num_captured_graphs == 0, state_of(gateway, model)
    assert {(one.outcome, one.lacks_adapters) for one in looks(gateway, model)} == {
        (SnapshotOutcome.USED, False)
    }
    watch.tell(model, "is served by restored graphs")


@pytest.mark.parametrize("group", GROUPS)
def test_restored_graphs_give_the_tokens_of_captured_ones(group: str, tmp_path: Path) -> None:
    """Also after another model was restored first, with another KV budget, and after all was taken away.

    Adapters come and go meanwhile: those that graphs serve were never seen by whoever captured them.
    """
    models, kernels = GROUPS[group], Path(StoreConfig().path).expanduser() / "kernels"
    watch = Watch(tmp_path / "workers.log")
    settings: dict[str, object] = {
        **{"kind": "cuda", "budget_bytes": BUDGET_BYTES, "kernels_path": str(kernels)},
        **{"snapshots_path": str(tmp_path / "snapshots"), "snapshot_bytes": 1 << 30, "log_level": "debug"},
    }
    expected: dict[Model, list[list[list[int]]]] = {}
    late: dict[Model, list[int]] = {}
    with watch.telling(), folder() as place, keeping(setup := keeper_setup(place, kind="cuda")):
        with working(setup.socket, log=watch.log, **settings) as rig:
            for slot, model in enumerate(models):
                host(rig.gateway, model, slot)
                watch.tell(model, "is hosted")
                make_snapshot(rig.gateway, model)
                watch.tell(model, "has a snapshot")
                expected[model] = [answers(rig.gateway, model) for _ in range(NUM_ROUNDS)]
                assert use_of(rig.gateway, model).num_captured_graphs > 0
                late[model] = late_answer(rig.gateway, model)
        with working(setup.socket, log=watch.log, **settings) as rig:
            for slot, model in reversed(list(enumerate(models))):
                watch.begin()
                host(rig.gateway, model, slot, model.other_kv_bytes)
                watch.tell(model, "is hosted by the second process")
                serve_restored(rig.gateway, model, expected[model], watch)
            for slot, model in enumerate(models):
                rig.gateway.send(RetireModel(ModelId(model.name)))
                host(rig.gateway, model, slot, model.other_kv_bytes)
                found = answers(rig.gateway, model, salt=b"back")
                assert_same(rig.gateway, model, "back", found, expected[model][0])
                rig.gateway.send(ForgetAdapter(model.adapters[0].adapter))
                assert_same(
                    rig.gateway, model, "late adapter", [late_answer(rig.gateway, model)], [late[model]]
                )
                assert use_of(rig.gateway, model).num_captured_graphs == 0, state_of(rig.gateway, model)
                watch.tell(model, "was retired and has come back")
            for slot, model in enumerate(models):
                watch.begin()
                rig.gateway.drop(model.name)  # with its engine: all is restored once more
                host(rig.gateway, model, slot, model.other_kv_bytes)
                serve_restored(rig.gateway, model, expected[model], watch)

"""How the catalog fits models to the memory of workers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hearth.control.datadir import DataDir
from hearth.control.deploy.catalog import Catalog
from hearth.control.deploy.deployed import AdapterFacts, Deployed, DeployedAdapter
from hearth.control.deploy.registry import Registry
from hearth.core.config import EngineConfig, ModelConfig
from hearth.core.errors import ConfigError, UnknownModel, UnsupportedModel
from hearth.core.messages import PrepareModel
from hearth.core.sizes import StepLimits, StepSize, workspace_bytes
from hearth.core.types import LOCAL, Hold, ModelId, NodeId, WorkerId
from hearth.policy.fleet.capacity import Promises
from hearth.policy.fleet.events import LoadModel
from hearth.policy.fleet.footprint import fixed_bytes_of, split_evenly
from hearth.policy.fleet.profile import Promise
from tests.policy.fleet.test_footprint import LARGE
from tests.policy.fleet.test_stage_sizes import SPLIT

BIG = "big"
ENGINE = EngineConfig(max_batch_tokens=4096, max_seqs=256)
LIMITS = StepLimits(max_batch_tokens=4096, max_seqs=256, block_tokens=16)
FITTING_BYTES = 40 << 30  #: for all of its context on a GPU, which takes a gibibyte of KV
TIGHT_BYTES = fixed_bytes_of(LARGE, "cuda", LIMITS, LARGE.max_positions) + (600 << 20)


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with Registry(DataDir.open(tmp_path)) as registry:
        registry.add(Deployed(BIG, "hf:a/b", "/models/big", "/models/big", "digest", LARGE, 1.0))
        yield registry


def catalog(
    registry: Registry, budget_bytes: int | None = None, engine: EngineConfig = ENGINE, **config: int
) -> Catalog:
    configs = {BIG: ModelConfig(**config)} if config else {}
    return Catalog(registry, configs, engine, 300.0, pool="cuda", budget_bytes=budget_bytes)


def cuts(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "context_cut" in record.getMessage()]


def test_a_model_is_served_with_all_of_its_context_where_that_fits(
    registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    entry = catalog(registry, FITTING_BYTES).find(BIG)
    assert entry.max_context == LARGE.max_positions
    assert cuts(caplog) == []


def test_settings_of_a_model_that_is_not_deployed_are_refused_with_the_nearest_name(
    registry: Registry,
) -> None:
    catalog(registry, FITTING_BYTES, context=64).check_settings()
    configs = {"bgi": ModelConfig(pinned=True), BIG: ModelConfig()}
    wrong = Catalog(registry, configs, ENGINE, 300.0, pool="cuda", budget_bytes=FITTING_BYTES)
    with pytest.raises(ConfigError, match=r"\[models\.bgi\] .*did you mean `big`\?"):
        wrong.check_settings()


def test_a_context_is_cut_to_the_budget_and_that_is_said_once(
    registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tight = catalog(registry, TIGHT_BYTES)
    entry = tight.find(BIG)
    assert 2048 <= entry.max_context < LARGE.max_positions
    assert entry.profile.footprints["cuda"].least_bytes <= TIGHT_BYTES
    assert tight.view(entry).max_context == entry.max_context
    assert (
        tight.host_order(LoadModel(ModelId(BIG), WorkerId("w"), 1, 2), 1, "cuda").max_context
        == entry.max_context
    )
    tight.refresh()
    (line,) = cuts(caplog)
    assert line == f"context_cut model=big context={entry.max_context} made_for=8192 budget={TIGHT_BYTES}"


def test_a_context_that_no_worker_can_hold_is_fitted_to_the_fewest_stages(registry: Registry) -> None:
    registry.add(Deployed("split", "hf:a/c", "/models/split", "/models/split", "other", SPLIT, 1.0))
    small = catalog(registry, 12 << 30)
    entry = small.find("split")
    sizes = entry.profile.stages["cuda"]
    assert entry.profile.footprints["cuda"].least_bytes > 12 << 30
    assert sizes.context_blocks == -(-entry.max_context // 16)
    assert entry.max_context > 2048
    shares = split_evenly(sizes, 12 << 30)
    assert shares is not None
    assert (len(shares), sum(shares)) == (2, 32)


def test_where_models_take_turns_a_cut_context_leaves_room_for_what_others_keep(registry: Registry) -> None:
    alone = catalog(registry, TIGHT_BYTES).find(BIG)
    beside = Catalog(
        registry, {}, ENGINE, 300.0, pool="cuda", budget_bytes=TIGHT_BYTES, takes_turns=True
    ).find(BIG)
    assert 2048 <= beside.max_context < alone.max_context
    promises = Promises(TIGHT_BYTES)
    for _ in range(10):
        promises.add(beside.profile.footprints["cuda"].promise, Hold.BUSY)
    assert promises.can_all_take_turns


def test_a_worker_is_told_how_much_kv_a_model_is_promised_and_may_have(registry: Registry) -> None:
    order = catalog(registry, FITTING_BYTES).host_order(
        LoadModel(ModelId(BIG), WorkerId("w"), 100, 200, Promise(50, 9, 3)), 7, "cuda"
    )
    assert (order.own_bytes, order.workspace_bytes, order.standing_bytes) == (50, 9, 3)
    assert (order.hosting, order.kv_floor_bytes, order.max_kv_bytes) == (7, 100, 200)
    assert order.slot == registry.space_slots()[BIG]


def test_the_first_worker_tells_the_budget_where_the_configuration_does_not(registry: Registry) -> None:
    unknown = catalog(registry)
    assert unknown.find(BIG).max_context == LARGE.max_positions
    (changed,) = unknown.fit("cuda", TIGHT_BYTES)
    assert changed is unknown.find(BIG)
    assert changed.max_context < LARGE.max_positions
    assert unknown.fit("cuda", FITTING_BYTES) == [], "later ones change nothing"


def test_nothing_changes_where_everything_fits(registry: Registry) -> None:
    assert catalog(registry).fit("cuda", FITTING_BYTES) == []


def test_a_budget_that_is_configured_is_not_changed_by_a_worker(registry: Registry) -> None:
    assert catalog(registry, FITTING_BYTES).fit("cuda", TIGHT_BYTES) == []


def test_a_context_that_somebody_named_is_kept(registry: Registry) -> None:
    assert catalog(registry, 1 << 30, context=4096).find(BIG).max_context == 4096


def test_a_ceiling_cuts_the_context_like_a_budget(registry: Registry) -> None:
    entry = catalog(registry, FITTING_BYTES, memory_ceiling_bytes=TIGHT_BYTES).find(BIG)
    assert 2048 <= entry.max_context < LARGE.max_positions
    footprint = entry.profile.footprints["cuda"]
    assert footprint.fixed_bytes + footprint.max_kv_bytes <= TIGHT_BYTES


def test_a_ceiling_that_not_even_a_short_context_fits_under_is_refused(registry: Registry) -> None:
    with pytest.raises(ConfigError, match="a memory ceiling of"):
        catalog(registry, memory_ceiling_bytes=LARGE.num_bytes)


def test_a_ceiling_that_only_another_kind_of_device_could_not_keep_is_fine(registry: Registry) -> None:
    """The model would be widened on a CPU alone, where it would take twice as much."""
    entry = catalog(registry, memory_ceiling_bytes=TIGHT_BYTES).find(BIG)
    assert entry.profile.footprints.keys() == {"cuda"}


@pytest.mark.parametrize("num_gib", [24, 48, 80, 141])
@pytest.mark.parametrize("engine", [EngineConfig(), EngineConfig(max_seqs=7), ENGINE])
def test_brain_and_worker_have_the_same_limits_of_a_model(
    registry: Registry, engine: EngineConfig, num_gib: int
) -> None:
    served = catalog(registry, num_gib << 30, engine)
    footprint = served.find(BIG).profile.footprints["cuda"]
    order = served.host_order(LoadModel(ModelId(BIG), WorkerId("w"), 1, 2), 1, "cuda")
    assert footprint.max_seqs == order.limits.max_seqs
    sizes, size = LARGE.dimensions, StepSize.of(order.limits, "cuda", num_processors=132)
    assert workspace_bytes(sizes, sizes.layers, LARGE.dtype, size) <= footprint.workspace_bytes


def test_the_first_worker_tells_how_large_steps_may_be_where_nobody_has_set_it(registry: Registry) -> None:
    unknown = catalog(registry, engine=EngineConfig())
    assert unknown.find(BIG).limits == StepLimits(2048, 256, 16)
    (changed,) = unknown.fit("cuda", 125 << 30)
    assert changed.limits == StepLimits(8192, 1024, 16)
    assert changed.profile.footprints["cuda"].max_seqs == 1024


@pytest.mark.parametrize("ceiling_gib", [16, 20, 40, 80])
@pytest.mark.parametrize("budget_gib", [24, 48, 80, 141])
def test_a_ceiling_that_is_fine_before_a_worker_is_there_is_fine_afterwards(
    registry: Registry, ceiling_gib: int, budget_gib: int
) -> None:
    unknown = catalog(registry, engine=EngineConfig(), memory_ceiling_bytes=ceiling_gib << 30)
    before = unknown.find(BIG).limits
    unknown.fit("cuda", budget_gib << 30)
    after = unknown.find(BIG).limits
    assert (after.max_batch_tokens, after.max_seqs) <= (before.max_batch_tokens, before.max_seqs)


def test_workers_prepare_for_all_models_and_first_for_one_of_each_kind(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are common to a kind, descriptions are not."""
    registry.add(Deployed("tuned", "hf:a/c", "/models/c", "/models/c", "other", LARGE, 2.0))
    small = replace(LARGE, quant="int8")
    registry.add(Deployed("small", "hf:a/d", "/models/d", "/models/d", "third", small, 3.0))
    orders = catalog(registry).prepare_orders(LOCAL, "cuda")
    assert len(set(orders)) == len(orders) == 3
    assert PrepareModel(ModelId("small"), "/models/d", LIMITS) in orders[:2]
    monkeypatch.setattr("hearth.control.deploy.catalog.MAX_PREPARED", 1)
    assert catalog(registry).prepare_orders(LOCAL, "cuda") == orders[:2], "no kind is left out"


def test_models_that_have_no_more_than_their_dimensions_in_common_are_of_two_kinds(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    longer = replace(LARGE, max_positions=2 * LARGE.max_positions)
    registry.add(Deployed("longer", "hf:a/c", "/models/c", "/models/c", "other", longer, 2.0))
    talking = replace(LARGE, has_chat_template=not LARGE.has_chat_template)
    registry.add(Deployed("talking", "hf:a/d", "/models/d", "/models/d", "third", talking, 3.0))
    monkeypatch.setattr("hearth.control.deploy.catalog.MAX_PREPARED", 1)
    orders = catalog(registry).prepare_orders(LOCAL, "cuda")
    assert len(orders) == 2
    assert PrepareModel(ModelId("longer"), "/models/c", LIMITS) in orders


ADAPTER = DeployedAdapter(
    "shop",
    BIG,
    "/lora",
    "/models/shop",
    "/models/shop",
    "digest of shop",
    AdapterFacts(4096, 64, LARGE.dtype, 8, ("qkv", "o"), LARGE.dimensions),
    created_at_s=2.5,
)


def test_the_name_of_an_adapter_means_its_base_with_the_adapter(registry: Registry) -> None:
    registry.add(ADAPTER)
    known = catalog(registry, FITTING_BYTES)
    entry = known.find("shop")
    assert entry.adapter == ADAPTER
    assert known.find(BIG).adapter is None
    assert replace(entry, adapter=None) == known.find(BIG)
    assert [one.name for one in known.entries()] == [BIG]
    assert [one.name for one in known.adapters()] == ["shop"]
    view = known.view(entry)
    assert (view.name, view.base, view.num_bytes, view.max_rank) == ("shop", BIG, 4096, 8)
    assert view.family == known.view(known.find(BIG)).family == LARGE.family == "llama"
    assert view.max_context == entry.max_context


def test_a_key_may_use_an_adapter_only_by_its_own_name(registry: Registry) -> None:
    registry.add(ADAPTER)
    known = catalog(registry, FITTING_BYTES)
    assert known.find("shop", allowed=["shop"]).adapter == ADAPTER
    assert known.adapters(allowed=[BIG]) == []
    with pytest.raises(UnknownModel, match="deployed: big"):
        known.find("shop", allowed=[BIG])
    with pytest.raises(UnknownModel, match="deployed: shop"):
        known.find(BIG, allowed=["shop"])


def test_an_adapter_has_aliases_and_a_pin_of_its_own_and_nothing_else(registry: Registry) -> None:
    registry.add(ADAPTER)
    configs = {"shop": ModelConfig(aliases=("clerk",), pinned=True, latency_weight=2.0)}
    entry = Catalog(registry, configs, ENGINE, 300.0, "cuda", FITTING_BYTES).find("clerk")
    assert entry.adapter == ADAPTER
    assert (entry.config.pinned, entry.profile.is_pinned) == (True, False)
    with pytest.raises(ConfigError, match=r"\[models.shop\] sets context, but `shop` is an adapter"):
        Catalog(registry, {"shop": ModelConfig(context=64)}, ENGINE, 300.0, "cuda", FITTING_BYTES)


def test_an_adapter_that_does_not_fit_its_base_is_refused_with_the_reason(
    registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    registry.add(replace(ADAPTER, facts=replace(ADAPTER.facts, dtype="float32")))
    known = catalog(registry, FITTING_BYTES)
    with pytest.raises(UnsupportedModel, match=r"`shop` .* for float32, .* `big` is computed in bfloat16"):
        known.find("shop")
    assert known.adapters() == []
    known.refresh()
    assert len([one for one in caplog.records if "adapter_unfit" in one.getMessage()]) == 1


def test_a_model_has_a_footprint_for_every_kind_of_device_in_the_cluster(registry: Registry) -> None:
    mixed = catalog(registry, FITTING_BYTES, EngineConfig())
    before = mixed.find(BIG)
    (changed,) = mixed.fit("cpu", 100 << 30)
    assert set(changed.profile.footprints) == {"cuda", "cpu"}
    assert (changed.max_context, changed.limits) == (before.max_context, before.limits)
    assert changed.limits == changed.limits_by_pool["cuda"]
    assert changed.limits_by_pool["cpu"] != changed.limits
    worker = WorkerId("gpu-2/w0")
    order = mixed.host_order(LoadModel(ModelId(BIG), worker, 1, 2), 1, "cpu")
    assert (order.where, order.limits) == ("hearth://digest", changed.limits_by_pool["cpu"])
    (prepared,) = mixed.prepare_orders(NodeId("gpu-2"), "cpu")
    assert prepared.where == "hearth://digest"


def test_a_head_without_workers_takes_the_first_kind_that_joins(registry: Registry) -> None:
    served = Catalog(registry, {}, ENGINE, 300.0, pool=None)
    assert served.kind == "cpu"
    served.fit("cuda", TIGHT_BYTES)
    assert served.kind == "cuda"
    assert set(served.find(BIG).profile.footprints) == {"cuda"}
    assert served.find(BIG).max_context < LARGE.max_positions


def test_a_model_has_footprints_only_for_nodes_that_have_all_its_labels(registry: Registry) -> None:
    configs = {BIG: ModelConfig(labels=("zone=a", "disk=ssd"))}
    served = Catalog(registry, configs, ENGINE, 300.0, "cuda", FITTING_BYTES)
    assert served.find(BIG).profile.footprints == {}
    assert served.fit("cuda zone=a", FITTING_BYTES) == [], "disk=ssd is missing"
    assert served.prepare_orders(LOCAL, "cuda zone=a") == []
    (changed,) = served.fit("cuda disk=ssd zone=a", TIGHT_BYTES)
    assert set(changed.profile.footprints) == {"cuda disk=ssd zone=a"}
    assert changed.max_context < LARGE.max_positions, "fitted to where it may run"
    assert len(served.prepare_orders(LOCAL, "cuda disk=ssd zone=a")) == 1


def test_the_context_is_fitted_to_the_first_devices_that_hold_the_model(registry: Registry) -> None:
    served = catalog(registry, 1 << 30)
    assert served.find(BIG).is_cut
    served.fit("cuda gpu=h200", FITTING_BYTES)
    entry = served.find(BIG)
    assert (entry.max_context, entry.fitted_to) == (LARGE.max_positions, "cuda gpu=h200")
    served.fit("cuda gpu=l40s", TIGHT_BYTES)
    assert served.find(BIG).max_context == LARGE.max_positions, "a node that joins later cuts no context"


def test_devices_on_which_a_model_exceeds_its_ceiling_are_left_out(registry: Registry) -> None:
    """The model is widened on a CPU, where it takes twice as much."""
    served = catalog(registry, memory_ceiling_bytes=TIGHT_BYTES)
    served.fit("cuda", FITTING_BYTES)
    served.fit("cpu", 100 << 30)
    assert set(served.find(BIG).profile.footprints) == {"cuda"}


def test_in_a_mixed_cluster_models_and_adapters_are_converted_for_gpus_and_run_on_both(
    registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    registry.add(ADAPTER)
    registry.add(replace(ADAPTER, name="wide", facts=replace(ADAPTER.facts, dtype="float32")))
    mixed = Catalog(registry, {}, ENGINE, 300.0, "cpu", 100 << 30)
    assert (mixed.kind, [one.name for one in mixed.adapters()]) == ("cpu", ["shop", "wide"])
    mixed.fit("cuda gpu=h200", FITTING_BYTES)
    assert (mixed.kind, [one.name for one in mixed.adapters()]) == ("cuda", ["shop"])
    assert "adapter_unfit adapter=wide" in caplog.text

"""Deployed models and adapters as brain and workers need to know them. The registry stores them."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from hearth.control.deploy.deployed import Deployed, DeployedAdapter
from hearth.control.deploy.names import Names, listed
from hearth.control.deploy.preset import DeployedPreset
from hearth.control.deploy.registry import Registry
from hearth.control.observe.views import ModelView
from hearth.core.config import EngineConfig, ModelConfig
from hearth.core.errors import ConfigError, HearthError, UnsupportedModel
from hearth.core.messages import AdapterOrder, HostModel, PrepareModel
from hearth.core.sizes import StepLimits, computed_dtype
from hearth.core.types import (
    LOCAL,
    AdapterId,
    Digest,
    ModelId,
    NodeId,
    Pace,
    kind_of,
    labels_of,
    model_of,
    node_of,
    where_on_nodes,
)
from hearth.policy.batch.step_limits import step_limits
from hearth.policy.fleet.events import LoadModel
from hearth.policy.fleet.footprint import (
    Facts,
    context_of,
    fitted_context,
    footprint,
    split_evenly,
    stage_sizes,
    staged_context,
)
from hearth.policy.fleet.profile import Footprint, ModelProfile
from hearth.policy.memory.space_slots import choose_slot
from hearth.store.format.manifest import Manifest, read_manifest

log = logging.getLogger(__name__)

#: The share of a measured budget that is relied on: the next worker may measure less.
MEASURED_SHARE = 0.97
#: The share of a budget that a context may fill where models take turns: the rest is for what others keep out
#: of turn. A model with all of it could not take turns.
TURN_SHARE = 31 / 32
#: Models that a starting worker prepares for, unless there are more kinds. Others are read when they are
#: first needed, which takes some milliseconds.
MAX_PREPARED = 256


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    deployed: Deployed
    config: ModelConfig  #: of the adapter, if there is one
    limits_by_pool: Mapping[str, StepLimits]
    fitted_to: str  #: the pool whose memory decides the context
    max_context: int
    profile: ModelProfile
    pace: Pace
    adapter: DeployedAdapter | None = None  #: None: the model itself is meant
    preset: DeployedPreset | None = None  #: None: the model or adapter itself is meant

    @property
    def name(self) -> str:
        if self.preset is not None:
            return self.preset.name
        return self.deployed.name if self.adapter is None else self.adapter.name

    @property
    def adapter_order(self) -> AdapterOrder | None:
        if (adapter := self.adapter) is None:
            return None
        weight, is_pinned = self.config.latency_weight, self.config.pinned
        return AdapterOrder(adapter.adapter_id, adapter.name, adapter.where, weight, is_pinned)

    @property
    def limits(self) -> StepLimits:
        return self.limits_by_pool[self.fitted_to]

    @property
    def is_cut(self) -> bool:
        """True if the context is shorter than the model's own, without a setting that says so."""
        return self.config.context is None and self.max_context < self.deployed.facts.max_positions

    def prepare_order(self, node: NodeId, pool: str) -> PrepareModel | None:
        """Return an order for a worker of a pool; None: the model does not run there."""
        deployed = self.deployed
        if pool not in self.profile.footprints:
            return None
        where = deployed.directory if node == LOCAL else where_on_nodes(deployed.digest)
        return PrepareModel(self.profile.model, where, self.limits_by_pool[pool])


class Catalog:
    """Mutable; used on the event loop alone.

    Without a setting, a model's context and its steps are as large as a worker's memory allows; where models
    take turns, some memory is left to others. The memory is known from the configuration, or else from the
    first worker of each pool: workers of one kind of device, on nodes of the same labels. The context is
    fitted to the first pool that has the model's labels and holds the model, or else holds it in stages. The
    model is placed wherever it fits with that context.
    """

    def __init__(
        self,
        registry: Registry,
        configs: Mapping[str, ModelConfig],
        engine: EngineConfig,
        keep_alive_s: float,
        pool: str | None = "cpu",
        budget_bytes: int | None = None,
        pace: Pace | None = None,
        *,
        takes_turns: bool = False,
    ) -> None:
        """Read the registry. `pool`: of the workers of this machine, None: it has none;
        `budget_bytes`: of each, None: not known yet.

        `pace`: of models without one of their own. `takes_turns`: models that do not fit together take turns.
        Raises ConfigError: the configuration of a model contradicts the model.
        """
        self._registry, self._configs = registry, configs
        self._wanted_limits = engine.wanted_limits
        self._keep_alive_s = keep_alive_s
        #: The memory of a worker, by pool; None: not known yet.
        self._budgets: dict[str, int | None] = {} if pool is None else {pool: budget_bytes}
        self._pace, self._takes_turns = pace or Pace(), takes_turns
        #: Contexts that were cut, by model, as they have been logged.
        self._cuts: dict[str, int] = {}
        #: Adapters that do not fit their base, with the reason, as they have been logged.
        self._misfits: dict[str, str] = {}
        self._entries: dict[ModelId, CatalogEntry] = {}
        self._slots: Mapping[str, int] = {}  #: of device addresses, by name
        self._adapters: dict[str, DeployedAdapter] = {}
        self._presets: dict[str, DeployedPreset] = {}
        self.refresh()

    def check_settings(self) -> None:
        for name, hint in self._names.waiting().items():
            raise ConfigError(
                f"[models.{name}] has settings for a model that is not deployed ({hint}); correct the name, "
                "deploy the model first, or remove the table"
            )

    def refresh(self) -> None:
        deployed, adapters = self._registry.all(), self._registry.adapters()
        presets = self._registry.presets()
        names = Names([*deployed, *adapters, *presets], self._configs)
        for adapter in adapters:
            _check_config(adapter.name, self._configs.get(adapter.name), "an adapter", _OF_ADAPTERS)
        for preset in presets:
            _check_config(preset.name, self._configs.get(preset.name), "a preset", _OF_PRESETS)
        entries = {ModelId(one.name): self._entry(one) for one in deployed}
        self._names, self._entries = names, entries  # all or, where the configuration is wrong, none
        self._adapters = {adapter.name: adapter for adapter in adapters}
        self._presets = {preset.name: preset for preset in presets}
        self._slots = self._registry.space_slots()
        self._log_cuts()
        self._log_misfits()

    def _log_cuts(self) -> None:
        cuts = {entry.deployed.name: entry.max_context for entry in self.entries() if entry.is_cut}
        for name, context in cuts.items():
            if self._cuts.get(name) != context:
                made_for = self._entries[ModelId(name)].deployed.facts.max_positions
                log.warning(
                    "context_cut model=%s context=%d made_for=%d budget=%s",
                    name,
                    context,
                    made_for,
                    self._budgets[self._entries[ModelId(name)].fitted_to],
                )
        self._cuts = cuts

    def _log_misfits(self) -> None:
        reasons = {adapter.name: self._misfit(adapter) for adapter in self._adapters.values()}
        misfits = {name: reason for name, reason in reasons.items() if reason is not None}
        for name, reason in misfits.items():
            if self._misfits.get(name) != reason:
                log.warning("adapter_unfit adapter=%s reason=%s", name, reason)
        self._misfits = misfits

    @property
    def kind(self) -> str:
        """The kind of device that models and adapters are converted for: CPUs run what GPUs need, too."""
        return "cuda" if "cuda" in map(kind_of, self._budgets) else "cpu"

    def fit(self, pool: str, budget_bytes: int) -> list[CatalogEntry]:
        """Take the budget of the first worker of a pool. Returns entries with a new profile."""
        if self._budgets.get(pool) is not None:
            return []
        self._budgets[pool] = int(budget_bytes * MEASURED_SHARE)
        before = self._entries
        self._entries = {name: self._entry(entry.deployed) for name, entry in before.items()}
        self._log_cuts()
        self._log_misfits()
        return [entry for name, entry in self._entries.items() if entry.profile != before[name].profile]

    def entries(self, allowed: Collection[str] | None = None) -> list[CatalogEntry]:
        if allowed is None:
            return list(self._entries.values())
        names = self._names.allowed(allowed)
        return [entry for name, entry in self._entries.items() if name in names]

    def adapters(self, allowed: Collection[str] | None = None) -> list[CatalogEntry]:
        names = None if allowed is None else self._names.allowed(allowed)
        return [
            self._with_adapter(adapter)
            for adapter in self._adapters.values()
            if (names is None or adapter.name in names) and self._misfit(adapter) is None
        ]

    def presets(self, allowed: Collection[str] | None = None) -> list[CatalogEntry]:
        names = None if allowed is None else self._names.allowed(allowed)
        served = {entry.name: entry for entry in (*self.entries(), *self.adapters())}
        return [
            replace(served[preset.base], preset=preset)
            for preset in self._presets.values()
            if preset.base in served and (names is None or preset.name in names)
        ]

    def bases(self) -> set[ModelId]:
        return {ModelId(adapter.base) for adapter in self._adapters.values()}

    def all_deployed(self) -> list[Deployed | DeployedAdapter]:
        return [*(entry.deployed for entry in self._entries.values()), *self._adapters.values()]

    def manifest_of(self, digest: Digest) -> Manifest | None:
        """Read the manifest of a deployed model; None: it is not deployed, or cannot be read."""
        directory = next(
            (one.deployed.directory for one in self._entries.values() if one.deployed.digest == digest), None
        )
        try:
            return None if directory is None else read_manifest(Path(directory))
        except HearthError as error:
            log.warning("manifest_unreadable path=%s reason=%s", directory, error)
            return None

    def adapter_ids(self) -> set[AdapterId]:
        return {adapter.adapter_id for adapter in self._adapters.values()}

    def find(self, name: str, allowed: Collection[str] | None = None) -> CatalogEntry:
        """Raises UnknownModel, and UnsupportedModel for an adapter that does not fit its base."""
        found = self._names.resolve(name, allowed)
        if isinstance(found, Deployed):
            return self._entries[ModelId(found.name)]
        if isinstance(found, DeployedPreset):
            return replace(self.find(found.base), preset=found)
        if (reason := self._misfit(found)) is not None:
            raise UnsupportedModel(f"the adapter `{found.name}` cannot be served: {reason}")
        return self._with_adapter(found)

    @property
    def aliases(self) -> dict[str, str]:
        return {alias: name for name, config in self._configs.items() for alias in config.aliases}

    def host_order(self, order: LoadModel, hosting: int, pool: str) -> HostModel:
        entry = self._entries[model_of(order.model)]
        deployed = entry.deployed
        is_here = node_of(order.worker) == LOCAL
        # A stage beside the whole model has addresses of its own.
        is_beside = model_of(order.model) != order.model
        slot = choose_slot(order.model, self._slots.values()) if is_beside else self._slots.get(order.model)
        members = [] if order.pipeline is None else [one.worker for one in order.pipeline.members]
        return HostModel(
            model=order.model,
            hosting=hosting,
            where=deployed.where if is_here else where_on_nodes(deployed.digest),
            digest=deployed.digest,
            weight=entry.config.latency_weight,
            max_context=entry.max_context,
            limits=entry.limits_by_pool[pool],
            kv_floor_bytes=order.kv_floor_bytes,
            max_kv_bytes=order.max_kv_bytes,
            eos_ids=tuple(deployed.facts.eos_ids),
            own_bytes=order.promise.own_bytes,
            workspace_bytes=order.promise.workspace_bytes,
            standing_bytes=order.promise.standing_bytes,
            slot=slot,
            pipeline=order.pipeline,
            member=members.index(order.worker) if members else 0,
            is_ahead=order.is_ahead,
        )

    def prepare_orders(self, node: NodeId, pool: str) -> list[PrepareModel]:
        """Return orders to prepare models for a start: one of each kind, then as many others as allowed.

        Models of a kind share kernels. They agree in all facts but those of their text: models of the same
        dimensions may still differ in biases or positions.
        """
        made = ((one.prepare_order(node, pool), one) for one in self._entries.values())
        pairs = [(order, one) for order, one in made if order is not None]
        kinds = {
            (
                replace(one.deployed.facts, eos_ids=(), has_chat_template=False),
                one.limits_by_pool[pool],
            ): order
            for order, one in pairs
        }
        orders = dict.fromkeys((*kinds.values(), *(order for order, _ in pairs)))
        return list(orders)[: max(len(kinds), MAX_PREPARED)]

    def view(self, entry: CatalogEntry) -> ModelView:
        if entry.preset is not None:
            return self._preset_view(entry, entry.preset)
        if entry.adapter is not None:
            return _adapter_view(entry, entry.adapter, self.view(self._entries[entry.profile.model]))
        deployed, facts, keep_alive_s = entry.deployed, entry.deployed.facts, entry.profile.keep_alive_s
        return ModelView(
            name=deployed.name,
            aliases=entry.config.aliases,
            source=deployed.source,
            where=deployed.where,
            digest=deployed.digest,
            created_at_s=deployed.created_at_s,
            num_bytes=facts.num_bytes,
            num_parameters=facts.num_parameters,
            dtype=facts.dtype,
            quant=facts.brief_quant,
            family=facts.family,
            max_context=entry.max_context,
            has_chat_template=facts.has_chat_template,
            keep_alive_s=None if math.isinf(keep_alive_s) else keep_alive_s,
            is_pinned=entry.profile.is_pinned,
            labels=entry.profile.labels,
            min_replicas=entry.profile.min_replicas,
            max_replicas=entry.profile.max_replicas,
        )

    def _preset_view(self, entry: CatalogEntry, deployed: DeployedPreset) -> ModelView:
        view, preset = self.view(replace(entry, preset=None)), deployed.preset
        return replace(
            view,
            name=deployed.name,
            aliases=self._configs.get(deployed.name, ModelConfig()).aliases,
            source=deployed.base,
            created_at_s=deployed.created_at_s,
            has_chat_template=view.has_chat_template or preset.template is not None,
            base=deployed.base,
            preset=preset,
        )

    def _with_adapter(self, adapter: DeployedAdapter) -> CatalogEntry:
        base, config = self._entries[ModelId(adapter.base)], self._configs.get(adapter.name, ModelConfig())
        return replace(base, config=config, adapter=adapter)

    def _misfit(self, adapter: DeployedAdapter) -> str | None:
        base = self._entries.get(ModelId(adapter.base))
        if base is None:
            return f"its base `{adapter.base}` is not deployed; deploy that, or the adapter with another"
        facts = base.deployed.facts
        if not adapter.fits(facts):
            return f"`{adapter.base}` has changed its dimensions or dtype; deploy the adapter again"
        # A CPU computes in float32 from any dtype.
        if adapter.facts.dtype != facts.dtype and "cuda" in map(kind_of, base.profile.footprints):
            return (
                f"it was made for {adapter.facts.dtype}, but `{adapter.base}` is computed in {facts.dtype}; "
                "deploy it again with `--overwrite`"
            )
        return None

    def _entry(self, deployed: Deployed) -> CatalogEntry:
        config, facts = self._configs.get(deployed.name, ModelConfig()), deployed.facts
        pools = list(self._budgets) or [self.kind]
        limits = {pool: self._limits(facts, config, pool) for pool in pools}
        wanted = tuple(dict.fromkeys((*deployed.labels, *config.labels)))
        suited = [pool for pool in pools if labels_of(pool).issuperset(wanted)]
        fitted_to = self._find_holding(facts, config, limits, suited or pools[:1])
        max_context = self._context(facts, config, fitted_to, limits[fitted_to])
        footprints = dict[str, Footprint]()
        for pool in suited:
            try:
                footprints[pool] = footprint(
                    facts,
                    kind_of(pool),
                    limits[pool],
                    max_context,
                    floor_bytes=config.memory_floor_bytes,
                    ceiling_bytes=config.memory_ceiling_bytes,
                )
            except ConfigError:  # its ceiling is too low for that kind of device
                if pool == fitted_to:
                    raise
        staged = {pool: stage_sizes(facts, kind_of(pool), limits[pool], max_context) for pool in footprints}
        keep_alive_s = self._keep_alive_s if config.keep_alive is None else config.keep_alive
        profile = ModelProfile(
            model=ModelId(deployed.name),
            num_bytes=facts.num_bytes,
            footprints=footprints,
            keep_alive_s=keep_alive_s,
            is_pinned=config.pinned or config.min_replicas > 0,
            weight=config.latency_weight,
            digest=deployed.digest,
            labels=wanted,
            min_replicas=config.min_replicas,
            max_replicas=config.max_replicas,
            may_drop=config.drop == "auto",
            stages={pool: sizes for pool, sizes in staged.items() if sizes is not None},
        )
        return CatalogEntry(deployed, config, limits, fitted_to, max_context, profile, self._pace_of(config))

    def _pace_of(self, config: ModelConfig) -> Pace:
        usual, target_s, max_pause_s = self._pace, config.first_token_target, config.max_pause
        return Pace(
            first_token_s=usual.first_token_s if target_s is None else target_s,
            tokens_per_s=usual.tokens_per_s if config.pace is None else config.pace,
            max_pause_s=usual.max_pause_s if max_pause_s is None else max_pause_s,
        )

    def _limits(self, facts: Facts, config: ModelConfig, pool: str) -> StepLimits:
        """Return the limits by memory. Under a ceiling, a budget that is known later never raises them."""
        known, kind = (self._budgets.get(pool), config.memory_ceiling_bytes), kind_of(pool)
        bounds = [bound for bound in known if bound is not None]
        dtype, budget_bytes = computed_dtype(facts.dtype, kind), min(bounds, default=None)
        return step_limits(self._wanted_limits, facts.dimensions, dtype, kind, budget_bytes)

    def _find_holding(
        self, facts: Facts, config: ModelConfig, limits: Mapping[str, StepLimits], pools: Sequence[str]
    ) -> str:
        """Return the first of `pools` whose workers can hold a model, else in stages, or else the first."""
        staging: list[str] = []
        for pool in pools if len(pools) > 1 else ():
            kind, context = kind_of(pool), self._context(facts, config, pool, limits[pool])
            budget_bytes = self._budgets[pool]
            needed_bytes = footprint(facts, kind, limits[pool], context).least_bytes
            if budget_bytes is None or needed_bytes <= budget_bytes:
                return pool
            sizes = stage_sizes(facts, kind, limits[pool], context)
            if sizes is not None and split_evenly(sizes, budget_bytes) is not None:
                staging.append(pool)
        return [*staging, *pools][0]

    def _context(self, facts: Facts, config: ModelConfig, pool: str, limits: StepLimits) -> int:
        budget_bytes = self._budgets.get(pool)
        if budget_bytes is not None and self._takes_turns:
            budget_bytes = int(budget_bytes * TURN_SHARE)
        bounds = [bound for bound in (budget_bytes, config.memory_ceiling_bytes) if bound is not None]
        if config.context is not None or not bounds:
            return context_of(facts, config.context)
        kind, most_bytes = kind_of(pool), min(bounds)
        context = fitted_context(facts, kind, limits, most_bytes)
        is_whole = footprint(facts, kind, limits, context).least_bytes <= most_bytes
        if is_whole or config.memory_ceiling_bytes is not None:
            return context
        return staged_context(facts, kind, limits, most_bytes) or context


def _adapter_view(entry: CatalogEntry, adapter: DeployedAdapter, base: ModelView) -> ModelView:
    return replace(
        base,
        name=adapter.name,
        aliases=entry.config.aliases,
        source=adapter.source,
        where=adapter.where,
        digest=adapter.digest,
        created_at_s=adapter.created_at_s,
        num_bytes=adapter.num_bytes,
        num_parameters=adapter.facts.num_parameters,
        dtype=adapter.facts.dtype,
        quant="none",
        is_pinned=entry.config.pinned,
        base=adapter.base,
        max_rank=adapter.facts.max_rank,
        targets=adapter.facts.targets,
    )


#: The settings that adapters and presets can have; the others are those of their base.
_OF_ADAPTERS, _OF_PRESETS = ("aliases", "pinned", "latency_weight", "source"), ("aliases",)


def _check_config(name: str, config: ModelConfig | None, what: str, known: Sequence[str]) -> None:
    unset = ModelConfig()
    given = [] if config is None else [one.name for one in fields(config)]
    wrong = [one for one in given if one not in known and getattr(config, one) != getattr(unset, one)]
    if wrong:
        raise ConfigError(
            f"[models.{name}] sets {listed(wrong)}, but `{name}` is {what}: only "
            f"{listed(known)} can be its own; the rest is set for its base"
        )

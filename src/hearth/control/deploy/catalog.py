"""Deployed models and adapters as brain and workers need to know them. The registry stores them."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace

from hearth.control.deploy.deployed import Deployed, DeployedAdapter
from hearth.control.deploy.names import Names, listed
from hearth.control.deploy.registry import Registry
from hearth.control.observe.views import ModelView
from hearth.core.config import EngineConfig, ModelConfig
from hearth.core.errors import ConfigError, UnsupportedModel
from hearth.core.messages import AdapterOrder, HostModel, PrepareModel
from hearth.core.sizes import StepLimits, computed_dtype
from hearth.core.types import LOCAL, AdapterId, Digest, ModelId, NodeId, Pace, node_of, where_on_nodes
from hearth.policy.batch.step_limits import step_limits
from hearth.policy.fleet.events import LoadModel
from hearth.policy.fleet.footprint import Facts, context_of, fitted_context, footprint
from hearth.policy.fleet.profile import ModelProfile

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
    limits_by_kind: Mapping[str, StepLimits]  #: of devices
    max_context: int
    profile: ModelProfile
    pace: Pace
    adapter: DeployedAdapter | None = None  #: None: the model itself is meant

    @property
    def name(self) -> str:
        return self.deployed.name if self.adapter is None else self.adapter.name

    @property
    def adapter_order(self) -> AdapterOrder | None:
        if (adapter := self.adapter) is None:
            return None
        weight, is_pinned = self.config.latency_weight, self.config.pinned
        return AdapterOrder(adapter.adapter_id, adapter.name, adapter.where, weight, is_pinned)

    @property
    def limits(self) -> StepLimits:
        """The limits on the kind of device that the context was fitted to."""
        return next(iter(self.limits_by_kind.values()))

    @property
    def is_cut(self) -> bool:
        """True if the context is shorter than the model's own, without a setting that says so."""
        return self.config.context is None and self.max_context < self.deployed.facts.max_positions

    def prepare_order(self, node: NodeId, kind: str) -> PrepareModel:
        deployed = self.deployed
        where = deployed.directory if node == LOCAL else where_on_nodes(deployed.digest)
        return PrepareModel(self.profile.model, where, self.limits_by_kind[kind])


class Catalog:
    """Mutable; used on the event loop alone.

    Without a setting, a model's context and its steps are as large as a worker's memory allows; where models
    take turns, some memory is left to others. The memory is known from the configuration, or else from the
    first worker of each kind of device. The context is fitted to the first kind: a model may fit only some
    devices, and is placed there.
    """

    def __init__(
        self,
        registry: Registry,
        configs: Mapping[str, ModelConfig],
        engine: EngineConfig,
        keep_alive_s: float,
        kind: str | None = "cpu",
        budget_bytes: int | None = None,
        pace: Pace | None = None,
        *,
        takes_turns: bool = False,
        is_served: bool = True,
    ) -> None:
        """Read the registry. `kind`: of the devices of this machine, None: it has no workers;
        `budget_bytes`: of each, None: not known yet.

        `pace`: of models without one of their own. `takes_turns`: models that do not fit together take turns.
        `is_served`: False: list adapters for all kinds of devices. Raises ConfigError: the configuration of a
        model contradicts the model.
        """
        self._registry, self._configs = registry, configs
        self._wanted_limits = engine.wanted_limits
        self._keep_alive_s = keep_alive_s
        #: The memory of each kind of device; None: not known yet. The context is fitted to the first.
        self._budgets: dict[str, int | None] = {} if kind is None else {kind: budget_bytes}
        self._pace, self._takes_turns, self._is_served = pace or Pace(), takes_turns, is_served
        #: Contexts that were cut, by model, as they have been logged.
        self._cuts: dict[str, int] = {}
        #: Adapters that do not fit their base, with the reason, as they have been logged.
        self._misfits: dict[str, str] = {}
        self._entries: dict[ModelId, CatalogEntry] = {}
        self._slots: Mapping[str, int] = {}  #: of device addresses, by name
        self._adapters: dict[str, DeployedAdapter] = {}
        self.refresh()

    def check_settings(self) -> None:
        for name, hint in self._names.waiting().items():
            raise ConfigError(
                f"[models.{name}] has settings for a model that is not deployed ({hint}); correct the name, "
                "deploy the model first, or remove the table"
            )

    def refresh(self) -> None:
        deployed, adapters = self._registry.all(), self._registry.adapters()
        names = Names([*deployed, *adapters], self._configs)
        for adapter in adapters:
            _check_adapter_config(adapter.name, self._configs.get(adapter.name, ModelConfig()))
        entries = {ModelId(one.name): self._entry(one) for one in deployed}
        self._names, self._entries = names, entries  # all or, where the configuration is wrong, none
        self._adapters = {adapter.name: adapter for adapter in adapters}
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
                    self._budgets[self.kind],
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
        """The kind of device that models and adapters are converted for."""
        return next(iter(self._budgets), "cpu")

    def fit(self, kind: str, budget_bytes: int) -> list[CatalogEntry]:
        """Take the budget of the first worker of a kind. Returns the entries that change by it."""
        if self._budgets.get(kind) is not None:
            return []
        self._budgets[kind] = int(budget_bytes * MEASURED_SHARE)
        before = self._entries
        self._entries = {name: self._entry(entry.deployed) for name, entry in before.items()}
        self._log_cuts()
        return [entry for name, entry in self._entries.items() if entry != before[name]]

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

    def bases(self) -> set[ModelId]:
        return {ModelId(adapter.base) for adapter in self._adapters.values()}

    def places(self) -> dict[Digest, str]:
        """Return where each deployed model and adapter is, by its digest."""
        models = {Digest(one.deployed.digest): one.deployed.where for one in self._entries.values()}
        return models | {Digest(one.digest): one.where for one in self._adapters.values()}

    def adapter_ids(self) -> set[AdapterId]:
        return {adapter.adapter_id for adapter in self._adapters.values()}

    def find(self, name: str, allowed: Collection[str] | None = None) -> CatalogEntry:
        """Raises UnknownModel, and UnsupportedModel for an adapter that does not fit its base."""
        found = self._names.resolve(name, allowed)
        if isinstance(found, Deployed):
            return self._entries[ModelId(found.name)]
        if (reason := self._misfit(found)) is not None:
            raise UnsupportedModel(f"the adapter `{found.name}` cannot be served: {reason}")
        return self._with_adapter(found)

    @property
    def aliases(self) -> dict[str, str]:
        return {alias: name for name, config in self._configs.items() for alias in config.aliases}

    def host_order(self, order: LoadModel, hosting: int, kind: str) -> HostModel:
        """`kind`: of the worker's device."""
        entry = self._entries[order.model]
        deployed = entry.deployed
        is_here = node_of(order.worker) == LOCAL
        return HostModel(
            model=order.model,
            hosting=hosting,
            where=deployed.where if is_here else where_on_nodes(deployed.digest),
            digest=deployed.digest,
            weight=entry.config.latency_weight,
            max_context=entry.max_context,
            limits=entry.limits_by_kind[kind],
            kv_floor_bytes=order.kv_floor_bytes,
            max_kv_bytes=order.max_kv_bytes,
            eos_ids=tuple(deployed.facts.eos_ids),
            own_bytes=order.promise.own_bytes,
            workspace_bytes=order.promise.workspace_bytes,
            standing_bytes=order.promise.standing_bytes,
            slot=self._slots.get(deployed.name),
        )

    def prepare_orders(self, node: NodeId, kind: str) -> list[PrepareModel]:
        """Return orders to prepare models for a start: one of each kind, then as many others as allowed.

        Models of a kind share kernels. They agree in all facts but those of their text: models of the same
        dimensions may still differ in biases or positions.
        """
        pairs = [(one.prepare_order(node, kind), one) for one in self._entries.values()]
        kinds = {
            (
                replace(one.deployed.facts, eos_ids=(), has_chat_template=False),
                one.limits_by_kind[kind],
            ): order
            for order, one in pairs
        }
        orders = dict.fromkeys((*kinds.values(), *(order for order, _ in pairs)))
        return list(orders)[: max(len(kinds), MAX_PREPARED)]

    def view(self, entry: CatalogEntry) -> ModelView:
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
            quant=facts.quant,
            family=facts.family,
            max_context=entry.max_context,
            has_chat_template=facts.has_chat_template,
            keep_alive_s=None if math.isinf(keep_alive_s) else keep_alive_s,
            is_pinned=entry.profile.is_pinned,
        )

    def _with_adapter(self, adapter: DeployedAdapter) -> CatalogEntry:
        base, config = self._entries[ModelId(adapter.base)], self._configs.get(adapter.name, ModelConfig())
        return replace(base, config=config, adapter=adapter)

    def _misfit(self, adapter: DeployedAdapter) -> str | None:
        base = self._entries.get(ModelId(adapter.base))
        if base is None:
            return f"its base `{adapter.base}` is not deployed; deploy that, or the adapter with another"
        facts = base.deployed.facts
        computed = computed_dtype(facts.dtype, self.kind)
        if not adapter.fits(facts):
            return f"`{adapter.base}` has changed its dimensions or dtype; deploy the adapter again"
        if self._is_served and adapter.facts.dtype != computed:
            return (
                f"it was made for {adapter.facts.dtype}, but `{adapter.base}` is computed in {computed}; "
                "deploy it again with `--overwrite`"
            )
        return None

    def _entry(self, deployed: Deployed) -> CatalogEntry:
        config, facts = self._configs.get(deployed.name, ModelConfig()), deployed.facts
        kinds = list(self._budgets) or [self.kind]
        limits = {kind: self._limits(facts, config, kind) for kind in kinds}
        max_context = self._context(facts, config, limits[self.kind])
        keep_alive_s = self._keep_alive_s if config.keep_alive is None else config.keep_alive
        profile = ModelProfile(
            model=ModelId(deployed.name),
            num_bytes=facts.num_bytes,
            footprints={
                kind: footprint(
                    facts,
                    kind,
                    limits[kind],
                    max_context,
                    floor_bytes=config.memory_floor_bytes,
                    ceiling_bytes=config.memory_ceiling_bytes,
                )
                for kind in kinds
            },
            keep_alive_s=keep_alive_s,
            is_pinned=config.pinned,
            weight=config.latency_weight,
            digest=deployed.digest,
        )
        return CatalogEntry(deployed, config, limits, max_context, profile, self._pace_of(config))

    def _pace_of(self, config: ModelConfig) -> Pace:
        usual, target_s, max_pause_s = self._pace, config.first_token_target, config.max_pause
        return Pace(
            first_token_s=usual.first_token_s if target_s is None else target_s,
            tokens_per_s=usual.tokens_per_s if config.pace is None else config.pace,
            max_pause_s=usual.max_pause_s if max_pause_s is None else max_pause_s,
        )

    def _limits(self, facts: Facts, config: ModelConfig, kind: str) -> StepLimits:
        """Return the limits by memory. Under a ceiling, a budget that is known later never raises them."""
        known = (self._budgets.get(kind), config.memory_ceiling_bytes)
        bounds = [bound for bound in known if bound is not None]
        dtype, budget_bytes = computed_dtype(facts.dtype, kind), min(bounds, default=None)
        return step_limits(self._wanted_limits, facts.dimensions, dtype, kind, budget_bytes)

    def _context(self, facts: Facts, config: ModelConfig, limits: StepLimits) -> int:
        budget_bytes = self._budgets.get(self.kind)
        if budget_bytes is not None and self._takes_turns:
            budget_bytes = int(budget_bytes * TURN_SHARE)
        bounds = [bound for bound in (budget_bytes, config.memory_ceiling_bytes) if bound is not None]
        if config.context is not None or not bounds:
            return context_of(facts, config.context)
        return fitted_context(facts, self.kind, limits, min(bounds))


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


def _check_adapter_config(name: str, config: ModelConfig) -> None:
    known = ("aliases", "pinned", "latency_weight")
    plain = ModelConfig(**{field: getattr(config, field) for field in known})
    if config != plain:
        wrong = [one.name for one in fields(config) if getattr(config, one.name) != getattr(plain, one.name)]
        raise ConfigError(
            f"[models.{name}] sets {listed(wrong)}, but `{name}` is an adapter: only "
            f"{listed(known)} can be its own; the rest is set for its base"
        )

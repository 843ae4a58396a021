"""The models of a worker as they come, stay, are retired and go. Knows no requests and sends no facts.

A method that completes the load of a model returns its `ModelLoaded`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from hearth.core.errors import DeviceError
from hearth.core.messages import HostModel, ModelLoaded, PrepareModel, sum_by_rung
from hearth.core.types import Hold, ModelId, model_of
from hearth.engine.engine import Engine
from hearth.worker.adapter_load import PostAdapterNews
from hearth.worker.adapters import WorkerAdapters
from hearth.worker.hosted_model import HostedModel
from hearth.worker.hosting_state import Finding, ServedModel
from hearth.worker.model_load import EngineReady, FrontLoaded, HostingNews, ModelFound
from hearth.worker.reclaimer import Reclaimer
from hearth.worker.runtime import HostingResources
from hearth.worker.stage_member import StageMember
from hearth.worker.turns import Turns
from hearth.worker.weights_transfer import WeightsLoaded

NUM_PREFETCHING = 2
#: Engines of retired models that are kept. Besides pool memory each takes some tens of MB, mostly for graphs.
MAX_RETIRED = 16

log = logging.getLogger(__name__)


class HostedModels:
    """Mutable; the step thread alone calls it. `post` is called by other threads."""

    def __init__(
        self,
        resources: HostingResources,
        post: Callable[[int, ModelId, HostingNews], None],
        post_adapter: PostAdapterNews,
    ) -> None:
        self.hosted: dict[ModelId, HostedModel] = {}
        self.reclaimer = Reclaimer(
            resources.new_pool,
            self.hosted,
            lambda model: max(0.0, self.turns.due_in_s(model) or 0.0),  # 0: late, or only pinned
            self._engines,
        )
        self.adapters = WorkerAdapters(resources, self.reclaimer, self.hosted, post_adapter)
        self.turns = Turns(
            resources.turns,
            self.hosted,
            self.reclaimer.pool,
            self.reclaimer.reload_costs,
            self.adapters.running_bytes,
        )
        self._resources, self._post = resources, post
        #: Retired models with their engine, the longest retired first.
        self._retired: dict[ModelId, HostedModel] = {}
        #: The last model without room for bytes before its turn, and the generation of memory then.
        self._vain_front: tuple[ModelId, int] | None = None
        self._is_prepared = False  #: for some model, which covers what all starts share

    # Coming and going.

    def prepare(self, order: PrepareModel) -> None:
        resources = self._resources
        if resources.kernels is not None:
            resources.kernels.prepare(order)
        if resources.snapshots is not None and not self._is_prepared:
            resources.loader.threads.start(resources.snapshots.prepare)
        self._is_prepared = True

    def host(self, order: HostModel) -> ModelLoaded | None:
        """Host a model; a retired one comes back with its engine, if that fits the order."""
        model, post = order.model, self._post
        assert model not in self.hosted, f"`{model}` is hosted already"
        self.reclaimer.reload_costs.hosted(model, order.weight)
        self._follow_displaced()
        retired = self._retired.pop(model, None)
        if retired is not None and _identity(retired.order) == _identity(order):
            retired.order, retired.hold = order, Hold.WARM
            self.hosted[model] = retired
            self.turns.hosted(retired)
            return self._load_ahead(retired) if order.is_ahead else self.load_in_turn(retired)
        if retired is not None:
            retired.close()
        self.hosted[model] = HostedModel(
            order,
            self._resources,
            self.reclaimer.pool,
            lambda hosting, news: post(hosting, model, news),
        )
        self.turns.hosted(self.hosted[model])
        self.hosted[model].find()
        return None

    def _follow_displaced(self) -> None:
        for model in self.reclaimer.pool.take_displaced():
            if (retired := self._retired.pop(model, None)) is not None:
                retired.close()
            elif (hosted := self.hosted.get(model)) is not None:
                hosted.displaced()

    def load_in_turn(self, hosted: HostedModel) -> ModelLoaded | None:
        return self.load(hosted) if hosted.has_turn else None

    def _load_ahead(self, hosted: HostedModel) -> ModelLoaded | None:
        """Load a model that nobody asks for yet; if models take turns, in a turn for which no other ends."""
        self._follow_displaced()
        if hosted.is_loaded:
            return None
        self.turns.awaited(hosted)
        return self.load_in_turn(hosted)

    def load(self, hosted: HostedModel) -> ModelLoaded | None:
        self._follow_displaced()
        if isinstance(hosted.state, Finding) or hosted.is_loading:
            return None
        if self._is_behind_stage(hosted):
            self.reclaimer.policy.defer(hosted.model, is_any_loading=True)
            return None
        try:
            return self._announced(hosted.load(self.reclaimer.place, is_beside=bool(self.busy())))
        except DeviceError:
            is_any_loading = any(one.is_loading for one in self.hosted.values())
            # Adapters in use may be in the way: until this has its place, they take no more requests.
            adapters = self.reclaimer.adapters
            is_any_loading |= adapters.is_any_coming or adapters.last_in_use() is not None
            is_any_loading |= self.reclaimer.is_any_returning
            if not self.reclaimer.policy.defer(hosted.model, is_any_loading=is_any_loading):
                raise
        log.info("model_deferred model=%s", hosted.model)
        return None

    def _is_behind_stage(self, hosted: HostedModel) -> bool:
        """True if a stage of the model is hosted beside it and lacks weights: it is loaded first."""
        return any(not stage.has_weights for stage in self._stages_of(hosted.model))

    def _stages_of(self, model: ModelId) -> list[HostedModel]:
        return [one for name, one in self.hosted.items() if name != model and model_of(name) == model]

    def _load_behind_stage(self, stage: ModelId) -> None:
        """Have the rest of a model be loaded behind a stage of it, which has its weights."""
        hosted = self.hosted.get(model_of(stage))
        if hosted is not None and hosted.model != stage:
            self.turns.awaited(hosted)
            self.reclaimer.policy.note_freed()  # the load is tried again

    def _engines(self) -> dict[ModelId, Engine]:
        all_models = {**self._retired, **self.hosted}
        return {model: one.served.engine for model, one in all_models.items() if one.served is not None}

    def found(self, hosted: HostedModel, news: ModelFound) -> ModelLoaded | None:
        hosted.found(news)
        self.turns.held(hosted)
        for stage in self._stages_of(hosted.model):
            if stage.has_weights:
                self._load_behind_stage(stage.model)
        return self._load_ahead(hosted) if hosted.order.is_ahead else self.load_in_turn(hosted)

    def engine_ready(self, hosted: HostedModel, news: EngineReady) -> ModelLoaded | None:
        loaded = hosted.engine_ready(news)
        self.limit_torch()
        return self._announced(loaded)

    def start_stage(self, hosted: HostedModel, member: StageMember) -> None:
        """Take all KV of a later stage, which then runs what arrives. Starting again is harmless.

        It is deferred while some of the KV comes back from another stage.
        """
        if (served := hosted.served) is None or member.is_started:
            return
        policy = self.reclaimer.policy
        try:
            self.reclaimer.take_floor(hosted.model)
        except DeviceError:
            if not policy.defer(hosted.model, is_any_loading=self.reclaimer.is_any_returning):
                raise
            return
        policy.stop_deferring(hosted.model)
        member.start(served.engine)

    def limit_torch(self) -> None:
        if self._resources.torch_limit is not None:
            models = {**self._retired, **self.hosted}
            self._resources.torch_limit.follow(
                {model: one.memory for model, one in models.items() if one.served is not None}
            )

    def weights_loaded(self, hosted: HostedModel, news: WeightsLoaded) -> ModelLoaded | None:
        loaded = hosted.weights_loaded(news)
        self._load_behind_stage(hosted.model)
        return self._announced(loaded)

    def retire(self, model: ModelId) -> None:
        """Take back all memory of an idle model but its weights, which stay until another model needs it."""
        hosted = self.hosted[model]
        hosted.settle()
        hosted.stop_loading()
        self.reclaimer.retire(hosted)
        if hosted.served is not None and self.reclaimer.pool.keeps_addresses and hosted.member is None:
            hosted.retire()
            self._retired[model] = hosted
            if len(self._retired) > MAX_RETIRED:
                self._retired.pop(next(iter(self._retired))).close()
        else:
            hosted.close()
        del self.hosted[model]
        self.turns.forget(model)
        self.limit_torch()
        log.info("model_retired model=%s", model)

    def drop(self, model: ModelId) -> None:
        """Drop a hosted or retired model entirely. Unknown models are ignored."""
        hosted = self.hosted.pop(model, None) or self._retired.pop(model, None)
        if hosted is not None:
            hosted.close()
        self.turns.forget(model)
        self.reclaimer.drop(model)
        self.reclaimer.reload_costs.forget(model)
        self.limit_torch()
        log.info("model_dropped model=%s", model)

    # Before turns.

    def prefetch(self) -> None:
        """Prefetch models that wait for their turn.

        The next ones come to host memory, and bytes of the very next to the device if its addresses last and
        cheaper bytes can be evicted.
        """
        line = self.turns.next_in_line()
        for model, hosted in self.hosted.items():
            if model not in line:
                hosted.prefetch.stop()
        missing = [self.hosted[model] for model in line if not self.hosted[model].is_loaded]
        for hosted in [one for one in missing if not self._is_behind_stage(one)][:NUM_PREFETCHING]:
            hosted.start_prefetch()
        if line and self.reclaimer.pool.keeps_addresses:
            self._copy_first(line)

    def _copy_first(self, line: Sequence[ModelId]) -> None:
        if any(one.is_loading for one in self.hosted.values()) or (model := self.turns.early(line)) is None:
            return
        hosted, generation = self.hosted[model], self.reclaimer.policy.generation
        if (spec := hosted.spec) is None or self._vain_front == (model, generation):
            return
        try:
            space = self.reclaimer.place_front(model, spec, self.turns.front_bytes)
        except DeviceError:  # it never fits, as is told in its turn
            return
        if space is not None:
            hosted.prefetch.copy(space, spec.layout)
        else:
            self._vain_front = (model, generation)

    def front_loaded(self, hosted: HostedModel, news: FrontLoaded) -> ModelLoaded | None:
        hosted.prefetch.copied(news)
        self.reclaimer.policy.note_freed()
        return self.load_in_turn(hosted)

    def set_hold(self, model: ModelId, hold: Hold) -> ModelLoaded | None:
        """Set how a model is held while it has no requests. A retained one that is kept again is completed.

        One that just failed is ignored, and so is a stage, which keeps its memory until it leaves.
        """
        hosted = self.hosted.get(model)
        if hosted is None or hosted.member is not None:
            return None
        was_retained, hosted.hold = hosted.hold is Hold.RETAINED, hold
        self.turns.held(hosted)
        self.reclaimer.policy.note_freed()
        return self._load_ahead(hosted) if was_retained and hold is Hold.WARM else None

    def turn_over(self, hosted: HostedModel) -> None:
        """Let others take the memory of a model whose turn is over, even while its last step is in flight."""
        self.reclaimer.policy.stop_deferring(hosted.model)
        self.reclaimer.policy.note_freed()

    def busy(self) -> dict[ModelId, ServedModel]:
        busy = ((model, one) for model, one in self.hosted.items() if one.has_turn and one.has_work)
        return {model: one.served for model, one in busy if one.served is not None}

    def _announced(self, loaded: ModelLoaded | None) -> ModelLoaded | None:
        if loaded is not None:
            log.info(
                "model_loaded model=%s load_s=%.3f open_s=%.3f place_s=%.3f kernels_s=%.3f assemble_s=%.3f "
                "sources=%s",
                loaded.model,
                loaded.total_s,
                loaded.open_s,
                loaded.place_s,
                loaded.kernels_s,
                loaded.assemble_s,
                ",".join(f"{use.source}:{use.num_bytes}" for use in loaded.rungs if use.source),
            )
            rungs = sum_by_rung(loaded.rungs)
            self.reclaimer.reload_costs.learn_load(
                loaded.model,
                {rung: use.num_bytes for rung, use in rungs.items()},
                {rung: use.seconds for rung, use in rungs.items()},
                loaded.whole_s,
            )
            self.reclaimer.policy.note_freed()
            self.turns.loaded(loaded.model)
        return loaded


def _identity(order: HostModel) -> tuple[object, ...]:
    where = (order.where, order.digest, order.weight, order.slot, order.layers)
    return (*where, order.limits, order.max_context, order.kv_floor_bytes, order.max_kv_bytes, order.eos_ids)

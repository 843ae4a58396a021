"""Reports how much KV the models of a worker are about to need. Decides nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

from hearth.core.messages import ModelPressure
from hearth.core.types import Hold, ModelId
from hearth.policy.batch.kv_pressure import PressureWatch
from hearth.worker.hosted_models import HostedModels
from hearth.worker.hosting_state import ServedModel


class PressureReports:
    """Mutable; the step thread alone calls it."""

    def __init__(self, models: HostedModels) -> None:
        self._models = models
        self._watches: dict[tuple[ModelId, int], PressureWatch] = {}  #: by model and hosting

    def stepped(self, model: ModelId) -> ModelPressure | None:
        """Return what to report behind a step; None: nothing has changed, or this worker cannot tell."""
        hosted = self._models.hosted.get(model)
        if hosted is None or hosted.later_stage is not None or (served := hosted.served) is None:
            return None
        key = model, hosted.order.hosting
        if (watch := self._watches.get(key)) is None:
            self._forget_gone()
            watch = self._watches[key] = PressureWatch()
        room_blocks = partial(self._room_blocks, model, served)
        pressure = watch.look(served.engine.batcher, room_blocks, time.monotonic())
        return None if pressure is None else ModelPressure(*key, pressure.demand_tokens, pressure.room_tokens)

    def idle(self) -> Iterator[ModelPressure]:
        """Yield the reports of models whose requests have all left without a further step."""
        for (model, _), watch in list(self._watches.items()):
            hosted = self._models.hosted.get(model)
            is_idle = hosted is not None and not hosted.has_work and watch.has_reported_demand
            if is_idle and (report := self.stepped(model)) is not None:
                yield report

    def _room_blocks(self, model: ModelId, served: ServedModel) -> int:
        reclaimer, shape = self._models.reclaimer, served.spec.shape
        room_bytes = reclaimer.pool.free_bytes
        for holding in reclaimer.pool.usage().holdings:
            if holding.model != model:
                terms = reclaimer.eviction_terms(holding.model)
                if terms.hold <= Hold.WARM and not terms.is_loading:
                    room_bytes += holding.weights_bytes - holding.shared_bytes
        num_blocks = served.engine.batcher.blocks.num_blocks + room_bytes // shape.block_bytes
        return min(num_blocks, shape.max_blocks - 1)

    def _forget_gone(self) -> None:
        hosted = {(model, one.order.hosting) for model, one in self._models.hosted.items()}
        self._watches = {key: watch for key, watch in self._watches.items() if key in hosted}

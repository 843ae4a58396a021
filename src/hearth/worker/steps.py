"""Steps of busy models: which may step, which is next, and which can never go on. Tells nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from hearth.core.types import ModelId
from hearth.engine.engine import StepOutcome, StepOutputs
from hearth.policy.batch.step_sharing import BusyModel, StepReadiness, StepSharing
from hearth.worker.failure import ModelBroke
from hearth.worker.hosted_model import HostedModel
from hearth.worker.hosted_models import HostedModels
from hearth.worker.hosting_state import Finding, ServedModel

#: How many steps in a row every ready model may make without computing anything before one must give way.
MAX_VAIN_ROUNDS = 8


class ModelSteps:
    """Mutable; the step thread alone calls it."""

    def __init__(self, models: HostedModels) -> None:
        self._models, self._reclaimer = models, models.reclaimer
        self._sharing, self._readiness = StepSharing(), StepReadiness()
        #: By model: steps without computation since any model computed something or an adapter was coming.
        self._num_vain = Counter[ModelId]()

    def ready(self) -> dict[ModelId, ServedModel]:
        lacking = self._reclaimer.adapters.lacking
        busy = {model: one for model, one in self._models.busy().items() if not lacking(model)}
        generation = self._reclaimer.policy.generation
        return {model: busy[model] for model in self._readiness.ready(self._views(busy), generation)}

    def next(self, ready: Mapping[ModelId, ServedModel]) -> ModelId:
        urgent = [model for model, served in ready.items() if served.engine.batcher.has_newcomer]
        computed = [model for model in urgent if len(ready) > 1 and ready[model].engine.computes_first_tokens]
        return self._sharing.next(ready, urgent, computed)

    def step(self, model: ModelId, served: ServedModel, *, is_prepared: bool) -> StepOutcome:
        """Step a ready model with the KV that it needs; `settle` has to follow.

        `is_prepared`: it has the KV.
        """
        if (stage := self._models.hosted[model].later_stage) is not None:
            return stage.step()
        if not is_prepared:
            self._reclaimer.before_step(model, served)
        return served.engine.step()

    def settle(self, model: ModelId, served: ServedModel, outcome: StepOutcome) -> None:
        """Finish the books of a step and take back KV, once its tokens are sent."""
        served.engine.settle()
        if self._models.hosted[model].later_stage is None:
            self._reclaimer.after_step(model, served, outcome)
        # Once a coming adapter is there, its requests may compute, or its memory may be taken.
        if outcome.has_run or self._reclaimer.adapters.is_any_coming:
            self._num_vain.clear()
        elif not served.engine.is_computing:  # else the next result of other stages is a message
            self._num_vain[model] += 1
        if not outcome.has_run and not outcome.preempted:
            self._readiness.starved(model, self._reclaimer.policy.generation)

    def stepped(self, model: ModelId, step_s: float) -> None:
        self._sharing.stepped(model, step_s)

    def forget(self, model: ModelId) -> None:
        self._sharing.forget(model)

    def flush(self, hosted: HostedModel) -> StepOutcome:
        outcome = StepOutcome(StepOutputs(), (), (), has_run=False)
        if (served := hosted.served) is not None and hosted.takes_requests:
            outcome = served.engine.flush()
            self._reclaimer.after_step(hosted.model, served, outcome)
            self._reclaimer.policy.note_freed()
        return outcome

    def recheck(self) -> None:
        """Let models step again that had nothing to compute: a message has come."""
        self._readiness.recheck()

    def hopeless(self) -> ModelBroke | None:
        """Return a model that waits for KV which no other model will give back, when none is ready.

        None: there is no such model, or a load, an adapter under way, the end of one's use on a later stage
        or KV that comes back from a stage may change that.
        """
        hosted = self._models.hosted.values()
        if any(isinstance(one.state, Finding) or one.is_loading for one in hosted):
            return None
        if self._reclaimer.is_any_returning:
            return None
        adapters = self._reclaimer.adapters
        if adapters.is_any_coming or any(one.later_stage and adapters.run_by(one.model) for one in hosted):
            return None
        busy = {
            model: one
            for model, one in self._models.busy().items()
            if self._models.hosted[model].member is None or not one.engine.is_computing
        }
        model = self._readiness.hopeless(self._views(busy))
        return None if model is None else ModelBroke(model, self._reclaimer.kv_shortage(model, busy[model]))

    @property
    def is_stuck(self) -> bool:
        """True if models short of KV take the same blocks from each other, and none computes.

        Every ready model must have tried again since the last adapter came: a model that had little of the
        device steps many times in a row.
        """
        ready = self.ready() if self._num_vain else {}
        return bool(ready) and all(self._num_vain[model] > MAX_VAIN_ROUNDS for model in ready)

    def _views(self, busy: Mapping[ModelId, ServedModel]) -> list[BusyModel]:
        views = []
        for model in busy:
            hosted = self._models.hosted[model]
            load = hosted.load_under_way
            views.append(BusyModel(model, hosted.is_loaded, load is not None and load.can_follow))
        return views

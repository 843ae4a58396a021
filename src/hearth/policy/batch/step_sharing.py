"""Which busy models of a worker may step, and which one steps next.

Busy models share the device by time, not by steps: the one that had the least is next. A model that was idle
starts at the least of the others, or at what it had if that is more. A long step never makes a model wait for
long.

First tokens go first, as long as their model is not far ahead of the others. Once the device computes a first
token the model in front of it on the device steps first:

    device    A's step | B's first token | A's next step
    host      B launches; A launches, and sends its tokens; B waits, and sends its first

If B waited at once, A's tokens would be sent as late as B's, and the device would run dry behind them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from hearth.core.types import ModelId

#: Limit of what a model counts as having had beyond the least served one. Longer than any step that only
#: computes, so that those share the time exactly.
MAX_LEAD_S = 0.5
#: How far ahead of the others a model may be whose first token goes first.
MAX_EARLY_S = 0.1
#: A step that follows a load layer by layer waits for copies, and all steps behind it wait too. So it starts
#: when the rest of the load should take no longer than this: enough to compute a prompt while the last layers
#: arrive, too little for other models' requests to notice.
MAX_HOLD_S = 0.05


@dataclass(frozen=True, slots=True)
class BusyModel:
    model: ModelId
    is_loaded: bool  #: all of its weights are loaded
    can_follow_load: bool  #: a step may follow the rest of its load layer by layer


class StepReadiness:
    """Which models had nothing to compute because KV was short. Mutable; written by the step thread."""

    def __init__(self) -> None:
        #: By model whose last step had nothing to compute: the generation of memory then. As long as that is
        #: the same, there is no more KV than there was.
        self._starved: dict[ModelId, int] = {}

    def ready(self, busy: Iterable[BusyModel], generation: int) -> list[ModelId]:
        """Return the models that may step now.

        A model that is being loaded would hold up the others, so it steps only if none of them can.
        """
        awake = [one for one in busy if self._starved.get(one.model) != generation]
        loaded = [one.model for one in awake if one.is_loaded]
        return loaded or [one.model for one in awake if one.can_follow_load]

    def starved(self, model: ModelId, generation: int) -> None:
        self._starved[model] = generation

    def recheck(self) -> None:
        self._starved.clear()

    def hopeless(self, busy: Iterable[BusyModel]) -> ModelId | None:
        """Return a model that waits for KV which will never come free; None if there is none.

        Only valid while no model is ready, looked up or loaded.
        """
        return next((one.model for one in busy if one.model in self._starved), None)


class StepSharing:
    def __init__(self) -> None:
        #: Time on the device, on a common scale, of every model that was busy and is not forgotten.
        self._spent_s: dict[ModelId, float] = {}
        self._busy: set[ModelId] = set()  #: when `next` was last asked
        #: Number of each model's last step: of equals the one that waited longer goes first.
        self._last_step: dict[ModelId, int] = {}
        self._num_steps = 0

    def next(
        self,
        ready: Collection[ModelId],
        urgent: Collection[ModelId] = (),
        computed: Collection[ModelId] = (),
    ) -> ModelId:
        """Return the model of `ready`, which must not be empty, that steps next.

        `urgent`: those with a request that waits for its first token. `computed`: those of `urgent` that have
        launched all steps that such requests wait for, and the device has not done them.
        """
        stayed = self._busy.intersection(ready)
        if not stayed:
            self._spent_s.clear()  # no other model to compare with
        least_s = min((self._spent_s[model] for model in stayed), default=0.0)
        for model in ready:
            spent_s = self._spent_s.get(model, 0.0)
            self._spent_s[model] = min(max(least_s, spent_s), least_s + MAX_LEAD_S)
        self._busy = set(ready)
        least_s = min(self._spent_s[model] for model in ready)
        early = [model for model in urgent if self._spent_s[model] <= least_s + MAX_EARLY_S]
        model = min(early or ready, key=self._place)
        # The model in front may be computing a first token as well, with another one in front.
        while model in computed and (in_front := self._launched_before(model, ready)):
            model = min(in_front, key=self._place)
        return model

    def stepped(self, model: ModelId, seconds: float) -> None:
        """Count a step, also of a model that stepped without `next`."""
        self._spent_s[model] = self._spent_s.get(model, 0.0) + seconds
        self._num_steps += 1
        self._last_step[model] = self._num_steps

    def _launched_before(self, model: ModelId, ready: Iterable[ModelId]) -> list[ModelId]:
        last_step = self._last_step.get(model, -1)
        return [one for one in ready if self._last_step.get(one, -1) < last_step]

    def _place(self, model: ModelId) -> tuple[float, int]:
        return self._spent_s[model], self._last_step.get(model, -1)

    def forget(self, model: ModelId) -> None:
        self._busy.discard(model)
        self._spent_s.pop(model, None)
        self._last_step.pop(model, None)

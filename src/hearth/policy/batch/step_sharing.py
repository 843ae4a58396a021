"""Which of a worker's busy models may step, and which one steps next. Measures no time and steps nothing.

Busy models share the device by time, not by steps: next is the one that has had the least. A model that was
idle has saved up nothing: it starts where the least served of the others stands, so it neither waits for
them to catch up nor makes them wait. What it had beyond that it keeps, or going idle for a moment would pay.

Nobody waits for long because a step of its own was long: that may have been a kernel being compiled, of which
the others had nothing and which will not come again, while its next token is due.

A first token goes first: somebody waits for it who has nothing to read yet. Whoever steps early for it has
had its share, so the others catch up, and it goes early only as long as it is not far ahead of them. Once the
device computes it there is nothing to launch for it, and whoever is in front of it on the device steps first:

    device    A's step | B's first token | A's next step
    host      B launches; A launches, and tells its tokens; B waits, and tells its first

If B waited at once, A's tokens would be told as late as B's, and the device had nothing to do behind them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from hearth.core.types import ModelId

#: No model counts as having had more than this beyond the least served one. No step that only computes takes
#: longer, so that by those the time is shared exactly.
MAX_LEAD_S = 0.5
#: How much more than the others a model may have had whose first token goes first.
MAX_EARLY_S = 0.1
#: A step that follows a load, layer by layer, waits for copies to be queued, and so does whatever comes after
#: it. So it starts when the rest of the load should not take longer than this: enough to have a prompt
#: computed while the last layers arrive, too little to be noticed by another model's request.
MAX_HOLD_S = 0.05


@dataclass(frozen=True, slots=True)
class BusyModel:
    """A model with work, and how much of it is on the device."""

    model: ModelId
    is_loaded: bool  #: all of its bytes are there
    can_follow_load: bool  #: the rest should be there soon, and a step may follow it layer by layer


class StepReadiness:
    """Mutable; written by the step thread alone. Which models had nothing to compute, for want of KV."""

    def __init__(self) -> None:
        #: By model whose last step had nothing to compute: the generation of memory then. As long as that is
        #: the same, there is no more KV than there was.
        self._starved: dict[ModelId, int] = {}

    def ready(self, busy: Iterable[BusyModel], generation: int) -> list[ModelId]:
        """Return the models that may step now.

        A model that is still being loaded would hold up others, so it steps only while none of them can.
        """
        awake = [one for one in busy if self._starved.get(one.model) != generation]
        loaded = [one.model for one in awake if one.is_loaded]
        return loaded or [one.model for one in awake if one.can_follow_load]

    def starved(self, model: ModelId, generation: int) -> None:
        """Note that a model's step had nothing to compute, for want of KV."""
        self._starved[model] = generation

    def look_again(self) -> None:
        """Let all models step that had nothing to compute: something has come from outside."""
        self._starved.clear()

    def hopeless(self, busy: Iterable[BusyModel]) -> ModelId | None:
        """Return a model that waits for KV which nobody is going to give back; None if there is none.

        To be asked when no model is ready, and none is being found or loaded.
        """
        return next((one.model for one in busy if one.model in self._starved), None)


class StepSharing:
    """Mutable; written by the step thread alone."""

    def __init__(self) -> None:
        #: Time on the device, on a common scale, of every model that was busy and is not forgotten.
        self._spent_s: dict[ModelId, float] = {}
        self._busy: set[ModelId] = set()  #: when `next` was last asked
        #: Number of each model's last step: of equals the one that waits for longer goes first.
        self._last_step: dict[ModelId, int] = {}
        self._num_steps = 0

    def next(
        self,
        ready: Collection[ModelId],
        urgent: Collection[ModelId] = (),
        computed: Collection[ModelId] = (),
    ) -> ModelId:
        """Return the one of `ready`, which must not be empty, that steps next.

        `urgent`: those of them with a request that waits for its first token. `computed`: those of `urgent`
        that have launched all that such requests wait for, and the device has not done it yet.
        """
        stayed = self._busy.intersection(ready)
        if not stayed:
            self._spent_s.clear()  # nobody to be compared with: a new beginning
        least_s = min((self._spent_s[model] for model in stayed), default=0.0)
        for model in ready:
            spent_s = self._spent_s.get(model, 0.0)
            self._spent_s[model] = min(max(least_s, spent_s), least_s + MAX_LEAD_S)
        self._busy = set(ready)
        least_s = min(self._spent_s[model] for model in ready)
        early = [model for model in urgent if self._spent_s[model] <= least_s + MAX_EARLY_S]
        model = min(early or ready, key=self._place)
        # Whoever is in front may have a first token of its own there, and somebody in front of that.
        while model in computed and (in_front := self._launched_before(model, ready)):
            model = min(in_front, key=self._place)
        return model

    def stepped(self, model: ModelId, seconds: float) -> None:
        """Note that a model has stepped for so long."""
        self._spent_s[model] += seconds
        self._num_steps += 1
        self._last_step[model] = self._num_steps

    def _launched_before(self, model: ModelId, ready: Iterable[ModelId]) -> list[ModelId]:
        last_step = self._last_step.get(model, -1)
        return [one for one in ready if self._last_step.get(one, -1) < last_step]

    def _place(self, model: ModelId) -> tuple[float, int]:
        return self._spent_s[model], self._last_step.get(model, -1)

    def forget(self, model: ModelId) -> None:
        """Forget a model that is no longer hosted, if it ever was busy."""
        self._busy.discard(model)
        self._spent_s.pop(model, None)
        self._last_step.pop(model, None)

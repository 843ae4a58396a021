"""Tells the turn policy what happens on this worker, and the models whose turn it is. Moves no bytes.

If models take no turns it does nothing, and every model always has its turn.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import assert_never

from hearth.core.messages import StartRequest
from hearth.core.types import Hold, ModelId, RequestId, TurnEnd
from hearth.memory.pool import Pool
from hearth.policy.fleet.profile import Promise
from hearth.policy.memory.reload_cost import DeviceReloadCosts
from hearth.policy.turns.turn_policy import (
    BeginTurn,
    EndTurn,
    TurnChange,
    TurnPolicy,
    TurnRules,
    WeightsView,
)
from hearth.worker.hosted_model import HostedModel
from hearth.worker.hosting_state import Finding

log = logging.getLogger(__name__)

#: How long a decision stands if any token may change it, and how long at most: weights that others take to
#: grow are not reported here. With eight models a decision takes as long as the host needs for a small step.
SETTLED_S, MAX_SETTLED_S = 0.005, 0.05
#: Shorter waits are logged at debug level: as long as all models fit, there is nothing to report.
TOLD_WAIT_S = 0.05


class Turns:
    """Mutable; the step thread alone calls it."""

    def __init__(
        self,
        rules: TurnRules | None,
        hosted: Mapping[ModelId, HostedModel],
        pool: Pool,
        reload_costs: DeviceReloadCosts,
        adapter_bytes: Callable[[ModelId], int],
    ) -> None:
        """`rules` None: no turns. `hosted` is owned by the caller. `adapter_bytes`: as in `TurnPolicy`."""
        self._hosted, self._reload_costs = hosted, reload_costs
        self._policy: TurnPolicy | None = None
        if rules is not None:
            # Pools that keep addresses share one workspace among all models.
            self._policy = TurnPolicy(
                pool.budget_bytes,
                shares_workspace=pool.keeps_addresses,
                rules=rules,
                adapter_bytes=adapter_bytes,
            )
        #: When the turn of each model began, or its wait.
        self._since_s: dict[ModelId, float] = {}
        self._settled_s = -math.inf  #: the last decision stands until then

    # What happens.

    def recheck(self) -> None:
        self._settled_s = -math.inf

    def hosted(self, hosted: HostedModel) -> None:
        if self._policy is not None:
            order = hosted.order
            promise = Promise(order.own_bytes, order.workspace_bytes, order.standing_bytes)
            self._policy.hosted(hosted.model, promise)
            hosted.has_turn = False

    def held(self, hosted: HostedModel) -> None:
        """Tell how a model is held: a pinned one always wants a turn, once it is found."""
        if self._policy is not None and not isinstance(hosted.state, Finding):
            is_pinned = hosted.hold is Hold.PINNED
            self._policy.pin(hosted.model, time.monotonic(), is_pinned=is_pinned)
            self._note_wait(hosted.model)

    def awaited(self, hosted: HostedModel) -> None:
        """Have a model be loaded in a turn, also without requests, once it is found."""
        if self._policy is not None and not (isinstance(hosted.state, Finding) or hosted.is_loaded):
            self._policy.awaited(hosted.model, time.monotonic())
            self._note_wait(hosted.model)
            self.recheck()

    def arrived(self, order: StartRequest, waited_s: float) -> None:
        """Tell of a request that came `waited_s` ago. Telling twice is harmless.

        Ignored until the model is found: others must not give way to a model that may be missing.
        """
        if self._policy is not None and not isinstance(self._hosted[order.model].state, Finding):
            self._policy.arrived(
                order.model,
                RequestId(str(order.run)),
                order.pace,
                now_s=time.monotonic(),
                age_s=order.age_s + waited_s,
                num_tokens=len(order.output),
            )
            self._note_wait(order.model)

    def sent(self, model: ModelId, request_ids: Collection[RequestId]) -> None:
        if self._policy is not None and self._policy.sent(model, request_ids, time.monotonic()):
            self.recheck()

    def ended(self, model: ModelId, run: int) -> None:
        if self._policy is not None:
            self._policy.ended(model, RequestId(str(run)))
            self._note_wait(model)
            self.recheck()

    def loaded(self, model: ModelId) -> None:
        if self._policy is not None:
            self._policy.loaded(model, time.monotonic())
            self.recheck()

    def forget(self, model: ModelId) -> None:
        if self._policy is not None:
            self._policy.forget(model)
            self._since_s.pop(model, None)
            self.recheck()

    # Whose turn it is.

    def is_settled(self) -> bool:
        return time.monotonic() < self._settled_s

    def decide(self) -> list[TurnChange]:
        """Return the turns that end and begin now, in that order."""
        now_s = time.monotonic()
        if self._policy is None:
            self._settled_s = math.inf
            return []
        changes = self._policy.decide(now_s, self._weights)
        stands_s = self._policy.stands_s
        self._settled_s = min(self._policy.wake_s, now_s + SETTLED_S)
        if stands_s > now_s:
            self._settled_s = min(stands_s, now_s + MAX_SETTLED_S)
        for change in changes:
            since_s = self._since_s.pop(change.model, now_s)
            self._hosted[change.model].has_turn = isinstance(change, BeginTurn)
            if self._policy.wants_turn(change.model):
                self._since_s[change.model] = now_s
            _log_change(change, now_s - since_s)
        return changes

    def timeout_s(self) -> float | None:
        """Return the seconds until another decision may follow without an event; None: never."""
        if self._policy is None or math.isinf(self._policy.wake_s):
            return None
        return max(0.0, self._policy.wake_s - time.monotonic())

    def is_in_turn(self, model: ModelId) -> bool:
        return self._policy is not None and self._policy.is_in_turn(model)

    def due_in_s(self, model: ModelId) -> float | None:
        """Return the seconds until the next token of a model is due; None: it has no requests."""
        if self._policy is None or math.isinf(due_s := self._policy.due_s(model)):
            return None
        return due_s - time.monotonic()

    def next_in_line(self) -> list[ModelId]:
        return [] if self._policy is None else self._policy.next_in_line(time.monotonic())

    def early(self, line: Sequence[ModelId]) -> ModelId | None:
        if self._policy is None:
            return None
        return self._policy.next_prefetch(line, lambda model: self._hosted[model].can_copy)

    def front_bytes(self, missing_bytes: int, free_bytes: int) -> int:
        return 0 if self._policy is None else self._policy.front_bytes(missing_bytes, free_bytes)

    def _note_wait(self, model: ModelId) -> None:
        if self._policy is None or self._policy.is_in_turn(model):
            return
        if self._policy.wants_turn(model):
            self._since_s.setdefault(model, time.monotonic())
        else:
            self._since_s.pop(model, None)

    def _weights(self, model: ModelId) -> WeightsView:
        """Return how long a model takes to load by the rates of earlier loads, whatever is under way."""
        hosted = self._hosted[model]
        spec = hosted.spec
        num_bytes = hosted.order.own_bytes if spec is None else spec.shape.stored.own_bytes
        byte_s = self._reload_costs.load_s_per_byte(model)
        # A model that lacks only its mapping or its engine is not loaded either.
        missing_bytes = 0 if hosted.is_loaded else max(1, num_bytes - hosted.loaded_bytes)
        return WeightsView(missing_bytes * byte_s, num_bytes * byte_s)


def _log_change(change: TurnChange, seconds: float) -> None:
    match change:
        case BeginTurn(model):
            level = logging.INFO if seconds >= TOLD_WAIT_S else logging.DEBUG
            log.log(level, "turn_began model=%s waited_s=%.3f", model, seconds)
        case EndTurn(model, why):
            level = logging.DEBUG if why is TurnEnd.IDLE else logging.INFO
            log.log(level, "turn_ended model=%s why=%s turn_s=%.3f", model, why, seconds)
        case _:
            assert_never(change)

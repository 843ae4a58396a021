"""Tells the policy of turns what happens on this worker, and its models whose turn it is. Moves no byte.

Where no turns are taken it does nothing, and every model always has its turn.
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

#: So long a decision stands where any token may make another one of it, and so long where none does: what
#: others take of weights to grow by is not told. With eight models a decision takes as long as the host needs
#: for a small model's step.
SETTLED_S, MAX_SETTLED_S = 0.005, 0.05
#: One that begins after less has not waited for a turn, and one that ends idle made room for nobody: as long
#: as all models fit there is nothing to tell.
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
        """`rules`: None if no turns are taken. `hosted` are the hosted models, kept by whoever calls.

        `adapter_bytes`: as in `TurnPolicy`.
        """
        self._hosted, self._reload_costs = hosted, reload_costs
        self._policy: TurnPolicy | None = None
        if rules is not None:
            # Mapped pages keep addresses, and are those that all models share the workspace in.
            self._policy = TurnPolicy(
                pool.budget_bytes,
                shares_workspace=pool.keeps_addresses,
                rules=rules,
                adapter_bytes=adapter_bytes,
            )
        #: When each model that is in turn began, or that waits began to wait.
        self._since_s: dict[ModelId, float] = {}
        self._settled_s = -math.inf  #: until when the last decision stands

    # What happens.

    def look_again(self) -> None:
        """Note that something has happened: the next decision may be another one."""
        self._settled_s = -math.inf

    def hosted(self, hosted: HostedModel) -> None:
        """Note a model that is hosted from now on; it waits for its turn until somebody asks for it."""
        if self._policy is not None:
            order = hosted.order
            promise = Promise(order.own_bytes, order.workspace_bytes, order.standing_bytes)
            self._policy.hosted(hosted.model, promise)
            hosted.has_turn = False

    def held(self, hosted: HostedModel) -> None:
        """Note how a model is held: one that is pinned wants a turn always, once it is found."""
        if self._policy is not None and not isinstance(hosted.state, Finding):
            is_pinned = hosted.hold is Hold.PINNED
            self._policy.pin(hosted.model, time.monotonic(), is_pinned=is_pinned)
            self._note_wait(hosted.model)

    def arrived(self, order: StartRequest, waited_s: float) -> None:
        """Note a request that came here so long ago.

        A model wants no turn for it before it is found: nobody is to give way to a model that cannot come.
        So the requests that came until then are to be told once more when it is. To be told of one twice does
        no harm.
        """
        if self._policy is not None and not isinstance(self._hosted[order.model].state, Finding):
            self._policy.arrived(
                *(order.model, RequestId(str(order.run)), order.pace),
                now_s=time.monotonic(),
                age_s=order.age_s + waited_s,
                num_tokens=len(order.output),
            )
            self._note_wait(order.model)

    def sent(self, model: ModelId, request_ids: Collection[RequestId]) -> None:
        """Note that requests were sent a token each."""
        if self._policy is not None and self._policy.sent(model, request_ids, time.monotonic()):
            self.look_again()

    def ended(self, model: ModelId, run: int) -> None:
        """Note that a request has ended, however it did."""
        if self._policy is not None:
            self._policy.ended(model, RequestId(str(run)))
            self._note_wait(model)
            self.look_again()

    def loaded(self, model: ModelId) -> None:
        """Note that all of a model is there."""
        if self._policy is not None:
            self._policy.loaded(model, time.monotonic())
            self.look_again()

    def forget(self, model: ModelId) -> None:
        """Forget a model that is hosted no longer."""
        if self._policy is not None:
            self._policy.forget(model)
            self._since_s.pop(model, None)
            self.look_again()

    # Whose turn it is.

    def is_settled(self) -> bool:
        """True if the last decision stands: nothing has happened since, and it is too early for another."""
        return time.monotonic() < self._settled_s

    def decide(self) -> list[TurnChange]:
        """Return whose turns end and begin now, in that order."""
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
        """Return in how many seconds another decision may follow though nothing happens; None: never."""
        if self._policy is None or math.isinf(self._policy.wake_s):
            return None
        return max(0.0, self._policy.wake_s - time.monotonic())

    def is_in_turn(self, model: ModelId) -> bool:
        return self._policy is not None and self._policy.is_in_turn(model)

    def next_due_in_s(self, model: ModelId) -> float | None:
        """Return in how many seconds the next token of a model is due; None: it has no requests."""
        if self._policy is None or math.isinf(due_s := self._policy.due_s(model)):
            return None
        return due_s - time.monotonic()

    def due_in_s(self, model: ModelId) -> float:
        """Return in how many seconds a model that waits for its turn has to have it; 0: it should already.

        So it is with a pinned model without requests, of which no token is due.
        """
        return max(0.0, self.next_due_in_s(model) or 0.0)

    def next_in_line(self) -> list[ModelId]:
        """Return the models that wait for their turn, the next one first."""
        return [] if self._policy is None else self._policy.next_in_line(time.monotonic())

    def early(self, line: Sequence[ModelId]) -> ModelId | None:
        """Return the one of those in line whose first bytes should cross ahead of its turn, if any."""
        if self._policy is None:
            return None
        return self._policy.next_prefetch(line, lambda model: self._hosted[model].can_cross)

    def front_bytes(self, missing_bytes: int, free_bytes: int) -> int:
        """Return how many of the bytes that a model lacks should cross at once ahead of its turn."""
        return 0 if self._policy is None else self._policy.front_bytes(missing_bytes, free_bytes)

    def _note_wait(self, model: ModelId) -> None:
        """Note since when a model waits for its turn, or that it wants none any more."""
        if self._policy is None or self._policy.is_in_turn(model):
            return
        if self._policy.wants_turn(model):
            self._since_s.setdefault(model, time.monotonic())
        else:
            self._since_s.pop(model, None)

    def _weights(self, model: ModelId) -> WeightsView:
        """Return how long a model takes to load, by what its bytes took before.

        What a load under way has brought so far is not looked at.
        """
        hosted = self._hosted[model]
        spec = hosted.spec
        num_bytes = hosted.order.own_bytes if spec is None else spec.shape.stored.num_bytes
        byte_s = self._reload_costs.load_s_per_byte(model)
        # One that lacks nothing but its mapping, or its engine, is not there either.
        missing_bytes = 0 if hosted.is_loaded else max(1, num_bytes - hosted.there_bytes)
        return WeightsView(missing_bytes * byte_s, num_bytes * byte_s)


def _log_change(change: TurnChange, seconds: float) -> None:
    """Log a turn that began after a wait of so long, or ended after so long."""
    match change:
        case BeginTurn(model):
            level = logging.INFO if seconds >= TOLD_WAIT_S else logging.DEBUG
            log.log(level, "turn_began model=%s waited_s=%.3f", model, seconds)
        case EndTurn(model, why):
            level = logging.DEBUG if why is TurnEnd.IDLE else logging.INFO
            log.log(level, "turn_ended model=%s why=%s turn_s=%.3f", model, why, seconds)
        case _:
            assert_never(change)

"""Which model's turn it is on a worker whose models do not all fit together. Moves no byte and steps nothing.

A model with requests wants a turn. In turn, it is promised its memory and steps; out of turn, its requests
wait and its memory is lent. The memory of models in turn, and the little that others keep, never exceeds the
budget (`turn_memory.py`).

Every token has a time at which it is due (`paced_request.py`), and a model is as urgent as its most urgent
request. The most urgent model is next; once several are overdue, these go by how long they have waited. One
model is loaded at a time, unless that takes longer than `max_turn_s`. A model that fits beside those in turn
begins at once, unless it would take the room of a more urgent one that waits.

Otherwise turns end, the least urgent first, each
    - once its requests that waited when it began have a token, or after `max_turn_s`; later requests do not
      count, but at least one token must be sent, so that every turn makes progress. If the same request is
      left out twice, the next turn waits twice as long, up to `catch_up` times: a pause may cost KV, and a
      long prompt that starts again in each turn would never finish,
    - after `min_turn_s`, at least as long as its weights take to reload, and as long again as its paused
      requests took to recompute their KV: so that a switch pays. If no other model would compute meanwhile,
      each further overdue model that waits adds `crowding` reloads: under overload only fewer switches help,
    - and if it is far enough ahead of its pace that no reader notices, or its quantum is over. The quantum of
      a model that is interrupted although it is late grows.
While nothing is being loaded, the first missing bytes of the next model are prefetched, some at a time, into
free memory and in place of weights out of turn whose reload cost is less.

No turn ends for a request that is ahead of its pace before its model has to be brought back. Pinned models
always want a turn, and theirs never end.

The bound: below saturation, where no request is left out of a turn, a token is sent at most the sum over all
models that want a turn of `max_turn_s`, their load time and the time to send one token to every waiting
request, after it may be due: the target of a first token, else the longest pause.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from hearth.core.types import ModelId, Pace, RequestId, TurnEnd
from hearth.policy.fleet.profile import Promise
from hearth.policy.turns.paced_request import PacedRequest
from hearth.policy.turns.turn_memory import Turn, TurnMemory, TurnModel


@dataclass(frozen=True, slots=True)
class TurnRules:
    min_turn_s: float = 0.3
    quantum_s: float = 0.6  #: for how long a model that is not ahead of its pace goes on
    max_turn_s: float = 2.0  #: limit of a quantum, and of waiting for first tokens or for a load
    growth: float = 1.5  #: of the quantum of a model that is interrupted although it is late
    catch_up: int = 8  #: limit of waiting for a request that was left out of several turns, in `max_turn_s`
    #: How far ahead of its pace a model must be for its turn to end, in reloads of its weights.
    slack_reloads: float = 2.0
    crowding: float = 2.0  #: what each overdue model adds to a turn, in reloads
    lead_s: float = 0.15  #: before a token is due, beyond the load time, that its model is brought back
    #: Bytes that are prefetched at a time. A model that gets a turn meanwhile waits for them.
    front_bytes: int = 2 << 30


@dataclass(frozen=True, slots=True)
class WeightsView:
    missing_s: float  #: those that are not on the device; 0: all are
    all_s: float


@dataclass(frozen=True, slots=True)
class BeginTurn:
    model: ModelId


@dataclass(frozen=True, slots=True)
class EndTurn:
    model: ModelId
    why: TurnEnd


TurnChange = BeginTurn | EndTurn


class _WeightsMemo(dict[ModelId, WeightsView]):
    def __init__(self, look: Callable[[ModelId], WeightsView]) -> None:
        self._look = look

    def __missing__(self, model: ModelId) -> WeightsView:
        self[model] = found = self._look(model)
        return found


class TurnPolicy:
    """Mutable; one thread reports events and carries out the decisions."""

    def __init__(
        self,
        budget_bytes: int,
        *,
        shares_workspace: bool = True,
        rules: TurnRules | None = None,
        adapter_bytes: Callable[[ModelId], int] = lambda model: 0,
    ) -> None:
        self._shares_workspace = shares_workspace
        self._rules = rules or TurnRules()
        self._models: dict[ModelId, TurnModel] = {}
        self.memory = TurnMemory(self._models, budget_bytes, adapter_bytes)
        self._weights = _WeightsMemo(lambda model: WeightsView(0.0, 0.0))  #: as of the present decision
        #: When to decide again though nothing happens; infinite: never.
        self.wake_s = math.inf
        #: Until when the last decision stands, if nothing happens but tokens for which `sent` returns False.
        #: By then tokens may have brought a model ahead of its pace. At most `wake_s`.
        self.stands_s = -math.inf

    # What happens.

    def hosted(self, model: ModelId, promise: Promise) -> None:
        assert model not in self._models, f"hosted twice: `{model}`"
        promise = promise if self._shares_workspace else promise.unshared
        self._models[model] = TurnModel(promise, self._rules.quantum_s, self._rules.max_turn_s)

    def forget(self, model: ModelId) -> None:
        """Forget a model that is no longer hosted, with its turn. Ignores unknown models."""
        self._models.pop(model, None)
        self.memory.turns_changed()

    def pin(self, model: ModelId, now_s: float, *, is_pinned: bool) -> None:
        known = self._models[model]
        self._want(known, now_s)
        known.is_pinned = is_pinned

    def awaited(self, model: ModelId, now_s: float) -> None:
        """Have a model be loaded in a turn, also without requests. No other turn ends for that."""
        known = self._models[model]
        self._want(known, now_s)
        known.is_awaited = True

    def arrived(
        self, model: ModelId, request_id: RequestId, pace: Pace, now_s: float, age_s: float, num_tokens: int
    ) -> None:
        """Note a request that arrived `age_s` ago and was sent `num_tokens` by other workers."""
        known = self._models[model]
        self._want(known, now_s)
        known.requests[request_id] = PacedRequest(pace, now_s - age_s, num_tokens, now_s)
        known.known_due_s = None

    def sent(self, model: ModelId, request_ids: Collection[RequestId], now_s: float) -> bool:
        """Note that requests were sent a token each; return whether turns must be decided again."""
        known = self._models[model]
        if not request_ids:
            return False
        known.known_due_s, requests, turn = None, known.requests, known.turn
        for request_id in request_ids:
            requests[request_id].sent(now_s)
        if turn is None:
            return True
        is_first, was_held, turn.has_sent = not turn.has_sent, turn.is_held, True
        if turn.unserved:
            turn.unserved.difference_update(request_ids)
        if turn.resuming:
            turn.resuming.difference_update(request_ids)
            turn.resumed_s = None if turn.resuming else now_s
        return is_first or (was_held and not turn.is_held)

    def ended(self, model: ModelId, request_id: RequestId) -> None:
        """Note that a request has ended. Ignores unknown requests."""
        known = self._models.get(model)
        if known is None or known.requests.pop(request_id, None) is None:
            return
        known.known_due_s = None
        if known.turn is not None:
            known.turn.unserved.discard(request_id)
            known.turn.resuming.discard(request_id)

    def loaded(self, model: ModelId, now_s: float) -> None:
        known = self._models[model]
        known.is_awaited = False
        if known.turn is not None and known.turn.loaded_s is None:
            known.turn.loaded_s = now_s

    def is_in_turn(self, model: ModelId) -> bool:
        known = self._models.get(model)
        return known is not None and known.turn is not None

    def wants_turn(self, model: ModelId) -> bool:
        known = self._models.get(model)
        return known is not None and known.wants_turn

    def due_s(self, model: ModelId) -> float:
        known = self._models.get(model)
        return math.inf if known is None else known.due_s

    def next_in_line(self, now_s: float) -> list[ModelId]:
        waiting = [model for model, one in self._models.items() if one.wants_turn and one.turn is None]
        return sorted(waiting, key=lambda model: (*self._urgency(self._models[model], now_s), model))

    # Decisions.

    def next_prefetch(self, line: Iterable[ModelId], can_come: Callable[[ModelId], bool]) -> ModelId | None:
        """Return the first model in `line` that `can_come`, to prefetch it; None while one is loading."""
        return None if self._is_any_loading() else next(filter(can_come, line), None)

    def front_bytes(self, missing_bytes: int, free_bytes: int) -> int:
        """Return how many of the missing bytes to prefetch now; 0: too few have room."""
        wanted_bytes = min(missing_bytes, self._rules.front_bytes)
        num_bytes = min(wanted_bytes, free_bytes)
        return num_bytes if num_bytes >= min(wanted_bytes, self._rules.front_bytes // 16) else 0

    def decide(self, now_s: float, weights_of: Callable[[ModelId], WeightsView]) -> list[TurnChange]:
        """Return the turns that end and begin now, in that order. They count as carried out."""
        self.wake_s = self.stands_s = math.inf
        self.memory.forget_adapters()
        self._weights = _WeightsMemo(weights_of)
        changes: list[TurnChange] = []
        for model, one in self._models.items():
            if one.turn is not None and not one.wants_turn:
                changes.append(self._end(model, TurnEnd.IDLE, now_s))
        blocked: ModelId | None = None
        leaving: list[ModelId] = []  # models whose room the blocked one will get
        for model in self.next_in_line(now_s):
            fits = self.memory.fits
            if blocked is not None and not (fits((model,)) and fits((model, blocked), leaving)):
                continue
            victims = self._choose_victims(model, now_s)
            if victims is not None:
                changes += victims
                changes.append(self._begin(model, now_s))
            elif blocked is None:
                blocked, leaving = model, self._choose_leaving(model)
        self.stands_s = min(self.stands_s, self.wake_s, self._next_overdue_s(now_s))
        return changes

    def _next_overdue_s(self, now_s: float) -> float:
        waiting = (one.due_s for one in self._models.values() if one.turn is None)
        return min((due_s for due_s in waiting if due_s >= now_s), default=math.inf)

    def _begin(self, model: ModelId, now_s: float) -> BeginTurn:
        known = self._models[model]
        is_whole = not self._weights[model].missing_s
        resuming = {name for name, request in known.requests.items() if request.num_tokens}
        known.turn = Turn(now_s if is_whole else None, set(known.requests), resuming)
        known.began_s = now_s
        self.memory.turns_changed()
        is_within = self.memory.bound_bytes() <= self.memory.budget_bytes
        assert is_within, f"`{model}` begins beyond the budget: {self._models}"
        return BeginTurn(model)

    def _end(self, model: ModelId, why: TurnEnd, now_s: float) -> EndTurn:
        known = self._models[model]
        is_late = why is TurnEnd.TIME and known.due_s < now_s
        grown_s = min(self._rules.max_turn_s, known.quantum_s * self._rules.growth)
        known.quantum_s = grown_s if is_late else self._rules.quantum_s
        self._note_left_out(known)
        known.turn, known.waits_since_s = None, now_s
        self.memory.turns_changed()
        return EndTurn(model, why)

    def _note_left_out(self, known: TurnModel) -> None:
        """Let the next turn wait longer if two in a row left out the same request."""
        unserved, rules = set() if known.turn is None else known.turn.unserved, self._rules
        left_out = next((name for name in known.requests if name in unserved), None)
        if left_out is None:
            known.wait_s = rules.max_turn_s
        elif left_out == known.left_out:
            known.wait_s = min(2 * known.wait_s, rules.catch_up * rules.max_turn_s)
        known.left_out = left_out

    def _want(self, known: TurnModel, now_s: float) -> None:
        if not known.wants_turn:
            known.waits_since_s = now_s

    def _urgency(self, known: TurnModel, now_s: float) -> tuple[int, float]:
        if known.is_pinned:
            return 0, known.waits_since_s
        due_s = known.due_s
        return (1, known.waits_since_s) if due_s < now_s else (2, due_s)

    def _must_wait_for_load(self, model: ModelId, now_s: float) -> bool:
        """True if weights of a model are missing during another load of at most `max_turn_s`."""
        ends_s = [
            one.began_s + self._rules.max_turn_s
            for one in self._models.values()
            if one.turn is not None and one.turn.loaded_s is None and one.began_s is not None
        ]
        end_s = max(ends_s, default=-math.inf)
        if now_s >= end_s or not self._weights[model].missing_s:
            return False
        self.wake_s = min(self.wake_s, end_s)
        return True

    def _is_any_loading(self) -> bool:
        return any(one.turn is not None and one.turn.loaded_s is None for one in self._models.values())

    def _choose_leaving(self, blocked: ModelId) -> list[ModelId]:
        """Return the models whose room is kept for one that waits: those with the oldest turns."""
        leaving: list[ModelId] = []
        for name in self._running_unpinned(key=lambda one: one.began_s or 0.0):
            if self.memory.fits((blocked,), leaving):
                break
            leaving.append(name)
        return leaving

    def _running_unpinned(self, key: Callable[[TurnModel], float]) -> list[ModelId]:
        names = [name for name, one in self._models.items() if one.turn is not None and not one.is_pinned]
        return sorted(names, key=lambda name: (key(self._models[name]), name))

    # Which turns end.

    def _choose_victims(self, model: ModelId, now_s: float) -> list[EndTurn] | None:
        """Return the fewest turns to end for a model; None: it waits, at most until `wake_s`."""
        if self._must_wait_for_load(model, now_s):
            return None
        if self.memory.fits((model,)):
            return []
        ripe_s = self._ripe_s(self._models[model], self._weights[model])
        if now_s < ripe_s:
            self.wake_s = min(self.wake_s, ripe_s)
            return None
        ready: list[ModelId] = []
        wakes: list[float] = []
        for name in self._running_unpinned(key=lambda one: -one.due_s):
            at_s = self._may_end_s(name, model, now_s)
            if at_s <= now_s:
                ready.append(name)
            else:
                wakes.append(at_s)
        if not self.memory.fits((model,), ready):
            self.wake_s = min([self.wake_s, *wakes])
            return None
        victims: list[ModelId] = []
        while not self.memory.fits((model,), victims):
            victims.append(ready[len(victims)])
        for name in victims[:-1]:  # a small one may be spared
            rest = [other for other in victims if other != name]
            if self.memory.fits((model,), rest):
                victims = rest
        return [self._end(name, self._why(name, model, now_s), now_s) for name in victims]

    def _ripe_s(self, known: TurnModel, weights: WeightsView) -> float:
        if known.is_pinned or known.has_newcomer:
            return -math.inf
        return known.due_s - weights.missing_s - self._rules.lead_s

    def _may_end_s(self, model: ModelId, other: ModelId, now_s: float) -> float:
        """Return when the turn of a model may end for another; infinite: not before it steps."""
        known, rules = self._models[model], self._rules
        turn = known.turn
        if turn is None or turn.loaded_s is None or not turn.has_sent:
            return math.inf
        if turn.unserved:
            return turn.loaded_s + known.wait_s
        reload_s = self._reload_s(model, other)
        num_overdue = 0 if self._has_company(model) else self._num_overdue(other, now_s)
        crowded_s = reload_s * (1 + rules.crowding * num_overdue)
        least_s = turn.loaded_s + max(rules.min_turn_s, min(rules.max_turn_s, crowded_s))
        if turn.resumed_s is not None:
            least_s = max(least_s, 2 * turn.resumed_s - turn.loaded_s)
        if self._is_ahead(known, reload_s, now_s):
            return least_s
        self.stands_s = min(self.stands_s, max(now_s, least_s))  # tokens until then may bring it ahead
        return max(least_s, turn.loaded_s + known.quantum_s)

    def _has_company(self, model: ModelId) -> bool:
        return any(
            one.turn is not None and one.turn.loaded_s is not None and one.requests
            for name, one in self._models.items()
            if name != model
        )

    def _num_overdue(self, model: ModelId, now_s: float) -> int:
        return sum(
            one.turn is None and one.due_s < now_s and name != model and self._weights[name].missing_s > 0
            for name, one in self._models.items()
        )

    def _why(self, model: ModelId, other: ModelId, now_s: float) -> TurnEnd:
        reload_s = self._reload_s(model, other)
        return TurnEnd.AHEAD if self._is_ahead(self._models[model], reload_s, now_s) else TurnEnd.TIME

    def _is_ahead(self, known: TurnModel, reload_s: float, now_s: float) -> bool:
        return known.due_s - now_s >= self._rules.slack_reloads * reload_s

    def _reload_s(self, model: ModelId, other: ModelId) -> float:
        """Return how long the weights that a model loses to another take to reload, at most."""
        return min(self._weights[model].all_s, self._weights[other].missing_s)

"""Whose turn it is on a worker whose models do not all fit together. Moves no byte and steps nothing.

A model with requests wants a turn. While it is in turn it is promised its memory, and it steps; otherwise its
requests wait, and what it has is lent. What those in turn are promised, and the little that all others keep,
is never more than the budget. Beside others a model begins only if the adapters of all running requests fit
as well: they are promised nothing, but requests that run with one do not go on without it.

Every token has a time at which it is due (`paced_request.py`), and a model is as urgent as its most urgent
request. Next in turn is the most urgent model; once several are overdue nobody has slack any more, and these
go by how long they wait. One model is loaded at a time, unless that takes longer than `max_turn_s`. A model
that can begin without anybody's giving way begins at once, unless it would be in the way of a more urgent one
that waits.

Otherwise models in turn give way, the least urgent first, each
    - once its requests that waited when its turn began have a token, or `max_turn_s` are over; those that
      came later do not count, but one token it has sent in any case: so every turn brings somebody on. If
      the same request is left out twice it has twice as long next time, up to `catch_up` times: a pause may
      cost KV, and a long prompt that is begun anew in each turn would never be done,
    - once it has had `min_turn_s`, as long as its bytes take to come back, and after that as long as its
      paused requests took to have a token again, whose KV was computed anew: so a switch pays. Where
      nobody else would compute meanwhile, it has `crowding` times as long again for each further model that
      waits and is overdue: where more is asked for than can be had, switching less is all that helps,
    - and if it is so far ahead of its pace that nobody notices, or its quantum is over. The quantum of a
      model that has to give way although it is late grows.
While nobody is being loaded, the first missing bytes of the next in line cross already, some at a time, into
free memory and in the place of weights out of turn whose reload cost is less.

Nobody gives way to a request that is ahead of its pace, before that has to be brought back. Pinned models
want a turn always and never give way.

The bound: a token is sent, at the latest, the sum over all models that want a turn, its own included, of
`max_turn_s`, the time to load the model and the time in which it sends a token to everyone who waits, after
the time until which it may be due: the target of a first token, else the longest pause. So it is below
saturation, that is where nobody is left out of a turn, and each model fits beside what is pinned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from hearth.core.types import ModelId, Pace, RequestId, TurnEnd
from hearth.policy.fleet.events import Promise
from hearth.policy.turns.paced_request import PacedRequest


@dataclass(frozen=True, slots=True)
class TurnRules:
    """The constants of turns, most of them in seconds."""

    min_turn_s: float = 0.3
    quantum_s: float = 0.6  #: a model that is not ahead of its pace may go on for so long
    max_turn_s: float = 2.0  #: what a quantum grows to, and the end of waiting for first tokens or for a load
    growth: float = 1.5  #: of the quantum of a model that gives way although it is late
    catch_up: int = 8  #: times `max_turn_s` that somebody is waited for who is left out of turn after turn
    #: How far ahead of its pace a model must be to give way, in times that its bytes take to come back.
    slack_reloads: float = 2.0
    crowding: float = 2.0  #: what each overdue model adds to a turn, in times that bytes take to come back
    lead_s: float = 0.15  #: before a token is due, beyond the load, its model is brought back
    #: Bytes that cross at a time before their model's turn. Whoever gets a turn meanwhile waits for them.
    front_bytes: int = 2 << 30


@dataclass(frozen=True, slots=True)
class WeightsView:
    """How long the weights of a model take to be on the device."""

    missing_s: float  #: those that are not there; 0: all of them are
    all_s: float


@dataclass(frozen=True, slots=True)
class BeginTurn:
    """Promise a model its memory, load what is missing, and have it step."""

    model: ModelId


@dataclass(frozen=True, slots=True)
class EndTurn:
    """Have a model step no more; unless it is idle its requests wait as they are."""

    model: ModelId
    why: TurnEnd


TurnChange = BeginTurn | EndTurn


@dataclass(slots=True)
class _Turn:
    """The turn of a model. Mutable, as is the model."""

    loaded_s: float | None  #: since when all of it is there; None: it is being loaded
    unserved: set[RequestId]  #: those that waited when it began, and have no token since
    resuming: set[RequestId]  #: of these, the ones that had tokens before
    resumed_s: float | None = None  #: when the last of those had a token
    has_sent: bool = False  #: a token, since it began

    @property
    def is_held(self) -> bool:
        """True if it goes on because somebody has no token."""
        return bool(self.unserved or self.resuming)


@dataclass(slots=True)
class _Model:
    promise: Promise
    quantum_s: float
    wait_s: float  #: that its turn waits for requests without a token
    is_pinned: bool = False
    requests: dict[RequestId, PacedRequest] = field(default_factory=dict)
    turn: _Turn | None = None
    began_s: float | None = None  #: its turn, or the last one; None: it never had one, and has no memory
    waits_since_s: float = 0.0  #: meaningless while it is in turn or wants none
    left_out: RequestId | None = None  #: the first one that had no token in the last turn, if any
    known_due_s: float | None = None  #: `due_s`; None since a request came, was sent a token or ended

    @property
    def has_memory(self) -> bool:
        """True if the model is in turn, or keeps what a model keeps that was."""
        return self.began_s is not None

    @property
    def wants_turn(self) -> bool:
        return self.is_pinned or bool(self.requests)

    @property
    def due_s(self) -> float:
        """When the next token of any request is due; never, without requests."""
        if self.known_due_s is None:
            self.known_due_s = min((request.due_s for request in self.requests.values()), default=math.inf)
        return self.known_due_s

    @property
    def has_newcomer(self) -> bool:
        """True if a reader waits for a first token."""
        return any(not one.num_tokens and one.pace.tokens_per_s for one in self.requests.values())


@dataclass(frozen=True, slots=True)
class _BoundMemory:
    """Bytes that models have as long as no turn begins or ends."""

    own_bytes: int  #: promised to those in turn, and kept by those that were
    workspace_bytes: int


class _WeightsMemo(dict[ModelId, WeightsView]):
    """Weights of models, each looked at when it is asked for first."""

    def __init__(self, look: Callable[[ModelId], WeightsView]) -> None:
        self._look = look

    def __missing__(self, model: ModelId) -> WeightsView:
        self[model] = found = self._look(model)
        return found


class TurnPolicy:
    """Mutable; written by the one thread that tells it what happens and carries out what it decides."""

    def __init__(
        self,
        budget_bytes: int,
        *,
        shares_workspace: bool = True,
        rules: TurnRules | None = None,
        adapter_bytes: Callable[[ModelId], int] = lambda model: 0,
    ) -> None:
        """`adapter_bytes`: what adapters of a model's running requests take besides its promise."""
        self._budget_bytes, self._shares_workspace = budget_bytes, shares_workspace
        self._look_at_adapters = adapter_bytes
        self._adapter_bytes: dict[ModelId, int] = {}  #: by model that the decision of now has looked at
        self._rules = rules or TurnRules()
        self._models: dict[ModelId, _Model] = {}
        self._bound: _BoundMemory | None = None  #: None since a turn began or ended, or a model left
        #: When another decision may follow though nothing happens; infinite: never.
        self.wake_s = math.inf
        #: Until when the last decision stands if nothing happens but what `sent` makes nothing of. By then a
        #: token may have brought a model ahead of its pace; not later than `wake_s`.
        self.stands_s = -math.inf

    # What happens.

    def hosted(self, model: ModelId, promise: Promise) -> None:
        """Note a model that requests may come for."""
        assert model not in self._models, f"hosted twice: `{model}`"
        promise = promise if self._shares_workspace else promise.unshared
        self._models[model] = _Model(promise, self._rules.quantum_s, self._rules.max_turn_s)

    def forget(self, model: ModelId) -> None:
        """Forget a model that is hosted no longer, with its turn; one that is unknown is no matter."""
        self._models.pop(model, None)
        self._bound = None

    def pin(self, model: ModelId, now_s: float, *, is_pinned: bool) -> None:
        """Note whether a model is never to give way."""
        known = self._models[model]
        self._want(known, now_s)
        known.is_pinned = is_pinned

    def arrived(
        self, model: ModelId, request_id: RequestId, pace: Pace, now_s: float, age_s: float, num_tokens: int
    ) -> None:
        """Note a request that arrived so long ago, and has been sent so many tokens elsewhere."""
        known = self._models[model]
        self._want(known, now_s)
        known.requests[request_id] = PacedRequest(pace, now_s - age_s, num_tokens, now_s)
        known.known_due_s = None

    def sent(self, model: ModelId, request_ids: Collection[RequestId], now_s: float) -> bool:
        """Note that requests were sent a token each; return whether turns are to be decided anew."""
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
        """Note that a request has ended, however it did; one that is unknown is no matter."""
        known = self._models.get(model)
        if known is None or known.requests.pop(request_id, None) is None:
            return
        known.known_due_s = None
        if known.turn is not None:
            known.turn.unserved.discard(request_id)
            known.turn.resuming.discard(request_id)

    def loaded(self, model: ModelId, now_s: float) -> None:
        """Note that all of a model in turn is there."""
        turn = self._models[model].turn
        if turn is not None and turn.loaded_s is None:
            turn.loaded_s = now_s

    # What is known.

    def is_in_turn(self, model: ModelId) -> bool:
        known = self._models.get(model)
        return known is not None and known.turn is not None

    def wants_turn(self, model: ModelId) -> bool:
        """True if a model has requests, or is pinned."""
        known = self._models.get(model)
        return known is not None and known.wants_turn

    def due_s(self, model: ModelId) -> float:
        """Return when the next token of a model is due; infinite for one without requests."""
        known = self._models.get(model)
        return math.inf if known is None else known.due_s

    def next_in_line(self, now_s: float) -> list[ModelId]:
        """Return the models that wait for their turn, the next one first."""
        waiting = [model for model, one in self._models.items() if one.wants_turn and one.turn is None]
        return sorted(waiting, key=lambda model: (*self._urgency(self._models[model], now_s), model))

    # Decisions.

    def early(self, line: Iterable[ModelId], can_come: Callable[[ModelId], bool]) -> ModelId | None:
        """Return whose first bytes should cross before its turn; None: nobody's, or another is being loaded.

        That is the next of those in `line` that lack bytes which can come.
        """
        return None if self._is_any_loading() else next(filter(can_come, line), None)

    def front_bytes(self, missing_bytes: int, free_bytes: int) -> int:
        """Return how many of the missing bytes should cross now, before the turn; 0: too few could."""
        wanted_bytes = min(missing_bytes, self._rules.front_bytes)
        num_bytes = min(wanted_bytes, free_bytes)
        return num_bytes if num_bytes >= min(wanted_bytes, self._rules.front_bytes // 16) else 0

    def decide(self, now_s: float, weights_of: Callable[[ModelId], WeightsView]) -> list[TurnChange]:
        """Return whose turn ends and begins now, in that order; they count as carried out.

        `weights_of` is asked once for each model: nothing is loaded or taken meanwhile.
        """
        self.wake_s = self.stands_s = math.inf
        self._adapter_bytes.clear()
        weights_of = _WeightsMemo(weights_of).__getitem__
        changes: list[TurnChange] = []
        for model, one in self._models.items():
            if one.turn is not None and not one.wants_turn:
                changes.append(self._end(model, TurnEnd.IDLE, now_s))
        blocked: ModelId | None = None
        leaving: list[ModelId] = []  # whose room the blocked one is to have
        for model in self.next_in_line(now_s):
            if blocked is not None and not (self._fits((model,)) and self._fits((model, blocked), leaving)):
                continue
            victims = self._choose_victims(model, now_s, weights_of)
            if victims is not None:
                changes += victims
                changes.append(self._begin(model, now_s, weights_of))
            elif blocked is None:
                blocked, leaving = model, self._choose_leaving(model)
        self.stands_s = min(self.stands_s, self.wake_s, self._next_overdue_s(now_s))
        return changes

    def _next_overdue_s(self, now_s: float) -> float:
        """Return when the next one of those that wait will be late, which changes their line."""
        waiting = (one.due_s for one in self._models.values() if one.turn is None)
        return min((due_s for due_s in waiting if due_s >= now_s), default=math.inf)

    def _begin(self, model: ModelId, now_s: float, weights_of: Callable[[ModelId], WeightsView]) -> BeginTurn:
        known = self._models[model]
        is_whole = not weights_of(model).missing_s
        resuming = {name for name, request in known.requests.items() if request.num_tokens}
        known.turn = _Turn(now_s if is_whole else None, set(known.requests), resuming)
        known.began_s = now_s
        self._bound = None
        assert self.bound_bytes() <= self._budget_bytes, f"`{model}` begins beyond the budget: {self._models}"
        return BeginTurn(model)

    def _end(self, model: ModelId, why: TurnEnd, now_s: float) -> EndTurn:
        known = self._models[model]
        is_late = why is TurnEnd.TIME and known.due_s < now_s
        grown_s = min(self._rules.max_turn_s, known.quantum_s * self._rules.growth)
        known.quantum_s = grown_s if is_late else self._rules.quantum_s
        self._note_left_out(known)
        known.turn, known.waits_since_s = None, now_s
        self._bound = None
        return EndTurn(model, why)

    def _note_left_out(self, known: _Model) -> None:
        """Have the next turn of a model wait longer if it is the second one to leave out the same request."""
        unserved, rules = set() if known.turn is None else known.turn.unserved, self._rules
        left_out = next((name for name in known.requests if name in unserved), None)
        if left_out is None:
            known.wait_s = rules.max_turn_s
        elif left_out == known.left_out:
            known.wait_s = min(2 * known.wait_s, rules.catch_up * rules.max_turn_s)
        known.left_out = left_out

    def _want(self, known: _Model, now_s: float) -> None:
        """Note since when a model waits that wants a turn from now on."""
        if not known.wants_turn:
            known.waits_since_s = now_s

    def _urgency(self, known: _Model, now_s: float) -> tuple[int, float]:
        """Return a key for sorting: pinned ones, then overdue ones by their wait, then by due time."""
        if known.is_pinned:
            return 0, known.waits_since_s
        due_s = known.due_s
        return (1, known.waits_since_s) if due_s < now_s else (2, due_s)

    def _must_wait_for_load(
        self, model: ModelId, now_s: float, weights_of: Callable[[ModelId], WeightsView]
    ) -> bool:
        """True if bytes of a model are missing while another is being loaded.

        But a load that takes longer than a turn may comes from farther away than host memory: it leaves the
        bus to others.
        """
        ends_s = [
            one.began_s + self._rules.max_turn_s
            for one in self._models.values()
            if one.turn is not None and one.turn.loaded_s is None and one.began_s is not None
        ]
        end_s = max(ends_s, default=-math.inf)
        if now_s >= end_s or not weights_of(model).missing_s:
            return False
        self.wake_s = min(self.wake_s, end_s)
        return True

    def _is_any_loading(self) -> bool:
        return any(one.turn is not None and one.turn.loaded_s is None for one in self._models.values())

    # Memory.

    def bound_bytes(self, beside: Collection[ModelId] = (), without: Collection[ModelId] = ()) -> int:
        """Return what is promised to models in turn, and kept by those that were; never beyond the budget.

        As it would be if the models `beside` were in turn as well, and those `without` were not.
        """
        bound = self._bound = self._bound or self._count_bound()
        num_bytes, workspace_bytes = bound.own_bytes, bound.workspace_bytes
        for model in without:
            one = self._models[model]
            if one.turn is not None and model not in beside:
                num_bytes -= one.promise.own_bytes - one.promise.standing_bytes
        for model in beside:
            one = self._models[model]
            if one.turn is None:
                num_bytes += one.promise.own_bytes - (one.promise.standing_bytes if one.has_memory else 0)
            if not one.has_memory:
                workspace_bytes = max(workspace_bytes, one.promise.workspace_bytes)
        return num_bytes + workspace_bytes

    def _count_bound(self) -> _BoundMemory:
        own_bytes = workspace_bytes = 0
        for one in self._models.values():
            if one.has_memory:
                own_bytes += one.promise.standing_bytes if one.turn is None else one.promise.own_bytes
                workspace_bytes = max(workspace_bytes, one.promise.workspace_bytes)
        return _BoundMemory(own_bytes, workspace_bytes)

    def _fits(self, models: Collection[ModelId], without: Collection[ModelId] = ()) -> bool:
        """True if models may be in turn beside those that are, but those `without`."""
        spare_bytes = self._budget_bytes - self.bound_bytes(models, without)
        return spare_bytes >= 0 and self._adapters_fit(models, without, spare_bytes)

    def _adapters_fit(
        self, models: Collection[ModelId], without: Collection[ModelId], spare_bytes: int
    ) -> bool:
        """True if the adapters of all running requests can be there beside what is promised.

        Adapters are promised nothing: none keeps a model from a turn alone, or beside pinned models.
        """
        staying = {name for name, one in self._models.items() if one.turn is not None}
        staying -= {*without, *models}
        if len(models) == 1 and all(self._models[name].is_pinned for name in staying):
            return True
        for model in {*models, *staying} - self._adapter_bytes.keys():
            self._adapter_bytes[model] = self._look_at_adapters(model)
        return sum(self._adapter_bytes[model] for model in {*models, *staying}) <= spare_bytes

    def _choose_leaving(self, blocked: ModelId) -> list[ModelId]:
        """Return the models whose room is kept for one that waits while less urgent ones may begin.

        Those with the oldest turns: they may end first.
        """
        leaving: list[ModelId] = []
        for name in self._running_unpinned(key=lambda one: one.began_s or 0.0):
            if self._fits((blocked,), leaving):
                break
            leaving.append(name)
        return leaving

    def _running_unpinned(self, key: Callable[[_Model], float]) -> list[ModelId]:
        """Return the models in turn that may have to give way, in the order of `key`."""
        names = [name for name, one in self._models.items() if one.turn is not None and not one.is_pinned]
        return sorted(names, key=lambda name: (key(self._models[name]), name))

    # Who gives way.

    def _choose_victims(
        self, model: ModelId, now_s: float, weights_of: Callable[[ModelId], WeightsView]
    ) -> list[EndTurn] | None:
        """Return whose turns end for a model, as few as it takes; None: it is to wait, until `wake_s`."""
        if self._must_wait_for_load(model, now_s, weights_of):
            return None
        if self._fits((model,)):
            return []
        ripe_s = self._ripe_s(self._models[model], weights_of(model))
        if now_s < ripe_s:
            self.wake_s = min(self.wake_s, ripe_s)
            return None
        ready: list[ModelId] = []
        wakes: list[float] = []
        for name in self._running_unpinned(key=lambda one: -one.due_s):
            at_s = self._may_end_s(name, model, now_s, weights_of)
            if at_s <= now_s:
                ready.append(name)
            else:
                wakes.append(at_s)
        if not self._fits((model,), ready):
            self.wake_s = min([self.wake_s, *wakes])
            return None
        victims: list[ModelId] = []
        while not self._fits((model,), victims):
            victims.append(ready[len(victims)])
        for name in victims[:-1]:  # a small one may be spared after all
            rest = [other for other in victims if other != name]
            if self._fits((model,), rest):
                victims = rest
        return [self._end(name, self._why(name, model, now_s, weights_of), now_s) for name in victims]

    def _ripe_s(self, known: _Model, weights: WeightsView) -> float:
        """Return from when on others have to give way to a model that waits."""
        if known.is_pinned or known.has_newcomer:
            return -math.inf
        return known.due_s - weights.missing_s - self._rules.lead_s

    def _may_end_s(
        self, model: ModelId, other: ModelId, now_s: float, weights_of: Callable[[ModelId], WeightsView]
    ) -> float:
        """Return from when on a model in turn may give way to another; infinite: not before it steps."""
        known, rules = self._models[model], self._rules
        turn = known.turn
        if turn is None or turn.loaded_s is None or not turn.has_sent:
            return math.inf
        if turn.unserved:
            return turn.loaded_s + known.wait_s
        reload_s = self._reload_s(model, other, weights_of)
        num_overdue = 0 if self._has_company(model) else self._num_overdue(other, now_s, weights_of)
        crowded_s = reload_s * (1 + rules.crowding * num_overdue)
        least_s = turn.loaded_s + max(rules.min_turn_s, min(rules.max_turn_s, crowded_s))
        if turn.resumed_s is not None:
            least_s = max(least_s, 2 * turn.resumed_s - turn.loaded_s)
        if self._is_ahead(known, reload_s, now_s):
            return least_s
        self.stands_s = min(self.stands_s, max(now_s, least_s))  # by the tokens until then it may be
        return max(least_s, turn.loaded_s + known.quantum_s)

    def _has_company(self, model: ModelId) -> bool:
        """True if another model in turn computes while this one gives way and the next one is loaded."""
        return any(
            one.turn is not None and one.turn.loaded_s is not None and one.requests
            for name, one in self._models.items()
            if name != model
        )

    def _num_overdue(self, model: ModelId, now_s: float, weights_of: Callable[[ModelId], WeightsView]) -> int:
        """Return how many models beside the next one are late, and wait for bytes as well as for a turn."""
        return sum(
            one.turn is None and one.due_s < now_s and name != model and weights_of(name).missing_s > 0
            for name, one in self._models.items()
        )

    def _why(
        self, model: ModelId, other: ModelId, now_s: float, weights_of: Callable[[ModelId], WeightsView]
    ) -> TurnEnd:
        reload_s = self._reload_s(model, other, weights_of)
        return TurnEnd.AHEAD if self._is_ahead(self._models[model], reload_s, now_s) else TurnEnd.TIME

    def _is_ahead(self, known: _Model, reload_s: float, now_s: float) -> bool:
        return known.due_s - now_s >= self._rules.slack_reloads * reload_s

    @staticmethod
    def _reload_s(model: ModelId, other: ModelId, weights_of: Callable[[ModelId], WeightsView]) -> float:
        """Return how long what a model loses to another takes to come back, at most."""
        return min(weights_of(model).all_s, weights_of(other).missing_s)

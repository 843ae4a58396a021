"""Models that take turns, and whether their memory fits together. Decides no turn.

Models in turn are promised their memory; those that were keep a little of it. A model begins beside others
only if the adapters of all running requests fit as well: adapters are promised nothing, but requests that run
with one do not go on without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from hearth.core.types import ModelId, RequestId
from hearth.policy.fleet.profile import Promise
from hearth.policy.turns.paced_request import PacedRequest


@dataclass(slots=True)
class Turn:
    loaded_s: float | None  #: since when all weights are there; None: they are being loaded
    unserved: set[RequestId]  #: requests that waited when it began and have no token since
    resuming: set[RequestId]  #: of these, those that had tokens before
    resumed_s: float | None = None  #: when the last of these had a token
    has_sent: bool = False  #: a token since it began

    @property
    def is_held(self) -> bool:
        return bool(self.unserved or self.resuming)


@dataclass(slots=True)
class TurnModel:
    promise: Promise
    quantum_s: float
    wait_s: float  #: for how long its turn waits for requests without a token
    is_pinned: bool = False
    is_awaited: bool = False  #: until it is loaded, also without requests
    requests: dict[RequestId, PacedRequest] = field(default_factory=dict)
    turn: Turn | None = None
    began_s: float | None = None  #: its turn, or the last one; None: it never had one and has no memory
    waits_since_s: float = 0.0  #: meaningless while it is in turn or wants none
    left_out: RequestId | None = None  #: the first request without a token in the last turn
    known_due_s: float | None = None  #: `due_s`; None: to be computed

    @property
    def has_memory(self) -> bool:
        return self.began_s is not None

    @property
    def wants_turn(self) -> bool:
        return self.is_pinned or self.is_awaited or bool(self.requests)

    @property
    def due_s(self) -> float:
        if self.known_due_s is None:
            self.known_due_s = min((request.due_s for request in self.requests.values()), default=math.inf)
        return self.known_due_s

    @property
    def has_newcomer(self) -> bool:
        return any(not one.num_tokens and one.pace.tokens_per_s for one in self.requests.values())


@dataclass(frozen=True, slots=True)
class _BoundMemory:
    own_bytes: int  #: promised to those in turn, and kept by those that were
    workspace_bytes: int


class TurnMemory:
    """Mutable; written by the `TurnPolicy` that owns it and the models."""

    def __init__(
        self, models: Mapping[ModelId, TurnModel], budget_bytes: int, adapter_bytes: Callable[[ModelId], int]
    ) -> None:
        """`adapter_bytes`: what adapters of a model's running requests take besides its promise."""
        self._models, self.budget_bytes, self._look_at_adapters = models, budget_bytes, adapter_bytes
        self._adapter_bytes: dict[ModelId, int] = {}  #: as looked at for the present decision
        self._bound: _BoundMemory | None = None  #: None: to be counted

    def turns_changed(self) -> None:
        self._bound = None

    def forget_adapters(self) -> None:
        """Begin a decision: adapters may have changed."""
        self._adapter_bytes.clear()

    def bound_bytes(self, beside: Collection[ModelId] = (), without: Collection[ModelId] = ()) -> int:
        """Return the bytes of models in turn, and of those that were; never beyond the budget.

        As if the models `beside` were in turn as well, and those `without` were not.
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

    def fits(self, models: Collection[ModelId], without: Collection[ModelId] = ()) -> bool:
        spare_bytes = self.budget_bytes - self.bound_bytes(models, without)
        return spare_bytes >= 0 and self._adapters_fit(models, without, spare_bytes)

    def _adapters_fit(
        self, models: Collection[ModelId], without: Collection[ModelId], spare_bytes: int
    ) -> bool:
        staying = {name for name, one in self._models.items() if one.turn is not None}
        staying -= {*without, *models}
        if len(models) == 1 and all(self._models[name].is_pinned for name in staying):
            return True
        for model in {*models, *staying} - self._adapter_bytes.keys():
            self._adapter_bytes[model] = self._look_at_adapters(model)
        return sum(self._adapter_bytes[model] for model in {*models, *staying}) <= spare_bytes

"""The timeline of a request: what happened to it and when. Reads no clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hearth.control.observe.load_log import ON_DEVICE, LoadLog, place_of, slowest_tier
from hearth.control.requests.caller import GroupId
from hearth.control.requests.correlation import UNNAMED, Correlation
from hearth.core.messages import AdapterLoaded
from hearth.core.types import ModelId, Pace, Pooling, RequestId, TurnEnd, WorkerId
from hearth.policy.fleet.events import Option
from hearth.policy.turns.paced_request import PacedRequest

MAX_EXPLAINED = 1000
#: Instead of an id: the last request.
LAST = "last"
#: Waits for turns that are recorded one by one; all are counted.
MAX_WAITS = 32
#: A shorter wait for a first turn is not shown: so long it takes to learn that no other model runs.
MIN_WAIT_S = 0.01
#: Why a model had to wait for its next turn, for people.
PAUSE_REASONS = {
    TurnEnd.AHEAD: "ahead of its pace, and another model needed the room",
    TurnEnd.TIME: "its time was over, and another model needed the room",
    TurnEnd.IDLE: "its turn had ended when it came",
}


@dataclass(slots=True)
class Stay:
    """A request's time on one worker. Mutable; written by the timeline."""

    worker: WorkerId
    placed_s: float
    started_s: float | None = None  #: it got a slot
    first_token_s: float | None = None
    ended_s: float | None = None


@dataclass(slots=True)
class TurnWait:
    """A time in which the model of a request was not in turn. Mutable; written by the timeline."""

    began_s: float
    is_pause: bool  #: it had been in turn, and tokens had been sent
    reason: str
    ended_s: float | None = None


@dataclass(slots=True)
class Timeline:
    """The life of one request. Mutable; written by the observer. All times are the event loop's own."""

    request_id: RequestId
    model: str  #: that computes it
    arrived_s: float
    arrived_at_s: float  #: since the epoch
    num_prompt_tokens: int
    group: GroupId  #: of the caller; others are not told of the request
    pace: Pace = field(default_factory=Pace)
    correlation: Correlation = UNNAMED
    pooling: Pooling | None = None  #: an embedding is wanted; None: tokens are
    adapter: str | None = None  #: that was asked for; None: the bare model was
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    outcome: str = "running"
    error: str | None = None
    waits_for: str = ""  #: why it had no worker when it came; empty: it had one at once
    why: str | None = None
    options: tuple[Option, ...] = ()
    load: LoadLog | None = None
    adapter_load: AdapterLoaded | None = None  #: that it waited for, the last one
    adapter_loaded_s: float = 0.0  #: when that was over
    stays: list[Stay] = field(default_factory=list)
    hosted: str = ""  #: the model, as the last worker hosts it
    num_moves: int = 0  #: from a worker that lives to another one
    first_token_s: float | None = None
    last_token_s: float | None = None
    ended_s: float | None = None
    marks: list[tuple[float, str, str]] = field(default_factory=list)
    num_late_tokens: int = 0  #: by its pace
    num_pauses: int = 0
    paused_s: float = 0.0  #: in all pauses that are over
    waits: list[TurnWait] = field(default_factory=list)  #: for turns, the first ones
    #: The wait that is not over, if there is one.
    wait: TurnWait | None = None
    paced: PacedRequest = field(init=False)  #: when its next token is due

    def __post_init__(self) -> None:
        self.paced = PacedRequest(self.pace, self.arrived_s, 0, 0.0)

    def mark(self, now_s: float, what: str, detail: str = "") -> None:
        self.marks.append((now_s, what, detail))

    def placed(
        self,
        now_s: float,
        worker: WorkerId,
        why: str,
        options: tuple[Option, ...],
        load: LoadLog | None,
        hosted: ModelId | None = None,
    ) -> None:
        """`hosted`: the model, as the worker hosts it; None: under its own name."""
        self.why, self.options, self.hosted = why, options, hosted or self.model
        if load is not None:
            self.load = load
        what = "resumed" if self.stays else "placed"
        if self.worker is not None:  # it was not lost
            self.stays[-1].ended_s, what = now_s, "moved"
            self.num_moves += 1
        self.stays.append(Stay(worker, now_s))
        self.mark(now_s, what, f"on {worker}: {why}")

    def started(self, now_s: float, num_cached_tokens: int, waited_s: float) -> None:
        """Note that the request got a slot after `waited_s` on the worker, for the model or for a slot."""
        stay = self.stays[-1]
        if stay.started_s is None:
            stay.started_s = now_s
        if len(self.stays) == 1 and not self.num_preemptions:
            self.num_cached_tokens = num_cached_tokens
        found = f"{num_cached_tokens} tokens found in the prefix cache"
        self.mark(now_s, "started", f"after {waited_s:.3f} s on the worker, {found}")

    def adapter_loaded(self, now_s: float, loaded: AdapterLoaded) -> None:
        self.adapter_load, self.adapter_loaded_s = loaded, now_s
        self.mark(now_s, "adapter_loaded", f"{self.adapter}, {adapter_bytes(loaded)}")

    @property
    def adapter_tier(self) -> str | None:
        if self.adapter_load is not None:
            return slowest_tier(use.rung for use in self.adapter_load.rungs)
        is_there = self.adapter is not None and any(stay.started_s is not None for stay in self.stays)
        return ON_DEVICE if is_there else None

    def turn_ended(self, now_s: float, why: TurnEnd | None = None, in_turn: Sequence[ModelId] = ()) -> None:
        """`why` None: it was not in turn when the request came. `in_turn`: the models that are."""
        if self.wait is not None:
            return
        reason = "its turn has yet to begin" if why is None else PAUSE_REASONS[why]
        if in_turn:
            reason += f"; in turn: {', '.join(in_turn)}"
        self.wait = TurnWait(now_s, why is not None and self.first_token_s is not None, reason)
        self.num_pauses += self.wait.is_pause
        if len(self.waits) < MAX_WAITS:
            self.waits.append(self.wait)

    def turn_began(self, now_s: float) -> float | None:
        wait, self.wait = self.wait, None
        if wait is None:
            return None
        wait.ended_s = now_s
        if not wait.is_pause:
            return None
        self.paused_s += now_s - wait.began_s
        return now_s - wait.began_s

    def preempted(self, now_s: float) -> None:
        self.num_preemptions += 1
        self.mark(now_s, "preempted", "its KV memory was needed; what it had is computed again")

    @property
    def queue_s(self) -> float | None:
        end_s = self.stays[0].placed_s if self.stays else self.ended_s
        return None if end_s is None else end_s - self.arrived_s

    @property
    def worker(self) -> WorkerId | None:
        return self.stays[-1].worker if self.stays and self.stays[-1].ended_s is None else None

    @property
    def is_started(self) -> bool:
        return bool(self.stays) and self.stays[-1].started_s is not None

    def lost(self, now_s: float, worker: WorkerId, how: str = "died") -> None:
        self.stays[-1].ended_s = now_s
        self.turn_began(now_s)  # it waits for a worker now
        self.mark(now_s, "worker_lost", f"{worker} {how} after {self.num_output_tokens} tokens")

    def token(self, now_s: float) -> None:
        paced = self.paced
        if self.pace.tokens_per_s and now_s > paced.due_s:
            self.num_late_tokens += 1
        paced.sent(now_s)
        self.num_output_tokens += 1
        self.last_token_s = now_s
        if self.first_token_s is None:
            self.first_token_s = now_s
        if self.stays[-1].first_token_s is None:
            self.stays[-1].first_token_s = now_s

    def ended(self, now_s: float, outcome: str, error: str | None = None) -> None:
        self.turn_began(now_s)
        self.ended_s, self.outcome, self.error = now_s, outcome, error
        if self.stays and self.stays[-1].ended_s is None:
            self.stays[-1].ended_s = now_s


class Timelines:
    """The timelines of the last requests. Mutable; used on the event loop alone."""

    def __init__(self) -> None:
        self._timelines: OrderedDict[RequestId, Timeline] = OrderedDict()

    def add(self, timeline: Timeline) -> None:
        self._timelines[timeline.request_id] = timeline
        while len(self._timelines) > MAX_EXPLAINED:
            self._timelines.popitem(last=False)

    def get(self, request_id: RequestId) -> Timeline | None:
        return self._timelines.get(request_id)

    def all(self) -> list[Timeline]:
        """Return them, the oldest first."""
        return list(self._timelines.values())

    def find(self, request_id: str, may_see: Callable[[Timeline], bool]) -> Timeline | None:
        """Find by id, or else the last one with that client id, among those that may be seen.

        `last` finds the last of all, unless a client chose that id.
        """
        timeline = self._timelines.get(RequestId(request_id))
        if timeline is not None and may_see(timeline):
            return timeline
        visible = [one for one in reversed(self._timelines.values()) if may_see(one)]
        named = (one for one in visible if one.correlation.client_id == request_id)
        return next(named, visible[0] if request_id == LAST and visible else None)


def adapter_bytes(loaded: AdapterLoaded) -> str:
    megabytes = [f"{use.num_bytes / 1e6:.1f} MB from {place_of(use)}" for use in loaded.rungs]
    waited = [f"after {loaded.wait_s:.3f} s until it had room"] if loaded.wait_s >= MIN_WAIT_S else []
    return ", ".join([*megabytes, *waited])

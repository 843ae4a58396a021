"""The doings of a service during a run, by the journal of its brain: loads, turns and pauses.

The journal and the clients share a clock: on Linux `time.monotonic` and `time.perf_counter` are the same one.
Asks no service.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.report import percentiles
from hearth.control.journal import decode
from hearth.core.types import ModelId, RequestId, TurnEnd
from hearth.policy.fleet import events


@dataclass(frozen=True, slots=True)
class Entry:
    """An event of the journal, and the actions that followed."""

    event: events.Event
    actions: list[events.Action]


def entries(path: Path, begin_s: float, end_s: float) -> list[Entry]:
    """Return what a journal holds of a time; a last line that is still being written is left out."""
    return [entry for entry in _entries(path) if begin_s <= entry.event.now_s <= end_s]


def _entries(path: Path) -> Iterator[Entry]:
    with path.open("rb") as file:
        next(file)  # version and configuration
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield Entry(*decode(line))


@dataclass(frozen=True, slots=True)
class Doings:
    """The loads, turns and pauses of a run."""

    num_loads: int
    num_evictions: int
    moved_bytes: int  #: to the device
    bus_s: float  #: for which bytes came from host memory or from below it
    load_s: Mapping[str, float] | None  #: None: there was none
    num_turns: int
    turn_ends: Mapping[str, int]  #: by why they ended
    num_pauses: int  #: of requests, each counted once for every turn that ended before it had
    pauses_per_request: float
    most_pauses: int  #: of one request


def doings(journal: Sequence[Entry]) -> Doings:
    ready = [entry.event for entry in journal if isinstance(entry.event, events.ModelReady)]
    loads = [each for each in ready if each.rungs]
    uses = [use for each in loads for use in each.rungs]
    ended = [entry.event for entry in journal if isinstance(entry.event, events.TurnEnded)]
    pauses = pauses_by_request(journal)
    num_requests = sum(isinstance(entry.event, events.RequestArrived) for entry in journal)
    return Doings(
        num_loads=len(loads),
        num_evictions=sum(isinstance(one, events.Evict) for entry in journal for one in entry.actions),
        moved_bytes=sum(use.num_bytes for use in uses),
        bus_s=sum(max(use.seconds for use in each.rungs) for each in loads),
        load_s=percentiles([each.total_s for each in loads]) if loads else None,
        num_turns=sum(isinstance(entry.event, events.TurnBegan) for entry in journal),
        turn_ends=dict(Counter(each.why.value for each in ended)),
        num_pauses=sum(pauses.values()),
        pauses_per_request=sum(pauses.values()) / max(1, num_requests),
        most_pauses=max(pauses.values(), default=0),
    )


def pauses_by_request(journal: Sequence[Entry]) -> Counter[RequestId]:
    """Count the turns that ended while each request still had tokens to come."""
    models: dict[RequestId, ModelId] = {}
    pauses: Counter[RequestId] = Counter()
    for entry in journal:
        match entry.event:
            case events.RequestArrived(request_id=request_id, model=model):
                models[request_id] = model
            case (
                events.RequestFinished(request_id=request_id) | events.RequestCancelled(request_id=request_id)
            ):
                models.pop(request_id, None)
            case events.TurnEnded(model=model, why=why) if why is not TurnEnd.IDLE:
                pauses.update(request_id for request_id, its in models.items() if its == model)
    return pauses

"""A record of one HTTP request and its response, for metrics, the access log and traces.

A context variable of the answering task holds the record, so the gateway notes the requests that the task
starts. Holds no body, and of the headers only the client's names for the request.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field

from hearth.control.observe.timeline import Timeline
from hearth.control.requests.correlation import UNNAMED, Correlation

#: The status if the client disconnected first, as in nginx.
CLIENT_GONE = 499


@dataclass(slots=True)
class ExchangeRecord:
    """Mutable; written by the task that answers. Times are the event loop's own, except `began_at_s`."""

    method: str = ""  #: empty, as the next: not HTTP
    path: str = ""  #: as the client sent it, without its query
    correlation: Correlation = UNNAMED
    peer: str | None = None  #: the address that the request came from; None: unknown
    began_s: float = field(default_factory=time.monotonic)
    began_at_s: float = field(default_factory=time.time)  #: since the epoch
    request_id: str = ""  #: the service's own; known at the end
    caller: str | None = None  #: the name of the key; None: not authenticated
    route: str | None = None  #: the template that the path fits; None: there is none
    model: str | None = None
    status: int | None = None  #: None: nothing was sent
    is_whole: bool = False  #: the response was sent to its end
    num_received_bytes: int = 0  #: of the body
    num_sent_bytes: int = 0  #: likewise
    ended_s: float = 0.0
    #: Its requests at the gateway, and whether the prompt of each counts.
    requests: list[tuple[Timeline, bool]] = field(default_factory=list)
    trace_id: str | None = None  #: of the trace that was recorded; None: none was

    def started(self, timeline: Timeline, *, counts_prompt: bool) -> None:
        """Note a request of the gateway. `counts_prompt` False: another answer to a prompt noted before."""
        self.model = timeline.model
        self.requests.append((timeline, counts_prompt))

    @property
    def status_code(self) -> int:
        return CLIENT_GONE if self.status is None else self.status

    @property
    def workers(self) -> str | None:
        """The workers that answered, with commas; None: none did. Their names begin with their node's."""
        names = dict.fromkeys(one.stays[-1].worker for one, _ in self.requests if one.stays)
        return ",".join(names) or None

    @property
    def num_prompt_tokens(self) -> int:
        return sum(one.num_prompt_tokens for one, counts_prompt in self.requests if counts_prompt)

    @property
    def num_cached_tokens(self) -> int:
        return sum(one.num_cached_tokens for one, counts_prompt in self.requests if counts_prompt)

    @property
    def num_output_tokens(self) -> int:
        return sum(one.num_output_tokens for one, _ in self.requests)

    @property
    def queue_s(self) -> float | None:
        waits = [one.queue_s for one, _ in self.requests]
        return max((wait for wait in waits if wait is not None), default=None)

    @property
    def first_token_s(self) -> float | None:
        firsts = [one.first_token_s for one, _ in self.requests if one.first_token_s is not None]
        return min(firsts) - self.began_s if firsts else None

    @property
    def total_s(self) -> float:
        return self.ended_s - self.began_s


_CURRENT: ContextVar[ExchangeRecord | None] = ContextVar("hearth_exchange_record", default=None)


def set_current_exchange(record: ExchangeRecord) -> None:
    """Note what this task and its children start in a record."""
    _CURRENT.set(record)


def current_exchange() -> ExchangeRecord | None:
    return _CURRENT.get()

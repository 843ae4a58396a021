"""Has the gateway of a service note what its event loop does, for whoever measures the service.

Of tasks every slice is noted, as all streams wait while one has the loop. What the loop itself writes to
sockets at the end of a round of callbacks cannot be seen: where nothing is noted, it may be that.
"""

from __future__ import annotations

from bench.coldstart.ring import Ring
from hearth.api.answer import Answer
from hearth.api.exchange import Exchanges
from hearth.api.protocol import LimitedProtocol
from hearth.control.driver import Driver
from hearth.control.gateway import Gateway
from hearth.control.journal import Journal
from hearth.control.observe.observer import Observer
from hearth.control.requests.fact_decoder import DecodedFact, DecodedLate, FactDecoder
from hearth.policy.fleet.events import Event

#: Functions, by how they are told of.
TRACED = (
    (Driver, "_deliver_all", "deliver"),
    (Driver, "_end", "end request"),
    (Driver, "_book_all_finished", "book ends"),
    (FactDecoder, "_decode_next", "decode"),
    (Gateway, "exchange_ended", "exchange ended"),
    (Gateway, "start", "start request"),
    (Journal, "record", "journal"),
    (LimitedProtocol, "data_received", "read request"),
    (Observer, "stepped", "observe step"),
)
#: Coroutines, likewise: what a request is answered by, and the task around it.
TRACED_SLICES = ((Answer, "_answer", "answer"), (Exchanges, "__call__", "exchange"))


def trace_gateway(ring: Ring) -> None:
    """Have all that matters in a gateway's process noted from now on."""
    for owner, function, what in TRACED:
        ring.trace(owner, function, what)
    for owner, function, what in TRACED_SLICES:
        ring.trace_slices(owner, function, what)
    _trace_by_kind(ring)
    ring.trace_garbage()


def _trace_by_kind(ring: Ring) -> None:
    """Have events and facts noted by what they are."""
    post, receive = Driver._post, Driver.receive

    def post_noted(driver: Driver, event: Event) -> None:
        with ring.span(f"post {type(event).__name__}"):
            post(driver, event)

    def receive_noted(driver: Driver, decoded: DecodedFact | DecodedLate) -> None:
        kind = "late text" if isinstance(decoded, DecodedLate) else type(decoded.fact).__name__
        with ring.span(f"receive {kind}"):
            receive(driver, decoded)

    Driver._post = post_noted  # type: ignore[method-assign]
    Driver.receive = receive_noted  # type: ignore[method-assign]

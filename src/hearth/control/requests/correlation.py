"""How a client names a request: by an id of its own, and by the trace that the request is part of.

Both are there to find a request again, in our log and in those of clients and proxies. They name nothing
inside of the service, where ids are unique: two clients may well send the same. Reads no headers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

#: What may stand in a log line and in a header as it is. UUIDs, ULIDs, base64 and Amazon's `Root=...` fit.
_CLIENT_ID = re.compile(r"[A-Za-z0-9_.:=+/|@~-]{1,128}")
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class TraceParent:
    """The place of a request in a trace, as W3C's header `traceparent` tells it."""

    trace_id: str  #: 32 hexadecimal digits, never all zero
    span_id: str  #: 16 of them: the span that the request was sent from
    is_sampled: bool  #: the sender records its part of the trace

    @classmethod
    def parse(cls, text: str) -> TraceParent | None:
        """Return what a header says; None: nothing that the standard allows."""
        match = _TRACEPARENT.fullmatch(text)
        if match is None:
            return None
        version, trace_id, span_id, flags, more = match.groups()
        is_wrong_version = version == "ff" or (version == "00" and more is not None)
        if is_wrong_version or not trace_id.strip("0") or not span_id.strip("0"):
            return None
        return cls(trace_id, span_id, is_sampled=bool(int(flags, 16) & 1))

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.is_sampled:02x}"


@dataclass(frozen=True, slots=True)
class Correlation:
    """The names that a client gives to a request, as far as it does."""

    client_id: str | None = None
    trace: TraceParent | None = None

    @classmethod
    def read(cls, client_ids: Sequence[str], traceparents: Sequence[str]) -> Correlation:
        """Return what the headers of each kind say; what is wrong or there twice counts as not there."""
        client_id = client_ids[0] if len(client_ids) == 1 and _CLIENT_ID.fullmatch(client_ids[0]) else None
        trace = TraceParent.parse(traceparents[0]) if len(traceparents) == 1 else None
        return cls(client_id, trace)

    @property
    def log_fields(self) -> str:
        """The names as the end of a log line."""
        client_id = "" if self.client_id is None else f" client_id={self.client_id}"
        return client_id + ("" if self.trace is None else f" traceparent={self.trace}")


#: A request that its client calls nothing.
UNNAMED = Correlation()

"""A client's own names for a request: an id and a trace. Not unique, so they identify nothing here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

#: Safe in a log line and in a header. UUIDs, ULIDs, base64 and Amazon's `Root=...` fit.
_CLIENT_ID = re.compile(r"[A-Za-z0-9_.:=+/|@~-]{1,128}")
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class TraceParent:
    """The place of a request in a trace, by W3C's header `traceparent`."""

    trace_id: str  #: 32 hexadecimal digits, never all zero
    span_id: str  #: 16 of them: the span that the request was sent from
    is_sampled: bool  #: the sender records its part of the trace

    @classmethod
    def parse(cls, text: str) -> TraceParent | None:
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
    client_id: str | None = None
    trace: TraceParent | None = None

    @classmethod
    def read(cls, client_ids: Sequence[str], traceparents: Sequence[str]) -> Correlation:
        """Read the headers of each kind; one that is invalid or repeated is ignored."""
        client_id = client_ids[0] if len(client_ids) == 1 and _CLIENT_ID.fullmatch(client_ids[0]) else None
        trace = TraceParent.parse(traceparents[0]) if len(traceparents) == 1 else None
        return cls(client_id, trace)

    @property
    def log_fields(self) -> str:
        client_id = "" if self.client_id is None else f" client_id={self.client_id}"
        return client_id + ("" if self.trace is None else f" traceparent={self.trace}")


UNNAMED = Correlation()

"""Finished spans, and their bytes in OTLP, the protocol of OpenTelemetry.

OTLP is protobuf: a message is a row of fields in any order, each a tag (its number and the kind of its
value) and the value; texts and inner messages have their length in front. Spans are written so at once: by
way of the SDK's objects and protobuf's they take three times as long. Numbers of fields and of states are
those of `opentelemetry/proto/trace/v1/trace.proto`. Imports nothing of OpenTelemetry and sends nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from struct import Struct
from typing import NamedTuple

AttributeValue = (
    str | bool | int | float | bytes | None | Sequence["AttributeValue"] | Mapping[str, "AttributeValue"]
)

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # kinds of values
_KIND_INTERNAL, _KIND_SERVER = 1, 2
_STATUS_ERROR = 2
_TELLS_REMOTE, _IS_REMOTE = 0x100, 0x200  # flags of a span: where its parent is
_MIN_INT, _MAX_INT = -(1 << 63), (1 << 63) - 1


class SpanEvent(NamedTuple):
    """Something that happened at a moment of a span."""

    name: str
    at_ns: int  #: since the epoch
    attributes: Mapping[str, AttributeValue]
    num_dropped_attributes: int = 0  #: over a limit


class FinishedSpan(NamedTuple):
    """A span that is over. A tuple, for that is what takes least time to make."""

    name: str
    trace_id: int
    span_id: int
    parent_id: int | None  #: None: the trace begins here
    begin_ns: int  #: since the epoch, as is the next
    end_ns: int
    attributes: Mapping[str, AttributeValue]
    events: Sequence[SpanEvent] = ()
    error: str | None = None  #: what went wrong, if only ""; None: nothing
    is_server: bool = False  #: the whole of a request that came over the net
    is_parent_remote: bool = False  #: the parent is a span of the client's
    trace_state: str = ""  #: of the sampler
    num_dropped_attributes: int = 0  #: over a limit, as is the next
    num_dropped_events: int = 0


class OtlpEnvelope:
    """The messages that the spans of one service are sent in."""

    def __init__(self, resource: bytes, scope: bytes) -> None:
        """Take a message ResourceSpans and a message ScopeSpans without any spans."""
        self._resource, self._scope = resource + _SCOPE_SPANS, scope

    def around(self, spans: Sequence[bytes]) -> bytes:
        """Return the message ExportTraceServiceRequest of fields that `span_field` made."""
        in_scope = b"".join((self._scope, *spans))
        in_resource = b"".join((self._resource, _varint(len(in_scope)), in_scope))
        return _RESOURCE_SPANS + _varint(len(in_resource)) + in_resource


def span_field(span: FinishedSpan) -> bytes:
    """Return a span as a field of a message ScopeSpans."""
    parts = [
        _HEAD.pack(
            *(_TRACE_ID, span.trace_id.to_bytes(16), _SPAN_ID, span.span_id.to_bytes(8)),
            *(_KIND, _KIND_SERVER if span.is_server else _KIND_INTERNAL),
            *(_BEGIN, span.begin_ns, _END, span.end_ns),
            *(_FLAGS, _TELLS_REMOTE | _IS_REMOTE if span.is_parent_remote else _TELLS_REMOTE),
        ),
        _name(_NAME, span.name),
        *map(_attribute, repeat(_ATTRIBUTE), span.attributes, span.attributes.values()),
    ]
    if span.parent_id is not None:
        parts.append(_PARENT_ID + span.parent_id.to_bytes(8))
    for event in span.events:
        parts.append(_field(_EVENT, _event(event)))
    if span.error is None:
        parts.append(_STATUS_UNSET)
    else:
        parts.append(_field(_STATUS, _ERROR_CODE + _text(_MESSAGE, span.error)))
    if span.trace_state:
        parts.append(_text(_TRACE_STATE, span.trace_state))
    if span.num_dropped_attributes or span.num_dropped_events:
        parts.append(_DROPPED_ATTRIBUTES + _varint(span.num_dropped_attributes))
        parts.append(_DROPPED_EVENTS + _varint(span.num_dropped_events))
    return _field(_SPAN, b"".join(parts))


def _event(event: SpanEvent) -> bytes:
    head = _EVENT_AT + event.at_ns.to_bytes(8, "little") + _name(_EVENT_NAME, event.name)
    for key, value in event.attributes.items():
        head += _attribute(_EVENT_ATTRIBUTE, key, value)
    if event.num_dropped_attributes:
        head += _EVENT_DROPPED + _varint(event.num_dropped_attributes)
    return head


def _attribute(tag: bytes, key: str, value: AttributeValue) -> bytes:
    if isinstance(value, (str, int)):  # a union would be made anew each time
        return _common_attribute(tag, key, value)
    return _field(tag, _text(_KEY, key) + _field(_VALUE, _any_value(value)))


@lru_cache(1024, typed=True)  # True is 1, but not in OTLP
def _common_attribute(tag: bytes, key: str, value: str | int) -> bytes:
    """Return an attribute, found again where it can be: most are of models, workers, routes and states."""
    return _field(tag, _text(_KEY, key) + _field(_VALUE, _any_value(value)))


@lru_cache(1024)
def _name(tag: bytes, name: str) -> bytes:
    return _text(tag, name)


def _any_value(value: AttributeValue) -> bytes:
    if isinstance(value, str):
        return _text(_STRING_VALUE, value)
    if isinstance(value, bool):
        return _TRUE if value else _FALSE
    if isinstance(value, int) and _MIN_INT <= value <= _MAX_INT:
        return _INT_VALUE + _varint(value)
    if isinstance(value, float):
        return _DOUBLE_VALUE + _DOUBLE.pack(value)
    if isinstance(value, bytes):
        return _field(_BYTES_VALUE, value)
    if isinstance(value, Sequence):
        return _field(_ARRAY_VALUE, b"".join([_field(_ELEMENT, _any_value(one)) for one in value]))
    if isinstance(value, Mapping):
        return _field(_LIST_VALUE, b"".join([_attribute(_ELEMENT, key, one) for key, one in value.items()]))
    return b"" if value is None else _text(_STRING_VALUE, str(value))  # OTLP has no integer as large


def _text(tag: bytes, text: str) -> bytes:
    return _field(tag, text.encode(errors="replace"))  # a half of a surrogate pair is no text


def _field(tag: bytes, value: bytes) -> bytes:
    size = len(value)
    return b"%b%b%b" % (tag, _ONE_BYTE[size] if size < 0x80 else _varint(size), value)


def _varint(number: int) -> bytes:
    """Return an integer of 64 bits, seven of them in a byte, the last first; negative ones take ten bytes."""
    if number < 0:
        number += 1 << 64
    groups = bytearray()
    while number >= 0x80:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    groups.append(number)
    return bytes(groups)


def _tag(number: int, kind: int) -> bytes:
    return _varint(number << 3 | kind)


_ONE_BYTE = [bytes([number]) for number in range(0x80)]
_DOUBLE = Struct("<d")
# ExportTraceServiceRequest, ResourceSpans, ScopeSpans
_RESOURCE_SPANS, _SCOPE_SPANS, _SPAN = _tag(1, _BYTES), _tag(2, _BYTES), _tag(2, _BYTES)
# Span
_TRACE_ID, _SPAN_ID = _tag(1, _BYTES) + _varint(16), _tag(2, _BYTES) + _varint(8)
_TRACE_STATE, _PARENT_ID, _NAME = _tag(3, _BYTES), _tag(4, _BYTES) + _varint(8), _tag(5, _BYTES)
_KIND, _BEGIN, _END, _FLAGS = _tag(6, _VARINT), _tag(7, _FIXED64), _tag(8, _FIXED64), _tag(16, _FIXED32)
_HEAD = Struct("<2s16s 2s8s 1sB 1sQ 1sQ 2sI")  # the fields of fixed length, tags included
_ATTRIBUTE, _DROPPED_ATTRIBUTES = _tag(9, _BYTES), _tag(10, _VARINT)
_EVENT, _DROPPED_EVENTS, _STATUS = _tag(11, _BYTES), _tag(12, _VARINT), _tag(15, _BYTES)
# Event
_EVENT_AT, _EVENT_NAME = _tag(1, _FIXED64), _tag(2, _BYTES)
_EVENT_ATTRIBUTE, _EVENT_DROPPED = _tag(3, _BYTES), _tag(4, _VARINT)
# Status
_MESSAGE, _ERROR_CODE = _tag(2, _BYTES), _tag(3, _VARINT) + _varint(_STATUS_ERROR)
_STATUS_UNSET = _STATUS + _varint(0)
# KeyValue, AnyValue, ArrayValue and KeyValueList
_KEY, _VALUE, _ELEMENT = _tag(1, _BYTES), _tag(2, _BYTES), _tag(1, _BYTES)
_STRING_VALUE, _INT_VALUE, _DOUBLE_VALUE = _tag(1, _BYTES), _tag(3, _VARINT), _tag(4, _FIXED64)
_FALSE, _TRUE = _tag(2, _VARINT) + b"\0", _tag(2, _VARINT) + b"\1"
_ARRAY_VALUE, _LIST_VALUE, _BYTES_VALUE = _tag(5, _BYTES), _tag(6, _BYTES), _tag(7, _BYTES)

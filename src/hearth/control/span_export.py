"""Hands finished spans to OpenTelemetry's SDK, which batches them, sends them and tries again.

Its exporter over HTTP turns a batch into a message of protobuf by `encode_spans`, a function that it finds by
name in its module, and posts what that message serialises to. `OtlpQueue` puts bytes into the batch, and has
that function wrap them; whatever else is exported goes on to the original. Where an exporter is built
otherwise, `SdkQueue` gives it the SDK's own spans. Makes no spans: `exchange_spans.py` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from types import FunctionType

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanLimits, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.util import BoundedList
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    INVALID_SPAN_CONTEXT,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
)

from hearth.control.otlp import AttributeValue, FinishedSpan, OtlpEnvelope, SpanEvent, span_field
from hearth.version import hearth_version

_EXPORTER, _SDK = "opentelemetry-exporter-otlp-proto-http", "opentelemetry-sdk"
_ENCODE, _SERIALIZE = "encode_spans", "SerializePartialToString"  # the names that the exporter goes by
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


def obstacle_to_bytes() -> str | None:
    """Say why the installed packages do not take spans as bytes; None: they do."""
    methods = [one for one in vars(trace_exporter.OTLPSpanExporter).values() if isinstance(one, FunctionType)]
    finds_encoder = any({_ENCODE, _SERIALIZE} <= set(method.__code__.co_names) for method in methods)
    if finds_encoder and hasattr(trace_exporter, _ENCODE) and _passes_bytes_on():
        return None
    versions = " with ".join(f"{package} {version(package)}" for package in (_EXPORTER, _SDK))
    return f"{versions} does not take spans as bytes; versions between 1.30 and 1.45 do"


def _passes_bytes_on() -> bool:
    """Return whether the SDK's queue hands bytes to an exporter as it does spans. Found out by trying."""
    exporter = InMemorySpanExporter()
    processor: SpanProcessor = BatchSpanProcessor(exporter)
    queued = _QueuedBytes(b"", OtlpEnvelope(b"", b""))
    try:
        processor.on_end(queued)  # type: ignore[arg-type]  # all that is asked of a span is its context
    except (AttributeError, TypeError):  # or more is asked
        return False
    finally:
        processor.shutdown()
    return len(exporter.get_finished_spans()) == 1


class SdkQueue:
    """Queues spans as objects of the SDK, which encodes them."""

    def __init__(self, resource: Resource, processor: SpanProcessor, limits: SpanLimits) -> None:
        self._processor, self._limits = processor, limits
        self._resource, self._scope = _HashedResource(resource), _scope()

    def add(self, span: FinishedSpan) -> None:
        self._processor.on_end(self.readable(span))

    def readable(self, span: FinishedSpan) -> ReadableSpan:
        """Return what the SDK makes of such a span: within its limits."""
        limits = self._limits
        events: BoundedList[Event] = BoundedList(limits.max_events)
        for name, at_ns, attributes, _ in span.events:
            kept = BoundedAttributes(
                limits.max_event_attributes, attributes, max_value_len=limits.max_attribute_length
            )
            events.append(Event(name, kept, at_ns))
        return ReadableSpan(
            span.name,
            SpanContext(
                *(span.trace_id, span.span_id, False, _SAMPLED),
                TraceState.from_header([span.trace_state]) if span.trace_state else TraceState(),
            ),
            None
            if span.parent_id is None
            else SpanContext(span.trace_id, span.parent_id, span.is_parent_remote, _SAMPLED),
            self._resource,
            BoundedAttributes(
                limits.max_span_attributes, span.attributes, max_value_len=limits.max_span_attribute_length
            ),
            events,
            kind=SpanKind.SERVER if span.is_server else SpanKind.INTERNAL,
            status=Status() if span.error is None else Status(StatusCode.ERROR, span.error or None),
            start_time=span.begin_ns,
            end_time=span.end_ns,
            instrumentation_scope=self._scope,
        )


class _HashedResource(Resource):
    """A resource that knows its hash: the exporter asks for it with every span, and the SDK's is of JSON."""

    def __init__(self, resource: Resource) -> None:
        super().__init__(resource.attributes, resource.schema_url)
        self._hash = super().__hash__()

    def __hash__(self) -> int:
        return self._hash


class OtlpQueue:
    """Queues spans as bytes."""

    def __init__(self, resource: Resource, processor: SpanProcessor, limits: SpanLimits) -> None:
        self._processor, self._limits = processor, limits
        self._envelope = _envelope(resource)
        setattr(trace_exporter, _ENCODE, _encode_spans)

    def add(self, span: FinishedSpan) -> None:
        field = span_field(within(span, self._limits))
        self._processor.on_end(_QueuedBytes(field, self._envelope))  # type: ignore[arg-type]  # all that is asked of a span is its context


class _QueuedBytes:
    """A span that is written already, in the place of the SDK's."""

    __slots__ = ("envelope", "field")
    #: By which the SDK sees that the span is to be sent.
    context = SpanContext(
        INVALID_SPAN_CONTEXT.trace_id, INVALID_SPAN_CONTEXT.span_id, is_remote=False, trace_flags=_SAMPLED
    )

    def __init__(self, field: bytes, envelope: OtlpEnvelope) -> None:
        self.field, self.envelope = field, envelope


class _Written:
    """Bytes that the exporter takes for a message of protobuf."""

    def __init__(self, message: bytes) -> None:
        self._message = message

    def SerializePartialToString(self) -> bytes:
        return self._message


def _encode_spans(batch: Sequence[ReadableSpan]) -> object:
    """Return a message of a batch; batches are of one service, and all of bytes or all of the SDK's spans."""
    written = [one for one in batch if isinstance(one, _QueuedBytes)]
    if not written:
        return encode_spans(batch)
    assert len(written) == len(batch), f"{len(batch) - len(written)} of {len(batch)} spans are not bytes"
    return _Written(written[0].envelope.around([one.field for one in written]))


def _scope() -> InstrumentationScope:
    return InstrumentationScope("hearth", hearth_version())


def _envelope(resource: Resource) -> OtlpEnvelope:
    """Return what the SDK writes around the spans of a service."""
    (in_resource,) = encode_spans(
        [ReadableSpan("", INVALID_SPAN_CONTEXT, resource=resource, instrumentation_scope=_scope())]
    ).resource_spans
    (in_scope,) = in_resource.scope_spans
    del in_resource.scope_spans[:], in_scope.spans[:]
    return OtlpEnvelope(in_resource.SerializeToString(), in_scope.SerializeToString())


def within(span: FinishedSpan, limits: SpanLimits) -> FinishedSpan:
    """Return a span within the limits that OTEL_*_LIMIT set: the latest of what is too many is kept."""
    if span.events:
        num_dropped = 0 if limits.max_events is None else max(0, len(span.events) - limits.max_events)
        events = [_event_within(event, limits) for event in span.events[num_dropped:]]
        span = span._replace(events=events, num_dropped_events=num_dropped)
    max_chars, max_attributes = limits.max_span_attribute_length, limits.max_span_attributes
    if max_chars is not None or _has_more(span.attributes, max_attributes):
        kept = BoundedAttributes(max_attributes, span.attributes, max_value_len=max_chars)
        span = span._replace(attributes=kept, num_dropped_attributes=kept.dropped)
    return span


def _event_within(event: SpanEvent, limits: SpanLimits) -> SpanEvent:
    max_chars, max_attributes = limits.max_attribute_length, limits.max_event_attributes
    if max_chars is None and not _has_more(event.attributes, max_attributes):
        return event
    kept = BoundedAttributes(max_attributes, event.attributes, max_value_len=max_chars)
    return event._replace(attributes=kept, num_dropped_attributes=kept.dropped)


def _has_more(attributes: Mapping[str, AttributeValue], max_attributes: int | None) -> bool:
    return max_attributes is not None and len(attributes) > max_attributes

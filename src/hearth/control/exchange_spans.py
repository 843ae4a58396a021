"""The spans of an exchange, made when it has ended, of the times that were noted.

Imports OpenTelemetry's SDK, which is an extra: `tracing.py` imports this module only where there is an
endpoint. All that is the same for many spans is made once: hundreds of requests may end in a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from hearth.control.correlation import TraceParent
from hearth.control.exchange_record import ExchangeRecord
from hearth.control.timeline import Timeline
from hearth.control.views import Explanation
from hearth.version import hearth_version

_UNSET = Status()
_NO_PARENT = Context()


class HashedResource(Resource):
    """A resource that knows its hash: the exporter asks for it with every span, and the SDK's is of JSON."""

    def __init__(self, resource: Resource) -> None:
        super().__init__(resource.attributes, resource.schema_url)
        self._hash = super().__hash__()

    def __hash__(self) -> int:
        return self._hash


class ExchangeSpans:
    """Makes spans of exchanges and hands them to a processor. Used on the event loop alone."""

    def __init__(self, provider: TracerProvider, processor: SpanProcessor) -> None:
        self._processor, self._resource = processor, provider.resource
        self._new_span_id = provider.id_generator.generate_span_id
        self._tracer = provider.get_tracer("hearth", hearth_version())
        self._scope = InstrumentationScope("hearth", hearth_version())

    def add(self, record: ExchangeRecord) -> None:
        """Hand over the spans of an exchange that has ended, and note their trace in its record."""
        span = self._tracer.start_span(
            f"{record.method} {record.route}" if record.route else record.method,
            _parent(record.correlation.trace),
            SpanKind.SERVER,
            _exchange_attributes(record),
            start_time=_nanoseconds(record.began_at_s),
        )
        if span.is_recording():
            record.trace_id = f"{span.get_span_context().trace_id:032x}"
            for timeline, _ in record.requests:
                self._trace_request(span.get_span_context(), timeline, record.ended_s)
            if record.status_code >= 500:
                span.set_status(Status(StatusCode.ERROR))
        span.end(_nanoseconds(record.began_at_s + record.total_s))

    def _trace_request(self, parent: SpanContext, timeline: Timeline, now_s: float) -> None:
        explained = timeline.explain(now_s)
        arrived_at_s = explained.arrived_at_s
        total_s = now_s - timeline.arrived_s if explained.total_s is None else explained.total_s
        is_failed = explained.error is not None
        own = self._add_span(
            *(parent, f"generate {explained.model}", arrived_at_s, total_s, _request_attributes(explained)),
            [
                Event(mark.what, _detail(mark.detail), _nanoseconds(arrived_at_s + mark.at_s))
                for mark in explained.marks
                if mark.what != "ended"  # whose detail may quote what somebody wrote
            ],
            Status(StatusCode.ERROR, explained.outcome) if is_failed else _UNSET,
        )
        for phase in explained.spans:
            seconds = phase.end_s - phase.begin_s
            self._add_span(*(own, phase.what, arrived_at_s + phase.begin_s, seconds, _detail(phase.detail)))

    def _add_span(
        self,
        parent: SpanContext,
        name: str,
        begin_s: float,
        seconds: float,
        attributes: Mapping[str, str | int | list[str]],
        events: Sequence[Event] = (),
        status: Status = _UNSET,
    ) -> SpanContext:
        """Hand over a span that is over, which costs a fifth of one that is begun and ended."""
        own = SpanContext(
            parent.trace_id, self._new_span_id(), is_remote=False, trace_flags=parent.trace_flags
        )
        self._processor.on_end(
            ReadableSpan(
                *(name, own, parent, self._resource, attributes, events),
                status=status,
                start_time=_nanoseconds(begin_s),
                end_time=_nanoseconds(begin_s + seconds),
                instrumentation_scope=self._scope,
            )
        )
        return own


def _parent(trace: TraceParent | None) -> Context:
    """Return where a client has begun the trace; empty: nowhere."""
    if trace is None:
        return _NO_PARENT
    flags = TraceFlags(TraceFlags.SAMPLED if trace.is_sampled else TraceFlags.DEFAULT)
    sent_from = SpanContext(
        int(trace.trace_id, 16), int(trace.span_id, 16), is_remote=True, trace_flags=flags
    )
    return set_span_in_context(NonRecordingSpan(sent_from), Context())


def _exchange_attributes(record: ExchangeRecord) -> dict[str, str | int]:
    """Return what OpenTelemetry's conventions say of an HTTP request, and who sent it."""
    attributes: dict[str, str | int] = {
        "http.request.method": record.method,
        "http.response.status_code": record.status_code,
        "http.request.body.size": record.num_received_bytes,
        "http.response.body.size": record.num_sent_bytes,
        "hearth.request_id": record.request_id,
    }
    optional = {
        "http.route": record.route,
        "client.address": record.peer,
        "hearth.client_request_id": record.correlation.client_id,
        "hearth.key": record.caller,
    }
    return attributes | {name: value for name, value in optional.items() if value is not None}


def _request_attributes(explained: Explanation) -> dict[str, str | int | list[str]]:
    """Return what OpenTelemetry's conventions say of an answer, and where it was made."""
    attributes: dict[str, str | int | list[str]] = {
        "gen_ai.request.model": explained.model,
        "gen_ai.response.finish_reasons": [explained.outcome],
        "gen_ai.usage.input_tokens": explained.num_prompt_tokens,
        "gen_ai.usage.output_tokens": explained.num_output_tokens,
        "hearth.cached_tokens": explained.num_cached_tokens,
        "hearth.request_id": explained.request_id,
    }
    if explained.worker is not None:
        attributes["hearth.worker"] = explained.worker
    if explained.why is not None:
        attributes["hearth.placed"] = explained.why
    return attributes


def _detail(text: str) -> dict[str, str]:
    return {"hearth.detail": text} if text else {}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)

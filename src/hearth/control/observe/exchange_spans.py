"""Creates the OpenTelemetry spans of an exchange that has ended. Imports the SDK, an optional extra."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    Tracer,
    set_span_in_context,
)
from prometheus_client import Counter

from hearth.control.observe.exchange_record import ExchangeRecord
from hearth.control.observe.explanation import marks_of, spans_of
from hearth.control.observe.timeline import Timeline
from hearth.control.observe.views import TimelineSpan
from hearth.control.requests.correlation import TraceParent

log = logging.getLogger(__name__)

_NO_PARENT = Context()
#: Requests of one exchange that get spans. Embeddings of a thousand inputs would hold up the event loop.
MAX_TRACED_REQUESTS = 64


class CountingExporter(SpanExporter):
    """Sends spans with the SDK's exporter and counts the traces that are dropped.

    The SDK calls `export` on its own thread; everything else runs on the event loop. An outage of the
    collector is logged once, after the SDK's own messages about the first batch, and not with every batch.
    """

    def __init__(self, exporter: SpanExporter, dropped: Counter) -> None:
        self._exporter, self._dropped = exporter, dropped
        self.num_taken = 0  #: spans that have left the SDK's queue
        self.note: str | None = None  #: set while traces are dropped
        self._sdk_log = logging.getLogger(type(exporter).__module__)
        self._sdk_log.addFilter(self._is_logged)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.num_taken += len(spans)
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            self.note = None
        else:
            num_traces = sum(span.kind is SpanKind.SERVER for span in spans)
            self.drop(num_traces, "the collector is unreachable or rejects them")
        return result

    def drop(self, num_traces: int, reason: str) -> None:
        self._dropped.inc(num_traces)
        if self.note is None:
            self.note = f"traces are dropped: {reason}"
            log.warning("fallback traces=dropped reason=`%s`", reason)

    def shutdown(self) -> None:
        self._exporter.shutdown()
        self._sdk_log.removeFilter(self._is_logged)

    def _is_logged(self, _: logging.LogRecord) -> bool:
        return self.note is None


class ExchangeSpans:
    def __init__(self, tracer: Tracer, exporter: CountingExporter, max_queued_spans: int) -> None:
        """`max_queued_spans`: size of the SDK's queue between `tracer` and `exporter`."""
        self._tracer, self._exporter, self._max_queued = tracer, exporter, max_queued_spans
        self._num_ended = 0  #: spans handed to the SDK

    def add(self, record: ExchangeRecord) -> None:
        """Create the spans of an exchange that has ended, if it is sampled; sets `record.trace_id`."""
        server = self._tracer.start_span(
            f"{record.method} {record.route}" if record.route else record.method,
            _parent(record.correlation.trace),
            SpanKind.SERVER,
            _exchange_attributes(record),
            start_time=_nanoseconds(record.began_at_s),
        )
        context = server.get_span_context()
        if not context.trace_flags.sampled:
            return
        now_s = record.ended_s
        traced = [(one, spans_of(one, now_s)) for one, _ in record.requests[:MAX_TRACED_REQUESTS]]
        num_spans = 1 + sum(1 + len(phases) for _, phases in traced)
        num_queued = self._num_ended - self._exporter.num_taken
        if num_queued + num_spans > self._max_queued:  # the SDK would drop parts of traces
            self._exporter.drop(1, "the collector is too slow")
            return
        self._num_ended += num_spans
        record.trace_id = f"{context.trace_id:032x}"
        inside = set_span_in_context(server, _NO_PARENT)
        for timeline, phases in traced:
            self._add_request(timeline, phases, inside, now_s)
        if record.status_code >= 500:
            server.set_status(StatusCode.ERROR)
        server.end(_nanoseconds(record.began_at_s + record.total_s))

    def _add_request(
        self, timeline: Timeline, phases: Sequence[TimelineSpan], parent: Context, now_s: float
    ) -> None:
        arrived_s, arrived_at_s = timeline.arrived_s, timeline.arrived_at_s
        end_s = now_s if timeline.ended_s is None else timeline.ended_s
        span = self._tracer.start_span(
            f"generate {timeline.adapter or timeline.model}",
            parent,
            attributes=_request_attributes(timeline),
            start_time=_nanoseconds(arrived_at_s),
        )
        for at_s, what, detail in marks_of(timeline, now_s):
            if what != "ended":  # its detail may quote the request
                span.add_event(what, _detail(detail), _nanoseconds(arrived_at_s + (at_s - arrived_s)))
        inside = set_span_in_context(span, parent)
        for phase in phases:
            self._tracer.start_span(
                phase.what,
                inside,
                attributes=_detail(phase.detail),
                start_time=_nanoseconds(arrived_at_s + phase.begin_s),
            ).end(_nanoseconds(arrived_at_s + phase.end_s))
        if timeline.error is not None:
            span.set_status(StatusCode.ERROR, timeline.outcome)
        span.end(_nanoseconds(arrived_at_s + (end_s - arrived_s)))


def _parent(trace: TraceParent | None) -> Context:
    """Return the context of the client's span, or an empty one: None means the current context to the SDK."""
    if trace is None:
        return _NO_PARENT
    flags = TraceFlags(TraceFlags.SAMPLED if trace.is_sampled else TraceFlags.DEFAULT)
    client = SpanContext(int(trace.trace_id, 16), int(trace.span_id, 16), is_remote=True, trace_flags=flags)
    return set_span_in_context(NonRecordingSpan(client), _NO_PARENT)


def _exchange_attributes(record: ExchangeRecord) -> dict[str, str | int]:
    attributes: dict[str, str | int] = {
        "http.request.method": record.method,
        "http.response.status_code": record.status_code,
        "http.request.body.size": record.num_received_bytes,
        "http.response.body.size": record.num_sent_bytes,
        "hearth.request_id": record.request_id,
    }
    num_requests = len(record.requests)
    optional: dict[str, str | int | None] = {
        "http.route": record.route,
        "client.address": record.peer,
        "hearth.client_request_id": record.correlation.client_id,
        "hearth.key": record.caller,
        "hearth.num_requests": num_requests if num_requests > MAX_TRACED_REQUESTS else None,
    }
    return attributes | {name: value for name, value in optional.items() if value is not None}


def _request_attributes(timeline: Timeline) -> dict[str, str | int | list[str]]:
    attributes: dict[str, str | int | list[str]] = {
        "gen_ai.request.model": timeline.adapter or timeline.model,
        "gen_ai.response.finish_reasons": [timeline.outcome],
        "gen_ai.usage.input_tokens": timeline.num_prompt_tokens,
        "gen_ai.usage.output_tokens": timeline.num_output_tokens,
        "hearth.cached_tokens": timeline.num_cached_tokens,
        "hearth.request_id": timeline.request_id,
    }
    if timeline.stays:
        attributes["hearth.worker"] = timeline.stays[-1].worker
    if timeline.why is not None:
        attributes["hearth.placed"] = timeline.why
    return attributes


def _detail(text: str) -> dict[str, str] | None:
    return {"hearth.detail": text} if text else None


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)

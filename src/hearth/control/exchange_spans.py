"""The spans of an exchange, made when it has ended, of the times that were noted.

Imports OpenTelemetry's SDK, which is an extra: `tracing.py` imports this module only where there is an
endpoint. The SDK's sampler decides which exchanges are traced. Encodes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    TraceFlags,
    set_span_in_context,
)

from hearth.control.correlation import TraceParent
from hearth.control.exchange_record import ExchangeRecord
from hearth.control.otlp import AttributeValue, FinishedSpan, SpanEvent
from hearth.control.timeline import Timeline

_NO_PARENT = Context()
_NO_DETAIL: dict[str, str] = {}


class ExchangeSpans:
    """Makes spans of exchanges and hands them on. Used on the event loop alone."""

    def __init__(self, provider: TracerProvider, add_span: Callable[[FinishedSpan], None]) -> None:
        self._add_span, self._sampler = add_span, provider.sampler
        self._new_trace_id = provider.id_generator.generate_trace_id
        self._new_span_id = provider.id_generator.generate_span_id

    def add(self, record: ExchangeRecord) -> None:
        """Hand over the spans of an exchange that has ended, if it is sampled; its record notes the trace."""
        sent = record.correlation.trace
        trace_id = self._new_trace_id() if sent is None else int(sent.trace_id, 16)
        name = f"{record.method} {record.route}" if record.route else record.method
        sampled = self._sampler.should_sample(
            _parent(sent), trace_id, name, SpanKind.SERVER, _exchange_attributes(record)
        )
        if sampled.decision is not Decision.RECORD_AND_SAMPLE:
            return
        record.trace_id = f"{trace_id:032x}"
        state = ",".join([f"{key}={value}" for key, value in (sampled.trace_state or {}).items()])
        span_id = self._new_span_id()
        for timeline, _ in record.requests:
            self._trace_request(trace_id, span_id, state, timeline, record.ended_s)
        self._add_span(
            FinishedSpan(
                *(name, trace_id, span_id, None if sent is None else int(sent.span_id, 16)),
                *(_nanoseconds(record.began_at_s), _nanoseconds(record.began_at_s + record.total_s)),
                sampled.attributes,
                error="" if record.status_code >= 500 else None,
                is_server=True,
                is_parent_remote=sent is not None,
                trace_state=state,
            )
        )

    def _trace_request(
        self, trace_id: int, parent_id: int, state: str, timeline: Timeline, now_s: float
    ) -> None:
        span_id = self._new_span_id()
        arrived_s, arrived_at_s = timeline.arrived_s, timeline.arrived_at_s
        end_s = now_s if timeline.ended_s is None else timeline.ended_s
        self._add_span(
            FinishedSpan(
                *(f"generate {timeline.adapter or timeline.model}", trace_id, span_id, parent_id),
                *(_nanoseconds(arrived_at_s), _nanoseconds(arrived_at_s + (end_s - arrived_s))),
                _request_attributes(timeline),
                [
                    SpanEvent(what, _nanoseconds(arrived_at_s + (at_s - arrived_s)), _detail(detail))
                    for at_s, what, detail in timeline.told_marks(now_s)
                    if what != "ended"  # whose detail may quote what somebody wrote
                ],
                None if timeline.error is None else timeline.outcome,
                trace_state=state,
            )
        )
        for phase in timeline.told_spans(now_s):
            self._add_span(
                FinishedSpan(
                    *(phase.what, trace_id, self._new_span_id(), span_id),
                    *(_nanoseconds(arrived_at_s + phase.begin_s), _nanoseconds(arrived_at_s + phase.end_s)),
                    _detail(phase.detail),
                    trace_state=state,
                )
            )


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


def _request_attributes(timeline: Timeline) -> dict[str, AttributeValue]:
    """Return what OpenTelemetry's conventions say of an answer, and where it was made."""
    attributes: dict[str, AttributeValue] = {
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


def _detail(text: str) -> dict[str, str]:
    return {"hearth.detail": text} if text else _NO_DETAIL


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)

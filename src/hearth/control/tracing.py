"""OpenTelemetry traces: a span for each HTTP request, with what `hearth explain` draws below it.

Spans are made when an exchange has ended, of the times that were noted; a thread of OpenTelemetry's SDK sends
them. Where to, how often and which of them say the standard OTEL_* variables, which the SDK reads itself. Its
packages are an extra, and imported only where an endpoint is set. Tells nothing of prompts and answers.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hearth.control.correlation import TraceParent
from hearth.control.exchange_record import ExchangeRecord
from hearth.control.timeline import Timeline
from hearth.control.views import Explanation
from hearth.errors import ConfigError
from hearth.version import hearth_version

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import Event, SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import SpanContext, Status

#: The variables that turn traces on, the more specific one first.
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL = "http/protobuf"
#: Routes whose requests are too many and too dull.
UNTRACED = frozenset(["/metrics"])
#: Time to send the last spans when the service ends.
CLOSING_S = 5.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Untraced:
    """The reason why nothing is traced though an endpoint is set, for people."""

    note: str


def tracing_of(environ: Mapping[str, str]) -> Tracing | Untraced | None:
    """Return what traces requests as the environment says; None: nothing is to be traced.

    The variables are no settings of Hearth, and may be there for all programs of a machine: where they ask
    for what cannot be done, the service runs without traces.
    """
    endpoint = next((name for name in ENDPOINTS if environ.get(name)), None)
    exporter = environ.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    is_disabled = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if endpoint is None or exporter == "none" or is_disabled:
        return None
    try:
        tracing = _tracing(environ, endpoint, exporter)
    except ConfigError as error:
        log.warning("fallback traces=off reason=`%s`", str(error).replace("`", ""))
        return Untraced(f"requests are not traced: {error}")
    log.info("tracing by=%s", endpoint)  # without its value: a URL may hold a password
    return tracing


def _tracing(environ: Mapping[str, str], endpoint: str, exporter: str) -> Tracing:
    """Return what sends traces to the URL in `endpoint`.

    Raises:
        ConfigError: the packages are missing, or the environment asks for what they cannot do.
    """
    if exporter != "otlp":
        raise ConfigError(f"OTEL_TRACES_EXPORTER must be `otlp` or `none`, given: `{exporter:.80}`")
    protocol = next((name for name in _PROTOCOLS if environ.get(name)), None)
    if protocol is not None and environ[protocol] != _PROTOCOL:
        raise ConfigError(
            f"{protocol} must be `{_PROTOCOL}`, given: `{environ[protocol]:.80}`; leave it out, and name the "
            f"collector's port for HTTP, usually 4318, in {endpoint}"
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"{endpoint} is set, and a package that sends traces is missing: {error.name}; install Hearth's "
            "extra `otel`, or unset the variable"
        ) from error
    defaults = Resource.create({"service.name": "hearth", "service.version": hearth_version()})
    resource = defaults.merge(OTELResourceDetector().detect())  # again: what the environment says wins
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    try:
        span_exporter = OTLPSpanExporter()
        processor = BatchSpanProcessor(span_exporter)
    except ValueError as error:  # of a number that is none, say
        raise ConfigError(
            f"a variable OTEL_* that sending traces goes by has a wrong value: {error}"
        ) from error
    provider.add_span_processor(processor)
    return Tracing(provider, processor, span_exporter)


class Tracing:
    """Makes spans of exchanges. Used on the event loop alone."""

    note: None = None  #: as of `Untraced`: all that is to be traced is

    def __init__(self, provider: TracerProvider, processor: SpanProcessor, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._provider, self._processor, self._exporter = provider, processor, exporter
        self._tracer = provider.get_tracer("hearth", hearth_version())
        self._scope = InstrumentationScope("hearth", hearth_version())

    def trace(self, record: ExchangeRecord) -> None:
        """Hand the spans of an exchange that has ended to the SDK; not of strangers and of scrapers."""
        if record.caller is None or record.route in UNTRACED:
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode

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

    async def close(self) -> None:
        """Send what is left, as far as the collector takes it in time."""
        closing = threading.Thread(target=self._provider.shutdown, name="hearth-traces", daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, CLOSING_S)
        if closing.is_alive():
            log.warning("traces_unsent reason=`the collector took too long, limit: %g s`", CLOSING_S)
            self._exporter.shutdown()  # which ends its attempts

    def _trace_request(self, parent: SpanContext, timeline: Timeline, now_s: float) -> None:
        from opentelemetry.sdk.trace import Event
        from opentelemetry.trace import Status, StatusCode

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
            Status(StatusCode.ERROR, explained.outcome) if is_failed else Status(),
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
        status: Status | None = None,
    ) -> SpanContext:
        """Hand over a span that is over, which costs a fifth of one that is begun and ended."""
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, Status

        span_id = self._provider.id_generator.generate_span_id()
        own = SpanContext(parent.trace_id, span_id, is_remote=False, trace_flags=parent.trace_flags)
        self._processor.on_end(
            ReadableSpan(
                *(name, own, parent, self._provider.resource, attributes, events),
                status=status or Status(),
                start_time=_nanoseconds(begin_s),
                end_time=_nanoseconds(begin_s + seconds),
                instrumentation_scope=self._scope,
            )
        )
        return own


def _parent(trace: TraceParent | None) -> Context:
    """Return where a client has begun the trace; empty: nowhere."""
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    if trace is None:
        return Context()
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

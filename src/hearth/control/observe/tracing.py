"""OpenTelemetry traces: a span for each HTTP request, with the phases that `hearth explain` shows below it.

`exchange_spans.py` creates spans when an exchange has ended. OpenTelemetry's SDK samples, batches and sends
them, configured by the standard OTEL_* variables. It is an optional extra, imported only if an endpoint is
set. Spans contain no prompts and no answers.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hearth.control.observe.exchange_record import ExchangeRecord
from hearth.control.observe.metrics import Metrics
from hearth.core.errors import ConfigError
from hearth.core.version import hearth_version

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from hearth.control.observe.exchange_spans import CountingExporter, ExchangeSpans

#: The variables that turn traces on, the more specific one first.
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL = "http/protobuf"
_MAX_QUEUED_SPANS = 2048  # the default of OTEL_BSP_MAX_QUEUE_SIZE
#: Routes whose requests are too many and too dull.
UNTRACED = frozenset(["/metrics"])
#: Time to send the last spans when the service ends.
CLOSING_S = 5.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Untraced:
    note: str


def tracing_of(environ: Mapping[str, str], metrics: Metrics) -> Tracing | Untraced | None:
    """None: nothing is traced. If the variables ask for something impossible, `metrics` count that."""
    endpoint = next((name for name in ENDPOINTS if environ.get(name)), None)
    exporter = environ.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    is_disabled = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if endpoint is None or exporter == "none" or is_disabled:
        return None
    try:
        tracing = _tracing(environ, endpoint, exporter, metrics)
    except ConfigError as error:
        log.warning("fallback traces=off reason=`%s`", str(error).replace("`", ""))
        metrics.fallbacks.labels("untraced").inc()
        return Untraced(f"requests are not traced: {error}")
    log.info("tracing by=%s", endpoint)  # without its value: a URL may hold a password
    return tracing


def _tracing(environ: Mapping[str, str], endpoint: str, exporter: str, metrics: Metrics) -> Tracing:
    """`endpoint` names the variable that holds the collector's URL. Raises ConfigError."""
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

        from hearth.control.observe.exchange_spans import CountingExporter, ExchangeSpans
    except ImportError as error:
        raise ConfigError(
            f"{endpoint} is set, and a package that sends traces is missing: {error.name}; install Hearth's "
            "extra `otel`, or unset the variable"
        ) from error
    defaults = Resource.create({"service.name": "hearth", "service.version": hearth_version()})
    resource = defaults.merge(OTELResourceDetector().detect())  # again: what the environment says wins
    try:
        max_queued = int(environ.get("OTEL_BSP_MAX_QUEUE_SIZE") or _MAX_QUEUED_SPANS)
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        span_exporter = CountingExporter(OTLPSpanExporter(), metrics.fallbacks.labels("traces_dropped"))
        provider.add_span_processor(BatchSpanProcessor(span_exporter, max_queue_size=max_queued))
    except ValueError as error:
        raise ConfigError(f"invalid value in an OTEL_* variable: {error}") from error
    tracer = provider.get_tracer("hearth", hearth_version())
    return Tracing(provider, ExchangeSpans(tracer, span_exporter, max_queued), span_exporter)


class Tracing:
    """Traces exchanges until it is closed. Used on the event loop alone."""

    def __init__(self, provider: TracerProvider, spans: ExchangeSpans, exporter: CountingExporter) -> None:
        self._provider, self._spans, self._exporter = provider, spans, exporter

    @property
    def note(self) -> str | None:
        return self._exporter.note

    def trace(self, record: ExchangeRecord) -> None:
        """Create the spans of an exchange that has ended, except for unauthenticated ones and scrapes."""
        if record.caller is None or record.route in UNTRACED:
            return
        try:
            self._spans.add(record)
        except Exception as error:  # a sampler may be a plugin; the access log still gets its line
            self._exporter.drop(1, repr(error))

    async def close(self) -> None:
        closing = threading.Thread(target=self._provider.shutdown, name="hearth-traces", daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, CLOSING_S)
        if closing.is_alive():
            log.warning("traces_unsent reason=`the collector took too long, limit: %g s`", CLOSING_S)
            self._exporter.shutdown()  # which ends its attempts

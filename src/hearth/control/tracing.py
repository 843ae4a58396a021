"""OpenTelemetry traces: a span for each HTTP request, with what `hearth explain` draws below it.

Spans (`exchange_spans.py`) are made when an exchange has ended; a thread of OpenTelemetry's SDK sends them
(`span_export.py`). Where to, how often and which of them say the standard OTEL_* variables, which the SDK
reads itself. Its packages are an extra, and imported only where an endpoint is set. Tells nothing of prompts
and answers.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hearth.control.exchange_record import ExchangeRecord
from hearth.control.metrics import Metrics
from hearth.errors import ConfigError
from hearth.version import hearth_version

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

    from hearth.control.exchange_spans import ExchangeSpans

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


def tracing_of(environ: Mapping[str, str], metrics: Metrics) -> Tracing | Untraced | None:
    """Return what traces requests as the environment says; None: nothing is to be traced.

    The variables are no settings of Hearth, and may be there for all programs of a machine: where they ask
    for what cannot be done, the service runs without traces, and `metrics` count that.
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
        metrics.fallbacks.labels("untraced").inc()
        return Untraced(f"requests are not traced: {error}")
    log.info("tracing by=%s", endpoint)  # without its value: a URL may hold a password
    if tracing.obstacle is not None:
        log.warning("fallback traces=slow reason=`%s`", tracing.obstacle)
        metrics.fallbacks.labels("trace_encoder").inc()
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
        from opentelemetry.sdk.trace import SpanLimits, TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        from hearth.control.exchange_spans import ExchangeSpans
        from hearth.control.span_export import OtlpQueue, SdkQueue, obstacle_to_bytes
    except ImportError as error:
        raise ConfigError(
            f"{endpoint} is set, and a package that sends traces is missing: {error.name}; install Hearth's "
            "extra `otel`, or unset the variable"
        ) from error
    defaults = Resource.create({"service.name": "hearth", "service.version": hearth_version()})
    resource = defaults.merge(OTELResourceDetector().detect())  # again: what the environment says wins
    try:
        limits = SpanLimits()
        provider = TracerProvider(resource=resource, shutdown_on_exit=False, span_limits=limits)
        span_exporter = OTLPSpanExporter()
        processor = BatchSpanProcessor(span_exporter)
    except ValueError as error:  # of a number that is none, say
        raise ConfigError(
            f"a variable OTEL_* that sending traces goes by has a wrong value: {error}"
        ) from error
    provider.add_span_processor(processor)
    obstacle = obstacle_to_bytes()
    queue = (OtlpQueue if obstacle is None else SdkQueue)(resource, processor, limits)
    return Tracing(provider, ExchangeSpans(provider, queue.add), span_exporter, obstacle)


class Tracing:
    """Traces exchanges until it is closed. Used on the event loop alone."""

    def __init__(
        self, provider: TracerProvider, spans: ExchangeSpans, exporter: SpanExporter, obstacle: str | None
    ) -> None:
        """`obstacle`: to sending spans as the bytes that we write; None: they are sent so."""
        self._provider, self._spans, self._exporter = provider, spans, exporter
        self.obstacle = obstacle

    @property
    def note(self) -> str | None:
        """Say why traces cost more than they need to; None: they do not."""
        return None if self.obstacle is None else f"traces take more processor time: {self.obstacle}"

    def trace(self, record: ExchangeRecord) -> None:
        """Hand the spans of an exchange that has ended to the SDK; not of strangers and of scrapers."""
        if record.caller is not None and record.route not in UNTRACED:
            self._spans.add(record)

    async def close(self) -> None:
        """Send what is left, as far as the collector takes it in time."""
        closing = threading.Thread(target=self._provider.shutdown, name="hearth-traces", daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, CLOSING_S)
        if closing.is_alive():
            log.warning("traces_unsent reason=`the collector took too long, limit: %g s`", CLOSING_S)
            self._exporter.shutdown()  # which ends its attempts

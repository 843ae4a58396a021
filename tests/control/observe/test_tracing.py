"""Traces as a collector receives them: spans of real exchanges, sent by the real exporter over HTTP."""

from __future__ import annotations

import asyncio
import gzip
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from hearth.api.app import ApiLimits, create_app
from hearth.control.datadir import DataDir
from hearth.control.deploy.deployed import Deployed
from hearth.control.observe.exchange_record import ExchangeRecord
from hearth.control.observe.metrics import Metrics
from hearth.control.observe.timeline import Timeline
from hearth.control.observe.tracing import Tracing, Untraced
from hearth.control.observe.tracing import tracing_of as tracing_with
from hearth.control.requests.caller import ANYBODY
from hearth.core.types import RequestId
from tests.control.gateway_rig import GatewayRig, RecordingLink, emit, with_rig

pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` is not installed")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace.sampling import ParentBased

from hearth.control.observe.exchange_spans import MAX_TRACED_REQUESTS

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def tracing_of(environment: dict[str, str]) -> Tracing | Untraced | None:
    return tracing_with(environment, Metrics(device_hour_price=1.0))


@dataclass
class Collector:
    """An HTTP server that takes traces. Mutable; written by its threads."""

    url: str = ""
    requests: list[ExportTraceServiceRequest] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    status: int = 200
    #: Requests wait until it is set.
    is_open: threading.Event = field(default_factory=threading.Event)

    def spans(self) -> list[Span]:
        resources = [resource for request in self.requests for resource in request.resource_spans]
        return [span for resource in resources for scope in resource.scope_spans for span in scope.spans]

    def resource(self) -> dict[str, str]:
        attributes = self.requests[0].resource_spans[0].resource.attributes
        return {one.key: one.value.string_value for one in attributes}


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    found.is_open.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            found.is_open.wait()
            if found.status == 200:
                found.requests.append(ExportTraceServiceRequest.FromString(body))
                found.headers.append({"path": self.path, **dict(self.headers.items())})
            self.send_response(found.status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield found
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def environment(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The variables of a service that traces; the SDK reads those of the process."""
    environment = {ENDPOINT: collector.url, "OTEL_EXPORTER_OTLP_HEADERS": "api-key=secret"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return environment


async def asked(rig: GatewayRig, link: RecordingLink, **headers: str) -> httpx.Response:
    """Ask the real API; the worker answers two tokens when it has the request."""

    async def answer() -> None:
        while not rig.driver.requests.by_run:
            await asyncio.sleep(0)
        emit(rig, link, 5, 6, finished=True)

    app = create_app(rig.gateway, ApiLimits(100_000, 30.0, 0))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        body = {"model": "tiny", "prompt": "!!"}
        response, _ = await asyncio.gather(
            client.post("/v1/completions", json=body, headers=headers), answer()
        )
        await client.get("/health")
        await client.get("/metrics")
    return response


def traced(
    data_dir: DataDir,
    environment: dict[str, str],
    check: Callable[[httpx.Response, list[ExchangeRecord]], None] = lambda *_: None,
    **headers: str,
) -> None:
    async def scene(rig: GatewayRig) -> None:
        tracing = tracing_of(environment)
        assert isinstance(tracing, Tracing)
        ended: list[ExchangeRecord] = []
        rig.exchange_sinks += [tracing.trace, ended.append]
        check(await asked(rig, rig.join(), **headers), ended)
        await tracing.close()

    with_rig(data_dir, scene)


def by_name(spans: list[Span]) -> dict[str, Span]:
    assert len({span.name for span in spans}) == len(spans)
    return {span.name: span for span in spans}


def values(span: Span) -> dict[str, object]:
    return {one.key: one.value.string_value or one.value.int_value for one in span.attributes}


def test_a_request_is_a_trace_with_the_spans_of_its_waterfall(
    data_dir: DataDir, deployed: Deployed, collector: Collector, environment: dict[str, str]
) -> None:
    records: list[ExchangeRecord] = []
    traced(data_dir, environment, lambda _, ended: records.extend(ended))

    spans = by_name(collector.spans())
    assert spans.keys() >= {"POST /v1/completions", "generate tiny", "queue", "decode"}
    server, generated = spans["POST /v1/completions"], spans["generate tiny"]
    assert server.kind == Span.SPAN_KIND_SERVER
    assert not server.parent_span_id
    assert generated.parent_span_id == server.span_id
    phases = [span for span in spans.values() if span not in (server, generated)]
    assert {span.parent_span_id for span in phases} == {generated.span_id}
    assert {span.trace_id for span in spans.values()} == {bytes.fromhex(records[0].trace_id or "")}
    assert values(server)["http.response.status_code"] == 200
    told = values(generated)
    assert (told["gen_ai.usage.output_tokens"], told["gen_ai.request.model"]) == (2, "tiny")
    assert {event.name for event in generated.events} >= {"queued", "placed", "first_token"}
    for span in spans.values():
        assert span.start_time_unix_nano <= span.end_time_unix_nano


def test_the_trace_of_the_client_goes_on(
    data_dir: DataDir, deployed: Deployed, collector: Collector, environment: dict[str, str]
) -> None:
    traced(data_dir, environment, traceparent=f"00-{TRACE_ID}-{SPAN_ID}-01")

    server = by_name(collector.spans())["POST /v1/completions"]
    assert (server.trace_id.hex(), server.parent_span_id.hex()) == (TRACE_ID, SPAN_ID)


def test_a_client_that_records_nothing_has_nothing_recorded_here(
    data_dir: DataDir, deployed: Deployed, collector: Collector, environment: dict[str, str]
) -> None:
    traced(data_dir, environment, traceparent=f"00-{TRACE_ID}-{SPAN_ID}-00")

    assert collector.requests == []


def test_standard_variables_are_respected(
    data_dir: DataDir,
    deployed: Deployed,
    collector: Collector,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test,service.name=other")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-hearth")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    traced(data_dir, environment)

    resource = collector.resource()
    assert (resource["service.name"], resource["deployment.environment"]) == ("my-hearth", "test")
    assert collector.headers[0]["path"] == "/v1/traces"
    assert collector.headers[0]["api-key"] == "secret"


@pytest.mark.parametrize(
    ("sampler", "argument", "is_traced"),
    [("always_off", "", False), ("traceidratio", "0", False), ("parentbased_traceidratio", "1", True)],
)
def test_the_sampler_of_the_environment_decides_what_is_traced(
    data_dir: DataDir,
    deployed: Deployed,
    collector: Collector,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    sampler: str,
    argument: str,
    is_traced: bool,
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", argument)
    records: list[ExchangeRecord] = []
    traced(data_dir, environment, lambda _, ended: records.extend(ended))

    assert bool(collector.spans()) == is_traced
    assert (records[0].trace_id is not None) == is_traced


def test_limits_of_spans_and_of_batches_hold(
    data_dir: DataDir,
    deployed: Deployed,
    collector: Collector,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "3")
    monkeypatch.setenv("OTEL_SPAN_EVENT_COUNT_LIMIT", "1")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    traced(data_dir, environment)

    spans = by_name(collector.spans())
    assert values(spans["POST /v1/completions"])["http.route"] == "/v1"
    generated = spans["generate tiny"]
    assert values(generated)["hearth.worker"] == "w0"
    assert (len(generated.events), generated.dropped_events_count) == (1, 2)
    assert len(collector.requests) == 3


def dropped(metrics: Metrics) -> float | None:
    return metrics.registry.get_sample_value("hearth_fallbacks_total", {"what": "traces_dropped"})


def answered() -> ExchangeRecord:
    record = ExchangeRecord("GET", "/v1/models", caller="ann", route="/v1/models", status=200)
    record.ended_s = record.began_s
    return record


def test_a_collector_that_is_gone_holds_up_neither_requests_nor_the_end(
    data_dir: DataDir, deployed: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hearth.control.observe.tracing.CLOSING_S", 0.2)
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:9")
    statuses: list[int] = []
    traced(
        data_dir, {ENDPOINT: "http://127.0.0.1:9"}, lambda response, _: statuses.append(response.status_code)
    )

    assert statuses == [200]


def test_traces_that_a_collector_rejects_are_counted_and_logged_once_until_it_accepts_them_again(
    collector: Collector, environment: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics()
    tracing = tracing_with(environment, metrics)
    assert isinstance(tracing, Tracing)
    collector.status = 400
    for _ in range(3):
        tracing.trace(answered())
        tracing._provider.force_flush()  # a batch each

    assert dropped(metrics) == 3
    assert "rejects them" in (tracing.note or "")
    messages = [record.getMessage() for record in caplog.records if record.levelname != "INFO"]
    ours = [message for message in messages if message.startswith("fallback traces=dropped")]
    assert len(ours) == 1
    assert "400" in messages[0], "the SDK's reason, which it gives again every 20 s"

    collector.status = 200
    tracing.trace(answered())
    asyncio.run(tracing.close())
    assert (dropped(metrics), tracing.note) == (3, None)
    assert len(collector.spans()) == 1


def test_a_full_queue_drops_whole_traces_and_counts_them(
    collector: Collector, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")  # a full one is sent at once
    metrics = Metrics()
    collector.is_open.clear()
    tracing = tracing_with(environment | {"OTEL_BSP_MAX_QUEUE_SIZE": "8"}, metrics)
    assert isinstance(tracing, Tracing)
    records = [answered() for _ in range(20)]
    for record in records:
        tracing.trace(record)

    num_dropped = int(dropped(metrics) or 0)
    assert num_dropped >= 20 - (8 + 4), "no more fit the queue and the batch on its way"
    assert sum(record.trace_id is None for record in records) == num_dropped
    assert "too slow" in (tracing.note or "")
    collector.is_open.set()
    asyncio.run(tracing.close())
    assert len(collector.spans()) == 20 - num_dropped


def test_an_exchange_of_many_requests_has_spans_of_some_and_drops_no_later_trace(
    collector: Collector, environment: dict[str, str]
) -> None:
    metrics = Metrics()
    collector.is_open.clear()
    tracing = tracing_with(environment, metrics)
    assert isinstance(tracing, Tracing)
    large, small = answered(), answered()
    for number in range(2048):
        timeline = Timeline(RequestId(f"r{number}"), "tiny", large.began_s, 0.0, 7, ANYBODY.group)
        large.requests.append((timeline, True))
    tracing.trace(large)
    tracing.trace(small)
    collector.is_open.set()
    asyncio.run(tracing.close())

    assert dropped(metrics) == 0
    assert small.trace_id is not None
    spans = [span for span in collector.spans() if span.trace_id.hex() == large.trace_id]
    assert sum(span.name.startswith("generate ") for span in spans) == MAX_TRACED_REQUESTS
    (server,) = (span for span in spans if not span.parent_span_id)
    assert values(server)["hearth.num_requests"] == 2048


def test_a_sampler_that_fails_costs_a_trace_and_no_request(
    data_dir: DataDir,
    deployed: Deployed,
    collector: Collector,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a plugin")

    monkeypatch.setattr(ParentBased, "should_sample", fail)
    ended: list[ExchangeRecord] = []
    traced(data_dir, environment, lambda _, records: ended.extend(records))

    assert (len(ended), ended[0].status) == (3, 200)
    assert collector.requests == []
    assert caplog.text.count("a plugin") == 1


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {ENDPOINT: ""},
        {ENDPOINT: "http://127.0.0.1:9", "OTEL_SDK_DISABLED": "true"},
        {ENDPOINT: "http://127.0.0.1:9", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_nothing_is_traced_unless_the_environment_asks_for_it(environment: dict[str, str]) -> None:
    assert tracing_of(environment) is None


def test_a_service_without_an_endpoint_does_not_import_opentelemetry() -> None:
    code = (
        "import sys, hearth.control.service as one; assert one.tracing_of({}, one.Metrics()) is None;"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json"),
        ("OTEL_TRACES_EXPORTER", "zipkin"),
    ],
)
def test_what_cannot_be_done_is_told_by_the_name_of_the_variable_and_stops_nobody(
    name: str, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics(device_hour_price=1.0)
    untraced = tracing_with({ENDPOINT: "http://127.0.0.1:9", name: value}, metrics)
    assert metrics.registry.get_sample_value("hearth_fallbacks_total", {"what": "untraced"}) == 1
    assert isinstance(untraced, Untraced)
    assert re.search(f"not traced: {name} must be .*, given: `{value}`", untraced.note)
    assert "fallback traces=off" in caplog.text


def test_missing_packages_are_told_and_stop_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables may be there for all programs of a machine."""
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    untraced = tracing_of({ENDPOINT: "http://127.0.0.1:9"})
    assert isinstance(untraced, Untraced)
    assert re.search(f"{ENDPOINT} is set, and .* is missing: .*extra `otel`", untraced.note)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("OTEL_BSP_SCHEDULE_DELAY", "schedule_delay_millis"),
        ("OTEL_SPAN_EVENT_COUNT_LIMIT", "OTEL_SPAN_EVENT_COUNT_LIMIT"),
    ],
)
def test_a_value_that_the_sdk_does_not_take_stops_nobody(
    name: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "-1")
    untraced = tracing_of({ENDPOINT: "http://127.0.0.1:9"})
    assert isinstance(untraced, Untraced)
    assert told in untraced.note


@pytest.mark.parametrize(
    ("of_all", "of_traces"), [("grpc", "http/protobuf"), ("", "")], ids=["its own", "empty"]
)
def test_the_protocol_of_traces_counts_before_that_of_all_and_an_empty_one_as_none(
    of_all: str, of_traces: str
) -> None:
    environment = {
        "OTEL_EXPORTER_OTLP_PROTOCOL": of_all,
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": of_traces,
    }
    tracing = tracing_of({ENDPOINT: "http://127.0.0.1:9", **environment})
    assert isinstance(tracing, Tracing)
    asyncio.run(tracing.close())

"""A service that speaks the documented JSON over a real socket and serves no model. Asserts nothing."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import msgspec

from hearth.control.datadir import DataDir, ServiceFile
from hearth.control.observe.views import (
    Explanation,
    ForecastView,
    Health,
    HostMemoryView,
    ModelView,
    NodeView,
    PartView,
    PoolView,
    ProcessView,
    ResidentView,
    RungView,
    SnapshotView,
    TimelineMark,
    TimelineSpan,
    UnloadView,
    WorkerView,
)
from hearth.core.forecast_messages import RequestForecast
from hearth.core.types import ModelId, Rung, WorkerId
from hearth.policy.fleet.events import Option

MODEL = ModelView(
    name="smol",
    aliases=("tiny",),
    source="/models/smol.gguf",
    where="/data/models/smol",
    digest="d1",
    created_at_s=1_700_000_000.0,
    num_bytes=538 << 20,
    num_parameters=135_000_000,
    dtype="float32",
    quant="none",
    family="llama",
    max_context=8192,
    has_chat_template=True,
    keep_alive_s=None,
    is_pinned=False,
)
POOL = PoolView(
    age_s=0.02,
    parts=(
        PartView("weights", "retained", "qwen", 3 << 30),
        PartView("weights", "active", "smol", 538 << 20),
        PartView("kv", "active", "smol", 30 << 20),
        PartView("kv", "retained", "smol", 10 << 20),
        PartView("kv", "spare", "smol", 60 << 20),
        PartView("workspace", "active", None, 100 << 20),
        PartView("free", "spare", None, (8 << 30) - (3 << 30) - (738 << 20)),
    ),
    moved_bytes=0,
    fallbacks={},
)
PROCESSES = ProcessView(
    workers=(
        WorkerView("w0", 4711, "cpu", "Neoverse-N1", "ready", 8 << 30, (3 << 30) + (738 << 20), 1, POOL),
    ),
    models=(
        ResidentView("qwen", "w0", "retained", 3 << 30, 3 << 30, 4 << 30, 0, None, is_hosted=False),
        ResidentView(
            *("smol", "w0", "busy", 638 << 20, 538 << 20, 538 << 20, 1, None),
            kv_bytes=100 << 20,
            kv_used_blocks=30,
            kv_cached_blocks=10,
            kv_blocks=100,
            is_in_turn=True,
            due_in_s=0.25,
            max_seqs=256,
        ),
    ),
    num_waiting=2,
    num_running=1,
    host=HostMemoryView(3 << 29, 4 << 30),
)
EXPLANATION = Explanation(
    request_id="r1",
    model="smol",
    arrived_at_s=1_700_000_000.0,
    outcome="stop",
    error=None,
    worker="w0",
    why="free_room",
    options=(
        Option(WorkerId("w0"), 0.0, 0.4, 0.5, 0.425, missing_bytes=500_000_000),
        Option(WorkerId("w1"), 0.0, 0.0, 0.0, 0.0, "busy models fill it"),
    ),
    num_prompt_tokens=38,
    num_cached_tokens=16,
    num_output_tokens=21,
    queue_s=0.001,
    load_s=0.4,
    first_token_s=0.5,
    total_s=1.0,
    tokens_per_s=40.0,
    reused_bytes=300_000_000,
    shared_bytes=0,
    rungs=(RungView(Rung.DISK, 500_000_000, 0.25),),
    num_preemptions=0,
    num_resumes=0,
    spans=(
        TimelineSpan("queue", 0.0, 0.001),
        TimelineSpan("load", 0.001, 0.4, "from disk"),
        TimelineSpan("prefill", 0.4, 0.5),
        TimelineSpan("decode", 0.5, 1.0),
    ),
    marks=(
        TimelineMark(0.0, "queued"),
        TimelineMark(0.001, "placed", "on w0"),
        TimelineMark(0.5, "first_token"),
    ),
)
FORECAST = ForecastView(
    model="smol",
    prewarm="advise",
    recent_step_s=10.0,
    recent_counts=(None,) * 300 + (10.0,) * 60,
    step_s=600.0,
    counts=(None, 300.0, 600.0, 600.0),
    begin_at_s=1_700_000_000.0,
    forecast=RequestForecast(ModelId("smol"), "last value", 600.0, (0.5, 0.25), (1.0, 0.5), 0.875),
    reason=None,
    num_loaded=0,
    num_wanted=1,
    lead_s=3.25,
    expected_per_s=0.5,
    budget_s=42.0,
    last_prewarm="would have been loaded on w0",
    last_prewarm_at_s=1_700_000_000.0,
)


@dataclass(slots=True)
class FakeService:
    """Mutable; tests set what it shall answer, the server's threads note what it was asked."""

    url: str = ""
    key: str | None = None  #: that it asks for
    instance_id: str = "life-1"
    models: list[ModelView] = field(default_factory=lambda: [MODEL])
    answer: list[str] = field(default_factory=lambda: ["The sky", " is blue.", "\u2028Really."])
    reasoning: tuple[str, ...] = ()  #: of a chat, before its answer
    derived_name: str = "derived"  #: of models that are deployed without a name
    breaks_after: int | None = None  #: pieces of an answer
    status: str = "ok"
    unloaded: UnloadView = field(default_factory=lambda: UnloadView("smol", False, True, 0, 638 << 20, 0))
    nodes: list[NodeView] = field(default_factory=list)
    forecast: ForecastView = FORECAST
    snapshot_failure: str | None = None  #: why none can be made; None: one can
    #: Method, path and body of every question but those for its health.
    asked: list[tuple[str, str, object]] = field(default_factory=list)
    health_keys: list[str | None] = field(default_factory=list)  #: sent with questions for its health

    def bodies(self, path: str) -> list[object]:
        return [body for _, asked, body in self.asked if asked == path]

    def announce(self, held: DataDir, keys_path: str = "keys.json") -> None:
        """Have the service found as that of a data directory, by its owner, who has the token `token`."""
        held.announce(ServiceFile(os.getpid(), self.url, self.instance_id, keys_path), "token")


@contextmanager
def serving() -> Iterator[FakeService]:
    service = FakeService()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"service": service}))
    service.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    service: FakeService

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._serve(None)

    def do_DELETE(self) -> None:
        self._serve(None)

    def do_POST(self) -> None:
        self._serve(json.loads(self.rfile.read(int(self.headers["content-length"]))))

    def _serve(self, body: dict[str, object] | None) -> None:
        service = self.service
        if self.path == "/health":
            service.health_keys.append(self.headers["authorization"])
            health = Health(service.status, 1, 1, "0.1.0", service.instance_id)
            return self._send(200 if service.status == "ok" else 503, health)
        service.asked.append((self.command, self.path, body))
        if service.key is not None and self.headers["authorization"] != f"Bearer {service.key}":
            return self._fail(401, "invalid_api_key", "the API key is missing or wrong")
        match self.command, self.path.partition("?")[0].strip("/").split("/"):
            case "GET", ["hearth", "ps"]:
                self._send(200, PROCESSES)
            case "GET", ["hearth", "models"]:
                self._send(200, service.models)
            case "GET", ["hearth", "nodes"]:
                self._send(200, service.nodes)
            case "POST", ["hearth", "models"] if body is not None:
                self._deploy(body)
            case "GET", ["hearth", "forecasts", "smol"]:
                self._send(200, service.forecast)
            case "GET", ["hearth", "requests", "r1"]:
                self._send(200, EXPLANATION)
            case "GET", ["hearth", "requests", other]:
                self._fail(404, "request_not_found", f"nothing is known of request `{other}`")
            case method, ["hearth", "models", name, *rest]:
                self._model(method, unquote(name), rest)
            case "POST", ["v1", *_] if body is not None:
                self._answer(body)
            case _:
                self._fail(404, "not_found", f"no such page: {self.path}")

    def _model(self, method: str, name: str, rest: list[str]) -> None:
        model = next((one for one in self.service.models if name in (one.name, *one.aliases)), None)
        if model is None:
            return self._fail(404, "model_not_found", f"no model named `{name}`")
        if method == "DELETE":
            self.service.models.remove(model)
        if rest == ["unload"]:
            return self._send(200, self.service.unloaded)
        if rest == ["presets"]:
            return self._send(200, model)
        if rest == ["snapshot"]:
            return self._make_snapshot()
        self._send(200, model if method == "GET" else {})

    def _deploy(self, body: dict[str, object]) -> None:
        if body["name"] == "smol":
            return self._fail(409, "name_taken", "a model is deployed as `smol` already")
        done = replace(MODEL, name=str(body["name"] or self.service.derived_name), source=str(body["source"]))
        events: list[object] = [
            {"event": "progress", "phase": "converting", "done_bytes": 1, "total_bytes": 2},
            {"error": {"message": "no room", "code": "store_full"}}
            if body["name"] == "large"
            else {"event": "done", "model": done},
        ]
        self._stream(events)

    def _make_snapshot(self) -> None:
        made = SnapshotView("smol", 12 << 10, 310 << 20, 2.5)
        end = self.service.snapshot_failure
        self._stream(
            [
                {"event": "progress", "phase": "measuring", "num_done": 1, "num_steps": 2},
                {"event": "done", "snapshot": made}
                if end is None
                else {"error": {"message": end, "code": "snapshot"}},
            ]
        )

    def _answer(self, body: dict[str, object]) -> None:
        is_chat = "messages" in body
        pieces = self.service.answer[: self.service.breaks_after]
        whole = "".join(pieces)
        usage = {"prompt_tokens": 5, "completion_tokens": len(pieces), "total_tokens": 5 + len(pieces)}
        shared = {"id": "chatcmpl-r1", "created": 1, "model": str(body["model"])}
        if not body.get("stream"):
            message = {"role": "assistant", "content": whole}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            return self._send(
                200, {**shared, "object": "chat.completion", "choices": [choice], "usage": usage}
            )
        events: list[object] = []
        for number, piece in enumerate(pieces):
            is_last = number == len(self.service.answer) - 1
            said: dict[str, object] = {"delta": {"content": piece}} if is_chat else {"text": piece}
            choice = {"index": 0, **said, "finish_reason": "stop" if is_last else None}
            events.append({**shared, "object": "chat.completion.chunk", "choices": [choice]})
        thoughts = [{"index": 0, "delta": {"reasoning": piece}} for piece in self.service.reasoning]
        events[:0] = [{**shared, "object": "chat.completion.chunk", "choices": [one]} for one in thoughts]
        options = body.get("stream_options")
        if options and self.service.breaks_after is None:
            events.append({**shared, "object": "chat.completion.chunk", "choices": [], "usage": usage})
        self._stream(events, is_done=self.service.breaks_after is None)

    def _stream(self, events: list[object], is_done: bool = True) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("x-hearth-request-id", "r1")
        self.end_headers()
        self.wfile.write(b": waiting\n\n")
        for event in events:
            self.wfile.write(b"data: " + msgspec.json.encode(event) + b"\n\n")
        if is_done:
            self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, status: int, answer: object) -> None:
        content = msgspec.json.encode(answer)
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _fail(self, status: int, code: str, message: str) -> None:
        self._send(
            status, {"error": {"message": message, "type": "hearth_error", "param": None, "code": code}}
        )

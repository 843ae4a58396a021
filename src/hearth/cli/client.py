"""The HTTP client of commands. httpx is imported late: that takes longer than the rest of `hearth --help`."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar
from urllib.parse import quote, urlsplit

import msgspec

from hearth.control.keys.keys import is_loopback
from hearth.control.observe.views import (
    Explanation,
    ForecastView,
    Health,
    ModelView,
    NodeView,
    ProcessView,
    SnapshotView,
    UnloadView,
)
from hearth.core.errors import (
    ConfigError,
    HearthError,
    Overloaded,
    PromptTooLong,
    RequestError,
    ServiceError,
    Unauthorized,
    Unreached,
    error_of,
)

if TYPE_CHECKING:
    import httpx

    from hearth.control.deploy.deploy import DeployOrder, DeployProgress
    from hearth.control.deploy.preset import Preset
    from hearth.core.types import SamplingParams
    from hearth.text.chat_template import Message

T = TypeVar("T")

CONNECT_S = 5.0
#: Timeout of everything but streams, which may be silent while a model starts.
ANSWER_S = 60.0


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """A part of an answer. The last has a finish reason; a token count may follow it."""

    text: str
    finish_reason: str | None = None
    token_ids: tuple[int, ...] = ()  #: only of a model in this process
    num_tokens: int | None = None  #: of the whole answer
    request_id: str | None = None  #: of a service, for `hearth explain`
    reasoning: str = ""  #: before the text; only of a service


class _Error(msgspec.Struct):
    message: str = ""
    code: str | int | None = None


class _Failure(msgspec.Struct):
    error: _Error


class _ChunkDelta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None


class _ChunkChoice(msgspec.Struct):
    delta: _ChunkDelta = msgspec.field(default_factory=_ChunkDelta)
    text: str | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_ChunkChoice] = []
    usage: _Usage | None = None


class _DeployEvent(msgspec.Struct):
    event: str
    phase: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    model: ModelView | None = None


class SnapshotEvent(msgspec.Struct):
    event: str
    phase: str = ""
    num_done: int = 0
    num_steps: int = 0
    snapshot: SnapshotView | None = None


class Client:
    """A connection to one service. Methods raise the errors of the service."""

    def __init__(self, url: str, key: str | None, *, is_direct: bool = False) -> None:
        """`is_direct`: use no proxy. Connects at the first request."""
        import httpx

        self.url = url.rstrip("/")
        self._key = key
        host = _host_of(url)
        try:
            self._http = httpx.Client(
                base_url=self.url,
                timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S),
                # Loading the certificates of all authorities takes 20 to 50 ms.
                verify=httpx.URL(self.url).scheme != "http",
                # A proxy cannot reach this machine's own service.
                trust_env=not (is_direct or is_loopback(host)),
            )
        except httpx.InvalidURL as error:
            raise _no_url(url) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def health(self) -> Health:
        """Return the health, also of a service that responds 503. Does not send the key: this is how
        commands find out whether the service may see it.
        """
        with self._answered("GET", "/health", may_be=(503,), has_key=False) as response:
            return self._decoded(response.read(), Health)

    def models(self) -> list[ModelView]:
        return self._get("/hearth/models", list[ModelView])

    def model(self, name: str, *, look: bool = False) -> ModelView:
        return self._get(f"/hearth/models/{_segment(name)}{'?look=true' if look else ''}", ModelView)

    def ps(self) -> ProcessView:
        return self._get("/hearth/ps", ProcessView)

    def nodes(self) -> list[NodeView]:
        return self._get("/hearth/nodes", list[NodeView])

    def drain_node(self, name: str, *, undo: bool) -> None:
        with self._answered("POST", f"/hearth/nodes/{_segment(name)}/drain", {"undo": undo}):
            pass

    def remove_node(self, name: str) -> None:
        with self._answered("DELETE", f"/hearth/nodes/{_segment(name)}"):
            pass

    def explain(self, request_id: str) -> Explanation:
        return self._get(f"/hearth/requests/{_segment(request_id)}", Explanation)

    def forecast(self, name: str) -> ForecastView:
        return self._get(f"/hearth/forecasts/{_segment(name)}", ForecastView)

    def remove(self, name: str, *, with_adapters: bool = False) -> None:
        query = "?with_adapters=true" if with_adapters else ""
        with self._answered("DELETE", f"/hearth/models/{_segment(name)}{query}"):
            pass

    def unload(self, name: str, free: bool) -> UnloadView:
        path = f"/hearth/models/{_segment(name)}/unload"
        with self._answered("POST", path, {"free": free}) as response:
            return self._decoded(response.read(), UnloadView)

    def deploy(self, order: DeployOrder) -> Iterator[DeployProgress | ModelView]:
        """Yield progress, and last the model. Closing the generator early cancels the deployment."""
        from hearth.control.deploy.deploy import DeployProgress

        names = ["source", "name", "dtype", "quant", "overwrite"]
        names += [name for name in ("base", "labels") if getattr(order, name)]  # an older service lacks these
        body = {name: getattr(order, name) for name in names}
        with self._answered("POST", "/hearth/models", body, is_stream=True) as response:
            for data in _server_sent(response.iter_bytes()):
                event = self._streamed(data, _DeployEvent)
                if event.model is not None:
                    yield event.model
                    return
                yield DeployProgress(event.phase, event.done_bytes, event.total_bytes)

    def put_preset(self, name: str, base: str, preset: Preset) -> None:
        path = f"/hearth/models/{_segment(base)}/presets"
        body = {"name": name, **{key: value for key, value in asdict(preset).items() if value is not None}}
        with self._answered("POST", path, body):
            pass

    def make_snapshot(self, name: str) -> Iterator[SnapshotEvent | SnapshotView]:
        """Yield progress, and last the snapshot. Closing the generator early stops nothing."""
        path = f"/hearth/models/{_segment(name)}/snapshot"
        with self._answered("POST", path, {}, is_stream=True) as response:
            for data in _server_sent(response.iter_bytes()):
                event = self._streamed(data, SnapshotEvent)
                if event.snapshot is not None:
                    yield event.snapshot
                    return
                yield event

    def chat(
        self, model: str, messages: Sequence[Message], params: SamplingParams
    ) -> Generator[AnswerDelta, None, None]:
        """Stream an answer. Closing the generator early cancels the request."""
        return self._deltas("/v1/chat/completions", {"model": model, "messages": list(messages)}, params)

    def complete(self, model: str, prompt: str, params: SamplingParams) -> Generator[AnswerDelta, None, None]:
        """Stream a continuation. Closing the generator early cancels the request."""
        return self._deltas("/v1/completions", {"model": model, "prompt": prompt}, params)

    def _deltas(
        self, path: str, fields: Mapping[str, object], params: SamplingParams
    ) -> Generator[AnswerDelta, None, None]:
        body = {
            **fields,
            **{name: getattr(params, name) for name in ("temperature", "max_tokens", "seed")},
            **{"stream": True, "stream_options": {"include_usage": True}},
        }
        is_ended = False
        with self._answered("POST", path, body, is_stream=True) as response:
            request_id = response.headers.get("x-hearth-request-id")
            for data in _server_sent(response.iter_bytes()):
                chunk = self._streamed(data, _Chunk)
                for choice in chunk.choices:
                    is_ended = is_ended or choice.finish_reason is not None
                    text = choice.text or choice.delta.content or ""
                    reasoning = choice.delta.reasoning or ""
                    yield AnswerDelta(text, choice.finish_reason, request_id=request_id, reasoning=reasoning)
                if chunk.usage is not None:
                    yield AnswerDelta("", num_tokens=chunk.usage.completion_tokens, request_id=request_id)
        if not is_ended:
            raise Unreached(f"the service at `{self.url}` stopped in the middle of its answer; try again")

    def _get(self, path: str, kind: type[T]) -> T:
        with self._answered("GET", path) as response:
            return self._decoded(response.read(), kind)

    @contextmanager
    def _answered(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        may_be: Sequence[int] = (),
        is_stream: bool = False,
        has_key: bool = True,
    ) -> Iterator[httpx.Response]:
        """Yield a response that succeeded or has a status in `may_be`. Raises Unreached."""
        import httpx

        timeout = httpx.Timeout(None, connect=CONNECT_S) if is_stream else self._http.timeout
        headers = {"Accept": "text/event-stream" if is_stream else "application/json"}
        if has_key and self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            with self._http.stream(method, path, json=body, headers=headers, timeout=timeout) as response:
                if not response.is_success and response.status_code not in may_be:
                    raise _error_of(response.status_code, response.headers, response.read(), self.url)
                yield response
        except httpx.ConnectError as error:
            raise Unreached(
                f"no service answers at `{self.url}`; start one with `hearth serve`, or name one with `--url`"
            ) from error
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise Unreached(f"the service at `{self.url}` broke off: {reason}; look at its log") from error

    def _streamed(self, data: bytes, kind: type[T]) -> T:
        if b'"error"' in data:
            try:
                failure = msgspec.json.decode(data, type=_Failure)
            except (msgspec.ValidationError, UnicodeDecodeError):  # the word stands in a text
                pass
            else:
                raise _named(failure.error, 500, None)
        return self._decoded(data, kind)

    def _decoded(self, body: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ServiceError(
                f"`{self.url}` answers, but not as this Hearth would: {error}; is it another service?"
            ) from error


def _host_of(url: str) -> str:
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise _no_url(url) from error
    if parts.scheme not in ("http", "https") or not host:
        raise _no_url(url)
    return host


def _no_url(url: str) -> ConfigError:
    return ConfigError(f"`--url` must be like http://127.0.0.1:8000, given: {url!r:.200}")


def _segment(name: str) -> str:
    return quote(name, safe="")


def _server_sent(parts: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the data of server-sent events, up to [DONE]. Splits bytes: text would also split at U+2028."""
    rest = b""
    for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            field, _, value = line.strip(b"\r").partition(b":")
            if field == b"data":
                value = value.removeprefix(b" ")
                if value == b"[DONE]":
                    return
                yield value


def _error_of(status: int, headers: Mapping[str, str], body: bytes, url: str) -> HearthError:
    try:
        error = msgspec.json.decode(body, type=_Failure).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        text = body[:200].decode(errors="replace").strip()
        error = _Error(f"`{url}` answered {status}: {json.dumps(text)}; is it another service?")
    return _named(error, status, headers.get("retry-after"))


#: The labels of errors that have a code of OpenAI.
_LABELS = {"context_length_exceeded": PromptTooLong.label, "invalid_api_key": Unauthorized.label}


def _named(error: _Error, status: int, retry_after: str | None) -> HearthError:
    if status == Overloaded.http_status or error.code == Overloaded.label:
        is_number = retry_after is not None and retry_after.isdecimal()  # a proxy may give a date
        return Overloaded(error.message, float(retry_after or 1) if is_number else 1.0)
    named = error_of(_LABELS.get(str(error.code), str(error.code)), error.message)
    if isinstance(named, Unauthorized):  # the service's message is about headers
        what = error.message.partition(";")[0]
        return Unauthorized(
            f"{what}; pass the key that `hearth keys add` printed, by `--api-key` or HEARTH_API_KEY"
        )
    is_refusal = 400 <= status < 500
    return RequestError(error.message) if is_refusal and type(named) is HearthError else named

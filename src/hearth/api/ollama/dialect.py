"""Ollama's chat and generate as dialects. Their lines are a hot path like the events of `openai/sse.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from hearth.api.answer import NDJSON_TYPE
from hearth.api.dialect import AnswerEvents, AnswerSpec, Choice, ChoiceReader, Part, TokenUsage
from hearth.api.error_spelling import spell
from hearth.api.errors import fault_of
from hearth.api.ollama.models import now_text
from hearth.api.openai.answer_format import call_id
from hearth.api.openai.sse import MAX_EVENTS
from hearth.control.observe.views import Explanation
from hearth.control.requests.generation import AnswerStream, TokenDelta
from hearth.core.errors import HearthError
from hearth.core.types import FinishReason
from hearth.text.reasoning import Thought
from hearth.text.tool_calls import ToolCall

encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class OllamaFormat:
    before_text: bytes
    after_text: bytes


CHAT = OllamaFormat(b',"message":{"role":"assistant","content":', b"}")
GENERATE = OllamaFormat(b',"response":', b"")


@dataclass(frozen=True, slots=True)
class OllamaDialect:
    format: OllamaFormat
    model: str  #: the name that the client sent
    explain: Callable[[str], Explanation | None]  #: by request id
    has_context: bool = False  #: return all tokens so far, as the context of the next prompt

    stream_type = NDJSON_TYPE

    @property
    def before_text(self) -> bytes:
        """The beginning of a line that is sent now."""
        return _head(self.model) + self.format.before_text

    @property
    def waiting(self) -> bytes:
        return b'%b""%b,"done":false}\n' % (self.before_text, self.format.after_text)

    def whole(self, spec: AnswerSpec, choices: Sequence[Choice], usage: TokenUsage) -> object:
        (choice,) = choices
        calls = b""
        if choice.calls:
            calls = b',"tool_calls":' + encode(
                [call_object(index, call) for index, call in enumerate(choice.calls)]
            )
        ending = self.ending(choice.stream, choice.finish_reason, usage, choice.deltas)
        before, after = self.before_text, self.format.after_text
        thought = b',"thinking":' + encode(choice.reasoning) if choice.reasoning else b""
        return msgspec.Raw(b"".join((before, encode(choice.text), thought, calls, after, ending)))

    def events(self, spec: AnswerSpec, streams: Sequence[AnswerStream]) -> AnswerEvents:
        (stream,) = streams
        return OllamaEvents(self, spec, stream)

    def ending(
        self, stream: AnswerStream, reason: FinishReason, usage: TokenUsage, deltas: Sequence[TokenDelta]
    ) -> bytes:
        told: dict[str, object] = {"done": True, "done_reason": reason}
        if self.has_context:
            told["context"] = [*stream.prompt, *(delta.token for delta in deltas)]
        if (explanation := self.explain(stream.request_id)) is not None:
            told |= durations(explanation)
        told |= {"prompt_eval_count": usage.num_prompt_tokens, "eval_count": usage.num_output_tokens}
        return b"," + encode(told)[1:]


class OllamaEvents:
    """Mutable; one per answer."""

    def __init__(self, dialect: OllamaDialect, spec: AnswerSpec, stream: AnswerStream) -> None:
        self._dialect, self._stream = dialect, stream
        self._reader = ChoiceReader(spec, stream)
        self._is_split = spec.is_split
        self._num_calls = 0
        self._before = b""  #: a text, in the lines that are being written
        self._after = dialect.format.after_text + b',"done":false}\n'
        self._has_context = dialect.has_context
        self._deltas: list[TokenDelta] = []  #: the whole answer, if `has_context`
        self._reason: FinishReason | None = None

    def first(self, echoes: Sequence[str]) -> bytes:
        return b""

    def write(self, index: int, deltas: Sequence[TokenDelta]) -> bytes:
        self._reason, self._before = deltas[-1].finish_reason, self._dialect.before_text
        if self._has_context:
            self._deltas += deltas
        if self._is_split:
            return b"".join(self._part(part) for part in self._reader.read(deltas))
        if len(deltas) > MAX_EVENTS:
            return self._part("".join([delta.text for delta in deltas]))
        lines: list[bytes] = []
        for delta in deltas:
            if delta.text:
                lines += (self._before, encode(delta.text), self._after)
        return b"".join(lines)

    def last(self, usage: TokenUsage) -> bytes:
        assert self._reason is not None, "the answer has ended"
        ending = self._dialect.ending(self._stream, self._reason, usage, self._deltas)
        return b'%b""%b%b\n' % (self._dialect.before_text, self._dialect.format.after_text, ending)

    def failed(self, error: HearthError) -> bytes:
        return spell(fault_of(error), "/api") + b"\n"

    def _part(self, part: Part) -> bytes:
        if isinstance(part, str):
            return self._before + encode(part) + self._after
        if isinstance(part, Thought):
            return b'%b"","thinking":%b%b' % (self._before, encode(part.text), self._after)
        call, self._num_calls = call_object(self._num_calls, part), self._num_calls + 1
        return b'%b"","tool_calls":[%b]%b' % (self._before, encode(call), self._after)


@dataclass(frozen=True, slots=True)
class LoadDialect:
    format: OllamaFormat
    model: str  #: the name that the client sent

    stream_type = NDJSON_TYPE
    waiting = b""

    def whole(self, spec: AnswerSpec, choices: Sequence[Choice], usage: TokenUsage) -> object:
        return nothing_done(self.format, self.model, "load")

    def events(self, spec: AnswerSpec, streams: Sequence[AnswerStream]) -> AnswerEvents:
        raise AssertionError("loads are not streamed")


def _head(model: str) -> bytes:
    return encode({"model": model, "created_at": now_text()})[:-1]


def nothing_done(format: OllamaFormat, model: str, reason: str) -> msgspec.Raw:
    ending = b',"done":true,"done_reason":%b}' % encode(reason)
    return msgspec.Raw(b'%b%b""%b%b' % (_head(model), format.before_text, format.after_text, ending))


def call_object(index: int, call: ToolCall) -> dict[str, object]:
    arguments = msgspec.Raw(call.arguments.encode())
    return {"id": call_id(), "function": {"index": index, "name": call.name, "arguments": arguments}}


def durations(explanation: Explanation) -> dict[str, int]:
    """Return the durations of a request's phases in nanoseconds."""

    def took(what: str) -> int:
        spans = (span for span in explanation.spans if span.what == what)
        return _nanoseconds(sum(span.end_s - span.begin_s for span in spans))

    # A request that is not marked as ended yet has sent its last token.
    ended_s = max((span.end_s for span in explanation.spans), default=0.0)
    return {
        "total_duration": _nanoseconds(explanation.total_s or ended_s),
        "load_duration": _nanoseconds(explanation.load_s or 0.0),
        "prompt_eval_duration": took("prefill"),
        "eval_duration": took("decode"),
    }


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)

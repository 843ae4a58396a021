"""The offline Python API: one model in this process, for any thread.

llm = LLM("path/to/model")
for completion in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
    print(completion.text)
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.progress import track

from hearth.core.config import EngineConfig, StoreConfig
from hearth.core.errors import BadPrompt, BadSampling, EngineFailed, UnknownModel
from hearth.core.types import (
    AdapterId,
    FinishReason,
    PromptReading,
    RankedLogprobs,
    RequestId,
    SamplingParams,
    TokenLogprobs,
)
from hearth.engine.engine import Engine, Output, StepOutputs
from hearth.engine.loop import Failed, Outbox, StepLoop
from hearth.offline import ModelOptions, OpenedModel, add_adapters, open_model, read_adapters
from hearth.policy.batch.plan import EngineRequest, RequestFailed
from hearth.store.tiers.tiers import Tiers
from hearth.store.transfer.record import LoadRecord
from hearth.system.garbage import postponed
from hearth.text.chat_template import Message
from hearth.text.tokenizer import Tokenizer
from hearth.text.transcript import Transcript

Prompt = str | Sequence[int]

#: Tokens that are decoded at once when answers are not streamed.
_TEXT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Delta:
    """The text and tokens that one step adds to an answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] | None


@dataclass(frozen=True, slots=True)
class Completion:
    """The whole answer to one prompt."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str  #: empty if the model has no tokenizer
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs] | None
    prompt_logprobs: list[RankedLogprobs | None] | None = None  #: the first is None


class LLM:
    """A loaded model. Thread-safe. Garbage collection is mostly postponed while it generates."""

    def __init__(
        self,
        path: str | Path,
        *,
        device: str = "auto",
        dtype: str = "auto",
        max_context: int | None = None,
        engine: EngineConfig | None = None,
        store: StoreConfig | Tiers | None = None,
        skip_tokenizer: bool = False,
        adapters: Mapping[str, str | Path] | None = None,
    ) -> None:
        """Open a converted model (a directory or a URL), a Hugging Face directory or a GGUF file.

        A converted model is loaded in the background: requests wait for the load, and fail if it fails.
        `max_context` defaults to that of the model. With `skip_tokenizer`, prompts are token ids, completions
        have no text and generation does not stop at an end token. Tiers passed as `store` stay open.
        `adapters` maps names to LoRA adapters: directories of PEFT or converted ones. They stay on the device
        as long as the model.
        """
        options = ModelOptions(device, dtype, max_context, skip_tokenizer, engine or EngineConfig())
        opened = open_model(path, options, store or StoreConfig())
        try:
            read = read_adapters(opened, adapters or {})
            adapter_ids = {name: one.adapter for name, one in read.items()}

            def build() -> Engine:
                engine = opened.build()
                add_adapters(engine, read.values())
                read.clear()  # they are on the device
                return engine

            self._open(build, opened.tokenizer, opened, adapter_ids)
        except BaseException:
            opened.close()
            raise

    @classmethod
    def over(cls, engine: Engine, tokenizer: Tokenizer | None) -> Self:
        """Return an LLM that owns `engine`."""
        llm = cls.__new__(cls)
        llm._open(lambda: engine, tokenizer, None, {})
        return llm

    def _open(
        self,
        build: Callable[[], Engine],
        tokenizer: Tokenizer | None,
        opened: OpenedModel | None,
        adapters: Mapping[str, AdapterId],
    ) -> None:
        self._tokenizer = tokenizer
        self._opened = opened
        self._adapters = adapters
        self._numbers = count()
        self._open_loop: StepLoop | None = StepLoop(build)
        # The step thread references the engine, so a dropped LLM would keep its memory without this.
        self._finalizer = weakref.finalize(self, _close_apart, self._open_loop, opened)

    def wait_loaded(self) -> LoadRecord | None:
        """Wait until all weights are loaded; None: there was no load in the background. Raises StoreError."""
        return None if self._opened is None else self._opened.wait()

    @property
    def engine(self) -> Engine:
        return self._loop.engine

    @property
    def _loop(self) -> StepLoop:
        if self._open_loop is None:
            raise EngineFailed("the LLM was closed; load the model again")
        return self._open_loop

    @property
    def has_chat_template(self) -> bool:
        return self._tokenizer is not None and self._tokenizer.has_chat_template

    def chat_prompt(self, messages: Sequence[Message], template: str | None = None) -> list[int]:
        """Return the token ids of a conversation, rendered by a chat template; None: the model's."""
        tokenizer = self._text()
        return (tokenizer if template is None else tokenizer.with_template(template)).chat_prompt(messages)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        progress: bool = False,
    ) -> list[Completion]:
        """Complete prompts in one batch, and return the completions in their order.

        A prompt is text or token ids. `params` and `adapter` (a name in `adapters`, or None for the base
        model) are for all prompts, or one for each. If any is invalid, nothing is generated; if a request
        fails, its error is raised and the others are cancelled. `max_step` does not apply, since answers are
        not streamed. `progress` shows a bar on the terminal.
        """
        with postponed():
            return self._generate(_as_prompts(prompts), params, adapter, progress=progress)

    def _generate(
        self,
        asked: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        adapter: str | Sequence[str | None] | None,
        *,
        progress: bool,
    ) -> list[Completion]:
        each = zip(asked, _as_params(params, len(asked)), _as_adapters(adapter, len(asked)), strict=True)
        requests = [self._request(*one, is_streamed=False) for one in each]
        answers = {
            request.request_id: _ReceivedAnswer(request, self._tokenizer, 1 + at % _TEXT_TOKENS)
            for at, request in enumerate(requests)
        }
        ends = self._collect(requests, answers)
        for _ in track(ends, "generating", total=len(requests)) if progress else ends:
            pass
        return [answer.completion() for answer in answers.values()]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, adapter: str | None = None
    ) -> Iterator[Delta]:
        """Complete one prompt, token by token. Closing the iterator early cancels the request."""
        return self._stream(self._request(prompt, params or SamplingParams(), adapter, is_streamed=True))

    def _stream(self, request: EngineRequest) -> Iterator[Delta]:
        loop, outbox = self._loop, Outbox()
        with postponed():
            loop.add([request], outbox)
            try:
                answer = _ReceivedAnswer(request, self._tokenizer)
                answer.open_transcript()  # while the device computes
                while answer.finish_reason is None:
                    message = _received(outbox)
                    if isinstance(message, RequestFailed):
                        raise message.error
                    for output in message:
                        yield answer.take(output)
            finally:
                loop.cancel(request.request_id)

    def close(self) -> None:
        """Cancel requests, wait for the step thread and free the memory. Idempotent."""
        if self._open_loop is not None and self._finalizer.detach() is not None:
            _close(self._open_loop, self._opened)
        self._open_loop = self._opened = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _collect(
        self, requests: Sequence[EngineRequest], answers: Mapping[RequestId, _ReceivedAnswer]
    ) -> Iterator[None]:
        """Run the requests, fill in their answers and yield at the end of each; cancels those left over."""
        loop, outbox, num_open = self._loop, Outbox(), len(requests)
        loop.add(requests, outbox)
        try:
            while num_open:
                message = _received(outbox)
                if isinstance(message, RequestFailed):
                    if answers[message.request_id].finish_reason is None:
                        raise message.error
                    continue  # it ran on after its stop string
                for row, request_id in enumerate(message.request_ids):
                    answer = answers[request_id]
                    if answer.finish_reason is not None:
                        continue  # likewise
                    answer.note(message, row)
                    if answer.finish_reason is not None:
                        if request_id not in message.finished:  # a stop string ended it
                            loop.cancel(request_id)
                        num_open -= 1
                        yield
        finally:
            for request_id, answer in answers.items():
                if answer.finish_reason is None:
                    loop.cancel(request_id)

    def _request(
        self, prompt: Prompt, params: SamplingParams, adapter: str | None, *, is_streamed: bool
    ) -> EngineRequest:
        if adapter is not None and adapter not in self._adapters:
            known = ", ".join(f"`{name}`" for name in self._adapters) or "none"
            raise UnknownModel(
                f"unknown adapter: `{adapter}`; the model was opened with: {known}; pass it in `adapters` "
                "when you open the model"
            )
        if params.stop_strings and self._tokenizer is None:
            raise BadSampling("`stop` needs a tokenizer, but the model was loaded with `skip_tokenizer`")
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
            raise BadPrompt(f"a prompt must be text or a list of token ids, given: {type(prompt).__name__}")
        token_ids = self._text().encode(prompt) if isinstance(prompt, str) else list(prompt)
        adapter_id = None if adapter is None else self._adapters[adapter]
        request_id = RequestId(f"r{next(self._numbers)}")
        return self.engine.request(request_id, token_ids, params, adapter=adapter_id, is_streamed=is_streamed)

    def _text(self) -> Tokenizer:
        if self._tokenizer is None:
            raise BadPrompt("the model was loaded with `skip_tokenizer`, so prompts must be token ids")
        return self._tokenizer


@dataclass(slots=True)
class _ReceivedAnswer:
    """The part of an answer received so far. Mutable; written by the calling thread."""

    request: EngineRequest
    tokenizer: Tokenizer | None  #: None: no text
    #: the number of tokens at which text is decoded next, without streaming: not all at the end, when the
    #: device is idle, and not for all answers at the same time
    read_at: int = 1
    num_read: int = 0  #: tokens that are decoded
    transcript: Transcript | None = None  #: opened with the first text
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    reading: PromptReading | None = None

    def open_transcript(self) -> Transcript | None:
        """Return the transcript. Opening it reads the end of the prompt, which the text continues."""
        if self.transcript is None and self.tokenizer is not None:
            self.transcript = Transcript(self.tokenizer, self.request.sampling, self.request.prompt)
        return self.transcript

    def take(self, output: Output) -> Delta:
        self.reading = self.reading or output.reading
        text, self.finish_reason = "", output.finish_reason
        if self._has_no_tokens:
            self.finish_reason = FinishReason.LENGTH  # its one token is not part of the answer
            return Delta("", (), self.finish_reason, None)
        if (transcript := self.open_transcript()) is not None:
            delta = transcript.push(output.token, output.finish_reason)
            text, self.finish_reason = delta.text, delta.finish_reason
        self.token_ids.append(output.token)
        self.texts.append(text)
        logprobs = () if output.logprobs is None else (output.logprobs,)
        self.logprobs.extend(logprobs)
        return Delta(text, (output.token,), self.finish_reason, logprobs or None)

    def note(self, outputs: StepOutputs, row: int) -> None:
        if self.request.sampling.stop or self._has_no_tokens:
            self.take(outputs[row])
            return
        self.reading = self.reading or outputs.readings.get(outputs.request_ids[row])
        self.token_ids.append(outputs.tokens[row])
        if outputs.logprobs is not None and (own := outputs.logprobs[row]) is not None:
            self.logprobs.append(own)
        self.finish_reason = outputs.finished.get(outputs.request_ids[row])
        if self.finish_reason is not None or len(self.token_ids) >= self.read_at:
            self._read()

    def _read(self) -> None:
        if (transcript := self.open_transcript()) is not None:
            self.texts.append(transcript.push_all(self.token_ids[self.num_read :], self.finish_reason))
        self.num_read = len(self.token_ids)
        self.read_at = self.num_read + _TEXT_TOKENS

    @property
    def _has_no_tokens(self) -> bool:
        return self.request.sampling.max_tokens == 0

    def completion(self) -> Completion:
        assert self.finish_reason is not None, f"{self.request.request_id} has not ended"
        has_logprobs = self.request.sampling.logprobs is not None
        return Completion(
            prompt_token_ids=list(self.request.prompt),
            token_ids=self.token_ids,
            text="".join(self.texts),
            finish_reason=self.finish_reason,
            logprobs=self.logprobs if has_logprobs else None,
            prompt_logprobs=self._prompt_logprobs(),
        )

    def _prompt_logprobs(self) -> list[RankedLogprobs | None] | None:
        if self.reading is None or self.reading.logprobs is None:
            return None
        return [None, *self.reading.logprobs]


def _close_apart(loop: StepLoop, opened: OpenedModel | None) -> None:
    """Close on a new thread: finalizers run on any thread, also one that closing would wait for."""
    try:
        threading.Thread(target=_close, args=(loop, opened), name="hearth-close", daemon=True).start()
    except RuntimeError:  # the interpreter is shutting down
        _close(loop, opened)


def _close(loop: StepLoop, opened: OpenedModel | None) -> None:
    """Close the load, then the loop: the step thread may be waiting for the load."""
    if opened is not None:
        opened.close()
    loop.close()


def _received(outbox: Outbox) -> StepOutputs | RequestFailed:
    message = outbox.get()
    if isinstance(message, Failed):
        raise EngineFailed(
            f"the engine stopped during {message.request_id}: {message.cause}"
        ) from message.cause
    return message


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Iterable):
        return [prompts]  # one prompt, or an invalid one
    items = list(prompts)
    token_ids = [item for item in items if isinstance(item, int)]
    many = [item for item in items if not isinstance(item, int)]
    if token_ids and many:
        raise BadPrompt(
            f"a list must have token ids or prompts, not both, given: {len(token_ids)} and {len(many)} of "
            "them; put the token ids of one prompt into a list of their own"
        )
    return [token_ids] if token_ids else many


def _as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if len(params) != num_prompts:
        raise BadSampling(
            f"{len(params)} sampling params for {num_prompts} prompts; pass one, or one for each"
        )
    return list(params)


def _as_adapters(adapter: str | Sequence[str | None] | None, num_prompts: int) -> list[str | None]:
    if adapter is None or isinstance(adapter, str):
        return [adapter] * num_prompts
    if len(adapter) != num_prompts:
        raise BadPrompt(f"{len(adapter)} adapters for {num_prompts} prompts; pass one, or one for each")
    return list(adapter)

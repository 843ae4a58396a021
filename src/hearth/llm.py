"""The offline Python API, with vLLM's names: one model in this process, for any thread or an event loop.

llm = LLM("path/to/model")
for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
    print(output.outputs[0].text)

`AsyncLLM` is the same for asyncio: requests come one by one and are answered together.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from array import array
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from queue import Empty
from random import Random
from types import TracebackType
from typing import Literal, Self

from rich.console import Console
from rich.progress import track

from hearth.core.config import EngineConfig, StoreConfig
from hearth.core.errors import BadPrompt, BadSampling, EngineFailed, UnknownModel
from hearth.core.types import (
    AdapterId,
    FinishReason,
    Pooling,
    PromptReading,
    RequestId,
    SamplingParams,
    TokenLogprobs,
)
from hearth.engine.engine import Engine, Output, StepOutputs
from hearth.engine.loop import Failed, Outbox, StepLoop
from hearth.inputs import (
    Adapter,
    LoRARequest,
    Prompt,
    RequestOutputKind,
    adapters_for,
    as_prompts,
    guide_of,
    one_for_each,
    output_kind_of,
    sampling_of_answers,
    text_and_tokens,
)
from hearth.offline import ModelOptions, OpenedModel, add_adapters, find_model, open_model, read_adapters
from hearth.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    RequestOutput,
    logprobs_by_token,
)
from hearth.policy.batch.plan import EngineRequest, RequestFailed
from hearth.store.tiers.tiers import Tiers
from hearth.store.transfer.record import LoadRecord
from hearth.system.garbage import postponed
from hearth.text.chat_template import RENDER_S, Json, Message
from hearth.text.tokenizer import Tokenizer
from hearth.text.transcript import Transcript
from hearth.vllm_options import engine_config

#: Tokens that are decoded at once when answers are not streamed.
_TEXT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Delta:
    """The text and tokens that one step adds to an answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] | None


class LLM:
    """A loaded model. Thread-safe. Garbage collection is mostly postponed while it generates."""

    def __init__(
        self,
        model: str | Path,
        *,
        device: str = "auto",
        dtype: str = "auto",
        revision: str | None = None,
        max_model_len: int | None = None,
        engine: EngineConfig | None = None,
        store: StoreConfig | Tiers | None = None,
        skip_tokenizer_init: bool = False,
        seed: int | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        **vllm_options: object,
    ) -> None:
        """Open a path, a URL, a deployed name or an id on the Hugging Face Hub, in this order.

        A path or URL is that of a converted model, a Hugging Face directory or a GGUF file. A converted model
        is loaded in the background: requests wait for the load, and fail if it fails. `revision` is of a
        model on the Hub. `max_model_len` defaults to the model's own context. With `skip_tokenizer_init`,
        prompts are token ids, answers have no text and generation does not stop at an end token. With `seed`,
        requests without a seed of their own get one by their order. Tiers passed as `store` stay open.
        `adapters` maps names to LoRA adapters: directories of PEFT or converted ones. A LoRARequest with a
        path adds one later. They stay on the device as long as the model. `vllm_options` such as
        `gpu_memory_utilization` change `engine`, or are refused with what to do instead (`vllm_options.py`).
        """
        config = engine_config(engine or EngineConfig(), vllm_options)
        options = ModelOptions(device, dtype, max_model_len, skip_tokenizer_init, config)
        opened = open_model(find_model(model, revision), options, store or StoreConfig())
        try:
            read = read_adapters(opened, adapters or {})
            adapter_ids = {name: one.adapter for name, one in read.items()}

            def build() -> Engine:
                engine = opened.build()
                add_adapters(engine, read.values())
                read.clear()  # they are on the device
                return engine

            self._open(build, opened.tokenizer, opened, adapter_ids, seed)
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
        seed: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._opened = opened
        self._adapters = dict(adapters)
        #: Held while an adapter is added: two requests that name it first would add it twice.
        self._adding = threading.Lock()
        self._numbers = count()
        self._seeds = None if seed is None else Random(seed)
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
        tokenizer = self.get_tokenizer()
        return (tokenizer if template is None else tokenizer.with_template(template)).chat_prompt(messages)

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        lora_request: Adapter | Sequence[Adapter] = None,
    ) -> list[RequestOutput]:
        """Complete prompts in one batch, and return the outputs in their order.

        A prompt is text, token ids or a dict of either. `sampling_params` and `lora_request` are for all
        prompts, or one for each. If any is invalid, nothing is generated; if a request fails, its error is
        raised and the others are cancelled. `max_step` does not apply, since answers are not streamed.
        `use_tqdm` shows a progress bar on standard error.
        """
        with postponed():
            asked = as_prompts(prompts)
            default = SamplingParams() if sampling_params is None else sampling_params
            params = one_for_each(default, len(asked))
            adapters = adapters_for(lora_request, len(asked))
            questions = [
                self._question(*one, is_streamed=False, read_at=at)
                for at, one in enumerate(zip(asked, params, adapters, strict=True))
            ]
            self._answer(questions, use_tqdm=use_tqdm)
            return [question.output() for question in questions]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        lora_request: Adapter | Sequence[Adapter] = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Json] | None = None,
        chat_template_kwargs: Mapping[str, Json] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several."""
        conversations = [one for one in messages if not isinstance(one, Mapping)]
        if len(conversations) < len(messages):
            conversations = [[one for one in messages if isinstance(one, Mapping)]]
        prompts: list[Prompt] = []
        for conversation in conversations:
            text = self.get_tokenizer().chat_text(
                conversation,
                tools,
                add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                limit_s=RENDER_S,
                **(chat_template_kwargs or {}),
            )
            token_ids = self.get_tokenizer().encode(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": token_ids})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def embed(
        self,
        prompts: Prompt | Iterable[Prompt],
        *,
        use_tqdm: bool = False,
        lora_request: Adapter | Sequence[Adapter] = None,
        pooling: Literal["last", "mean"] = "last",
    ) -> list[EmbeddingRequestOutput]:
        """Return the hidden states of prompts after the model's last norm, pooled and scaled to length 1."""
        with postponed():
            asked = as_prompts(prompts)
            params = SamplingParams(temperature=0.0, max_tokens=0)
            questions = [
                self._question(one, params, adapter, is_streamed=False, pooling=Pooling(pooling))
                for one, adapter in zip(asked, adapters_for(lora_request, len(asked)), strict=True)
            ]
            self._answer(questions, use_tqdm=use_tqdm)
            return [question.embedding() for question in questions]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, lora_request: Adapter = None
    ) -> Iterator[Delta]:
        """Complete one prompt, token by token. Closing the iterator early cancels the request."""
        question = self._question(prompt, sampling_params or SamplingParams(), lora_request, is_streamed=True)
        if len(question.answers) > 1:
            raise BadSampling("a stream is one answer; leave out `n`, or use `generate`")
        return self._stream(question.answers[0])

    def _stream(self, answer: _ReceivedAnswer) -> Iterator[Delta]:
        loop, outbox = self._loop, Outbox()
        with postponed():
            loop.add([answer.request], outbox)
            try:
                answer.open_transcript()  # while the device computes
                while answer.finish_reason is None:
                    message = _received(outbox)
                    if isinstance(message, RequestFailed):
                        raise message.error
                    for output in message:
                        yield answer.take(output)
            finally:
                loop.cancel(answer.request.request_id)

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

    def _answer(self, questions: Sequence[_Question], *, use_tqdm: bool) -> None:
        answers = [answer for question in questions for answer in question.answers]
        ends = self._collect({answer.request.request_id: answer for answer in answers})
        shown = track(ends, "generating", len(answers), console=Console(stderr=True)) if use_tqdm else ends
        for _ in shown:
            pass

    def _collect(self, answers: Mapping[RequestId, _ReceivedAnswer]) -> Iterator[None]:
        """Run the requests, fill in their answers and yield at the end of each; cancels those left over."""
        loop, outbox, num_open = self._loop, Outbox(), len(answers)
        loop.add([answer.request for answer in answers.values()], outbox)
        try:
            while num_open:
                grown = _taken(answers, [_received(outbox)], loop)
                ended = sum(answers[one].finish_reason is not None for one in grown)
                num_open -= ended
                yield from [None] * ended
        finally:
            _cancelled(answers, loop)

    def _question(
        self,
        prompt: Prompt,
        params: SamplingParams,
        adapter: Adapter,
        *,
        is_streamed: bool,
        read_at: int = 0,
        pooling: Pooling | None = None,
    ) -> _Question:
        """Return a checked prompt and its requests, which `_loop` has not got yet."""
        if params.stop_strings and self._tokenizer is None:
            raise BadSampling("`stop` needs a tokenizer, but the model was loaded with `skip_tokenizer_init`")
        text, token_ids = text_and_tokens(prompt)
        if token_ids is None:
            assert text is not None, "a prompt has a text or token ids"
            token_ids = self.get_tokenizer().encode(text)
        adapter_id, guide = self._adapter_id(adapter), guide_of(params)
        if self._seeds is not None and params.seed is None:
            params = replace(params, seed=self._seeds.getrandbits(63))
        answers = []
        for at, one in enumerate(sampling_of_answers(params), read_at):
            request = self.engine.request(
                RequestId(f"r{next(self._numbers)}"),
                token_ids,
                one,
                guide=guide,
                pooling=pooling,
                adapter=adapter_id,
                is_streamed=is_streamed,
            )
            stop_ids = frozenset(params.stop_ids)
            answers.append(_ReceivedAnswer(request, self._tokenizer, stop_ids, 1 + at % _TEXT_TOKENS))
        return _Question(text, answers)

    def _adapter_id(self, adapter: Adapter) -> AdapterId | None:
        """Return the adapter of a request, loaded now if it is new and the request has its path."""
        path = adapter.lora_path if isinstance(adapter, LoRARequest) else ""
        name = adapter.lora_name if isinstance(adapter, LoRARequest) else adapter
        if name is None:
            return None
        with self._adding:
            if name not in self._adapters:
                if not path or self._opened is None:
                    known = ", ".join(f"`{one}`" for one in self._adapters) or "none"
                    raise UnknownModel(
                        f"unknown adapter: `{name}`; the model has: {known}; pass it in `adapters` when you "
                        f"open the model, or as `LoRARequest({name!r}, lora_path=...)`"
                    )
                (read,) = read_adapters(self._opened, {name: path}).values()
                if read.adapter not in self.engine.adapters:
                    self._loop.change(lambda engine: add_adapters(engine, [read]))
                self._adapters[name] = read.adapter
            return self._adapters[name]

    def get_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise BadPrompt("the model was loaded with `skip_tokenizer_init`, so prompts must be token ids")
        return self._tokenizer


class AsyncEngineArgs:
    """The arguments of `LLM`, for `AsyncLLM.from_engine_args`."""

    __slots__ = ("model", "options")

    def __init__(self, model: str | Path, **options: object) -> None:
        self.model, self.options = model, options


class AsyncLLM:
    """A loaded model whose requests are async generators. All but its making is for one event loop."""

    def __init__(self, model: str | Path, **options: object) -> None:
        """Open a model as `LLM` does, with its arguments."""
        self._llm = LLM(model, **options)  # type: ignore[arg-type] # `LLM` has their types
        self._outboxes: dict[str, _AwaitedOutbox] = {}  #: of running requests

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs) -> Self:
        return cls(engine_args.model, **engine_args.options)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: Adapter = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt. `output_kind` of `sampling_params` says what each output has.

        An output has the answers that have grown, and what came while the caller was busy is one output.
        Closing the generator or cancelling its task ends the request.
        """
        if request_id in self._outboxes:
            raise BadPrompt(f"a request with the id `{request_id}` is running; choose another id")
        kind = output_kind_of(sampling_params)
        loop = self._llm._loop
        outbox = self._outboxes[request_id] = _AwaitedOutbox(asyncio.get_running_loop())
        answers: Mapping[RequestId, _ReceivedAnswer] = {}
        try:
            question = await asyncio.to_thread(  # it tokenises, and may load an adapter
                self._llm._question,
                prompt,
                sampling_params,
                lora_request,
                is_streamed=kind is not RequestOutputKind.FINAL_ONLY,
            )
            answers = {answer.request.request_id: answer for answer in question.answers}
            with postponed():
                loop.add([answer.request for answer in question.answers], outbox)
                while not question.is_finished:
                    before = [len(answer.token_ids) for answer in question.answers]
                    grown = _taken(answers, await outbox.received(), loop)
                    if outbox.is_aborted:
                        grown |= _cancelled(answers, loop)
                    begins = {at: before[at] for at, one in enumerate(answers) if one in grown}
                    if not begins:
                        continue  # woken without a message, or by a step after a stop string
                    if kind is RequestOutputKind.DELTA:
                        yield question.output(request_id, begins)
                    elif kind is RequestOutputKind.CUMULATIVE:
                        yield question.output(request_id, dict.fromkeys(begins, 0))
            if kind is RequestOutputKind.FINAL_ONLY:
                yield question.output(request_id)
        finally:
            _cancelled(answers, loop)
            del self._outboxes[request_id]

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests: their last outputs have the finish reason `cancelled`. Unknown ids are ignored."""
        for one in [request_id] if isinstance(request_id, str) else request_id:
            if (outbox := self._outboxes.get(one)) is not None:
                outbox.abort()

    async def get_tokenizer(self) -> Tokenizer:
        return self._llm.get_tokenizer()

    def shutdown(self) -> None:
        """Fail running requests and free the memory. Idempotent."""
        self._llm.close()


AsyncLLMEngine = AsyncLLM  #: vLLM's older name


class _AwaitedOutbox(Outbox):
    """Wakes an event loop, which alone reads it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.is_aborted = False
        self._loop, self._event = loop, asyncio.Event()

    def put(
        self,
        item: StepOutputs | RequestFailed | Failed,
        block: bool = True,
        timeout: float | None = None,
    ) -> None:
        super().put(item, block, timeout)
        with suppress(RuntimeError):  # the event loop was closed, and the step thread goes on
            self._loop.call_soon_threadsafe(self._event.set)

    def abort(self) -> None:
        self.is_aborted = True
        self._event.set()

    async def received(self) -> list[StepOutputs | RequestFailed]:
        """Wait for messages or an abort, and return all messages there are. Raises EngineFailed."""
        await self._event.wait()
        self._event.clear()
        messages = []
        with suppress(Empty):
            while True:
                messages.append(_checked(self.get_nowait()))
        return messages


def _taken(
    answers: Mapping[RequestId, _ReceivedAnswer],
    messages: Iterable[StepOutputs | RequestFailed],
    loop: StepLoop,
) -> set[RequestId]:
    """Take messages and return the answers that have grown. Raises the error of a request that failed."""
    grown = set()
    for message in messages:
        if isinstance(message, RequestFailed):
            if answers[message.request_id].finish_reason is None:
                raise message.error
            continue  # it ran on after its stop string
        for row, request_id in enumerate(message.request_ids):
            answer = answers[request_id]
            if answer.finish_reason is not None:
                continue  # likewise
            answer.note(message, row)
            grown.add(request_id)
            if answer.finish_reason is not None and request_id not in message.finished:
                loop.cancel(request_id)  # a stop string ended it
    return grown


def _cancelled(answers: Mapping[RequestId, _ReceivedAnswer], loop: StepLoop) -> set[RequestId]:
    """Cancel the requests that have not ended, and return them."""
    live = {one for one, answer in answers.items() if answer.finish_reason is None}
    for request_id in live:
        answers[request_id].cancel()
        loop.cancel(request_id)
    return live


@dataclass(slots=True)
class _ReceivedAnswer:
    """The part of an answer received so far. Mutable; written by the calling thread."""

    request: EngineRequest
    tokenizer: Tokenizer | None  #: None: no text
    stop_ids: frozenset[int]  #: that the caller gave
    #: the number of tokens at which text is decoded next, without streaming: not all at the end, when the
    #: device is idle, and not for all answers at the same time
    read_at: int = 1
    num_read: int = 0  #: tokens that are decoded
    transcript: Transcript | None = None  #: opened with the first text
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    named_logprobs: list[dict[int, Logprob]] = field(default_factory=list)  #: of tokens that were returned
    finish_reason: FinishReason | None = None
    stop_string: str | None = None  #: that ended it
    reading: PromptReading | None = None
    #: Logprobs of the prompt; None: not asked for, or not yet.
    named_prompt: list[dict[int, Logprob] | None] | None = None

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
            text, self.finish_reason, self.stop_string = delta.text, delta.finish_reason, delta.stop
        self.token_ids.append(output.token)
        self.texts.append(text)
        logprobs = () if output.logprobs is None else (output.logprobs,)
        self.logprobs.extend(logprobs)
        return Delta(text, (output.token,), self.finish_reason, logprobs or None)

    def note(self, outputs: StepOutputs, row: int) -> None:
        if self._is_read_by_token:
            self.take(outputs[row])
            return
        self.reading = self.reading or outputs.readings.get(outputs.request_ids[row])
        self.token_ids.append(outputs.tokens[row])
        if outputs.logprobs is not None and (own := outputs.logprobs[row]) is not None:
            self.logprobs.append(own)
        self.finish_reason = outputs.finished.get(outputs.request_ids[row])
        if self.finish_reason is not None or len(self.token_ids) >= self.read_at:
            self._read()

    def cancel(self) -> None:
        """End the answer with the tokens it has, and all their text."""
        self.finish_reason = FinishReason.CANCELLED
        if not self._is_read_by_token and self.token_ids:
            self._read()
        elif self.transcript is not None:
            self.texts.append(self.transcript.flush())

    def _read(self) -> None:
        if (transcript := self.open_transcript()) is not None:
            self.texts.append(transcript.push_all(self.token_ids[self.num_read :], self.finish_reason))
        self.num_read = len(self.token_ids)
        self.read_at = self.num_read + _TEXT_TOKENS

    @property
    def _is_read_by_token(self) -> bool:
        return self.request.is_streamed or bool(self.request.sampling.stop) or self._has_no_tokens

    @property
    def _has_no_tokens(self) -> bool:
        return self.request.sampling.max_tokens == 0

    def completion(self, index: int, begin: int = 0) -> CompletionOutput:
        """Return the answer from token `begin` on, which is 0 unless tokens were taken one by one."""
        logprobs = None
        if self.request.sampling.logprobs is not None:
            at = len(self.named_logprobs)
            for one, own in zip(self.token_ids[at:], self.logprobs[at:], strict=True):
                self.named_logprobs.append(logprobs_by_token(one, own.logprob, None, own.top, self._decode))
            logprobs = self.named_logprobs[begin:]
        stop_reason: str | int | None = self.stop_string
        if self.finish_reason is FinishReason.STOP and self.token_ids[-1] in self.stop_ids:
            stop_reason = stop_reason or self.token_ids[-1]
        return CompletionOutput(
            index=index,
            text="".join(self.texts[begin:]),
            token_ids=self.token_ids[begin:],
            cumulative_logprob=None if logprobs is None else sum(one.logprob for one in self.logprobs),
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=stop_reason,
        )

    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        if self.named_prompt is None and self.reading is not None and self.reading.logprobs is not None:
            each = zip(self.request.prompt[1:], self.reading.logprobs, strict=True)
            named = (
                logprobs_by_token(one, own.logprob, own.rank, own.top, self._decode) for one, own in each
            )
            self.named_prompt = [None, *named]
        return self.named_prompt

    def _decode(self, token: int) -> str | None:
        if self.tokenizer is None:
            return None
        return self.tokenizer.token_bytes(token).decode(errors="replace")


@dataclass(frozen=True, slots=True)
class _Question:
    """A prompt and its answers."""

    prompt: str | None
    answers: Sequence[_ReceivedAnswer]

    @property
    def is_finished(self) -> bool:
        return all(answer.finish_reason is not None for answer in self.answers)

    def output(self, request_id: str | None = None, begins: Mapping[int, int] | None = None) -> RequestOutput:
        """Return the answers, or from `begins` on alone, by index."""
        first = self.answers[0]
        begins = dict.fromkeys(range(len(self.answers)), 0) if begins is None else begins
        return RequestOutput(
            request_id=first.request.request_id if request_id is None else request_id,
            prompt=self.prompt,
            prompt_token_ids=list(first.request.prompt),
            prompt_logprobs=first.prompt_logprobs(),
            outputs=[self.answers[index].completion(index, begin) for index, begin in sorted(begins.items())],
            finished=self.is_finished,
        )

    def embedding(self) -> EmbeddingRequestOutput:
        request, reading = self.answers[0].request, self.answers[0].reading
        assert reading is not None, f"{request.request_id} has no reading"
        vector = EmbeddingOutput(array("f", reading.embedding or b"").tolist())
        return EmbeddingRequestOutput(request.request_id, vector, list(request.prompt))


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
    return _checked(outbox.get())


def _checked(message: StepOutputs | RequestFailed | Failed) -> StepOutputs | RequestFailed:
    if isinstance(message, Failed):
        raise EngineFailed(
            f"the engine stopped during {message.request_id}: {message.cause}"
        ) from message.cause
    return message

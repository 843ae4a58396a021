"""The offline Python API, with vLLM's names: one model in this process, for any thread.

llm = LLM("path/to/model")
for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
    print(output.outputs[0].text)

`AsyncLLM` (`async_llm.py`) is the same for asyncio.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Literal, Self

from rich.console import Console
from rich.progress import track

from hearth.core.config import EngineConfig, StoreConfig
from hearth.core.errors import BadPrompt, BadSampling, EngineFailed, UnknownModel
from hearth.core.types import AdapterId, Pooling, RequestId, SamplingParams
from hearth.engine.engine import Engine
from hearth.engine.loop import Outbox, StepLoop
from hearth.inputs import (
    Adapter,
    LoRARequest,
    Prompt,
    adapters_for,
    as_prompts,
    guide_of,
    one_for_each,
    sampling_of_answers,
    text_and_tokens,
)
from hearth.offline import ModelOptions, OpenedModel, add_adapters, find_model, open_model, read_adapters
from hearth.outputs import Delta, EmbeddingRequestOutput, RequestOutput
from hearth.policy.batch.plan import RequestFailed
from hearth.question import TEXT_TOKENS, Question, ReceivedAnswer, cancel_open, checked, take_outputs
from hearth.store.tiers.tiers import Tiers
from hearth.store.transfer.record import LoadRecord
from hearth.system.garbage import postponed
from hearth.text.chat_template import RENDER_S, Json, Message
from hearth.text.tokenizer import Tokenizer
from hearth.vllm_options import engine_config


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

    def _stream(self, answer: ReceivedAnswer) -> Iterator[Delta]:
        loop, outbox = self._loop, Outbox()
        with postponed():
            loop.add([answer.request], outbox)
            try:
                answer.open_transcript()  # while the device computes
                while answer.finish_reason is None:
                    message = checked(outbox.get())
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

    def _answer(self, questions: Sequence[Question], *, use_tqdm: bool) -> None:
        answers = [answer for question in questions for answer in question.answers]
        ends = self._collect({answer.request.request_id: answer for answer in answers})
        shown = track(ends, "generating", len(answers), console=Console(stderr=True)) if use_tqdm else ends
        for _ in shown:
            pass

    def _collect(self, answers: Mapping[RequestId, ReceivedAnswer]) -> Iterator[None]:
        """Run the requests, fill in their answers and yield at the end of each; cancels those left over."""
        loop, outbox, num_open = self._loop, Outbox(), len(answers)
        loop.add([answer.request for answer in answers.values()], outbox)
        try:
            while num_open:
                grown = take_outputs(answers, [checked(outbox.get())], loop)
                ended = sum(answers[one].finish_reason is not None for one in grown)
                num_open -= ended
                yield from [None] * ended
        finally:
            cancel_open(answers, loop)

    def _question(
        self,
        prompt: Prompt,
        params: SamplingParams,
        adapter: Adapter,
        *,
        is_streamed: bool,
        read_at: int = 0,
        pooling: Pooling | None = None,
    ) -> Question:
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
            answers.append(ReceivedAnswer(request, self._tokenizer, stop_ids, 1 + at % TEXT_TOKENS))
        return Question(text, answers)

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

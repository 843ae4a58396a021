"""`LLM` for asyncio: requests come one by one and are answered together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from queue import Empty
from typing import Self

from hearth.core.errors import BadPrompt
from hearth.core.types import RequestId, SamplingParams
from hearth.engine.engine import StepOutputs
from hearth.engine.loop import Failed, Outbox
from hearth.inputs import Adapter, Prompt, RequestOutputKind, output_kind_of
from hearth.llm import LLM
from hearth.outputs import RequestOutput
from hearth.policy.batch.plan import RequestFailed
from hearth.question import ReceivedAnswer, cancel_open, checked, take_outputs
from hearth.system.garbage import postponed
from hearth.text.tokenizer import Tokenizer


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
        answers: Mapping[RequestId, ReceivedAnswer] = {}
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
                    grown = take_outputs(answers, await outbox.received(), loop)
                    if outbox.is_aborted:
                        grown |= cancel_open(answers, loop)
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
            cancel_open(answers, loop)
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
                messages.append(checked(self.get_nowait()))
        return messages

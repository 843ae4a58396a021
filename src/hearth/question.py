"""A prompt of the Python API, and its answers as they are received."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hearth.core.errors import EngineFailed
from hearth.core.types import FinishReason, PromptReading, RequestId, TokenLogprobs
from hearth.engine.engine import Output, StepOutputs
from hearth.engine.loop import Failed, StepLoop
from hearth.outputs import (
    CompletionOutput,
    Delta,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    RequestOutput,
    logprobs_by_token,
)
from hearth.policy.batch.plan import EngineRequest, RequestFailed
from hearth.text.tokenizer import Tokenizer
from hearth.text.transcript import Transcript

#: Tokens that are decoded at once when answers are not streamed.
TEXT_TOKENS = 16


def take_outputs(
    answers: Mapping[RequestId, ReceivedAnswer],
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


def cancel_open(answers: Mapping[RequestId, ReceivedAnswer], loop: StepLoop) -> set[RequestId]:
    """Cancel the requests that have not ended, and return them."""
    live = {one for one, answer in answers.items() if answer.finish_reason is None}
    for request_id in live:
        answers[request_id].cancel()
        loop.cancel(request_id)
    return live


@dataclass(slots=True)
class ReceivedAnswer:
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
        self.read_at = self.num_read + TEXT_TOKENS

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
class Question:
    """A prompt and its answers."""

    prompt: str | None
    answers: Sequence[ReceivedAnswer]

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


def checked(message: StepOutputs | RequestFailed | Failed) -> StepOutputs | RequestFailed:
    if isinstance(message, Failed):
        raise EngineFailed(
            f"the engine stopped during {message.request_id}: {message.cause}"
        ) from message.cause
    return message

"""The text thread, with links and transcripts that are real or fail."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from hearth import wire
from hearth.control.active_request import ActiveRequest
from hearth.control.fact_decoder import DecodedFact, FactDecoder
from hearth.control.generation import AnswerStream
from hearth.control.worker_link import WorkerLink
from hearth.messages import Fact, Sampling, StepDone
from hearth.text.tokenizer import Tokenizer
from hearth.text.transcript import TextDelta, Transcript
from hearth.types import FinishReason, ModelId, PromptReading, RequestId, SamplingParams

MODEL = ModelId("tiny")
SECRET = "what somebody has written"

#: A text thread that meets what nobody has foreseen.
BROKEN = """
import asyncio
from hearth.control.fact_decoder import FactDecoder

async def main():
    decoder = FactDecoder(asyncio.get_running_loop(), {}, print)
    decoder._decoded = None
    decoder.left(None)
    await asyncio.Event().wait()

asyncio.run(main())
"""


class Panic(BaseException):
    """An error like those of the tokenizers package, which are no Exceptions."""


class Failing(Transcript):
    def push(self, token: int, finish_reason: FinishReason | None) -> TextDelta:
        raise Panic(SECRET)


class Nobody:
    """A link whose worker is gone."""

    worker = None

    def __init__(self) -> None:
        self.aborted = asyncio.Event()

    def abort(self) -> None:
        self.aborted.set()


def active(tokenizer: Tokenizer, run: int, kind: type[Transcript] = Transcript) -> ActiveRequest:
    request_id = RequestId(f"r{run}")
    params = SamplingParams()
    return ActiveRequest(
        request_id=request_id,
        model=MODEL,
        prompt=(1,),
        sampling=Sampling.of(params, 0),
        salt=b"",
        guide=None,
        stream=AnswerStream(request_id, MODEL, tokenizer, 1, lambda: None),
        transcript=kind(tokenizer, params, (1,)),
    )


def body(fact: Fact) -> bytes:
    return bytes(wire.frame(fact))[wire.HEADER.size :]


def with_decoder(
    runs: dict[int, ActiveRequest],
    scene: Callable[[FactDecoder, asyncio.Queue[DecodedFact]], Awaitable[None]],
) -> None:
    async def run() -> None:
        delivered: asyncio.Queue[DecodedFact] = asyncio.Queue()
        decoder = FactDecoder(asyncio.get_running_loop(), runs, delivered.put_nowait)
        try:
            await scene(decoder, delivered)
        finally:
            decoder.close()

    asyncio.run(run())


def test_one_text_that_breaks_leaves_the_others_alone(
    converted: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = Tokenizer.load(converted)
    runs = {1: active(tokenizer, 1), 2: active(tokenizer, 2, Failing), 3: active(tokenizer, 3)}

    async def scene(decoder: FactDecoder, delivered: asyncio.Queue[DecodedFact]) -> None:
        link = WorkerLink(b"", lambda _: False, None)  # type: ignore[arg-type] # it is never connected
        decoder.decode(link, body(StepDone(MODEL, [1, 2, 3], [10, 11, 12])))
        decoded = await delivered.get()
        assert [token.request for token in decoded.tokens] == [runs[1], runs[3]]
        assert decoded.broken == [runs[2]]
        decoder.decode(link, body(StepDone(MODEL, [2, 3], [10, 11])))
        decoded = await delivered.get()
        assert ([token.request for token in decoded.tokens], decoded.broken) == ([runs[3]], [])

    with_decoder(runs, scene)
    assert "text_broken request=r2 model=tiny error=Panic" in caplog.text
    assert "in push" in caplog.text
    assert SECRET not in caplog.text


def test_a_request_of_no_tokens_ends_without_the_one_that_its_step_sampled(converted: Path) -> None:
    tokenizer = Tokenizer.load(converted)
    runs = {1: active(tokenizer, 1), 2: active(tokenizer, 2)}
    runs[2].sampling = Sampling.of(SamplingParams(max_tokens=0), 0)

    async def scene(decoder: FactDecoder, delivered: asyncio.Queue[DecodedFact]) -> None:
        link = WorkerLink(b"", lambda _: False, None)  # type: ignore[arg-type] # it is never connected
        reading = PromptReading(embedding=b"1234")
        step = StepDone(MODEL, [1, 2], [10, 11], {2: FinishReason.LENGTH}, readings={2: reading})
        decoder.decode(link, body(step))
        decoded = await delivered.get()
        assert decoded.fact == step
        assert ([one.request for one in decoded.tokens], decoded.ended) == ([runs[1]], [runs[2]])
        assert (runs[2].emitted, runs[2].is_complete) == ([], True)

    with_decoder(runs, scene)


def test_workers_take_turns_so_that_none_waits_for_the_backlog_of_another(converted: Path) -> None:
    tokenizer = Tokenizer.load(converted)
    has_begun, may_go_on = threading.Event(), threading.Event()

    class Slow(Transcript):
        def push(self, token: int, finish_reason: FinishReason | None) -> TextDelta:
            has_begun.set()
            assert may_go_on.wait(60)
            return super().push(token, finish_reason)

    runs = {1: active(tokenizer, 1, Slow), 2: active(tokenizer, 2)}

    async def scene(decoder: FactDecoder, delivered: asyncio.Queue[DecodedFact]) -> None:
        busy, other = Nobody(), Nobody()
        for token in (10, 11, 12, 13):
            decoder.decode(busy, body(StepDone(MODEL, [1], [token])))  # type: ignore[arg-type] # as much of a link as is needed
        decoder.left(busy)  # type: ignore[arg-type] # likewise
        await asyncio.to_thread(has_begun.wait, 60)
        decoder.decode(other, body(StepDone(MODEL, [2], [20])))  # type: ignore[arg-type] # likewise
        may_go_on.set()
        facts = [await delivered.get() for _ in range(6)]
        of_busy = [fact for fact in facts if fact.link is busy]  # type: ignore[comparison-overlap] # likewise
        assert [token.delta.token for fact in of_busy for token in fact.tokens] == [10, 11, 12, 13]
        assert of_busy[-1].fact is None
        assert [fact.link is other for fact in facts].index(True) <= 2  # type: ignore[comparison-overlap] # likewise

    with_decoder(runs, scene)


@pytest.mark.parametrize(
    "junk", [b"junk", body(StepDone(MODEL, [1], [10, 11]))], ids=["no message", "rows that do not match"]
)
def test_a_worker_that_is_not_understood_is_dropped_and_others_are_heard(
    converted: Path, junk: bytes
) -> None:
    runs = {1: active(Tokenizer.load(converted), 1)}

    async def scene(decoder: FactDecoder, delivered: asyncio.Queue[DecodedFact]) -> None:
        link = Nobody()
        decoder.decode(link, junk)  # type: ignore[arg-type] # as much of a link as is needed
        await link.aborted.wait()
        decoder.left(link)  # type: ignore[arg-type] # likewise
        assert (await delivered.get()).fact is None

    with_decoder(runs, scene)


def test_a_thread_that_dies_takes_the_process_along() -> None:
    ended = subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "service_broken part=fact_decoder error=TypeError" in ended.stderr


def test_nothing_is_delivered_once_it_is_closed() -> None:
    """A service that stops closes its journal, where the end of a worker's connection would be written."""
    delivered: list[DecodedFact] = []

    class Handed(asyncio.SelectorEventLoop):
        """A loop that tells when it was handed a call from another thread."""

        has_been_handed = threading.Event()

        def call_soon_threadsafe(self, *args: Any, **kwargs: Any) -> asyncio.Handle:
            handle = super().call_soon_threadsafe(*args, **kwargs)
            self.has_been_handed.set()
            return handle

    async def scene() -> None:
        decoder = FactDecoder(asyncio.get_running_loop(), {}, delivered.append)
        decoder.left(Nobody())  # type: ignore[arg-type] # nobody looks at it
        assert Handed.has_been_handed.wait(60)
        decoder.close()
        await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=Handed) as runner:
        runner.run(scene())
    assert delivered == []

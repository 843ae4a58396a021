"""The text thread, with links and transcripts that are real or fail."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from hearth import wire
from hearth.control.active_request import ActiveRequest
from hearth.control.ask import Stream
from hearth.control.fact_decoder import DecodedFact, FactDecoder
from hearth.control.link import WorkerLink
from hearth.control.timeline import Timeline
from hearth.messages import Fact, Sampling, StepDone
from hearth.text.tokenizer import Tokenizer
from hearth.text.transcript import Piece, Transcript
from hearth.types import FinishReason, ModelId, RequestId, SamplingParams

MODEL = ModelId("tiny")
SECRET = "what somebody has written"

#: A text thread that meets what nobody has foreseen.
BROKEN = """
import asyncio
from hearth.control.fact_decoder import FactDecoder

async def main():
    hearing = FactDecoder(asyncio.get_running_loop(), {}, print)
    hearing._understand = None
    hearing.left(None)
    await asyncio.Event().wait()

asyncio.run(main())
"""


class Panic(BaseException):
    """As the tokenizers package raises it."""


class Failing(Transcript):
    def push(self, token: int, finish_reason: FinishReason | None) -> Piece:
        raise Panic(SECRET)


class Nobody:
    """A link whose worker is gone."""

    worker = None

    def __init__(self) -> None:
        self.aborted = asyncio.Event()

    def abort(self) -> None:
        self.aborted.set()


def live(tokenizer: Tokenizer, run: int, kind: type[Transcript] = Transcript) -> ActiveRequest:
    request_id = RequestId(f"r{run}")
    params = SamplingParams()
    return ActiveRequest(
        request_id=request_id,
        model=MODEL,
        prompt=(1,),
        sampling=Sampling.of(params, 0),
        guide=None,
        stream=Stream(request_id, MODEL, tokenizer, 1, lambda: None),
        transcript=kind(tokenizer, params),
        timeline=Timeline(request_id, MODEL, 0.0, time.time(), 1),
    )


def body(fact: Fact) -> bytes:
    return bytes(wire.frame(fact))[wire.HEADER.size :]


def with_hearing(
    runs: dict[int, ActiveRequest],
    scene: Callable[[FactDecoder, asyncio.Queue[DecodedFact]], Awaitable[None]],
) -> None:
    async def run() -> None:
        told: asyncio.Queue[DecodedFact] = asyncio.Queue()
        hearing = FactDecoder(asyncio.get_running_loop(), runs, told.put_nowait)
        try:
            await scene(hearing, told)
        finally:
            hearing.close()

    asyncio.run(run())


def test_one_text_that_breaks_leaves_the_others_alone(
    converted: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = Tokenizer.load(converted)
    runs = {1: live(tokenizer, 1), 2: live(tokenizer, 2, Failing), 3: live(tokenizer, 3)}

    async def scene(hearing: FactDecoder, told: asyncio.Queue[DecodedFact]) -> None:
        link = WorkerLink(b"", lambda _: False, None)  # type: ignore[arg-type] # it is never connected
        hearing.heard(link, body(StepDone(MODEL, [1, 2, 3], [10, 11, 12])))
        heard = await told.get()
        assert [said.live for said in heard.said] == [runs[1], runs[3]]
        assert heard.broken == [runs[2]]
        hearing.heard(link, body(StepDone(MODEL, [2, 3], [10, 11])))
        heard = await told.get()
        assert ([said.live for said in heard.said], heard.broken) == ([runs[3]], [])

    with_hearing(runs, scene)
    assert "text_broken request=r2 model=tiny error=Panic" in caplog.text
    assert "in push" in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    "junk", [b"junk", body(StepDone(MODEL, [1], [10, 11]))], ids=["no message", "rows that do not match"]
)
def test_a_worker_that_is_not_understood_is_dropped_and_others_are_heard(
    converted: Path, junk: bytes
) -> None:
    runs = {1: live(Tokenizer.load(converted), 1)}

    async def scene(hearing: FactDecoder, told: asyncio.Queue[DecodedFact]) -> None:
        link = Nobody()
        hearing.heard(link, junk)  # type: ignore[arg-type] # as much of a link as is needed
        await link.aborted.wait()
        hearing.left(link)  # type: ignore[arg-type] # likewise
        assert (await told.get()).fact is None

    with_hearing(runs, scene)


def test_a_thread_that_dies_takes_the_process_along() -> None:
    ended = subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "service_broken part=fact_decoder error=TypeError" in ended.stderr

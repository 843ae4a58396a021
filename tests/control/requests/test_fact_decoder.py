"""The text thread, with links and transcripts that are real or fail."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from hearth.control.requests.active_request import ActiveRequest
from hearth.control.requests.fact_decoder import MAX_TEXT_S, DecodedFact, DecodedLate, FactDecoder
from hearth.control.requests.generation import AnswerStream
from hearth.core import wire
from hearth.core.messages import Fact, HostingFailed, RunFailed, StepDone
from hearth.core.types import FinishReason, ModelId, PromptReading, RequestId, SamplingParams, WorkerId
from hearth.node.link import WorkerLink
from hearth.text.tokenizer import Tokenizer
from hearth.text.transcript import TextDelta, Transcript

MODEL = ModelId("tiny")
SECRET = "what somebody has written"

#: A text thread that meets what nobody has foreseen.
BROKEN = """
import asyncio
from hearth.control.requests.fact_decoder import FactDecoder

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
        sampling=params,
        salt=b"",
        guide=None,
        stream=AnswerStream(request_id, MODEL, tokenizer, 1, lambda: None),
        transcript=kind(tokenizer, params, (1,)),
        run=run,
    )


def body(fact: Fact) -> bytes:
    return bytes(wire.frame(fact))[wire.HEADER.size :]


def with_decoder(
    runs: dict[int, ActiveRequest],
    scene: Callable[[FactDecoder, asyncio.Queue[Any]], Awaitable[None]],
    clock_s: Callable[[], float] = time.thread_time,
) -> None:
    async def run() -> None:
        delivered: asyncio.Queue[DecodedFact | DecodedLate] = asyncio.Queue()
        decoder = FactDecoder(asyncio.get_running_loop(), runs, delivered.put_nowait, clock_s)
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
        assert [token.request for token in decoded.texts.tokens] == [runs[1], runs[3]]
        assert decoded.texts.broken == [runs[2]]
        decoder.decode(link, body(StepDone(MODEL, [2, 3], [10, 11])))
        decoded = await delivered.get()
        assert ([token.request for token in decoded.texts.tokens], decoded.texts.broken) == ([runs[3]], [])

    with_decoder(runs, scene)
    assert "text_broken request=r2 model=tiny error=Panic" in caplog.text
    assert "in push" in caplog.text
    assert SECRET not in caplog.text


def test_a_worker_cannot_write_into_answers_of_another_one(converted: Path) -> None:
    tokenizer = Tokenizer.load(converted)
    runs = {1: active(tokenizer, 1), 2: active(tokenizer, 2)}
    runs[1].worker, runs[2].worker = WorkerId("w0"), WorkerId("gpu-2/w0")

    async def scene(decoder: FactDecoder, delivered: asyncio.Queue[DecodedFact]) -> None:
        link = WorkerLink(b"", lambda _: False, None)  # type: ignore[arg-type] # it is never connected
        link.worker = WorkerId("gpu-2/w0")
        decoder.decode(link, body(StepDone(MODEL, [1, 2], [10, 11])))
        decoded = await delivered.get()
        assert [token.request for token in decoded.texts.tokens] == [runs[2]]

    with_decoder(runs, scene)
    assert runs[1].emitted == []


def test_a_token_that_is_late_is_dropped_once_its_request_has_left_a_worker_that_lives(
    converted: Path,
) -> None:
    """Another worker makes that token again: it must not be added twice."""
    tokenizer = Tokenizer.load(converted)
    moved, other = active(tokenizer, 1), active(tokenizer, 2)
    runs = {1: moved, 2: other}

    async def scene(decoder: FactDecoder, delivered: asyncio.Queue[DecodedFact | DecodedLate]) -> None:
        link = WorkerLink(b"", lambda _: False, None)  # type: ignore[arg-type] # it is never connected
        moved.text_s = other.text_s = 1.0  # their tokens are queued
        with moved.handover:  # the text thread waits at the first token
            decoder.decode(link, body(StepDone(MODEL, [1, 2], [10, 11])))
            await delivered.get()
            del runs[1]
            moved.run = None
        late = [await delivered.get(), await delivered.get()]
        assert [token.request for one in late for token in one.texts.tokens] == [other]

    with_decoder(runs, scene)
    assert (moved.emitted, other.emitted) == ([], [11])


def test_a_request_of_no_tokens_ends_without_the_one_that_its_step_sampled(converted: Path) -> None:
    tokenizer = Tokenizer.load(converted)
    runs = {1: active(tokenizer, 1), 2: active(tokenizer, 2)}
    runs[2].sampling = SamplingParams(max_tokens=0)

    async def scene(decoder: FactDecoder, delivered: asyncio.Queue[DecodedFact]) -> None:
        link = WorkerLink(b"", lambda _: False, None)  # type: ignore[arg-type] # it is never connected
        reading = PromptReading(embedding=b"1234")
        step = StepDone(MODEL, [1, 2], [10, 11], {2: FinishReason.LENGTH}, readings={2: reading})
        decoder.decode(link, body(step))
        decoded = await delivered.get()
        assert decoded.fact == step
        texts = decoded.texts
        assert ([one.request for one in texts.tokens], texts.ended) == ([runs[1]], [runs[2]])
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
        assert [token.delta.token for fact in of_busy for token in fact.texts.tokens] == [10, 11, 12, 13]
        assert of_busy[-1].fact is None
        assert [fact.link is other for fact in facts].index(True) <= 2  # type: ignore[comparison-overlap] # likewise

    with_decoder(runs, scene)


class Costly:
    """Requests whose text takes long, by a clock that counts work and not time.

    The text thread waits in front of the first token until `may_go_on`, so that all frames are there.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._now_s = tokenizer, 0.0
        self.may_go_on = threading.Event()

    def clock_s(self) -> float:
        return self._now_s

    def active(self, run: int, cost_s: float) -> ActiveRequest:
        costly = self

        class Measured(Transcript):
            def push(self, token: int, finish_reason: FinishReason | None) -> TextDelta:
                assert costly.may_go_on.wait(60)
                costly._now_s += cost_s
                return super().push(token, finish_reason)

        return active(self._tokenizer, run, Measured)


def tokens_of(decoded: DecodedFact | DecodedLate) -> list[tuple[str, int]]:
    return [(token.request.request_id, token.delta.token) for token in decoded.texts.tokens]


def test_a_request_whose_text_takes_long_takes_a_bounded_share_and_loses_no_token(converted: Path) -> None:
    costly = Costly(Tokenizer.load(converted))
    runs = {1: costly.active(1, 1.0), 2: costly.active(2, 1e-6), 3: costly.active(3, 1.0)}
    num_steps = 20

    async def scene(decoder: FactDecoder, delivered: asyncio.Queue[DecodedFact | DecodedLate]) -> None:
        link = Nobody()
        for token in range(num_steps):
            finished = dict.fromkeys(runs, FinishReason.LENGTH) if token == num_steps - 1 else {}
            step = StepDone(MODEL, list(runs), [token] * len(runs), finished)
            decoder.decode(link, body(step))  # type: ignore[arg-type] # as much of a link as is needed
        costly.may_go_on.set()
        heard: list[DecodedFact | DecodedLate] = []
        while sum(len(decoded.texts.tokens) for decoded in heard) < len(runs) * num_steps:
            heard.append(await delivered.get())
        told = [token for decoded in heard for token in tokens_of(decoded)]
        for request in ("r1", "r2", "r3"):
            assert [token for name, token in told if name == request] == list(range(num_steps)), request
        assert all(request.is_complete for request in runs.values())

        steps = [at for at, decoded in enumerate(heard) if isinstance(decoded, DecodedFact)]
        assert tokens_of(heard[0]) == [("r1", 0), ("r2", 0), ("r3", 0)], "nothing was measured yet"
        assert [tokens_of(heard[at]) for at in steps[1:]] == [[("r2", at)] for at in range(1, num_steps)]
        assert all(later - at <= 2 for at, later in itertools.pairwise(steps)), "one late token between two"
        late = [tokens_of(decoded)[0][0] for decoded in heard if isinstance(decoded, DecodedLate)]
        assert late == ["r1", "r3"] * (num_steps - 1), "they take turns"

    with_decoder(runs, scene, costly.clock_s)


def test_a_request_whose_text_is_quick_again_is_late_no_longer(converted: Path) -> None:
    costly = Costly(Tokenizer.load(converted))
    costly.may_go_on.set()
    runs = {1: costly.active(1, 1e-6)}

    async def scene(decoder: FactDecoder, delivered: asyncio.Queue[DecodedFact | DecodedLate]) -> None:
        runs[1].text_s = 2 * MAX_TEXT_S
        kinds = []
        for token in range(20):
            decoder.decode(Nobody(), body(StepDone(MODEL, [1], [token])))  # type: ignore[arg-type] # as much of a link as is needed
            while not tokens_of(decoded := await delivered.get()):
                pass
            kinds.append(type(decoded))
        num_late = kinds.count(DecodedLate)
        assert 0 < num_late < 10
        assert kinds == [DecodedLate] * num_late + [DecodedFact] * (20 - num_late)

    with_decoder(runs, scene, costly.clock_s)


def test_nothing_is_made_of_what_is_late_of_a_request_that_ends_while_its_text_is_made(
    converted: Path,
) -> None:
    costly = Costly(Tokenizer.load(converted))
    runs = {run: costly.active(run, 1.0) for run in (1, 2)}
    costly.may_go_on.set()
    push = runs[1].transcript.push

    def cancelled_meanwhile(token: int, finish_reason: FinishReason | None) -> TextDelta:
        if token == 3:
            runs[1].is_complete = True  # as the driver does on its own thread
        return push(token, finish_reason)

    runs[1].transcript.push = cancelled_meanwhile  # type: ignore[method-assign] # in the midst of a text

    async def scene(decoder: FactDecoder, delivered: asyncio.Queue[DecodedFact | DecodedLate]) -> None:
        for token in range(10):
            decoder.decode(Nobody(), body(StepDone(MODEL, [1, 2], [token] * 2)))  # type: ignore[arg-type] # as much of a link as is needed
        while ("r2", 9) not in tokens_of(await delivered.get()):
            pass
        assert runs[1].emitted == [0, 1, 2, 3]

    with_decoder(runs, scene, costly.clock_s)


@pytest.mark.parametrize("why", ["worker", "model", "run"])
def test_what_is_late_of_a_request_that_its_worker_has_lost_is_made_again(converted: Path, why: str) -> None:
    """None of it was emitted, so that whoever carries the request on begins with it."""
    costly = Costly(Tokenizer.load(converted))
    runs = {run: costly.active(run, 1.0) for run in (1, 2, 3)}
    lost: dict[str, Fact] = {
        "model": HostingFailed(MODEL, 1, "device", "broken"),
        "run": RunFailed(1, "device", "broken"),
    }

    async def scene(decoder: FactDecoder, delivered: asyncio.Queue[DecodedFact | DecodedLate]) -> None:
        link, other = Nobody(), Nobody()
        for token in range(10):
            decoder.decode(link, body(StepDone(MODEL, [1, 3], [token] * 2)))  # type: ignore[arg-type] # as much of a link as is needed
            decoder.decode(other, body(StepDone(MODEL, [2], [token])))  # type: ignore[arg-type] # likewise
        if why == "worker":
            decoder.left(link)  # type: ignore[arg-type] # likewise
        else:
            decoder.decode(link, body(lost[why]))  # type: ignore[arg-type] # likewise
        costly.may_go_on.set()
        told: list[tuple[str, int]] = []
        while ("r2", 9) not in told:
            decoded = await delivered.get()
            told += tokens_of(decoded)
            if isinstance(decoded, DecodedFact) and not isinstance(decoded.fact, StepDone):
                assert runs[1].emitted == [token for name, token in told if name == "r1"]
                assert len(runs[1].emitted) < 10
        assert [token for name, token in told if name == "r2"] == list(range(10)), "the other's is made"
        assert len(runs[1].emitted) < 10, "and nothing that was late of the first"

    with_decoder(runs, scene, costly.clock_s)


@pytest.mark.parametrize(
    "junk",
    [
        b"junk",
        body(StepDone(MODEL, [1], [10, 11])),
        body(StepDone(MODEL, [1, 2], [10, 11], logprobs=[None])),
    ],
    ids=["no message", "rows that do not match", "logprobs that do not match"],
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
        assert runs[1].emitted == [], "nobody was given any of it, so that whoever carries on begins there"

    with_decoder(runs, scene)


def test_a_thread_that_dies_takes_the_process_along() -> None:
    ended = subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, text=True, timeout=240)
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

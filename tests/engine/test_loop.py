"""The step thread, over the real engine and over one that breaks: every request ends exactly once."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Iterator, Sequence
from queue import Empty, SimpleQueue

import pytest
import torch

from hearth.core.errors import DeviceError, EngineFailed, LoadCancelled, LogitsNotFinite
from hearth.core.types import FinishReason, RequestId
from hearth.engine import loop as loop_module
from hearth.engine.engine import Engine, Output, StepOutcome, StepOutputs
from hearth.engine.loop import Failed, Outbox, StepLoop
from hearth.policy.batch.plan import EngineRequest, RequestFailed, StepPlan
from tests.engine.harness import engine_for, greedy

PATIENCE_S = 120.0


@pytest.fixture
def engine() -> Engine:
    return engine_for("llama-gqa")


@pytest.fixture
def loop(engine: Engine) -> Iterator[StepLoop]:
    loop = StepLoop(lambda: engine)
    yield loop
    loop.close()


def request(engine: Engine, name: str, num_prompt: int = 4, max_tokens: int = 5) -> EngineRequest:
    return engine.request(RequestId(name), list(range(3, 3 + num_prompt)), greedy(max_tokens))


def messages(outbox: Outbox) -> list[Output | RequestFailed | Failed]:
    """Everything up to the end of one request."""
    received: list[Output | RequestFailed | Failed] = []
    while not received or not is_end(received[-1]):
        received += one_by_one(outbox.get(timeout=PATIENCE_S))
    return received


def one_by_one(message: StepOutputs | RequestFailed | Failed) -> Sequence[Output | RequestFailed | Failed]:
    return list(message) if isinstance(message, StepOutputs) else [message]


def is_end(message: Output | RequestFailed | Failed) -> bool:
    return isinstance(message, RequestFailed | Failed) or message.finish_reason is not None


def rest(outbox: Outbox) -> list[Output | RequestFailed | Failed]:
    received: list[Output | RequestFailed | Failed] = []
    while True:
        try:
            received += one_by_one(outbox.get_nowait())
        except Empty:
            return received


def test_a_request_gets_its_tokens_and_one_end(engine: Engine, loop: StepLoop) -> None:
    outbox: Outbox = SimpleQueue()
    loop.add([request(engine, "a", max_tokens=5)], outbox)

    received = messages(outbox)

    assert [getattr(message, "finish_reason", None) for message in received] == [None] * 4 + [
        FinishReason.LENGTH
    ]
    loop.close()
    assert rest(outbox) == []


def test_the_tokens_of_a_step_come_as_one_message_to_each_outbox(engine: Engine, loop: StepLoop) -> None:
    shared, own = Outbox(), Outbox()
    mine = [request(engine, name, max_tokens=3) for name in ("a", "b", "c")]
    other = request(engine, "d", max_tokens=3)
    loop.add(mine, shared)
    loop.add([other], own)

    assert len(messages(own)) == 3
    steps: list[StepOutputs] = []
    while sum(map(len, steps)) < 9:
        message = shared.get(timeout=PATIENCE_S)
        assert isinstance(message, StepOutputs)
        steps.append(message)

    assert max(len(step) for step in steps) == 3
    assert {output.request_id for step in steps for output in step} == {"a", "b", "c"}
    ends = [output for step in steps for output in step if output.finish_reason is not None]
    assert [end.request_id for end in ends] == ["a", "b", "c"]
    assert all(step.finished.keys() <= set(step.request_ids) for step in steps)


@pytest.mark.parametrize("attempt", range(5))
def test_the_first_step_has_all_requests_that_were_added_together(
    engine: Engine, loop: StepLoop, monkeypatch: pytest.MonkeyPatch, attempt: int
) -> None:
    plans, plan = list[StepPlan | None](), engine.batcher.plan

    def noted(max_prompt_tokens: int | None, max_lone_tokens: int | None) -> StepPlan | None:
        plans.append(plan(max_prompt_tokens, max_lone_tokens))
        return plans[-1]

    monkeypatch.setattr(engine.batcher, "plan", noted)
    asked = [request(engine, str(number), num_prompt=2, max_tokens=1) for number in range(4)]
    loop.add(asked, outbox := Outbox())

    assert len(messages(outbox)) == 4
    assert plans[0] is not None
    assert plans[0].request_ids == [one.request_id for one in asked]


def test_requests_that_were_added_together_all_fail_where_one_breaks_the_engine(
    engine: Engine, loop: StepLoop
) -> None:
    asked = [request(engine, name) for name in ("a", "b", "b", "c")]  # by one that is there twice
    loop.add(asked, outbox := Outbox())

    loop.close()

    assert sorted(end.request_id for end in rest(outbox) if isinstance(end, Failed)) == ["a", "b", "c"]


def test_whatever_threads_add_and_cancel_every_request_ends_exactly_once(
    engine: Engine, loop: StepLoop
) -> None:
    outboxes: dict[RequestId, Outbox] = {}
    cancelled: set[RequestId] = set()

    def trouble(thread: int) -> None:
        chance = random.Random(thread)
        for number in range(12):
            asked = request(engine, f"{thread}-{number}", chance.randint(1, 20), chance.randint(1, 8))
            outbox = outboxes[asked.request_id] = SimpleQueue()
            loop.add([asked], outbox)
            if chance.random() < 0.4:
                cancelled.add(asked.request_id)
                if chance.random() < 0.5:
                    outbox.get(timeout=PATIENCE_S)
                loop.cancel(asked.request_id)

    threads = [threading.Thread(target=trouble, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for request_id, outbox in outboxes.items():
        if request_id not in cancelled:
            messages(outbox)

    loop.close()
    engine.batcher.check()
    assert (engine.batcher.num_running, engine.batcher.num_waiting) == (0, 0)
    assert len(outboxes) == 48
    for request_id, outbox in outboxes.items():
        late = rest(outbox)
        assert sum(map(is_end, late)) <= (request_id in cancelled)
        assert not any(isinstance(message, Failed) for message in late)


def test_a_request_that_fails_is_told_so_and_the_others_go_on(engine: Engine, loop: StepLoop) -> None:
    weights = engine.runner.layers.decoder.weights
    assert weights.embed is not None
    weights.embed[9] = torch.nan
    broken, sound = Outbox(), Outbox()
    loop.add([request(engine, "broken", num_prompt=9)], broken)
    loop.add([request(engine, "sound", num_prompt=4)], sound)

    (failed,) = messages(broken)

    assert isinstance(failed, RequestFailed)
    assert (failed.request_id, type(failed.error)) == ("broken", LogitsNotFinite)
    assert len(messages(sound)) == 5
    loop.close()
    assert rest(broken) == rest(sound) == []


@pytest.mark.parametrize("when", ["before it was added", "after its end"])
def test_cancelling_what_is_not_live_is_harmless(engine: Engine, loop: StepLoop, when: str) -> None:
    outbox: Outbox = SimpleQueue()
    if when == "before it was added":
        loop.cancel(RequestId("a"))
    loop.add([request(engine, "a")], outbox)
    received = messages(outbox)
    loop.cancel(RequestId("a"))
    loop.cancel(RequestId("a"))

    loop.add([request(engine, "b")], outbox)

    assert len(messages(outbox)) == len(received) == 5


def test_a_cancelled_request_gets_no_end_and_leaves_nothing_behind(
    engine: Engine, loop: StepLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepping, may_go_on = threading.Event(), threading.Event()
    step = engine.step

    def held_step() -> StepOutcome:
        stepping.set()
        may_go_on.wait(PATIENCE_S)
        return step()

    monkeypatch.setattr(engine, "step", held_step)
    outbox: Outbox = SimpleQueue()
    loop.add([request(engine, "a", max_tokens=100)], outbox)
    stepping.wait(PATIENCE_S)
    loop.cancel(RequestId("a"))
    may_go_on.set()
    other: Outbox = SimpleQueue()
    loop.add([request(engine, "b")], other)

    assert len(messages(other)) == 5
    loop.close()
    assert rest(outbox) == []
    engine.batcher.check()


class Broken(Exception):
    pass


@pytest.fixture
def broken(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Its third step raises, once the event is set."""
    may_break, step, num_steps = threading.Event(), engine.step, iter(range(1_000_000))

    def break_at_third() -> StepOutcome:
        if next(num_steps) == 2:
            may_break.wait(PATIENCE_S)
            raise Broken("the device is gone")
        return step()

    monkeypatch.setattr(engine, "step", break_at_third)
    return may_break


def test_when_a_step_raises_every_live_request_fails_and_later_ones_too(
    engine: Engine, loop: StepLoop, broken: threading.Event
) -> None:
    live: list[Outbox] = [SimpleQueue() for _ in range(12)]
    for number, outbox in enumerate(live):
        loop.add([request(engine, f"live-{number}", max_tokens=50)], outbox)
    broken.set()
    ends = [messages(outbox)[-1] for outbox in live]
    later: Outbox = SimpleQueue()
    loop.cancel(RequestId("live-0"))
    loop.add([request(engine, "later")], later)
    ends.append(messages(later)[-1])

    assert [end.request_id for end in ends] == [*(f"live-{number}" for number in range(12)), "later"]
    assert all(isinstance(end, Failed) and isinstance(end.cause, Broken) for end in ends)
    loop.close()
    assert [rest(outbox) for outbox in [*live, later]] == [[]] * 13


def test_an_engine_that_is_stuck_fails_its_requests_instead_of_spinning(
    engine: Engine, loop: StepLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.batcher, "plan", lambda max_prompt_tokens, max_lone_tokens: None)
    outbox: Outbox = SimpleQueue()
    loop.add([request(engine, "a")], outbox)

    (end,) = messages(outbox)

    assert isinstance(end, Failed)
    assert "there is work, but nothing to compute" in str(end.cause)


def test_a_load_that_was_called_off_fails_requests_and_is_no_error_to_log(
    engine: Engine, loop: StepLoop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def call_off() -> StepOutcome:
        raise LoadCancelled("the load of `a` was called off")

    monkeypatch.setattr(engine, "step", call_off)
    outbox: Outbox = SimpleQueue()
    loop.add([request(engine, "a")], outbox)

    (end,) = messages(outbox)

    assert isinstance(end, Failed)
    assert isinstance(end.cause, LoadCancelled)
    loop.close()
    assert caplog.records == []


def test_a_broken_loop_closes_and_says_so_to_whoever_comes_after(
    engine: Engine, loop: StepLoop, broken: threading.Event
) -> None:
    broken.set()
    outbox: Outbox = SimpleQueue()
    loop.add([request(engine, "a", max_tokens=50)], outbox)
    messages(outbox)
    loop.close()

    loop.add([request(engine, "b")], outbox)

    assert isinstance(messages(outbox)[-1], Failed)


def test_closing_fails_what_is_live(engine: Engine, loop: StepLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "step", lambda: StepOutcome(StepOutputs(), (), ()))  # never gets anywhere
    outboxes: list[Outbox] = [SimpleQueue() for _ in range(3)]
    for number, outbox in enumerate(outboxes):
        loop.add([request(engine, str(number))], outbox)

    loop.close()

    (ends,) = zip(*(rest(outbox) for outbox in outboxes), strict=True)
    assert all(isinstance(end, Failed) and isinstance(end.cause, EngineFailed) for end in ends)


def test_closing_twice_is_harmless_and_what_comes_after_fails_at_once(engine: Engine, loop: StepLoop) -> None:
    loop.close()
    loop.close()
    outbox: Outbox = SimpleQueue()

    loop.add([request(engine, "late")], outbox)
    loop.cancel(RequestId("late"))

    (end,) = rest(outbox)
    assert isinstance(end, Failed)
    assert str(end.cause) == "it was closed; load the model again"


@pytest.mark.parametrize("attempt", range(10))
def test_requests_that_race_with_the_closing_all_end(engine: Engine, loop: StepLoop, attempt: int) -> None:
    outboxes: list[Outbox] = [SimpleQueue() for _ in range(8)]

    def add_all() -> None:
        for number, outbox in enumerate(outboxes):
            loop.add([request(engine, str(number), max_tokens=1)], outbox)

    adder = threading.Thread(target=add_all)
    adder.start()
    loop.close()
    adder.join()

    assert [len(rest(outbox)) for outbox in outboxes] == [1] * 8


def test_an_idle_loop_waits_for_its_inbox_without_a_timeout(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asleep: SimpleQueue[tuple[bool, float | None]] = SimpleQueue()

    class WatchedQueue(SimpleQueue[object]):
        """Tells with which arguments a thread is about to wait for it."""

        def get(self, block: bool = True, timeout: float | None = None) -> object:
            if self.empty():
                asleep.put((block, timeout))
            return super().get(block, timeout)

    with monkeypatch.context() as patched:
        patched.setattr(loop_module, "SimpleQueue", WatchedQueue)
        loop = StepLoop(lambda: engine)
    assert asleep.get(timeout=PATIENCE_S) == (True, None)
    outbox: Outbox = SimpleQueue()
    loop.add([request(engine, "a")], outbox)
    messages(outbox)

    # Once for a moment, for readers come before the books; then for as long as it takes.
    assert asleep.get(timeout=PATIENCE_S) == (True, loop_module._READERS_S)
    assert asleep.get(timeout=PATIENCE_S) == (True, None)
    assert asleep.empty()
    assert engine.batcher.is_settled
    loop.close()


def test_readers_are_told_before_the_books_are_finished(
    engine: Engine, loop: StepLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_release, release_all = threading.Event(), engine.batcher.blocks.release_all

    def wait_and_release(sequences: Iterable[Sequence[int]]) -> None:
        assert may_release.wait(PATIENCE_S)
        release_all(sequences)

    monkeypatch.setattr(engine.batcher.blocks, "release_all", wait_and_release)
    num_free = len(engine.batcher.blocks.free)
    loop.add([request(engine, "a", num_prompt=9, max_tokens=1)], outbox := Outbox())

    assert len(messages(outbox)) == 1
    assert len(engine.batcher.blocks.free) < num_free
    may_release.set()
    loop.close()
    assert engine.batcher.blocks.num_available == num_free
    engine.batcher.check()


def test_what_building_raises_is_raised_to_whoever_asked_for_the_loop() -> None:
    def build() -> Engine:
        raise DeviceError("no memory")

    with pytest.raises(DeviceError, match="no memory"):
        StepLoop(build)


def test_the_engine_is_built_on_the_thread_that_steps_it() -> None:
    builders: list[str] = []

    def build() -> Engine:
        builders.append(threading.current_thread().name)
        return engine_for("llama-gqa")

    StepLoop(build).close()

    assert builders == ["hearth-step"]

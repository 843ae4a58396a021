"""Stages that are connected by sockets: the tokens of the whole model, and a clear end when one is lost."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue

import pytest
import torch

from hearth.core.errors import DeviceError, ServiceError, StageLost
from hearth.core.types import RequestId
from hearth.engine.assemble import assemble, assemble_runner, step_size
from hearth.engine.engine import Engine
from hearth.engine.pending_step import PendingCopy, StepResult
from hearth.engine.pipeline import BlockMap, LaterStage
from hearth.engine.stage_messages import (
    AdapterAnswer,
    StageAdapterFailed,
    StageAdapterReady,
    StageKvReturn,
    StageMessage,
    StageMoves,
    StageResult,
    StageStep,
    StageWork,
)
from hearth.policy.batch.blocks import BlockBook, BlockMove
from hearth.policy.batch.plan import DecodeRows, StepPlan, TableWrites
from hearth.worker.stage_link import (
    FrameSender,
    HiddenPlaces,
    StageInlet,
    StageLinks,
    StageOutlet,
    result_frame,
)
from tests.engine.harness import ROOMY, ask, engine_for, greedy
from tests.engine.pipeline_rig import CPU, parts_of
from tests.engine.test_elastic import EXTENTS, SINK, elastic_memory

NAME, PROMPTS = "llama-gqa", [[5, 6, 7, 8, 9, 10, 11], [3], list(range(3, 30))]


@dataclass(frozen=True, slots=True)
class TwoStages:
    engine: Engine
    links: StageLinks
    results: socket.socket  #: the last stage's end


@pytest.fixture(params=[True, False], ids=["shared", "sent"])
def stages(request: pytest.FixtureRequest) -> Iterator[TwoStages]:
    first, last = parts_of(NAME, [1], ROOMY)
    runner = assemble_runner(
        *last, ROOMY, elastic_memory(last[0]), step_size(last[0].limits, torch.device("cpu"))
    )
    runner.fill_tables()
    book = BlockBook(ROOMY.block_tokens, floor_blocks=1)
    book.add(range(1, SINK))
    like = runner.layers.decoder.hidden(1)
    size = HiddenPlaces.num_bytes(2, ROOMY.max_batch_tokens or 0, like)
    own, other = (torch.empty(size, dtype=torch.uint8) for _ in range(2))
    near, far = (
        HiddenPlaces.over(memory, 2, like, is_shared=request.param)
        for memory in (own, own if request.param else other)
    )
    (out, into), (results, back) = socket.socketpair(), socket.socketpair()
    links = StageLinks("p0", [0, 1], StageOutlet(out, near, "p0"), results)
    inlet, stage = (
        StageInlet(into, far, "p0"),
        LaterStage(runner, None, BlockMap(book)),
    )

    def serve() -> None:
        while (got := inlet.receive()) is not None:
            message, hidden = got
            assert isinstance(message, StageWork)
            if isinstance(message, StageStep) and hidden is None:
                stage.prepare(message)
                continue
            pending = stage.take(message, hidden)
            if pending is not None and isinstance(message, StageStep):
                result = StageResult("p0", message.plan.step_id, pending.wait())
                with suppress(OSError):  # it was shut by the test
                    back.sendall(result_frame(result))

    thread = threading.Thread(target=serve)
    thread.start()
    engine = assemble(*first, ROOMY, CPU, elastic_memory(first[0]), later=links)
    engine.runner.fill_tables()
    for extent in EXTENTS:
        engine.add_blocks(extent)
    yield TwoStages(engine, links, back)
    links.close()
    thread.join()
    inlet.end()
    back.close()


def test_stages_over_sockets_say_what_the_whole_model_says(stages: TwoStages) -> None:
    for _ in range(2):
        assert ask(stages.engine, PROMPTS, greedy()) == ask(engine_for(NAME), PROMPTS, greedy())


def test_a_lost_stage_ends_the_pipeline(stages: TwoStages) -> None:
    stages.results.shutdown(socket.SHUT_RDWR)
    with pytest.raises(DeviceError, match="a stage of pipeline p0 was lost"):
        ask(stages.engine, PROMPTS, greedy())


def test_steps_that_arrive_twice_run_once(stages: TwoStages, monkeypatch: pytest.MonkeyPatch) -> None:
    send, num_steps = stages.links.send, 0

    def send_twice(message: StageMessage, hidden: PendingCopy | None = None) -> None:
        nonlocal num_steps
        send(message, hidden)
        if isinstance(message, StageStep):
            num_steps += 1
            send(message, hidden)

    monkeypatch.setattr(stages.links, "send", send_twice)
    assert ask(stages.engine, PROMPTS, greedy()) == ask(engine_for(NAME), PROMPTS, greedy())
    assert num_steps > 0
    assert stages.links.num_dropped == 0, "no step gave two results"


def test_results_of_another_pipeline_are_dropped_and_counted(stages: TwoStages) -> None:
    stages.results.sendall(result_frame(StageResult("p9", 0, StepResult([1], None, []))))
    assert ask(stages.engine, PROMPTS, greedy()) == ask(engine_for(NAME), PROMPTS, greedy())
    assert stages.links.num_dropped == 1


def test_answers_about_adapters_come_beside_results() -> None:
    """Those of another pipeline are dropped and counted."""
    told: SimpleQueue[AdapterAnswer] = SimpleQueue()
    (near, far), (out, into) = socket.socketpair(), socket.socketpair()
    outlet = StageOutlet(out, HiddenPlaces(torch.empty(1, 4, 8), is_shared=True), "p0")
    links = StageLinks("p0", [0], outlet, near, told=told.put)
    answers = StageAdapterReady("p0", 7), StageAdapterFailed("p0", 8, "device", "no room")
    for answer in (StageAdapterReady("p9", 7), *answers):
        far.sendall(result_frame(answer))
    assert (told.get(), told.get()) == answers
    assert (links.num_dropped, links.result(waits=False)) == (1, None)

    links.check()
    far.close()
    with pytest.raises(StageLost, match="a stage of pipeline p0 was lost"):
        links.result(waits=True)
    with pytest.raises(StageLost, match="a stage of pipeline p0 was lost"):
        links.check()
    links.close()
    into.close()


def test_messages_of_another_pipeline_are_dropped_and_counted() -> None:
    near, far = socket.socketpair()
    places = HiddenPlaces(torch.empty(1, 4, 8), is_shared=False)
    outlet, inlet = StageOutlet(near, places, "p0"), StageInlet(far, places, "p0")
    for pipeline in ("p9", "p0"):
        outlet.send(StageMoves(pipeline, ()))
    assert inlet.receive() == (StageMoves("p0", ()), None)
    assert inlet.num_dropped == 1
    outlet.close()
    inlet.end()


def test_a_stage_that_reads_nothing_does_not_hold_up_the_one_before() -> None:
    """It may hang: other models of the sender's worker go on until it is killed."""
    near, far = socket.socketpair()
    places = HiddenPlaces(torch.empty(1, 4, 8), is_shared=True)
    outlet, inlet = StageOutlet(near, places, "p0"), StageInlet(far, places, "p0")
    moves = [StageMoves("p0", (BlockMove(number, 1),) * 100_000) for number in range(3)]
    sending = threading.Thread(target=lambda: [outlet.send(message) for message in moves], daemon=True)
    sending.start()
    sending.join(60.0)
    assert not sending.is_alive(), "it waits for the reader"
    assert [inlet.receive() for _ in moves] == [(message, None) for message in moves]
    outlet.close()
    inlet.end()


@pytest.mark.parametrize("is_shared", [True, False], ids=["shared", "sent"])
def test_a_step_of_another_pipeline_takes_no_place(is_shared: bool) -> None:
    near, far = socket.socketpair()
    memory = torch.empty(2, 1, 8)
    outlet = StageOutlet(near, HiddenPlaces(memory, is_shared), "p0")
    inlet = StageInlet(far, HiddenPlaces(memory if is_shared else memory.clone(), is_shared), "p0")
    received = []
    for number, pipeline in enumerate(("p0", "p9", "p0")):
        hidden = torch.full((1, 8), float(number))
        place = outlet.place(1) if pipeline == "p0" else torch.empty(1, 8)
        outlet.send(StageStep(pipeline, step_of_one_row(number)), PendingCopy(hidden, place))
        if pipeline == "p0":
            received += [inlet.receive(), inlet.receive()]  # announced, and with its hidden states
    assert [int(got[1][0, 0]) for got in received if got is not None and got[1] is not None] == [0, 2]
    assert inlet.num_dropped == 1
    outlet.close()
    inlet.end()


@pytest.mark.parametrize("is_shared", [True, False], ids=["shared", "sent"])
def test_a_repeated_step_is_dropped_and_takes_no_place(is_shared: bool) -> None:
    near, far = socket.socketpair()
    memory = torch.empty(2, 1, 8)
    outlet = StageOutlet(near, HiddenPlaces(memory, is_shared), "p0")
    inlet = StageInlet(far, HiddenPlaces(memory if is_shared else memory.clone(), is_shared), "p0")
    received = []
    for number, is_new in ((4, True), (4, False), (3, False), (7, True)):
        place = outlet.place(1) if is_new else torch.empty(1, 8)
        hidden = PendingCopy(torch.full((1, 8), float(number if is_new else -1)), place)
        outlet.send(StageStep("p0", step_of_one_row(number)), hidden)
        if is_new:
            received += [inlet.receive(), inlet.receive()]  # announced, and with its hidden states
    assert [int(got[1][0, 0]) for got in received if got is not None and got[1] is not None] == [4, 7]
    assert inlet.num_dropped == 2
    outlet.close()
    inlet.end()


def test_a_message_between_the_two_frames_of_a_step_does_not_repeat_it() -> None:
    near, far = socket.socketpair()
    memory = torch.empty(1, 1, 8)
    outlet = StageOutlet(near, HiddenPlaces(memory, is_shared=True), "p0")
    inlet = StageInlet(far, HiddenPlaces(memory, is_shared=True), "p0")
    step, other = StageStep("p0", step_of_one_row(4)), StageKvReturn("p0", 7, is_promised=True)
    hidden = PendingCopy(torch.ones(1, 8), outlet.place(1))
    outlet.announce(step)
    outlet.send(other)
    outlet.send(step, hidden)
    outlet.send(other)
    received = [inlet.receive() for _ in range(4)]
    kinds = [StageStep, StageKvReturn, StageStep, StageKvReturn]
    assert [None if got is None else type(got[0]) for got in received] == kinds
    assert inlet.num_dropped == 0
    outlet.close()
    inlet.end()


def test_a_repeated_result_is_dropped() -> None:
    (near, far), (out, into) = socket.socketpair(), socket.socketpair()
    outlet = StageOutlet(out, HiddenPlaces(torch.empty(1, 4, 8), is_shared=True), "p0")
    links = StageLinks("p0", [0], outlet, near)
    for number in (0, 0, 1, 0, 1, 3):
        far.sendall(result_frame(StageResult("p0", number, StepResult([number], None, []))))
    found = [links.result(waits=True) for _ in range(3)]
    assert [one.number for one in found if one is not None] == [0, 1, 3]
    assert (links.num_dropped, links.result(waits=False)) == (3, None)
    links.close()
    far.close()
    into.close()


def test_hidden_states_that_are_missing_are_noticed() -> None:
    near, far = socket.socketpair()
    memory = torch.empty(1, 4, 8)
    outlet = StageOutlet(near, HiddenPlaces(memory, is_shared=True), "p0")
    inlet = StageInlet(far, HiddenPlaces(memory.clone(), is_shared=False), "p0")
    step = StageStep("p0", step_of_one_row(0))
    outlet.send(step, PendingCopy(torch.ones(1, 8), outlet.place(1)))
    assert inlet.receive() is not None, "it is announced"
    with pytest.raises(ServiceError, match="expected on the socket, 0 bytes came"):
        inlet.receive()
    outlet.close()
    inlet.end()


def test_a_frame_beyond_the_limit_is_refused() -> None:
    near, far = socket.socketpair()
    inlet = StageInlet(far, HiddenPlaces(torch.empty(1, 4, 8), is_shared=False), "p0")
    near.sendall(b"\xff" * 8)
    with pytest.raises(ServiceError, match="limits: 67108864 and 1073741824"):
        inlet.receive()
    near.close()
    assert inlet.receive() is None
    inlet.end()


def test_a_descriptor_stays_open_while_the_thread_that_receives_uses_it() -> None:
    """Else its number could be that of another connection, whose bytes the thread would take."""
    near, far = socket.socketpair()
    inlet = StageInlet(far, HiddenPlaces(torch.empty(1, 4, 8), is_shared=False), "p0")
    inlet.close()
    assert far.fileno() >= 0
    assert inlet.receive() is None
    inlet.end()
    assert far.fileno() < 0
    near.close()


def test_a_descriptor_stays_open_while_the_thread_that_takes_results_uses_it() -> None:
    is_told, may_go_on, has_ended = threading.Event(), threading.Event(), threading.Event()
    (near, far), (out, into) = socket.socketpair(), socket.socketpair()
    outlet = StageOutlet(out, HiddenPlaces(torch.empty(1, 4, 8), is_shared=True), "p0")

    def told(answer: object) -> None:
        is_told.set()
        may_go_on.wait()

    links = StageLinks("p0", [0], outlet, near, arrived=has_ended.set, told=told)
    far.sendall(result_frame(StageAdapterReady("p0", 7)))
    assert is_told.wait(60.0)
    links.close()
    assert near.fileno() >= 0
    may_go_on.set()
    assert has_ended.wait(60.0)
    assert near.fileno() < 0
    far.close()
    into.close()


def test_a_descriptor_stays_open_while_a_thread_sends() -> None:
    is_sending, may_go_on, has_ended = threading.Event(), threading.Event(), threading.Event()
    near, far = socket.socketpair()
    sender = FrameSender(near, "p0", has_ended.set)

    def send() -> None:
        is_sending.set()
        may_go_on.wait()

    sender.send_later(send)
    assert is_sending.wait(60.0)
    sender.close()
    assert near.fileno() >= 0
    may_go_on.set()
    assert has_ended.wait(60.0)
    assert near.fileno() < 0
    far.close()


def step_of_one_row(number: int) -> StepPlan:
    return StepPlan(number, (), TableWrites(), DecodeRows([RequestId("r")], [0], [0]), ())

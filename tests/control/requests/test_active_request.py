"""Requests as they go to workers, lose them and end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from hearth.control.requests.active_request import ActiveRequest, ActiveRequests
from hearth.control.requests.generation import AnswerStream
from hearth.core.types import ModelId, RequestId, SamplingParams, WorkerId, pipeline_name
from hearth.text.tokenizer import Tokenizer
from hearth.text.transcript import Transcript

A, B = ModelId("a"), ModelId("b")
W0, W1 = WorkerId("w0"), WorkerId("w1")


@pytest.fixture
def tokenizer(converted: Path) -> Tokenizer:
    return Tokenizer.load(converted)


def request_of(tokenizer: Tokenizer, name: str, model: ModelId = A) -> ActiveRequest:
    request_id, params = RequestId(name), SamplingParams()
    return ActiveRequest(
        request_id=request_id,
        model=model,
        prompt=(1,),
        sampling=params,
        salt=b"",
        guide=None,
        stream=AnswerStream(request_id, model, tokenizer, 1, lambda: None),
        transcript=Transcript(tokenizer, params, (1,)),
    )


def added(tokenizer: Tokenizer, *models: ModelId) -> tuple[ActiveRequests, list[ActiveRequest]]:
    requests = ActiveRequests()
    made = [request_of(tokenizer, f"r{number}", model) for number, model in enumerate(models)]
    for request in made:
        requests.add(request)
    return requests, made


def test_a_run_has_a_number_of_its_own_and_a_request_one_run_at_a_time(tokenizer: Tokenizer) -> None:
    requests, (request,) = added(tokenizer, A)
    first = requests.start_run(request, W0, request.model)
    second = requests.start_run(request, W1, request.model)
    assert first != second
    assert (requests.by_run, request.run, request.worker) == ({second: request}, second, W1)


def test_a_lost_worker_has_no_runs_and_a_broken_model_only_its_own(tokenizer: Tokenizer) -> None:
    requests, (mine, other, elsewhere) = added(tokenizer, A, B, A)
    for request, worker in ((mine, W0), (other, W0), (elsewhere, W1)):
        requests.start_run(request, worker, request.model)
    requests.detach(W0, A)
    assert list(requests.by_run.values()) == [other, elsewhere]
    assert (mine.run, mine.worker) == (None, None)
    requests.detach(W0)
    assert list(requests.by_run.values()) == [elsewhere]
    assert len(requests.by_id) == 3, "they go on elsewhere"


def test_requests_on_stages_beside_the_whole_model_leave_only_with_these(tokenizer: Tokenizer) -> None:
    requests, (whole, staged) = added(tokenizer, A, A)
    requests.start_run(whole, W0, A)
    requests.start_run(staged, W0, pipeline_name(A, 1))
    requests.detach(W0, A)
    assert list(requests.by_run.values()) == [staged]
    requests.detach(W0, pipeline_name(A, 1))
    assert not requests.by_run


def test_a_request_ends_once_and_waiting_is_over_with_the_last(tokenizer: Tokenizer) -> None:
    async def scene() -> None:
        requests, (one, other) = added(tokenizer, A, A)
        requests.start_run(one, W0, one.model)
        waiting = asyncio.create_task(requests.wait_empty())
        assert requests.end(one)
        assert not requests.end(one)
        assert requests.by_run == {}
        await asyncio.sleep(0)
        assert not waiting.done()
        requests.end(other)
        await waiting

    asyncio.run(scene())


def test_cached_tokens_are_those_of_the_first_admission_on_the_first_worker(tokenizer: Tokenizer) -> None:
    requests, (admitted, lost) = added(tokenizer, A, A)
    for request in (admitted, lost):
        requests.start_run(request, W0, request.model)
    admitted.admitted(0.0, 3)
    admitted.admitted(0.0, 9)  # after a preemption
    requests.detach(W0)
    for request in (admitted, lost):
        requests.start_run(request, W1, request.model)
        request.admitted(0.0, 5)
    assert (admitted.stream.num_cached_tokens, lost.stream.num_cached_tokens) == (3, 0)

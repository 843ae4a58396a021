"""Embeddings in OpenAI's format, over a gateway with a script."""

from __future__ import annotations

import base64
from array import array

import httpx
import pytest

from hearth.api import answer as answer_module
from hearth.api.openai.embedding import MAX_INPUTS
from hearth.control.requests.generation import AnswerStream
from hearth.core.errors import LogitsNotFinite
from hearth.core.types import FinishReason, Pooling, PromptReading
from tests.api.conftest import request
from tests.api.fake import FakeGateway


def vector(number: int) -> list[float]:
    return [float(number), 0.5, -0.25]


@pytest.fixture(autouse=True)
def _embeds(gateway: FakeGateway) -> None:
    """Have each request answered by a vector that begins with its number."""

    def script(stream: AnswerStream) -> None:
        numbers = vector(len(gateway.streams) - 1)
        stream.reading = PromptReading(embedding=array("f", numbers).tobytes())
        stream.end(FinishReason.STOP)

    gateway.script = script


def embed(gateway: FakeGateway, **fields: object) -> httpx.Response:
    return request(gateway, "POST", "/v1/embeddings", {"model": "tiny", "input": "Hi"} | fields)


def test_an_embedding_has_the_shape_of_openais(gateway: FakeGateway) -> None:
    response = embed(gateway, user="me", seed=3)

    assert response.json() == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": vector(0)}],
        "model": "tiny",
        "usage": {"prompt_tokens": 5, "total_tokens": 5},
    }
    assert response.headers["x-hearth-ignored-fields"] == "seed"
    (asked,) = gateway.requests
    assert (asked.prompt, asked.sampling.max_tokens, asked.pooling) == ("Hi", 0, Pooling.LAST)


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        (["Hi", "Ho"], ["Hi", "Ho"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_an_input_is_text_or_tokens_or_several(gateway: FakeGateway, given: object, asked: object) -> None:
    answer = embed(gateway, input=given, pooling="mean", encoding_format="base64", service_tier="flex").json()

    assert [one.prompt for one in gateway.requests] == asked
    assert {(one.pooling, one.is_batch) for one in gateway.requests} == {(Pooling.MEAN, True)}
    for index, one in enumerate(answer["data"]):
        assert one["index"] == index
        assert array("f", base64.b64decode(one["embedding"])).tolist() == vector(index)
    assert answer["usage"]["prompt_tokens"] == 5 * len(gateway.requests)


def test_more_inputs_than_may_be_on_their_way_are_answered_in_their_order(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_module, "MAX_STARTED", 3)
    monkeypatch.setattr(answer_module, "MANY_BYTES", 10)  # and are spelt on another thread
    answered = gateway.script
    waiting: list[AnswerStream] = []

    def script(stream: AnswerStream) -> None:
        """Three wait for each other."""
        answered(stream)
        stream.finish_reason, stream.is_ended = None, False
        waiting.append(stream)
        assert len([one for one in waiting if one.finish_reason is None]) <= 3
        if len(waiting) in (3, 6, 7):
            for one in waiting:
                one.end(FinishReason.STOP)

    gateway.script = script
    answer = embed(gateway, input=["Hi"] * 7).json()
    assert [one["embedding"][0] for one in answer["data"]] == list(range(7))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dimensions": 256}, "`dimensions` is not supported and would change the answer; leave it out"),
        ({"encoding_format": "int8"}, "`encoding_format`: input should be 'float' or 'base64'"),
        ({"pooling": "max"}, "`pooling`: input should be 'last' or 'mean'"),
        ({"input": []}, "`input"),
        ({"input": [[]]}, "`input"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, f"at most {MAX_INPUTS} items"),
        ({"stream": True}, "leave it out: embeddings are not streamed"),
        ({"normalize": False}, "`normalize` is not supported"),
        ({"truncate_prompt_tokens": 5}, "shorten the input"),
        ({"keep_alive": "nonsense"}, "`keep_alive`"),
    ],
)
def test_what_makes_no_sense_is_refused(
    gateway: FakeGateway, fields: dict[str, object], message: str
) -> None:
    response = embed(gateway, **fields)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
    assert gateway.streams == []


def test_one_input_that_fails_fails_the_answer_and_ends_the_others(gateway: FakeGateway) -> None:
    answered = gateway.script

    def script(stream: AnswerStream) -> None:
        if len(gateway.streams) == 2:
            stream.fail(LogitsNotFinite("NaN"))
        elif len(gateway.streams) == 1:
            answered(stream)

    gateway.script = script
    response = embed(gateway, input=["a", "b", "c"])
    assert response.status_code == 500
    assert gateway.cancelled == ["r2"]

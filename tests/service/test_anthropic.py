"""Anthropic's client against SmolLM2 and a tiny model: what is asked for is what comes back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.service.harness import PATIENCE_S, Service

if TYPE_CHECKING:
    import anthropic
    from anthropic.types import MessageParam, ToolParam

pytestmark = pytest.mark.e2e

MODEL = "smollm2"
TINY = "tiny-a"  #: knows nothing, and answers in milliseconds where answers are only compared
GREEDY = {"temperature": 0}
QUESTION: list[MessageParam] = [
    {"role": "user", "content": "What is the capital of France? Answer in one word."}
]
WEATHER: ToolParam = {
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def client(service: Service) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(
        base_url=service.url, api_key="none", max_retries=0, timeout=PATIENCE_S
    ) as client:
        yield client


@pytest.mark.client("anthropic", "messages")
def test_a_message_answers_a_question_that_the_model_knows(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(
        model=MODEL, max_tokens=12, messages=QUESTION, system="You are brief.", extra_body=GREEDY
    )

    (block,) = answer.content
    assert block.type == "text"
    assert "Paris" in block.text
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert 0 < answer.usage.output_tokens <= 12
    assert answer.usage.input_tokens > 0


@pytest.mark.client("anthropic", "messages, streamed")
def test_a_streamed_message_is_the_same_text_in_pieces(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(model=TINY, max_tokens=8, messages=QUESTION, extra_body=GREEDY)
    with client.messages.stream(model=TINY, max_tokens=8, messages=QUESTION, extra_body=GREEDY) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()

    assert len(pieces) > 2
    assert [block.text for block in whole.content if block.type == "text"] == ["".join(pieces)]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


@pytest.mark.client("anthropic", "`stop_sequences`")
def test_the_stop_sequence_that_ended_an_answer_is_named(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(model=TINY, max_tokens=12, messages=QUESTION, extra_body=GREEDY)
    (block,) = whole.content
    assert block.type == "text"
    stop = block.text[2:5]
    cut = client.messages.create(
        model=TINY, max_tokens=12, messages=QUESTION, stop_sequences=["zzz", stop], extra_body=GREEDY
    )

    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)


@pytest.mark.client("anthropic", "a tool that must be called, and its result")
def test_a_tool_is_called_and_its_result_sent_back(client: anthropic.Anthropic) -> None:
    asked: list[MessageParam] = [{"role": "user", "content": "How is the weather in Rome?"}]
    answer = client.messages.create(
        model="hermes",
        max_tokens=80,
        messages=asked,
        tools=[WEATHER],
        tool_choice={"type": "tool", "name": "get_weather"},
        extra_body=GREEDY,
    )

    (call,) = answer.content
    assert call.type == "tool_use"
    assert (answer.stop_reason, call.name, list(call.input)) == ("tool_use", "get_weather", ["city"])  # type: ignore[call-overload] # an object
    told = client.messages.create(
        model="hermes",
        max_tokens=4,
        messages=[
            *asked,
            {"role": "assistant", "content": answer.content},
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": call.id,
                        "content": "no such city",
                        "is_error": True,
                    }
                ],
            },
        ],
        tools=[WEATHER],
    )
    assert told.usage.output_tokens > 0


@pytest.mark.client("anthropic", "tool call, streamed")
def test_a_streamed_call_is_put_together_by_the_client(client: anthropic.Anthropic) -> None:
    with client.messages.stream(
        model="hermes",
        max_tokens=80,
        messages=[{"role": "user", "content": "How is the weather in Rome?"}],
        tools=[WEATHER],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        extra_body=GREEDY,
    ) as stream:
        final = stream.get_final_message()

    (call,) = final.content
    assert call.type == "tool_use"
    assert (final.stop_reason, list(call.input)) == ("tool_use", ["city"])  # type: ignore[call-overload] # an object


@pytest.mark.client("anthropic", "`count_tokens`")
def test_tokens_are_counted_as_the_answer_counts_them(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model=TINY, messages=QUESTION, system="You are brief.")
    answer = client.messages.create(model=TINY, max_tokens=1, messages=QUESTION, system="You are brief.")

    cached = answer.usage.cache_read_input_tokens or 0
    assert counted.input_tokens == answer.usage.input_tokens + cached


@pytest.mark.client("anthropic", "models")
def test_models_are_listed_with_their_aliases(client: anthropic.Anthropic) -> None:
    assert {"smollm2", "tiny-a", "little"} <= {model.id for model in client.models.list()}
    assert client.models.retrieve("little").display_name == "little"


@pytest.mark.client(
    "anthropic", "images", refused="only blocks of type `text`, `tool_use` and `tool_result` are supported"
)
def test_what_cannot_be_read_is_refused(client: anthropic.Anthropic, refusal: str) -> None:
    import anthropic

    with pytest.raises(anthropic.BadRequestError, match=refusal):
        client.messages.create(
            model=MODEL,
            max_tokens=1,
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": {"type": "url", "url": "http://localhost/x.png"}}
                    ],
                }
            ],
        )


def test_errors_are_those_of_the_client(client: anthropic.Anthropic) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError, match="no model named `absent`"):
        client.messages.create(model="absent", max_tokens=1, messages=QUESTION)
    with pytest.raises(
        anthropic.BadRequestError, match="`max_tokens`: input should be greater than or equal"
    ):
        client.messages.create(model=MODEL, max_tokens=0, messages=QUESTION)

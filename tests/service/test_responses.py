"""The official client's responses against SmolLM2: whole, streamed, structured, with tools, and continued."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Literal

import openai
import pytest
from openai.types.responses import FunctionToolParam, ResponseFunctionToolCall, ResponseInputItemParam
from pydantic import BaseModel, Field

from tests.service.harness import Service

pytestmark = pytest.mark.e2e

MODEL = "smollm2"
QUESTION = "What is the capital of France? Answer in one word."
WEATHER: FunctionToolParam = {
    "type": "function",
    "name": "get_weather",
    "description": "Asks for the weather.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "London", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


class Drink(BaseModel):
    kind: Literal["tea", "coffee"]
    num_cups: int = Field(ge=0, le=9)


@pytest.fixture
def client(service: Service) -> Iterable[openai.OpenAI]:
    with service.client(is_strict=True) as client:
        yield client


@pytest.mark.client("openai", "responses")
def test_a_response_says_what_chat_says(client: openai.OpenAI, service: Service) -> None:
    response = client.responses.create(
        model=MODEL, instructions="Be brief.", input=QUESTION, temperature=0, max_output_tokens=64
    )
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}],
        temperature=0,
        max_completion_tokens=64,
    )
    assert response.status == "completed"
    assert response.output_text == chat.choices[0].message.content
    assert response.usage is not None
    assert chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == chat.usage.completion_tokens
    assert service.explain(response.id)["model"] == MODEL


@pytest.mark.client("openai", "responses, streamed")
def test_a_stream_ends_with_the_same_response(client: openai.OpenAI) -> None:
    whole = client.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=64)
    with client.responses.stream(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=64) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        streamed = stream.get_final_response()
    assert len(texts) > 1
    assert "".join(texts) == streamed.output_text == whole.output_text
    assert streamed.usage is not None
    assert whole.usage is not None
    assert streamed.usage.output_tokens == whole.usage.output_tokens


@pytest.mark.client("openai", "responses, `max_output_tokens`")
def test_an_answer_at_its_limit_is_incomplete(client: openai.OpenAI) -> None:
    response = client.responses.create(model="tiny-a", input="Hi", max_output_tokens=2)
    *_, last = client.responses.create(model="tiny-a", input="Hi", max_output_tokens=2, stream=True)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert last.type == "response.incomplete"


@pytest.mark.client("openai", "responses, `parse`, also streamed")
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_type_is_parsed(client: openai.OpenAI, is_stream: bool) -> None:
    if is_stream:
        with client.responses.stream(
            model="tiny-a", input="Tea, two cups.", text_format=Drink, temperature=0
        ) as stream:
            drink = stream.get_final_response().output_parsed
    else:
        drink = client.responses.parse(
            model="tiny-a", input="Tea, two cups.", text_format=Drink, temperature=0
        ).output_parsed
    assert isinstance(drink, Drink)


@pytest.mark.client("openai", "responses, tools, `store` and `previous_response_id`")
def test_the_result_of_a_tool_continues_a_stored_response(client: openai.OpenAI) -> None:
    asked = client.responses.create(
        model="hermes",
        input="What is the weather in Paris?",
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_output_tokens=32,
        store=True,
    )
    (call,) = asked.output
    assert isinstance(call, ResponseFunctionToolCall)
    assert json.loads(call.arguments)["city"] in ("Paris", "London", "Rome")
    result: ResponseInputItemParam = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": "sunny, 24 degrees",
    }
    answer = client.responses.create(
        model="hermes",
        input=[result],
        previous_response_id=asked.id,
        tools=[WEATHER],
        temperature=0,
        max_output_tokens=4,
    )
    # The same without anything stored: all items are sent back as they came.
    history: list[ResponseInputItemParam] = [
        {"role": "user", "content": "What is the weather in Paris?"},
        call.to_dict(),  # type: ignore[list-item]  # as the guide of OpenAI does
        result,
    ]
    again = client.responses.create(
        model="hermes", input=history, tools=[WEATHER], temperature=0, max_output_tokens=4
    )
    assert again.output_text == answer.output_text
    assert client.responses.retrieve(asked.id) == asked
    client.responses.delete(asked.id)
    with pytest.raises(openai.NotFoundError, match="no stored response"):
        client.responses.create(model=MODEL, input="Hi", previous_response_id=asked.id)

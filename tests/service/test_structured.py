"""The official client asks for JSON and for calls of tools, and gets what parses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

import openai
import pytest
from openai.types.chat import (
    ChatCompletionMessageFunctionToolCall,
    ChatCompletionMessageParam,
    ChatCompletionToolParam,
)
from openai.types.shared_params import ResponseFormatJSONSchema

from tests.service.harness import Service

pytestmark = pytest.mark.e2e

PERSON: ResponseFormatJSONSchema = {
    "type": "json_schema",
    "json_schema": {
        "name": "person",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 12},
                "age": {"type": "integer", "minimum": 0, "maximum": 120},
                "likes": {"type": "array", "items": {"enum": ["tea", "coffee"]}, "maxItems": 2},
            },
            "required": ["name", "age", "likes"],
            "additionalProperties": False,
        },
    },
}


def tool(name: str, argument: str, values: list[str]) -> ChatCompletionToolParam:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Asks for {argument}.",
            "parameters": {
                "type": "object",
                "properties": {argument: {"type": "string", "enum": values}},
                "required": [argument],
                "additionalProperties": False,
            },
        },
    }


WEATHER = tool("get_weather", "city", ["Paris", "London", "Rome"])
CLOCK = tool("get_time", "zone", ["UTC", "CET"])
QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture
def client(service: Service) -> Iterable[openai.OpenAI]:
    with service.client(is_strict=True) as client:
        yield client


@pytest.mark.client("openai", "`response_format` with a JSON schema")
@pytest.mark.parametrize("model", ["smollm2", "tiny-a"])
def test_an_answer_held_to_a_schema_follows_it(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Describe a person as JSON."}],
        response_format=PERSON,
        temperature=0,
        max_completion_tokens=80,
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    person = json.loads(choice.message.content or "")
    assert set(person) == {"name", "age", "likes"}
    assert len(person["name"]) <= 12
    assert 0 <= person["age"] <= 120
    assert set(person["likes"]) <= {"tea", "coffee"}


@pytest.mark.client("openai", "`response_format` of JSON mode")
def test_an_answer_in_json_mode_is_an_object_as_far_as_it_goes(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": 'Repeat exactly: {"a": 1}'}],
        response_format={"type": "json_object"},
        temperature=0,
        max_completion_tokens=40,
    )
    choice = answer.choices[0]
    text = choice.message.content or ""
    assert text.lstrip().startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_schema_that_cannot_be_followed_to_the_end_is_an_error(
    client: openai.OpenAI, is_stream: bool
) -> None:
    kinds = [{"type": "object", "properties": {f"k{i}_{j}": {} for j in range(3)}} for i in range(200)]

    def ask() -> None:
        answer = client.chat.completions.create(
            model="tiny-a",
            messages=QUESTION,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"anyOf": kinds}},
            },
            temperature=0,  # by chance it may write `{}` in one token, which follows the schema
            stream=is_stream,
        )
        list(answer)

    with pytest.raises(openai.APIError, match="cannot be followed beyond token") as caught:
        ask()
    assert caught.value.code == "guide_stuck"
    assert isinstance(caught.value, openai.BadRequestError) != is_stream


def test_a_schema_that_means_nothing_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(
            model="tiny-a",
            messages=QUESTION,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "no such type"}},
            },
            max_completion_tokens=4,
        )


@pytest.mark.client("openai", "`tool_choice` `required`")
def test_a_required_tool_is_called_with_arguments_of_its_schema(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="hermes",
        messages=QUESTION,
        tools=[WEATHER, CLOCK],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_completion_tokens=48,
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    call = choice.message.tool_calls[0]
    assert isinstance(call, ChatCompletionMessageFunctionToolCall)
    arguments = json.loads(call.function.arguments)
    assert (call.function.name, *arguments) in {("get_weather", "city"), ("get_time", "zone")}


@pytest.mark.client("openai", "`tool_choice` of a named tool")
def test_a_named_tool_is_the_one_that_is_called(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="hermes",
        messages=QUESTION,
        tools=[WEATHER, CLOCK],
        tool_choice={"type": "function", "function": {"name": "get_time"}},
        temperature=0,
        max_completion_tokens=48,
    )
    assert answer.choices[0].message.tool_calls
    call = answer.choices[0].message.tool_calls[0]
    assert isinstance(call, ChatCompletionMessageFunctionToolCall)
    assert call.function.name == "get_time"
    assert json.loads(call.function.arguments)["zone"] in ("UTC", "CET")


@pytest.mark.client("openai", "tool call, streamed")
def test_a_streamed_tool_call_is_put_together_from_its_pieces(client: openai.OpenAI) -> None:
    chunks = client.chat.completions.create(
        model="hermes",
        messages=QUESTION,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_completion_tokens=48,
        stream=True,
    )
    name, arguments, reasons = "", "", []
    for chunk in chunks:
        choice = chunk.choices[0]
        reasons.append(choice.finish_reason)
        for call in choice.delta.tool_calls or []:
            assert call.function is not None
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    assert name == "get_weather"
    assert json.loads(arguments)["city"] in ("Paris", "London", "Rome")
    assert reasons[-1] == "tool_calls"


@pytest.mark.client("openai", "a tool's result sent back")
def test_the_result_of_a_tool_can_be_sent_back(client: openai.OpenAI) -> None:
    asked = client.chat.completions.create(
        model="hermes",
        messages=QUESTION,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_completion_tokens=48,
    )
    calls = asked.choices[0].message.tool_calls
    assert calls
    history: list[ChatCompletionMessageParam] = [
        *QUESTION,
        asked.choices[0].message.model_dump(exclude_none=True),  # type: ignore[list-item]  # as the guide of OpenAI does
        {"role": "tool", "tool_call_id": calls[0].id, "content": "sunny, 24 degrees"},
    ]
    answer = client.chat.completions.create(
        model="hermes", messages=history, tools=[WEATHER], temperature=0, max_completion_tokens=8
    )
    assert answer.choices[0].message.content or answer.choices[0].message.tool_calls


@pytest.mark.client("openai", "tool call of a model whose template knows no tools, streamed")
def test_a_model_whose_template_knows_no_tools_calls_one_and_gets_the_result(client: openai.OpenAI) -> None:
    chunks = client.chat.completions.create(
        model="tiny-a",
        messages=QUESTION,
        tools=[WEATHER, CLOCK],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        temperature=0,
        max_completion_tokens=40,
        stream=True,
    )
    (call,) = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert call.function is not None
    assert call.function.name == "get_weather"
    assert call.function.arguments is not None
    assert json.loads(call.function.arguments)["city"] in ("Paris", "London", "Rome")

    answer = client.chat.completions.create(
        model="tiny-a",
        messages=[
            *QUESTION,
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "get_weather", "arguments": call.function.arguments},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "sunny, 24 degrees"},
        ],
        temperature=0,
        max_completion_tokens=8,
    )
    assert answer.choices[0].message.content


@pytest.mark.client("openai", "`structured_outputs` and `guided_...` of vLLM")
def test_guides_of_vllm_hold_the_output(client: openai.OpenAI) -> None:
    def said(**fields: object) -> str:
        answer = client.chat.completions.create(
            model="tiny-a", messages=QUESTION, temperature=0, max_completion_tokens=24, extra_body=fields
        )
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0].message.content or ""

    assert said(guided_choice=["sun", "rain"]) in ("sun", "rain")
    assert re.fullmatch("[A-Z]{3}-[0-9]{2}", said(structured_outputs={"regex": "[A-Z]{3}-[0-9]{2}"}))
    assert re.fullmatch("(ab){1,3}", said(guided_grammar='root ::= "ab" | "abab" | "ababab"'))
    assert json.loads(said(guided_json={"enum": [{"a": 1}, {"b": 2}]})) in ({"a": 1}, {"b": 2})


def test_text_that_spells_a_special_token_arrives_whole(client: openai.OpenAI) -> None:
    text = "yes<|im_end|>no"
    answer = client.chat.completions.create(
        model="smollm2",
        messages=QUESTION,
        max_completion_tokens=80,
        tools=[tool("say", "words", [text])],
        tool_choice="required",
    )
    (call,) = answer.choices[0].message.tool_calls or []
    stream = client.chat.completions.create(
        model="smollm2",
        messages=QUESTION,
        max_completion_tokens=80,
        stream=True,
        extra_body={"guided_choice": [text]},
    )
    choices = [chunk.choices[0] for chunk in stream]

    assert isinstance(call, ChatCompletionMessageFunctionToolCall)
    assert json.loads(call.function.arguments) == {"words": text}
    assert "".join(choice.delta.content or "" for choice in choices) == text
    assert choices[-1].finish_reason == "stop"


@pytest.mark.client(
    "openai",
    "two guides at once",
    refused="an output can have one format, given: `guided_regex`, `guided_choice`",
)
def test_two_guides_at_once_are_refused(client: openai.OpenAI, refusal: str) -> None:
    with pytest.raises(openai.BadRequestError, match=refusal):
        client.chat.completions.create(
            model="tiny-a", messages=QUESTION, extra_body={"guided_regex": "a", "guided_choice": ["a"]}
        )


@pytest.mark.client("openai", "`continue_final_message` of vLLM")
def test_the_last_message_of_the_assistant_is_continued(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2",
        messages=[
            {"role": "user", "content": "What is the capital of France?"},
            {"role": "assistant", "content": "The capital of France is the city of"},
        ],
        temperature=0,
        max_completion_tokens=4,
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )
    assert (answer.choices[0].message.content or "").startswith(" Paris")

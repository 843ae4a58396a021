"""Anthropic's messages: what the inner request becomes, and how its answer is spelt."""

from __future__ import annotations

import json
from dataclasses import replace

import httpx
import pytest

from hearth.control.requests.generation import AnswerStream, ChatPrompt
from hearth.core.errors import Overloaded
from hearth.core.types import FinishReason
from hearth.text.tokenizer import Tokenizer
from tests.api.conftest import request
from tests.api.fake import FakeGateway, tokens_of

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
ADD = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
HI = [{"role": "user", "content": "Hi"}]
USED = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}


def ask(gateway: FakeGateway, **fields: object) -> httpx.Response:
    body = {"model": "tiny", "max_tokens": 16, "messages": HI} | fields
    return request(gateway, "POST", "/v1/messages", body)


def prompt_of(gateway: FakeGateway) -> ChatPrompt:
    prompt = gateway.requests[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def events(response: httpx.Response) -> list[dict[str, object]]:
    """The data of a stream, each named as its type says."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    found = []
    for frame in response.text.split("\n\n")[:-1]:
        name, data = frame.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_an_answer_is_a_message_and_its_cached_tokens_count_apart(gateway: FakeGateway) -> None:
    answer = ask(gateway).json()

    assert answer["content"] == [{"type": "text", "text": "Hello"}]
    assert (answer["id"], answer["type"], answer["role"], answer["model"]) == (
        *("msg_r0", "message", "assistant", "tiny"),
    )
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    usage = answer["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (3, 2, 2)


def test_the_fields_of_a_message_become_those_of_the_one_request(gateway: FakeGateway) -> None:
    blocks = [{"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}}]
    blocks.append({"type": "text", "text": "kind."})
    options = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "stop_sequences": ["\n"]}
    ask(gateway, system=blocks, metadata={"user_id": "ann"}, **options)

    sampling = gateway.requests[0].sampling
    assert prompt_of(gateway).messages == [
        {"role": "system", "content": "Be\nkind."},
        {"role": "user", "content": "Hi"},
    ]
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 3)
    assert (sampling.max_tokens, sampling.stop) == (16, ("\n",))


def test_tools_and_their_results_are_messages_of_chat(gateway: FakeGateway) -> None:
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "2"}]}
    failed = {"type": "tool_result", "tool_use_id": "t1", "content": "too large", "is_error": True}
    ask(
        gateway,
        messages=[
            *HI,
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}, USED]},
            {"role": "user", "content": [result, failed, {"type": "text", "text": "So?"}]},
        ],
    )

    _, called, told, refused, asked = prompt_of(gateway).messages
    function = {"name": "add", "arguments": {"a": 1}}
    assert called["tool_calls"] == [{"id": "t1", "type": "function", "function": function}]
    assert told == {"role": "tool", "content": "2", "tool_call_id": "t1", "name": "add"}
    assert refused["content"] == "Error: too large"
    assert asked == {"role": "user", "content": "So?"}


def test_a_message_of_nothing_that_is_read_is_an_empty_one(gateway: FakeGateway) -> None:
    for content in ([], [{"type": "thinking", "thinking": "Hm."}], ""):
        response = ask(gateway, messages=[{"role": "user", "content": content}])

        assert response.status_code == 200, response.text
        assert prompt_of(gateway).messages == [{"role": "user", "content": ""}]


def test_an_answer_that_the_last_message_begins_goes_on(gateway: FakeGateway) -> None:
    ask(gateway, messages=[*HI, {"role": "assistant", "content": "Hel"}])

    prompt = prompt_of(gateway)
    assert (prompt.is_continued, prompt.has_turn) == (True, False)
    assert prompt.messages[-1] == {"role": "assistant", "content": "Hel"}


def test_a_call_is_a_block_of_the_answer(tokenizers: dict[str, Tokenizer]) -> None:
    gateway = FakeGateway(tokenizers["hermes"], lambda stream: stream.put(tokens_of("Well", CALL)))
    answer = ask(gateway, tools=[ADD]).json()

    text, call = answer["content"]
    assert text == {"type": "text", "text": "Well"}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "add", {"a": 1})
    assert answer["stop_reason"] == "tool_use"
    assert prompt_of(gateway).tools == [
        {
            "type": "function",
            "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
        }
    ]


@pytest.mark.parametrize(
    ("choice", "has_guide"),
    [("auto", False), ("any", True), ("tool", True), ("none", False)],
)
def test_a_choice_of_tools_demands_a_call_or_none(
    tokenizers: dict[str, Tokenizer], choice: str, has_guide: bool
) -> None:
    gateway = FakeGateway(tokenizers["hermes"])
    named = {"name": "add"} if choice == "tool" else {}
    response = ask(gateway, tools=[ADD], tool_choice={"type": choice, **named})

    assert response.status_code == 200, response.text
    assert (gateway.requests[0].guide is not None) is has_guide
    assert (prompt_of(gateway).tools is None) is (choice == "none")


def test_parallel_calls_can_be_ruled_out(tokenizers: dict[str, Tokenizer]) -> None:
    gateway = FakeGateway(tokenizers["hermes"], lambda stream: stream.put(tokens_of(CALL, CALL)))
    only_one = {"type": "auto", "disable_parallel_tool_use": True}

    assert len(ask(gateway, tools=[ADD]).json()["content"]) == 2
    assert len(ask(gateway, tools=[ADD], tool_choice=only_one).json()["content"]) == 1


def test_a_stream_begins_adds_to_and_ends_each_block(tokenizers: dict[str, Tokenizer]) -> None:
    gateway = FakeGateway(tokenizers["hermes"], lambda stream: stream.put(tokens_of("We", "ll", CALL)))
    start, *blocks, delta, stop = events(ask(gateway, tools=[ADD], stream=True))

    assert start["message"] == {
        **{"id": "msg_r0", "type": "message", "role": "assistant", "model": "tiny", "content": []},
        **{"stop_reason": None, "stop_sequence": None},
        "usage": {
            **{"input_tokens": 3, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 2},
            "output_tokens": 3,
        },
    }
    assert [(block["type"], block["index"]) for block in blocks] == [
        ("content_block_start", 0),
        ("content_block_delta", 0),
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_delta", 1),
        ("content_block_stop", 1),
    ]
    assert blocks[1]["delta"] == {"type": "text_delta", "text": "Well"}
    assert blocks[4]["delta"] == {"type": "input_json_delta", "partial_json": '{"a": 1}'}
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] == 3  # type: ignore[index] # an object
    assert stop == {"type": "message_stop"}


def test_a_stream_has_an_event_per_token_and_names_the_stop_sequence(gateway: FakeGateway) -> None:
    def script(stream: AnswerStream) -> None:
        one, two = tokens_of("Hel", "lo")
        stream.put([one, replace(two, stop="\n\n")])

    gateway.script = script
    found = events(ask(gateway, stream=True))

    deltas = [event["delta"] for event in found if event["type"] == "content_block_delta"]
    assert [delta["text"] for delta in deltas] == ["Hel", "lo"]  # type: ignore[index] # an object
    assert found[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "\n\n"}


def test_an_answer_that_is_cut_says_so(gateway: FakeGateway) -> None:
    gateway.script = lambda stream: stream.put(tokens_of("Hel", finish=FinishReason.LENGTH))

    assert ask(gateway).json()["stop_reason"] == "max_tokens"
    assert events(ask(gateway, stream=True))[-2]["delta"]["stop_reason"] == "max_tokens"  # type: ignore[index] # an object


def test_a_stream_that_fails_ends_with_an_error_of_anthropics(gateway: FakeGateway) -> None:
    def script(stream: AnswerStream) -> None:
        stream.put(tokens_of("Hel", finish=None))
        stream.fail(Overloaded("too many", 1.0))

    gateway.script = script
    last = events(ask(gateway, stream=True))[-1]

    assert last == {"type": "error", "error": {"type": "rate_limit_error", "message": "too many"}}


def test_tokens_are_counted_without_an_answer(gateway: FakeGateway) -> None:
    counted = request(
        gateway, "POST", "/v1/messages/count_tokens", {"model": "tiny", "messages": HI, "system": "Be kind."}
    )

    (prompt,) = gateway.encoded
    assert isinstance(prompt, ChatPrompt)
    assert [message["role"] for message in prompt.messages] == ["system", "user"]
    tokens = gateway.tokenizer_.encode(gateway.tokenizer_.chat_text(prompt.messages))
    assert counted.json() == {"input_tokens": len(tokens)}
    assert not gateway.streams


def test_models_are_listed_as_anthropic_does_for_its_clients(gateway: FakeGateway) -> None:
    version = {"anthropic-version": "2023-06-01"}
    listed = request(gateway, "GET", "/v1/models", headers=version).json()

    assert [model["id"] for model in listed["data"]] == ["tiny", "small"]
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("tiny", "small", False)
    assert listed["data"][0]["created_at"] == "2023-11-14T22:13:20Z"
    assert request(gateway, "GET", "/v1/models/small", headers=version).json() == listed["data"][1]


def test_an_output_may_be_held_to_a_schema(gateway: FakeGateway) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    ask(gateway, output_config={"effort": "low", "format": {"type": "json_schema", "schema": schema}})

    guide = gateway.requests[0].guide
    assert guide is not None
    assert (guide.kind, json.loads(guide.text)) == ("json_schema", schema)
    assert prompt_of(gateway).extra == {"reasoning_effort": "low"}


def test_what_is_not_read_is_told(gateway: FakeGateway) -> None:
    redacted = {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}
    response = ask(
        gateway,
        messages=[*HI, redacted, *HI],
        context_management={"edits": []},
        tools=[ADD | {"strict": True}],
    )

    ignored = ["messages.content.redacted_thinking", "tools.strict", "context_management"]
    assert response.headers["x-hearth-ignored-fields"] == ", ".join(ignored)
    assert gateway.ignored == ["other", "tools.strict", "context_management"]
    assert "x-hearth-ignored-fields" not in ask(gateway, thinking={"type": "disabled"}).headers


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": None}, "`max_tokens`: input should be a valid integer"),
        ({"messages": []}, "`messages`: list should have at least 1 item"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "`messages[0].content[0]`: only blocks of type `text`, `tool_use` and `tool_result` are "
            "supported, given: 'image'; send text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
            "`messages[0].content[0].text`: input should be a valid string, given: 5",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_use", "id": "t", "name": "x", "input": {}}]}
                ]
            },
            "`messages[0].content[0]` is of type `tool_use`, which only a message of role `assistant`",
        ),
        (
            {"messages": [*HI, {"role": "assistant", "content": [USED]}]},
            "`messages[1]` uses tools without results",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "only tools of type `custom`"),
        ({"tools": [ADD], "tool_choice": {"type": "tool"}}, "needs the `name` of one"),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "sub"}}, "is `sub`"),
        ({"stop_sequences": [""]}, "`stop_sequences` contains an empty text"),
        ({"stop_sequences": ["x"] * 17}, "`stop_sequences`: at most 16 stop strings are allowed"),
        ({"n": 2}, "`n` is not supported and would change the answer; use `/v1/chat/completions`"),
        ({"max_output_tokens": 5}, "`max_output_tokens` is not supported"),
    ],
)
def test_errors_name_the_clients_own_fields(
    tokenizers: dict[str, Tokenizer], fields: dict[str, object], message: str
) -> None:
    response = ask(FakeGateway(tokenizers["hermes"]), **fields)

    assert response.status_code == 400, response.text
    error = response.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert message in error["error"]["message"]


def test_a_model_that_is_not_there_is_an_error_of_anthropics(gateway: FakeGateway) -> None:
    response = request(
        gateway, "POST", "/v1/messages", {"model": "huge", "max_tokens": 1, "messages": HI, "tools": [ADD]}
    )

    assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from hearth.api.body import Body, GenerationBody
from hearth.api.openai.chat import ChatBody
from hearth.api.openai.completion import CompletionBody
from hearth.api.responses.body import ResponseBody
from hearth.api.unread_fields import (
    FREQUENT,
    IGNORED_FIELDS,
    MAX_IGNORED,
    MAX_NAME_CHARS,
    OTHER,
    ignored_fields_header,
    metric_labels,
)
from hearth.control.requests.generation import AnswerStream, ChatPrompt
from hearth.core.types import FinishReason, PromptReading
from tests.api.conftest import chat, complete, events, request
from tests.api.fake import FakeGateway, tokens_of

ENDPOINTS: list[tuple[type[Body], dict[str, object]]] = [
    (ChatBody, {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}),
    (CompletionBody, {"model": "tiny", "prompt": "Hi"}),
]


@pytest.mark.parametrize(
    ("fields", "param", "instead"),
    [
        ({"regex": "a+"}, "regex", "`structured_outputs`"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "leave it out"),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
            "leave it out",
        ),
        ({"use_beam_search": True}, "use_beam_search", "leave it out"),
        ({"n_predict": 8}, "n_predict", "use `max_tokens`"),
        ({"thinking": False}, "thinking", "use `enable_thinking`"),
        ({"thinking_budget": 9}, "thinking_budget", "use `thinking_token_budget`"),
        ({"reasoning": {"effort": "high"}}, "reasoning", "use `reasoning_effort`"),
        ({"mirostat_mode": 2}, "mirostat_mode", "leave it out"),
        ({"ban_eos_token": True}, "ban_eos_token", "use `ignore_eos`"),
        ({"tfs": 0.9}, "tfs", "leave it out"),
        ({"grammar_string": "root ::= a"}, "grammar_string", "`response_format`"),
        ({"custom_token_bans": "1,2"}, "custom_token_bans", "leave it out"),
        ({"truncate": 100}, "truncate", "leave it out"),
        ({"modalities": ["text", "audio"]}, "modalities", "leave it out"),
        ({"extra_body": {"top_k": 1}}, "extra_body", "into the body itself"),
        (
            {"response_format": {"type": "json_object", "schema": {"type": "object"}}},
            "response_format.schema",
            "use the type `json_schema`",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "b", "prefix": True},
                ]
            },
            "messages[1].prefix",
            "set `continue_final_message`",
        ),
    ],
)
def test_a_field_that_would_change_the_answer_is_refused_by_name(
    gateway: FakeGateway, fields: dict[str, object], param: str, instead: str
) -> None:
    response = chat(gateway, **fields)

    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, "unsupported_parameter")
    assert error["message"].startswith(f"`{param}` is not supported")
    assert instead in error["message"]
    assert gateway.requests == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"continue_final_message": True}, "continue_final_message"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
    ],
)
def test_completions_refuse_what_only_chat_knows(
    gateway: FakeGateway, fields: dict[str, object], param: str
) -> None:
    response = complete(gateway, **fields)

    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(("body", "needed"), [*ENDPOINTS, (ResponseBody, {"model": "tiny", "input": "Hi"})])
def test_every_unsupported_field_is_refused_unless_its_value_changes_nothing(
    body: type[GenerationBody], needed: dict[str, object]
) -> None:
    assert not body.unsupported.keys() & body.model_fields.keys()
    for name, field in body.unsupported.items():
        with pytest.raises(ValidationError, match="is not supported"):
            body.model_validate(needed | {name: ["anything else"]})
        for neutral in (None, *field.neutral):
            assert body.model_validate(needed | {name: neutral}).ignored_fields == ()


@pytest.mark.parametrize(("body", "needed"), ENDPOINTS)
@pytest.mark.parametrize(
    ("fields", "value"),
    [
        ({"max_tokens": 7, "max_new_tokens": 7}, 8),
        ({"max_tokens": 9, "max_completion_tokens": 7, "max_output_tokens": 7}, 9),
        ({"max_tokens": 7, "n_predict": 7}, 8),
        ({"min_tokens": 2, "min_new_tokens": 2}, 3),
        ({"repetition_penalty": 1.1, "repeat_penalty": 1.1}, 1.2),
        ({"stop": ["a", "b"], "stop_sequences": ["a", "b"]}, ["a"]),
        ({"n": 2, "num_return_sequences": 2}, 3),
    ],
)
def test_what_a_field_that_is_read_says_already_may_be_said_twice(
    body: type[Body], needed: dict[str, object], fields: dict[str, object], value: object
) -> None:
    assert body.model_validate(needed | fields).ignored_fields == ()
    twin = list(fields)[-1]
    with pytest.raises(ValidationError, match="is not supported"):
        body.model_validate(needed | fields | {twin: value})


def test_the_limit_that_completions_have_by_default_may_be_repeated() -> None:
    needed = ENDPOINTS[1][1]
    CompletionBody.model_validate(needed | {"max_new_tokens": 16})
    with pytest.raises(ValidationError, match="`max_tokens`"):
        CompletionBody.model_validate(needed | {"max_new_tokens": 17})


def test_what_looks_like_a_neutral_value_and_is_none_is_refused() -> None:
    needed = ENDPOINTS[0][1]
    for fields in ({"do_sample": False}, {"add_special_tokens": True}, {"json_schema": {}}, {"think": False}):
        with pytest.raises(ValidationError, match="is not supported"):
            ChatBody.model_validate(needed | fields)


def test_a_schema_beside_another_format_is_refused(gateway: FakeGateway) -> None:
    schema = {"name": "a", "schema": {"type": "object"}}
    for kind in ("text", "json_object"):
        response = chat(gateway, response_format={"type": kind, "json_schema": schema})
        assert response.status_code == 400
        assert f"of type `{kind}` takes no `json_schema`" in response.json()["error"]["message"]


def test_other_fields_are_accepted_listed_and_counted(gateway: FakeGateway) -> None:
    fields: dict[str, object] = {"store": True, "tempreature": 0, "metadata": None}
    options = {"include_usage": True, "include_obfuscation": False}

    whole = chat(gateway, **fields)
    streamed = chat(gateway, **fields, stream=True, stream_options=options)
    plain = complete(gateway, tempreature=0)

    assert whole.headers[IGNORED_FIELDS] == "store, tempreature"
    assert streamed.headers[IGNORED_FIELDS] == "store, tempreature, stream_options.include_obfuscation"
    assert plain.headers[IGNORED_FIELDS] == "tempreature"
    obfuscation = "stream_options.include_obfuscation"
    assert gateway.ignored == ["store", OTHER, "store", OTHER, obfuscation, OTHER]
    assert events(streamed)


def test_fields_that_are_read_are_not_listed(gateway: FakeGateway) -> None:
    schema = {"name": "a", "description": "b", "strict": True, "schema": {"type": "object"}}
    message = {"role": "user", "content": "Hi", "for_the_template": 1}

    response = chat(
        gateway,
        messages=[message],
        response_format={"type": "json_schema", "json_schema": schema},
        user="ann",
    )

    assert IGNORED_FIELDS not in response.headers
    assert gateway.ignored == []


def test_strict_tools_are_told_where_nothing_holds_a_call_to_them(gateway: FakeGateway) -> None:
    tool = {"type": "function", "function": {"name": "add", "strict": True, "parameters": {"type": "object"}}}
    gateway.script = lambda stream: stream.put(tokens_of("Hello"))

    assert chat(gateway, tools=[tool]).headers[IGNORED_FIELDS] == "tools.function.strict"
    assert IGNORED_FIELDS not in chat(gateway, tools=[tool], tool_choice="none").headers


def test_the_names_of_a_client_cannot_make_a_header_of_their_own(gateway: FakeGateway) -> None:
    names = ["a\r\nset-cookie: x=1", "é, b", *(f"field{number}" for number in range(40))]

    response = chat(gateway, **dict.fromkeys(names, 1))

    listed = response.headers[IGNORED_FIELDS].split(", ")
    assert listed[:3] == ["a??set-cookie??x?1", "???b", "field0"]
    assert (len(listed), listed[-1]) == (MAX_IGNORED + 1, "...")
    assert gateway.ignored == [OTHER] * MAX_IGNORED
    assert "set-cookie" not in response.headers


@given(st.lists(st.text(st.characters(), max_size=200), max_size=40))
def test_a_header_is_short_and_plain_whatever_the_names(names: list[str]) -> None:
    for value in ignored_fields_header(names).values():
        assert re.fullmatch(r"[A-Za-z0-9_.?-]*(, [A-Za-z0-9_.?-]*)*", value)
        assert len(value) <= (MAX_IGNORED + 1) * (MAX_NAME_CHARS + 2)
    assert set(metric_labels(names)) <= FREQUENT | {OTHER}


def test_a_prompt_may_end_without_the_beginning_of_an_answer(gateway: FakeGateway) -> None:
    for given_value, has_turn in ((None, True), (True, True), (False, False)):
        chat(gateway, add_generation_prompt=given_value)
        asked = gateway.requests[-1].prompt
        assert isinstance(asked, ChatPrompt)
        assert asked.has_turn is has_turn


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (
            "/hearth/models",
            {"source": "a", "overwite": True},
            "`overwite` is unknown; did you mean `overwrite`?",
        ),
        ("/hearth/models/tiny/unload", {"soon": True}, "`soon` is unknown; valid: `free`"),
        ("/hearth/models/tiny/unload", {"\ud800": True}, "`?` is unknown; valid: `free`"),
    ],
)
def test_hearths_own_routes_take_no_unknown_field(
    gateway: FakeGateway, path: str, body: object, message: str
) -> None:
    response = request(gateway, "POST", path, body)

    assert (response.status_code, response.json()["error"]["message"]) == (400, message)
    assert gateway.done == []


HI = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "Hi"}),
        ("/tokenize", {"messages": HI}),
        ("/detokenize", {"tokens": [5]}),
        ("/v1/messages/count_tokens", {"messages": HI}),
        ("/api/embeddings", {"prompt": "Hi"}),
        ("/api/embed", {"input": "Hi"}),
    ],
)
def test_every_route_that_asks_a_model_tells_what_it_has_not_read(
    gateway: FakeGateway, path: str, body: dict[str, object]
) -> None:
    def script(stream: AnswerStream) -> None:
        stream.reading = PromptReading(embedding=bytes(8))
        stream.end(FinishReason.LENGTH)

    gateway.script = script
    response = request(gateway, "POST", path, {"model": "tiny", "cache_prompt": True, "own": 1} | body)

    assert (response.status_code, response.headers[IGNORED_FIELDS]) == (200, "cache_prompt, own")
    assert gateway.ignored == ["cache_prompt", OTHER]


@pytest.mark.parametrize("field", ["max_completion_tokens", "stop"])
def test_a_field_that_repeats_one_which_is_not_read_there_is_refused(
    gateway: FakeGateway, field: str
) -> None:
    body = {"model": "tiny", "messages": HI, field: 5}
    response = request(gateway, "POST", "/v1/messages/count_tokens", body)

    assert response.status_code == 400
    assert f"`{field}` is not supported" in response.json()["error"]["message"]

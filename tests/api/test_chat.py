from __future__ import annotations

import json
import math
from collections.abc import Callable

import httpx
import pytest

from hearth.api.openai.answer_format import CHAT
from hearth.api.openai.chat import ChatBody
from hearth.api.openai.dialect import CompletionDialect
from hearth.control.requests.generation import ChatPrompt
from hearth.core.errors import BadGuide, NoCapacity
from hearth.core.types import FinishReason
from hearth.text.chat_template import Json
from hearth.text.tokenizer import Tokenizer
from hearth.text.tool_calls import Tool, ToolFormat, call_grammar
from tests.api.conftest import chat, complete, events
from tests.api.fake import FakeGateway, tokens_of, with_logprobs


def test_an_answer_has_the_shape_of_openais(gateway: FakeGateway) -> None:
    response = chat(gateway)

    answer = response.json()
    assert answer.pop("created") > 1_700_000_000
    assert answer == {
        "id": "chatcmpl-r0",
        "object": "chat.completion",
        "model": "tiny",
        "system_fingerprint": "fp_0123456789ab",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 2,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }
    assert response.headers["x-request-id"] == "r0"
    assert gateway.cancelled == []


def test_messages_reach_the_template_as_it_knows_them(gateway: FakeGateway) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    chat(
        gateway,
        messages=[
            {"role": "developer", "content": "Be brief."},
            {
                "role": "user",
                "name": "ann",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "2", "own": True},
        ],
        chat_template_kwargs={"enable_thinking": False},
    )

    asked = gateway.requests[0].prompt
    assert isinstance(asked, ChatPrompt)
    assert list(asked.messages) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb", "name": "ann"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
            ],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c1", "own": True},
    ]
    assert asked.extra == {"enable_thinking": False}


def test_the_effort_of_reasoning_is_a_variable_of_the_template(gateway: FakeGateway) -> None:
    chat(gateway, reasoning_effort="high", chat_template_kwargs={"reasoning_effort": "high", "depth": 1})
    chat(gateway, reasoning_effort=None, reasoning={"effort": None})

    extras = [request.prompt.extra for request in gateway.requests if isinstance(request.prompt, ChatPrompt)]
    assert extras == [{"reasoning_effort": "high", "depth": 1}, {}]


def test_sampling_fields_reach_the_gateway(gateway: FakeGateway) -> None:
    fields: dict[str, object] = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 11,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.5,
        "min_tokens": 2,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    chat(
        gateway,
        **fields,
        stop=["a", "b"],
        stop_token_ids=[3],
        allowed_token_ids=[5, 7],
        logit_bias={"5": -100},
        max_completion_tokens=9,
    )

    sampling = gateway.requests[0].sampling
    assert {name: getattr(sampling, name) for name in fields} == fields
    assert (sampling.stop_strings, sampling.stop_ids) == (("a", "b"), (3,))
    assert sampling.allowed_token_ids == (5, 7)
    assert (sampling.bias_by_token, sampling.max_tokens, sampling.logprobs) == ({5: -100}, 9, None)


def test_without_a_limit_an_answer_goes_to_the_end_of_the_context(gateway: FakeGateway) -> None:
    chat(gateway)
    chat(gateway, max_tokens=3, unknown_field={"is": "accepted"})

    assert [request.sampling.max_tokens for request in gateway.requests] == [None, 3]


@pytest.mark.parametrize(("given", "seconds"), [(0, 0.0), (-1, math.inf), ("5m", 300.0), (2.5, 2.5)])
def test_keep_alive_is_a_duration(gateway: FakeGateway, given: object, seconds: float) -> None:
    chat(gateway, keep_alive=given)

    assert gateway.requests[0].keep_alive_s == seconds


def test_a_request_may_say_when_its_tokens_are_due(gateway: FakeGateway) -> None:
    chat(gateway, pace=0, first_token_target=30)
    chat(gateway)

    paces = [(request.tokens_per_s, request.first_token_s) for request in gateway.requests]
    assert paces == [(0.0, 30.0), (None, None)]


@pytest.mark.parametrize(
    ("field", "given"),
    [("pace", -1), ("pace", 1001), ("pace", "10"), ("first_token_target", 0), ("first_token_target", 3601)],
)
def test_a_pace_beyond_its_limits_is_refused(gateway: FakeGateway, field: str, given: object) -> None:
    response = chat(gateway, **{field: given})

    assert response.status_code == 400
    assert f"`{field}" in response.json()["error"]["message"]


@pytest.mark.parametrize("given", ["soon", "5 parsecs", "", "nan", "1e999", [5], True, {"s": 5}])
def test_what_is_no_duration_is_refused(gateway: FakeGateway, given: object) -> None:
    response = chat(gateway, keep_alive=given)

    assert response.status_code == 400
    assert "`keep_alive" in response.json()["error"]["message"]


def test_several_answers_have_several_seeds(gateway: FakeGateway) -> None:
    answer = chat(gateway, n=3, seed=2**63 - 1)

    assert [request.sampling.seed for request in gateway.requests] == [2**63 - 1, -(2**63), -(2**63) + 1]
    assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1, 2]
    assert answer.json()["usage"]["prompt_tokens"] == 5
    assert answer.json()["usage"]["completion_tokens"] == 6
    assert answer.headers["x-request-id"] == "r0,r1,r2"


def test_response_formats_become_guides(gateway: FakeGateway) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    chat(gateway, response_format={"type": "text"})
    chat(gateway, response_format={"type": "json_object"})
    chat(gateway, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})

    guides = [request.guide for request in gateway.requests]
    assert guides[0] is None
    assert guides[1] is not None
    assert guides[2] is not None
    assert (guides[1].kind, guides[2].kind, json.loads(guides[2].text)) == (
        "json_object",
        "json_schema",
        schema,
    )


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize("ask", [chat, complete])
@pytest.mark.parametrize(
    ("name", "given", "kind", "text"),
    [
        ("regex", "a+", "regex", "a+"),
        ("choice", ["yes", "no"], "lark", 'start: "yes" | "no"'),
        ("grammar", 'root ::= "a"', "grammar", 'root ::= "a"'),
        ("json", SCHEMA, "json_schema", json.dumps(SCHEMA)),
        ("json", json.dumps(SCHEMA), "json_schema", json.dumps(SCHEMA)),
    ],
)
def test_guides_have_the_names_that_users_of_vllm_know(
    gateway: FakeGateway,
    ask: Callable[..., httpx.Response],
    name: str,
    given: object,
    kind: str,
    text: str,
) -> None:
    ask(gateway, **{f"guided_{name}": given})
    answer = ask(gateway, structured_outputs={name: given, "disable_any_whitespace": False})

    assert answer.status_code == 200
    assert [(r.guide.kind, r.guide.text) for r in gateway.requests if r.guide] == [(kind, text)] * 2


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"guided_regex": "a", "guided_choice": ["a"]}, "`guided_regex`, `guided_choice`"),
        (
            {"structured_outputs": {"json": {}, "grammar": "start: /a/"}},
            "`structured_outputs.json`, `structured_outputs.grammar`",
        ),
        (
            {"guided_json": {}, "response_format": {"type": "json_object"}},
            "`guided_json`, `response_format`",
        ),
    ],
)
def test_an_output_is_held_to_one_form(gateway: FakeGateway, fields: dict[str, object], names: str) -> None:
    response = chat(gateway, **fields)

    assert response.status_code == 400
    assert f"can have one format, given: {names}; remove" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("guided_regex", "a" * 16_385),
        ("guided_grammar", "a" * 16_385),
        ("guided_choice", []),
        ("guided_choice", ["a"] * 1025),
        ("guided_choice", ["a" * 1025]),
        ("guided_choice", "yes"),
        ("guided_json", 5),
    ],
)
def test_a_guide_beyond_its_limits_is_refused(gateway: FakeGateway, field: str, given: object) -> None:
    response = chat(gateway, **{field: given})

    assert response.status_code == 400
    assert f"`{field}" in response.json()["error"]["message"]
    assert len(response.text) < 1000


def test_a_schema_that_is_nested_too_deep_is_refused() -> None:
    """Python can read a little more than it can write."""
    schema: dict[str, Json] = {"type": "object"}
    for _ in range(5000):
        schema = {"a": schema}
    needed = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}

    with pytest.raises(BadGuide, match="nested too deep"):
        ChatBody.model_validate(needed | {"guided_json": schema}).guide()
    with pytest.raises(BadGuide, match="nested too deep"):
        call_grammar(ToolFormat.JSON, [Tool("f", schema)], may_repeat=False, tags_are_tokens=False)


def test_an_empty_schema_asks_for_any_json_value(gateway: FakeGateway) -> None:
    for fields in ({"guided_json": {}}, {"structured_outputs": {"json": {}}}):
        chat(gateway, **fields)

    assert [r.guide and (r.guide.kind, r.guide.text) for r in gateway.requests] == [("json_schema", "{}")] * 2


@pytest.mark.parametrize("name", ["json", "regex", "grammar"])
def test_an_empty_guide_is_refused(gateway: FakeGateway, name: str) -> None:
    for fields, field in (
        ({f"guided_{name}": ""}, f"guided_{name}"),
        ({"structured_outputs": {name: ""}}, f"structured_outputs.{name}"),
    ):
        response = chat(gateway, **fields)

        assert response.status_code == 400
        assert f"`{field}" in response.json()["error"]["message"]


def test_a_request_may_name_no_form(gateway: FakeGateway) -> None:
    chat(gateway, structured_outputs={}, guided_regex=None)

    assert gateway.requests[0].guide is None


def test_the_last_message_of_the_assistant_is_continued(gateway: FakeGateway) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}]
    chat(gateway, messages=messages, continue_final_message=True, add_generation_prompt=False)
    chat(gateway, messages=messages, continue_final_message=True)
    chat(gateway, messages=messages, continue_final_message=False)

    prompts = [request.prompt for request in gateway.requests if isinstance(request.prompt, ChatPrompt)]
    assert [(p.is_continued, p.has_turn) for p in prompts] == [(True, False), (True, False), (False, True)]


def test_logprobs_list_the_chosen_and_the_likeliest_tokens(gateway: FakeGateway) -> None:
    gateway.script = lambda stream: stream.put(with_logprobs(tokens_of("Hi", "")))

    (choice,) = chat(gateway, logprobs=True, top_logprobs=2).json()["choices"]

    entries = choice["logprobs"]["content"]
    own = gateway.tokenizer_.decode([300])
    assert (entries[0]["token"], entries[0]["logprob"]) == (own, -0.5)
    assert bytes(entries[0]["bytes"]).decode() == own
    assert [entry["logprob"] for entry in entries[0]["top_logprobs"]] == [-0.25, -9999.0]
    assert len(entries) == 2
    assert gateway.requests[0].sampling.logprobs == 2


def test_a_stream_has_role_pieces_reason_and_usage(gateway: FakeGateway) -> None:
    gateway.script = lambda stream: stream.put(tokens_of("Hel", "", 'l"o\n', finish=FinishReason.LENGTH))

    chunks = events(chat(gateway, stream=True, stream_options={"include_usage": True}))

    assert {(chunk["id"], chunk["object"], chunk["model"]) for chunk in chunks} == {
        ("chatcmpl-r0", "chat.completion.chunk", "tiny")
    }
    assert [chunk["choices"] for chunk in chunks] == [
        [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]
        for delta, reason in [
            ({"role": "assistant", "content": ""}, None),
            ({"content": "Hel"}, None),
            ({"content": 'l"o\n'}, None),
            ({}, "length"),
        ]
    ] + [[]]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 4
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_a_client_that_is_far_behind_gets_pieces_together(gateway: FakeGateway) -> None:
    gateway.script = lambda stream: stream.put(tokens_of(*"abcdefghij"))

    deltas = [chunk["choices"][0]["delta"] for chunk in events(chat(gateway, stream=True))]  # type: ignore[index]

    assert deltas == [{"role": "assistant", "content": ""}, {"content": "abcdefghij"}, {}]


def test_streamed_logprobs_wait_for_the_text_of_their_token(gateway: FakeGateway) -> None:
    gateway.script = lambda stream: stream.put(with_logprobs(tokens_of("", "é", "")))

    chunks = events(chat(gateway, stream=True, logprobs=True))
    choices = [chunk["choices"][0] for chunk in chunks]  # type: ignore[index]

    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"content": "é"},
        {},
    ]
    assert [choice["logprobs"] and len(choice["logprobs"]["content"]) for choice in choices] == [None, 2, 1]


def test_choices_of_a_stream_come_interleaved_and_all_end(gateway: FakeGateway) -> None:
    chunks = events(chat(gateway, stream=True, n=3))

    texts = ["", "", ""]
    reasons = []
    for chunk in chunks:
        (choice,) = chunk["choices"]  # type: ignore[misc]
        texts[choice["index"]] += choice["delta"].get("content", "")
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert texts == ["Hello"] * 3
    assert reasons == ["stop"] * 3


def test_a_failure_in_mid_stream_is_an_event(gateway: FakeGateway) -> None:
    def script(stream: object) -> None:
        gateway.streams[-1].put(tokens_of("Hel", finish=None))
        gateway.streams[-1].fail(NoCapacity("gone"))

    gateway.script = script
    response = chat(gateway, stream=True)

    frames = response.text.split("\n\n")
    assert "Hel" in frames[1]
    error = {"message": "gone", "type": "server_error", "param": None, "code": "no_capacity"}
    assert json.loads(frames[2].removeprefix("data: ")) == {"error": error}
    assert frames[3:] == [""]


def test_a_failure_before_the_first_piece_has_its_own_status(gateway: FakeGateway) -> None:
    gateway.script = lambda stream: stream.fail(NoCapacity("it never fits"))

    for is_stream in (True, False):
        response = chat(gateway, stream=is_stream)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_capacity")
    assert response.headers["x-request-id"] == "r1"


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture
def hermes(tokenizers: dict[str, Tokenizer]) -> FakeGateway:
    gateway = FakeGateway(tokenizers["hermes"])
    gateway.script = lambda stream: stream.put(tokens_of("I look.\n", CALL[:20], CALL[20:]))
    return gateway


def test_a_tools_schema_is_not_looked_at_value_by_value(tokenizers: dict[str, Tokenizer]) -> None:
    """A large one would hold up the event loop for as long as it takes to copy it."""
    parameters = {"type": "object", "enum": [1, 2, 3]}
    tool = {"type": "function", "extra": 1, "function": {"name": "f", "parameters": parameters, "also": 2}}
    body = ChatBody.model_validate(
        {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "tools": [tool]}
    )

    prompt = (
        body.answer_spec(CompletionDialect(CHAT, "fp", False, False), tokenizers["hermes"]).requests[0].prompt
    )

    assert isinstance(prompt, ChatPrompt)
    assert prompt.tools == [tool]
    assert prompt.tools[0]["function"]["parameters"]["enum"] is parameters["enum"]  # type: ignore[index, call-overload] # what was sent


def test_calls_are_told_as_such(hermes: FakeGateway) -> None:
    (choice,) = chat(hermes, tools=[WEATHER]).json()["choices"]

    (call,) = choice["message"]["tool_calls"]
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    assert (choice["message"]["content"], choice["finish_reason"]) == ("I look.", "tool_calls")
    asked = hermes.requests[0]
    assert isinstance(asked.prompt, ChatPrompt)
    assert (asked.prompt.tools, asked.guide) == ([WEATHER], None)
    assert not asked.sampling.skip_special_tokens, "the tags are special tokens of this model"


def test_calls_are_streamed_whole(hermes: FakeGateway) -> None:
    chunks = events(chat(hermes, tools=[WEATHER], stream=True))
    choices = [chunk["choices"][0] for chunk in chunks]  # type: ignore[index]

    assert choices[1]["delta"] == {"content": "I look."}
    (call,) = choices[2]["delta"]["tool_calls"]
    assert (call["index"], call["type"], call["function"]["arguments"]) == (0, "function", '{"city": "Rome"}')
    assert (choices[3]["delta"], choices[3]["finish_reason"]) == ({}, "tool_calls")


def test_one_call_is_told_where_no_more_are_wanted(hermes: FakeGateway) -> None:
    hermes.script = lambda stream: stream.put(tokens_of(CALL, CALL))

    (choice,) = chat(hermes, tools=[WEATHER], parallel_tool_calls=False).json()["choices"]

    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["message"]["content"] is None


def test_a_demanded_call_becomes_a_grammar(hermes: FakeGateway) -> None:
    other = {"type": "function", "function": {"name": "other"}}
    named = {"type": "function", "function": {"name": "weather"}}
    chat(hermes, tools=[WEATHER, other], tool_choice="required")
    chat(hermes, tools=[WEATHER, other], tool_choice=named)

    either, one = (request.guide for request in hermes.requests)
    assert either is not None
    assert one is not None
    assert (either.kind, "other" in either.text, "other" in one.text) == ("lark", True, False)
    assert 'tagged: <tool_call> "\\n" call' in one.text


def test_tools_that_must_not_be_called_are_not_shown(hermes: FakeGateway) -> None:
    (choice,) = chat(hermes, tools=[WEATHER], tool_choice="none").json()["choices"]

    asked = hermes.requests[0].prompt
    assert isinstance(asked, ChatPrompt)
    assert asked.tools is None
    assert choice["message"]["content"] == f"I look.\n{CALL}"


def test_a_template_with_an_unknown_format_answers_in_text(tokenizers: dict[str, Tokenizer]) -> None:
    gateway = FakeGateway(tokenizers["mistral"])
    gateway.script = lambda stream: stream.put(tokens_of(CALL))

    (choice,) = chat(gateway, tools=[WEATHER]).json()["choices"]

    assert choice["message"] == {"role": "assistant", "content": CALL, "refusal": None}
    asked = gateway.requests[0].prompt
    assert isinstance(asked, ChatPrompt)
    assert asked.tools == [WEATHER]


PLAIN_CALL = '{"name": "weather", "arguments": {"city": "Rome"}}'


@pytest.mark.parametrize("template", ["plain", "mistral"])
def test_a_call_can_be_demanded_of_every_model(tokenizers: dict[str, Tokenizer], template: str) -> None:
    gateway = FakeGateway(tokenizers[template])
    gateway.script = lambda stream: stream.put(tokens_of(PLAIN_CALL[:9], PLAIN_CALL[9:]))
    named = {"type": "function", "function": {"name": "weather"}}

    for tool_choice in ("required", named):
        (choice,) = chat(gateway, tools=[WEATHER], tool_choice=tool_choice).json()["choices"]

        function = choice["message"]["tool_calls"][0]["function"]
        assert function == {"name": "weather", "arguments": '{"city": "Rome"}'}
        assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    assert all(request.guide and request.guide.kind == "lark" for request in gateway.requests)


def test_several_plain_calls_are_allowed_where_they_are_asked_for(gateway: FakeGateway) -> None:
    gateway.script = lambda stream: stream.put(tokens_of(f"{PLAIN_CALL}\n", PLAIN_CALL))
    demand = {"tools": [WEATHER], "tool_choice": "required"}

    (choice,) = chat(gateway, **demand, parallel_tool_calls=True).json()["choices"]
    assert len(choice["message"]["tool_calls"]) == 2
    chunks = events(chat(gateway, **demand, parallel_tool_calls=True, stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]  # type: ignore[index]
    assert [call["index"] for delta in deltas for call in delta.get("tool_calls", [])] == [0, 1]
    chat(gateway, **demand)

    grammars = [request.guide.text for request in gateway.requests if request.guide]
    assert ["call)*" in grammar for grammar in grammars] == [True, True, False]


def test_a_model_that_was_told_of_tools_in_words_may_call_one(gateway: FakeGateway) -> None:
    gateway.script = lambda stream: stream.put(tokens_of(PLAIN_CALL))
    (called,) = chat(gateway, tools=[WEATHER]).json()["choices"]
    gateway.script = lambda stream: stream.put(tokens_of("Hello"))
    (answered,) = chat(gateway, tools=[WEATHER], tool_choice="auto").json()["choices"]

    assert called["message"]["tool_calls"][0]["function"]["name"] == "weather"
    assert answered["message"]["content"] == "Hello"
    assert [request.guide for request in gateway.requests] == [None, None]


def test_llama_calls_are_the_whole_answer(tokenizers: dict[str, Tokenizer]) -> None:
    gateway = FakeGateway(tokenizers["llama3"])
    gateway.script = lambda stream: stream.put(tokens_of('{"name": "weather", ', '"parameters": {}}'))

    (choice,) = chat(gateway, tools=[WEATHER], tool_choice="auto").json()["choices"]

    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": "{}"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tool_choice": "required"}, "`tool_choice` needs `tools`"),
        (
            {"continue_final_message": True},
            "needs a text of the assistant as the last message, given: one of",
        ),
        ({"continue_final_message": True, "add_generation_prompt": True}, "set one of them to false"),
        ({"chat_template_kwargs": {"continue_final_message": True}}, "must not set `continue_final_message`"),
        ({"top_logprobs": 2}, "`top_logprobs` needs `logprobs`"),
        ({"logit_bias": {"x": 1}}, "keys of `logit_bias` must be token ids, given: 'x'"),
        ({"keep_alive": "soon"}, "`keep_alive`: a duration is"),
        ({"keep_alive": 10**400}, "`keep_alive`"),
        ({"chat_template_kwargs": {"messages": []}}, "must not set `messages`"),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            "`reasoning_effort` is 'low', but 'high' in `chat_template_kwargs`",
        ),
        ({"response_format": {"type": "json_schema"}}, "needs `json_schema` with a `schema`"),
        ({"stop": ["a", ""]}, "`stop` holds an empty string"),
        ({"min_tokens": 5, "max_tokens": 2}, "`min_tokens` must not exceed `max_tokens`"),
    ],
)
def test_contradictions_are_refused(gateway: FakeGateway, fields: dict[str, object], message: str) -> None:
    response = chat(gateway, **fields)

    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


def test_a_grammar_and_a_format_contradict_each_other(hermes: FakeGateway) -> None:
    unknown = {"type": "function", "function": {"name": "storm"}}
    both = chat(hermes, tools=[WEATHER], tool_choice="required", response_format={"type": "json_object"})
    neither = chat(hermes, tools=[WEATHER], tool_choice=unknown)

    assert "leave one out" in both.json()["error"]["message"]
    assert "is `storm`, which is not among the `tools`" in neither.json()["error"]["message"]

"""/v1/responses over a gateway with a script: what is asked reaches it, the answer is spelt as OpenAI's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import httpx
import msgspec
import openai
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage

from hearth.api.dialect import AnswerSpec, Choice, TokenUsage, ToolUse
from hearth.api.responses.dialect import ResponseDialect
from hearth.control.requests.caller import Caller, GroupId, KeyTerms
from hearth.control.requests.generation import AnswerStream, ChatPrompt, GenerationRequest, TokenDelta
from hearth.core.errors import NoCapacity
from hearth.core.types import FinishReason, ModelId, RequestId, SamplingParams
from hearth.text.tokenizer import Tokenizer
from hearth.text.tool_calls import ToolFormat
from tests.api.conftest import Connection, app_of
from tests.api.fake import FakeGateway, FakeKeys, tokens_of, with_logprobs

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {"type": "object"},
    "strict": True,
}


@pytest.fixture
def gateway(tokenizers: dict[str, Tokenizer]) -> FakeGateway:
    return FakeGateway(tokenizers["hermes"])


@dataclass
class Api:
    """One application, so that what one request has stored the next one finds."""

    app: FastAPI
    headers: dict[str, str] = field(default_factory=dict)

    def request(self, method: str, path: str, body: object = None) -> httpx.Response:
        async def answered() -> httpx.Response:
            async with client_of(self.app) as client:
                content = None if body is None else json.dumps(body)
                headers = {"content-type": "application/json", **self.headers}
                return await client.request(method, f"/v1/responses{path}", headers=headers, content=content)

        return asyncio.run(answered())

    def create(self, **fields: object) -> httpx.Response:
        return self.request("POST", "", {"model": "tiny", "input": "Hi", **fields})

    def created(self, **fields: object) -> dict[str, object]:
        answer = self.create(**fields)
        assert answer.status_code == 200, answer.text
        body = answer.json()
        assert isinstance(body, dict)
        return body

    def as_key(self, key: str) -> Api:
        return replace(self, headers={"authorization": f"Bearer {key}"})


@asynccontextmanager
async def client_of(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        yield client


@pytest.fixture
def api(gateway: FakeGateway) -> Api:
    return Api(app_of(gateway))


@pytest.fixture(scope="module")
def strict_api(tokenizers: dict[str, Tokenizer]) -> Api:
    """One for all bodies that are refused, and leave no trace."""
    return Api(app_of(FakeGateway(tokenizers["hermes"])))


def events_of(response: httpx.Response) -> list[dict[str, object]]:
    """The events of a stream, which must be well framed and numbered."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    frames = response.text.split("\n\n")
    assert frames.pop() == ""
    events = []
    for number, frame in enumerate(frames):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        events.append(event)
    return events


def prompt_of(gateway: FakeGateway) -> ChatPrompt:
    prompt = gateway.requests[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def without_times(response: object) -> object:
    """A response without what no two have in common."""
    assert isinstance(response, dict)
    text = json.dumps({**response, "created_at": 0, "completed_at": 0})
    for item in response["output"]:
        for name in ("id", "call_id"):
            text = text.replace(item.get(name, "none"), name)
    return json.loads(text.replace(response["id"], "id"))


# Answers.


def test_an_answer_is_a_response_with_its_usage(api: Api) -> None:
    response = api.created(metadata={"a": "b"}, max_output_tokens=7, instructions="Be brief.")
    assert response["id"] == "resp_r0"
    assert response["object"] == "response"
    assert response["status"] == "completed"
    assert response["model"] == "tiny"
    assert response["output"] == [
        {
            "id": "msg_r0_0",
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}],
        }
    ]
    usage = response["usage"]
    assert isinstance(usage, dict)
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (5, 2, 7)
    assert usage["input_tokens_details"]["cached_tokens"] == 2
    assert usage["output_tokens_details"]["reasoning_tokens"] == 0
    assert (response["metadata"], response["max_output_tokens"]) == ({"a": "b"}, 7)
    assert (response["instructions"], response["store"]) == ("Be brief.", False)


def test_a_stream_has_every_event_in_order(api: Api, gateway: FakeGateway) -> None:
    gateway.script = lambda stream: stream.put(tokens_of("We", "ll", CALL))
    events = events_of(api.create(stream=True, tools=[WEATHER]))
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]


def test_a_stream_ends_with_what_a_whole_answer_is(api: Api, gateway: FakeGateway) -> None:
    gateway.script = lambda stream: stream.put(tokens_of("Well", CALL, "Then", CALL))
    whole = api.created(tools=[WEATHER])
    streamed = events_of(api.create(tools=[WEATHER], stream=True))[-1]["response"]
    assert without_times(streamed) == without_times(whole)
    output = whole["output"]
    assert isinstance(output, list)
    assert [item["type"] for item in output] == ["message", "function_call", "message", "function_call"]


def test_an_answer_cut_off_at_its_limit_is_incomplete(api: Api, gateway: FakeGateway) -> None:
    gateway.script = lambda stream: stream.put(tokens_of("Hel", finish=FinishReason.LENGTH))
    whole = api.created()
    last = events_of(api.create(stream=True))[-1]
    assert last["type"] == "response.incomplete"
    assert without_times(last["response"]) == without_times(whole)
    assert (whole["status"], whole["completed_at"]) == ("incomplete", None)
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert whole["output"][0]["status"] == "incomplete"  # type: ignore[index]


def test_an_answer_that_says_nothing_is_a_message_without_text(api: Api, gateway: FakeGateway) -> None:
    gateway.script = lambda stream: stream.put(tokens_of(""))
    (item,) = api.created()["output"]  # type: ignore[misc, attr-defined]
    assert item["content"][0]["text"] == ""


def test_a_failure_in_mid_stream_is_told_and_raised(api: Api, gateway: FakeGateway) -> None:
    def fail(stream: AnswerStream) -> None:
        stream.put(tokens_of("Hel", finish=None))
        stream.fail(NoCapacity("gone"))

    gateway.script = fail
    *_, failed, error = events_of(api.create(stream=True, store=True))
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"  # type: ignore[index]
    assert failed["response"]["error"]["message"] == "gone"  # type: ignore[index]
    assert failed["response"]["output"][0]["status"] == "incomplete"  # type: ignore[index]
    assert (error["type"], error["message"]) == ("error", "gone")
    assert api.request("GET", "/resp_r0").status_code == 404

    async def stream() -> None:
        async with official(api) as client, client.responses.stream(model="tiny", input="Hi") as events:
            await events.get_final_response()

    with pytest.raises(openai.APIError, match="gone"):
        asyncio.run(stream())


TEXTS = st.lists(st.sampled_from(["", "Hi", " there", "\n", "é", "<tool", "_call>", CALL, "{}"]), max_size=24)


@given(
    texts=TEXTS,
    cuts=st.lists(st.integers(1, 12), max_size=8),
    has_logprobs=st.booleans(),
    has_tools=st.booleans(),
)
def test_however_tokens_come_the_stream_ends_with_the_whole_answer(
    tokenizers: dict[str, Tokenizer], texts: list[str], cuts: list[int], has_logprobs: bool, has_tools: bool
) -> None:
    deltas: Sequence[TokenDelta] = tokens_of(*texts, "!")
    deltas = with_logprobs(deltas) if has_logprobs else deltas
    dialect = ResponseDialect({"previous_response_id": None}, 0.0)
    sampling = SamplingParams(logprobs=2 if has_logprobs else None)
    use = ToolUse(ToolFormat.HERMES, {"weather"}, None) if has_tools else None
    spec = AnswerSpec(dialect, [GenerationRequest("tiny", "Hi", sampling)], 1, True, use)
    stream = AnswerStream(RequestId("r0"), ModelId("tiny"), tokenizers["hermes"], 5, lambda: None)
    usage = TokenUsage(5, len(deltas), 0)

    whole = json.loads(msgspec.json.encode(dialect.whole(spec, [Choice(stream, deltas, "", "", ())], usage)))
    events, written, at = dialect.events(spec, [stream]), b"", 0
    written += events.first([""])
    for size in [*cuts, len(deltas)]:
        if group := deltas[at : at + size]:
            written += events.write(0, group)
        at += size
    written += events.last(usage)

    frames = [json.loads(frame.split(b"data: ")[1]) for frame in written.split(b"\n\n")[:-1]]
    assert [frame["sequence_number"] for frame in frames] == list(range(len(frames)))
    assert without_times(frames[-1]["response"]) == without_times(whole)
    said: dict[int, str] = {}
    for frame in frames:
        if frame["type"].endswith(".delta"):
            said[frame["output_index"]] = said.get(frame["output_index"], "") + frame["delta"]
    items = frames[-1]["response"]["output"]
    assert [said.get(index, "") for index in range(len(items))] == [
        item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"] for item in items
    ]


# Requests.


@asynccontextmanager
async def official(api: Api) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client, which refuses what is not as its types say."""
    http = httpx.AsyncClient(transport=httpx.ASGITransport(api.app))
    async with openai.AsyncOpenAI(
        api_key="none",
        base_url="http://localhost/v1",
        http_client=http,
        max_retries=0,
        _strict_response_validation=True,
    ) as client:
        yield client


def test_the_official_client_accepts_all_of_it(api: Api, gateway: FakeGateway) -> None:
    gateway.script = lambda stream: stream.put(with_logprobs(tokens_of("Well", CALL)))

    async def ask() -> None:
        async with official(api) as client:
            tool = openai.types.responses.FunctionToolParam(
                type="function", name="weather", parameters={"type": "object"}, strict=True
            )
            asked = await client.responses.create(
                model="tiny",
                input="Hi",
                tools=[tool],
                include=["message.output_text.logprobs"],
                top_logprobs=2,
                store=True,
            )
            async with client.responses.stream(model="tiny", input="Hi", tools=[tool]) as events:
                seen = [event.type async for event in events]
                streamed = await events.get_final_response()
            stored = await client.responses.retrieve(asked.id)
            listed = await client.responses.input_items.list(asked.id)
            await client.responses.delete(asked.id)
            with pytest.raises(openai.NotFoundError, match="no stored response"):
                await client.responses.retrieve(asked.id)
        assert "response.function_call_arguments.delta" in seen
        assert stored == asked
        assert [item.type for item in listed.data] == ["message"]
        for response in (asked, streamed):
            message, call = response.output
            assert isinstance(message, ResponseOutputMessage)
            assert isinstance(call, ResponseFunctionToolCall)
            assert response.output_text == "Well"
            assert (call.name, call.arguments) == ("weather", '{"city": "Rome"}')
        assert asked.output[0].content[0].logprobs[0].logprob == -0.5  # type: ignore[union-attr, index]

    asyncio.run(ask())


def test_items_become_messages(api: Api, gateway: FakeGateway) -> None:
    api.created(
        instructions="Be brief.",
        input=[
            {"role": "developer", "content": "And kind."},
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "Rome"}, {"type": "input_text", "text": "?"}],
            },
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {
                "type": "message",
                "id": "msg_1",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
            },
            {
                "type": "function_call",
                "id": "fc_1",
                "call_id": "a",
                "name": "weather",
                "arguments": '{"x": 1}',
            },
            {"type": "function_call", "call_id": "b", "name": "weather", "arguments": ""},
            {"type": "function_call_output", "call_id": "a", "output": "sun"},
            {
                "type": "function_call_output",
                "call_id": "b",
                "output": [{"type": "input_text", "text": "rain"}],
            },
            {"role": "system", "content": "Later."},
        ],
    )
    calls = [
        {"id": name, "type": "function", "function": {"name": "weather", "arguments": arguments}}
        for name, arguments in (("a", {"x": 1}), ("b", {}))
    ]
    assert prompt_of(gateway).messages == [
        {"role": "system", "content": "Be brief.\n\nAnd kind."},
        {"role": "user", "content": "Rome\n?"},
        {"role": "assistant", "content": "I look.", "tool_calls": calls},
        {"role": "tool", "content": "sun", "tool_call_id": "a"},
        {"role": "tool", "content": "rain", "tool_call_id": "b"},
        {"role": "system", "content": "Later."},
    ]


def test_fields_reach_the_inner_request(api: Api, gateway: FakeGateway) -> None:
    answer = api.create(
        max_output_tokens=3,
        temperature=0.5,
        top_p=0.25,
        seed=7,
        stop=["x"],
        reasoning={"effort": "low"},
        text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
        tools=[WEATHER],
        keep_alive="1m",
        pace=3,
        first_token_target=9,
        service_tier="flex",
        top_logprobs=4,
        user="me",
        truncation="disabled",
        include=["reasoning.encrypted_content"],
    )
    assert answer.status_code == 200, answer.text
    asked = gateway.requests[-1]
    sampling = asked.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.seed) == (3, 0.5, 0.25, 7)
    assert (sampling.stop_strings, sampling.logprobs) == (("x",), 4)
    assert asked.guide is not None
    assert (asked.guide.kind, asked.guide.text) == ("json_schema", '{"type": "object"}')
    assert (asked.keep_alive_s, asked.tokens_per_s, asked.first_token_s) == (60, 3, 9)
    assert asked.is_batch
    assert answer.json()["service_tier"] == "flex"
    prompt = prompt_of(gateway)
    assert prompt.extra == {"reasoning_effort": "low"}
    function = {name: value for name, value in WEATHER.items() if name != "type"}
    assert prompt.tools == [{"type": "function", "function": function}]


def test_a_choice_of_a_tool_is_one_of_the_inner_request(api: Api, gateway: FakeGateway) -> None:
    api.created(tools=[WEATHER], tool_choice={"type": "function", "name": "weather"})
    guide = gateway.requests[-1].guide
    assert guide is not None
    assert guide.kind == "lark"
    api.created(tools=[WEATHER], tool_choice="none")
    assert prompt_of(gateway).tools is None


REFUSED = [
    ({"tools": [{"type": "web_search"}]}, "tools[0]", "implement it as a function"),
    ({"tool_choice": "required"}, None, "`tool_choice` needs `tools`"),
    (
        {"tools": [WEATHER], "tool_choice": "required", "text": {"format": {"type": "json_object"}}},
        None,
        "`text.format` another format",
    ),
    ({"background": True}, "background", "use `stream`"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt", "a part of `input`"),
    ({"conversation": "conv_1"}, "conversation", "use `previous_response_id`"),
    ({"messages": [{}]}, "messages", "send them as `input`"),
    ({"max_tokens": 3}, "max_tokens", "use `max_output_tokens`"),
    ({"response_format": {"type": "json_object"}}, "response_format", "use `text.format`"),
    ({"guided_regex": ""}, "guided_regex", "use `text.format`"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "use `reasoning.effort`"),
    ({"n": 2}, "n", "send several requests"),
    ({"text": {"verbosity": "low"}}, "text.verbosity", "chat_template_kwargs"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format", "needs a `schema`"),
    ({"input": []}, None, "`input` has no message"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "send it as a message"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]", "send text"),
    ({"input": ["Hi"]}, "input[0]", "send a message"),
    (
        {"input": [{"type": "function_call", "call_id": "a", "name": "b", "arguments": "{}"}] * 129},
        None,
        "more than 128 calls in a row",
    ),
    ({"continue_final_message": True}, "continue_final_message", "no message is continued"),
    ({"input": [{"type": 4}]}, "input[0]", "given: int"),
    (
        {"input": [{"type": "function_call", "call_id": "a", "name": "b", "arguments": "{"}]},
        None,
        "`input[0].arguments` is not valid JSON",
    ),
    (
        {"input": [{"type": "function_call", "call_id": "a", "name": "b", "arguments": "[]"}]},
        None,
        "`input[0].arguments` must be a JSON object",
    ),
    ({"min_tokens": 4, "max_output_tokens": 3}, None, "`max_output_tokens`: 4 > 3"),
    ({"metadata": {str(index): "" for index in range(17)}}, "metadata", "at most 16 pairs"),
    (
        {"reasoning": {"effort": "low"}, "chat_template_kwargs": {"reasoning_effort": "high"}},
        None,
        "`reasoning.effort` is 'low'",
    ),
]


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED)
def test_what_is_not_supported_is_refused_by_the_names_of_this_api(
    strict_api: Api, fields: dict[str, object], param: str | None, message: str
) -> None:
    answer = strict_api.create(**fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert message in error["message"]
    assert error["param"] == param


def test_fields_that_nothing_reads_are_told_by_the_names_of_this_api(api: Api) -> None:
    answer = api.create(
        input=[{"role": "user", "content": "Hi"}, {"type": "reasoning"}],
        tools=[WEATHER],
        truncation="auto",
        reasoning={"summary": "auto"},
        prompt_cache_key="x",
    )
    assert answer.headers["x-hearth-ignored-fields"].split(", ") == [
        *("tools.strict", "truncation", "prompt_cache_key", "reasoning.summary"),
    ]


def test_a_schema_with_half_characters_and_long_numbers_is_repeated(api: Api) -> None:
    odd = {"\ud800": 10**40}
    response = api.created(tools=[{**WEATHER, "parameters": odd}], store=True)
    assert response["tools"][0]["parameters"] == odd  # type: ignore[index]
    api.created(previous_response_id=response["id"])


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 2**40)
    | st.floats()
    | st.text(max_size=4)
    | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
KINDS = st.sampled_from(
    ["message", "function_call", "function_call_output", "reasoning", "input_text", "output_text", "function"]
)
OBJECTS = st.fixed_dictionaries(
    {},
    optional={
        "type": KINDS | JSON,
        "role": st.sampled_from(["user", "assistant", "system"]) | JSON,
        "content": st.lists(st.fixed_dictionaries({"type": KINDS, "text": JSON}), max_size=2) | JSON,
        "call_id": JSON,
        "name": st.sampled_from(["weather", "\ud800"]) | JSON,
        "arguments": st.sampled_from(["{}", "[" * 4000, '{"a": NaN}']) | JSON,
        "output": JSON,
        "parameters": JSON,
        "format": st.fixed_dictionaries({"type": st.sampled_from(["json_schema", "text"]), "schema": JSON}),
        "effort": JSON,
    },
)
FIELDS = (
    *("input", "instructions", "tools", "tool_choice", "text", "reasoning", "include", "metadata", "store"),
    *("previous_response_id", "max_output_tokens", "top_logprobs", "truncation", "stream", "user"),
    *("parallel_tool_calls", "chat_template_kwargs", "service_tier", "keep_alive", "temperature"),
)


BODIES = st.dictionaries(
    st.sampled_from(FIELDS), JSON | OBJECTS | st.lists(OBJECTS, max_size=2), min_size=1, max_size=4
)


def test_no_body_makes_the_api_fail(api: Api) -> None:
    @given(BODIES)
    def check(fields: dict[str, object]) -> None:
        answer = api.create(**fields)
        assert answer.status_code in (200, 400, 404), f"{answer.status_code} {answer.text} after {fields}"

    check()


# What is stored.


def test_a_response_is_stored_only_if_asked(api: Api) -> None:
    for fields in ({}, {"store": False}, {"store": None}):
        response = api.created(**fields)
        assert response["store"] is False
        missing = api.request("GET", f"/{response['id']}")
        assert missing.status_code == 404
        assert "`store: true`" in missing.json()["error"]["message"]
    response = api.created(store=True)
    assert response["store"] is True
    assert api.request("GET", f"/{response['id']}").json() == response


def test_a_conversation_goes_on_from_a_stored_response(api: Api, gateway: FakeGateway) -> None:
    gateway.script = lambda stream: stream.put(tokens_of("Sure.", CALL))
    first = api.created(input="Weather?", instructions="Be brief.", tools=[WEATHER], store=True)
    call = first["output"][1]  # type: ignore[index]
    gateway.script = lambda stream: stream.put(tokens_of("It is sunny."))
    answered = {"type": "function_call_output", "call_id": call["call_id"], "output": "sun"}
    events = events_of(
        api.create(input=[answered], previous_response_id=first["id"], store=True, stream=True)
    )
    second = events[-1]["response"]
    assert isinstance(second, dict)
    api.created(input="Thanks", instructions="Be kind.", previous_response_id=second["id"])
    called = {"name": "weather", "arguments": {"city": "Rome"}}
    assert prompt_of(gateway).messages == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "Sure.",
            "tool_calls": [{"id": call["call_id"], "type": "function", "function": called}],
        },
        {"role": "tool", "content": "sun", "tool_call_id": call["call_id"]},
        {"role": "assistant", "content": "It is sunny."},
        {"role": "user", "content": "Thanks"},
    ]

    api.request("DELETE", f"/{first['id']}")
    broken = api.create(previous_response_id=second["id"])
    assert broken.status_code == 404
    assert f"`{first['id']}`" in broken.json()["error"]["message"]


def test_a_long_conversation_is_read_off_the_event_loop(api: Api, gateway: FakeGateway) -> None:
    long = "x" * 70_000
    first = api.created(input=long, store=True)
    api.created(input="Hi", previous_response_id=first["id"])
    assert prompt_of(gateway).messages[0] == {"role": "user", "content": long}


def test_a_key_sees_no_response_of_a_model_that_only_others_of_its_group_may_use(
    tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, group = FakeKeys(), GroupId("team")
    terms = {"all": KeyTerms(), "other": KeyTerms(models=("other",)), "same": KeyTerms(models=("tiny",))}
    monkeypatch.setattr(keys, "check", lambda key: Caller(key, "user", group, terms[key]))
    api = Api(app_of(FakeGateway(tokenizers["hermes"], keys=keys)))
    response = api.as_key("all").created(store=True)
    path = f"/{response['id']}"
    other, same = api.as_key("other"), api.as_key("same")
    for method, where in (("GET", path), ("GET", f"{path}/input_items"), ("DELETE", path)):
        assert other.request(method, where).status_code == 404
    assert other.create(previous_response_id=response["id"]).status_code == 404
    assert same.create(previous_response_id=response["id"]).status_code == 200
    assert same.request("GET", path).json()["id"] == response["id"]


def test_groups_do_not_see_each_others_responses(tokenizers: dict[str, Tokenizer]) -> None:
    api = Api(app_of(FakeGateway(tokenizers["hermes"], keys=FakeKeys())))
    ann, bob = api.as_key("user-key"), api.as_key("admin-key")
    response = ann.created(store=True)
    path = f"/{response['id']}"
    for method, where in (("GET", path), ("GET", f"{path}/input_items"), ("DELETE", path)):
        assert bob.request(method, where).status_code == 404
    assert bob.create(previous_response_id=response["id"]).status_code == 404
    assert ann.request("DELETE", path).json() == {"id": response["id"], "object": "response", "deleted": True}
    assert ann.request("GET", path).status_code == 404


def test_input_items_come_in_pages(api: Api) -> None:
    response = api.created(input=[{"role": "user", "content": str(index)} for index in range(5)], store=True)

    def page(query: str) -> dict[str, object]:
        found = api.request("GET", f"/{response['id']}/input_items?{query}").json()
        assert isinstance(found, dict)
        return found

    def texts(found: dict[str, object]) -> list[str]:
        return [item["content"][0]["text"] for item in found["data"]]  # type: ignore[attr-defined]

    first = page("limit=2")
    assert (texts(first), first["has_more"]) == (["4", "3"], True)
    second = page(f"limit=3&after={first['last_id']}")
    assert (texts(second), second["has_more"]) == (["2", "1", "0"], False)
    assert texts(page("order=asc")) == ["0", "1", "2", "3", "4"]
    assert "no item has the id" in str(page("after=none"))
    assert api.request("GET", f"/{response['id']}?stream=true").status_code == 400


def test_a_response_too_large_to_be_stored_says_that_it_is_not(gateway: FakeGateway) -> None:
    api = Api(app_of(gateway, response_store_bytes=3000))
    response = api.created(input="x" * 3000, store=True)
    assert response["store"] is False
    assert api.request("GET", f"/{response['id']}").status_code == 404


def test_a_service_that_stores_nothing_refuses_to(gateway: FakeGateway) -> None:
    api = Api(app_of(gateway, response_store_bytes=0))
    assert "`service.response_store_bytes` is 0" in api.create(store=True).json()["error"]["message"]
    assert "stores none" in api.create(previous_response_id="resp_1").json()["error"]["message"]
    assert gateway.requests == []


def test_a_response_whose_client_left_is_not_stored(gateway: FakeGateway) -> None:
    app = app_of(gateway)
    body = json.dumps({"model": "tiny", "input": "Hi", "store": True, "stream": True}).encode()
    gateway.script = lambda stream: stream.put(tokens_of("Hel", finish=None))

    async def leave() -> None:
        connection = Connection(body)

        def leave_at_text(data: bytes) -> None:
            if b"delta" in data:
                connection.is_gone.set()

        connection.on_data = leave_at_text
        await connection.run(app, "/v1/responses")

    asyncio.run(leave())
    assert gateway.cancelled == ["r0"]
    assert Api(app).request("GET", "/resp_r0").status_code == 404

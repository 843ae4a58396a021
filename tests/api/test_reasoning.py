"""Reasoning in all APIs: thinking is apart from the answer, whole and streamed, and switched and limited."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import httpx
import ollama
import openai
import pytest

from hearth.control.requests.generation import AnswerStream, ChatPrompt
from hearth.core.types import FinishReason, GuideSpec, ThinkingSpec
from hearth.text.tokenizer import Tokenizer
from tests.api.conftest import app_of, chat, events, request, served_app
from tests.api.fake import FakeGateway, tokens_of, with_logprobs
from tests.text.reasoning_templates import DEEPSEEK, QWEN
from tests.text.test_reasoning import made

#: The marks are split over tokens, and a token ends the thinking and begins the white space after it.
PIECES = ("<", "think>", "\n", "Hm", ".\n\n", "So", "\n</th", "ink>\n", "\n", "Ye", "s.")
HI = [{"role": "user", "content": "Hi"}]
THOUGHT, ANSWER = "Hm.\n\nSo", "Yes."
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = ("<tool_call>\n", '{"name": "add", "arguments": {"a": 1}}', "\n</tool_call>")

T = TypeVar("T")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return made(tmp_path_factory.mktemp("qwen"), QWEN)


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return made(tmp_path_factory.mktemp("deepseek"), DEEPSEEK)


def gateway_of(
    tokenizer: Tokenizer,
    pieces: Sequence[str] = PIECES,
    finish: FinishReason = FinishReason.STOP,
    *,
    has_logprobs: bool = False,
) -> FakeGateway:
    """Return one that answers with `pieces`, a token each, to prompts of the real template."""
    gateway = FakeGateway(tokenizer)

    def play(stream: AnswerStream) -> None:
        asked = gateway.requests[-1].prompt
        assert isinstance(asked, ChatPrompt)
        text = tokenizer.chat_text(
            asked.messages,
            asked.tools,
            asked.has_turn,
            continue_final_message=asked.is_continued,
            **asked.extra,
        )
        stream.prompt = tokenizer.encode(text)
        made = tokens_of(*pieces, finish=finish)
        stream.put(with_logprobs(made) if has_logprobs else made)

    gateway.script = play
    return gateway


def prompt_text(gateway: FakeGateway) -> str:
    return gateway.tokenizer_.decode(list(gateway.streams[-1].prompt), skip_special_tokens=False)


def guide_of(gateway: FakeGateway) -> GuideSpec | None:
    asked = gateway.requests[-1]
    return asked.full_guide(gateway.tokenizer_, gateway.streams[-1].prompt)


def with_http(gateway: FakeGateway, ask: Callable[[httpx.AsyncClient], Awaitable[T]]) -> T:
    """Ask an application by a client of its own, as the official packages take one."""

    async def asked() -> T:
        transport = httpx.ASGITransport(app_of(gateway))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await ask(http)

    return asyncio.run(asked())


# OpenAI's chat.


def test_a_message_has_its_reasoning_under_both_names(qwen: Tokenizer) -> None:
    answer = chat(gateway_of(qwen)).json()

    message = answer["choices"][0]["message"]
    assert message == {
        **{"role": "assistant", "content": ANSWER, "refusal": None},
        **{"reasoning": THOUGHT, "reasoning_content": THOUGHT},
    }
    assert answer["usage"]["completion_tokens"] == len(PIECES)
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 8}


@pytest.mark.parametrize("pieces", [PIECES, tuple("".join(PIECES)), ("".join(PIECES),)])
def test_a_stream_is_the_same_in_pieces(qwen: Tokenizer, pieces: tuple[str, ...]) -> None:
    *found, last = events(chat(gateway_of(qwen, pieces), stream=True, stream_options={"include_usage": True}))

    deltas = [event["choices"][0]["delta"] for event in found]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == THOUGHT
    assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in deltas)
    assert "".join(delta.get("content", "") for delta in deltas) == ANSWER
    assert last["usage"]["completion_tokens_details"]["reasoning_tokens"] >= 1


def test_the_thinking_that_a_prompt_has_begun_needs_no_mark(deepseek: Tokenizer) -> None:
    message = chat(gateway_of(deepseek, ("Hm", "</think>", "\n\nYes."))).json()["choices"][0]["message"]

    assert (message["reasoning"], message["content"]) == ("Hm", "Yes.")


def test_an_answer_cut_in_its_thinking_has_no_content_and_can_be_sent_back(qwen: Tokenizer) -> None:
    gateway = gateway_of(qwen, ("<think>", "\n", "Hm."), FinishReason.LENGTH)
    answer = chat(gateway).json()

    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == (None, "Hm.")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
    assert chat(gateway, messages=[*HI, message, *HI]).status_code == 200


def test_a_model_that_answers_at_once_has_no_reasoning(qwen: Tokenizer) -> None:
    answer = chat(gateway_of(qwen, ("Yes", "."))).json()

    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "Yes.", "refusal": None}
    assert "completion_tokens_details" not in answer["usage"]


def test_reasoning_can_be_left_out_and_is_counted_all_the_same(qwen: Tokenizer) -> None:
    answer = chat(gateway_of(qwen), include_reasoning=False).json()
    found = events(chat(gateway_of(qwen), include_reasoning=False, stream=True))

    assert answer["choices"][0]["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 8}
    assert not any("reasoning" in event["choices"][0]["delta"] for event in found)


def test_a_call_inside_the_thinking_is_thinking(qwen: Tokenizer) -> None:
    gateway = gateway_of(qwen, ("<think>", *CALL, "</think>", "\n\n", *CALL))
    choice = chat(gateway, tools=[ADD]).json()["choices"][0]
    deltas = [event["choices"][0]["delta"] for event in events(chat(gateway, tools=[ADD], stream=True))]

    assert choice["message"]["reasoning"] == "".join(CALL)
    assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == ['{"a": 1}']
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "".join(CALL)
    assert sum(len(delta.get("tool_calls", [])) for delta in deltas) == 1


def test_logprobs_are_those_of_all_tokens_whole_and_streamed(qwen: Tokenizer) -> None:
    gateway = gateway_of(qwen, has_logprobs=True)
    whole = chat(gateway, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    found = events(chat(gateway, logprobs=True, stream=True))

    streamed = [(event["choices"][0]["logprobs"] or {}).get("content") or [] for event in found]
    assert len(whole) == len(PIECES)
    assert [one for part in streamed for one in part] == whole


@pytest.mark.parametrize(
    "fields",
    [
        {"enable_thinking": False},
        {"reasoning_effort": "none"},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
)
def test_thinking_is_switched_off_by_the_template(qwen: Tokenizer, fields: dict[str, object]) -> None:
    gateway = gateway_of(qwen, ("<think>", "Yes."))
    message = chat(gateway, **fields).json()["choices"][0]["message"]

    assert prompt_text(gateway).endswith("<think>\n\n</think>\n\n")
    assert message["content"] == "<think>Yes."  # nothing is thinking any more
    assert guide_of(gateway) is None


def test_without_a_switch_in_the_template_thinking_is_ended_where_it_begins(deepseek: Tokenizer) -> None:
    gateway = gateway_of(deepseek, ("</think>", "Yes."))
    message = chat(gateway, enable_thinking=False).json()["choices"][0]["message"]

    assert (message["content"], "reasoning" in message) == ("Yes.", False)
    assert guide_of(gateway) == GuideSpec("any", "", ThinkingSpec("<think>", "</think>", True, 0))


def test_a_budget_and_a_schema_become_one_guide(qwen: Tokenizer, deepseek: Tokenizer) -> None:
    for tokenizer, is_open in ((qwen, False), (deepseek, True)):
        gateway = gateway_of(tokenizer)
        chat(gateway, thinking_token_budget=9)
        assert guide_of(gateway) == GuideSpec("any", "", ThinkingSpec("<think>", "</think>", is_open, 9))
        chat(gateway, response_format={"type": "json_object"})
        guide = guide_of(gateway)
        assert guide == GuideSpec("json_object", "", ThinkingSpec("<think>", "</think>", is_open, None))
        chat(gateway)
        assert guide_of(gateway) is None


def test_earlier_reasoning_reaches_a_template_that_takes_it(qwen: Tokenizer) -> None:
    for name in ("reasoning", "reasoning_content"):
        gateway = gateway_of(qwen)
        chat(gateway, messages=[*HI, {"role": "assistant", "content": "No.", name: "Hm"}, *HI])
        assert "<think>\nHm\n</think>\n\nNo." in prompt_text(gateway)


def test_a_begun_message_goes_on_where_it_is(qwen: Tokenizer) -> None:
    begun = {"role": "assistant", "content": "<think>\nHm"}
    gateway = gateway_of(qwen, (", so.", "</think>", "Yes."))
    message = chat(gateway, messages=[*HI, begun], continue_final_message=True).json()["choices"][0][
        "message"
    ]
    assert (message["reasoning"], message["content"]) == (", so.", "Yes.")

    gateway = gateway_of(qwen, (", so.", "</think>"))
    begun = {"role": "assistant", "content": "Yes"}
    message = chat(gateway, messages=[*HI, begun], continue_final_message=True).json()["choices"][0][
        "message"
    ]
    assert message["content"] == ", so.</think>"


def test_marks_that_are_special_tokens_are_seen(tmp_path: Path) -> None:
    tokenizer = made(tmp_path, "{{ '[THINK]' }}{{ messages[0].content }}[/THINK]", [])
    tokenizer._backend.add_special_tokens(["[/THINK]"])
    special = replace(tokenizer, special_ids=frozenset([tokenizer._backend.token_to_id("[/THINK]")]))
    gateway = gateway_of(special)

    chat(gateway)

    assert gateway.requests[-1].sampling.skip_special_tokens is False


def test_openais_client_reads_reasoning(qwen: Tokenizer) -> None:
    async def ask(http: httpx.AsyncClient) -> tuple[object, str, str, int]:
        client = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=http)
        whole = await client.chat.completions.create(model="tiny", messages=HI)  # type: ignore[arg-type] # plain
        details = whole.usage and whole.usage.completion_tokens_details
        thought, text = "", ""
        stream = await client.chat.completions.create(model="tiny", messages=HI, stream=True)  # type: ignore[call-overload] # plain
        async for chunk in stream:
            delta = chunk.choices[0].delta
            thought += getattr(delta, "reasoning_content", None) or ""
            text += delta.content or ""
        assert details is not None
        return whole.choices[0].message.model_extra, thought, text, details.reasoning_tokens or 0

    extra, thought, text, num_tokens = with_http(gateway_of(qwen), ask)

    assert extra == {"reasoning": THOUGHT, "reasoning_content": THOUGHT}
    assert (thought, text, num_tokens) == (THOUGHT, ANSWER, 8)


# OpenAI's responses.


def test_a_response_has_an_item_of_reasoning_that_can_be_sent_back(qwen: Tokenizer) -> None:
    gateway = gateway_of(qwen, has_logprobs=True)

    async def ask(http: httpx.AsyncClient) -> None:
        client = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=http)
        whole = await client.responses.create(model="tiny", input="Hi", store=True, top_logprobs=1)
        async with client.responses.stream(model="tiny", input="Hi") as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        for response in (whole, final):
            reasoning, message = response.output
            assert reasoning.type == "reasoning"
            assert [part.text for part in reasoning.content or ()] == [THOUGHT]
            assert response.output_text == ANSWER
            assert message.type == "message"
            assert response.usage is not None
            assert response.usage.output_tokens_details.reasoning_tokens == 8
        part = whole.output[1].content[0]  # type: ignore[union-attr] # a message, as checked above
        assert len(part.logprobs) == 2  # type: ignore[union-attr, arg-type] # likewise
        order = ("reasoning_text.delta", "reasoning_text.done", "output_text.delta", "output_text.done")
        at = [kinds.index(f"response.{kind}") for kind in order]
        assert at == sorted(at)
        await client.responses.create(model="tiny", input="And?", previous_response_id=whole.id)
        assert f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}" in prompt_text(gateway)
        items = [item.model_dump(exclude_none=True) for item in final.output]
        await client.responses.create(model="tiny", input=[*HI, *items, *HI])  # type: ignore[list-item] # plain
        assert f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}" in prompt_text(gateway)

    with_http(gateway, ask)


def test_a_response_cut_in_its_thinking_is_incomplete(qwen: Tokenizer) -> None:
    gateway = gateway_of(qwen, ("<think>", "Hm."), FinishReason.LENGTH)
    (item,) = request(gateway, "POST", "/v1/responses", {"model": "tiny", "input": "Hi"}).json()["output"]

    assert (item["type"], item["status"]) == ("reasoning", "incomplete")


# Anthropic's messages.


def test_anthropics_client_reads_blocks_of_thinking(qwen: Tokenizer) -> None:
    import anthropic  # 3,000 modules, which other processes of the tests can do without

    gateway = gateway_of(qwen)
    with served_app(gateway) as url, anthropic.Anthropic(base_url=url, api_key="none") as client:
        whole = client.messages.create(
            model="tiny",
            max_tokens=2048,
            messages=HI,  # type: ignore[arg-type] # plain
            thinking={"type": "enabled", "budget_tokens": 1024},
        )
        guide = guide_of(gateway)
        with client.messages.stream(model="tiny", max_tokens=9, messages=HI) as stream:  # type: ignore[arg-type] # plain
            kinds = [event.type for event in stream]
            streamed = stream.get_final_message()
        history = [*HI, {"role": "assistant", "content": [one.model_dump() for one in whole.content]}, *HI]
        client.messages.create(model="tiny", max_tokens=9, messages=history)  # type: ignore[arg-type] # plain

    assert guide is not None
    assert guide.thinking is not None
    assert guide.thinking.budget_tokens == 1024
    for message in (whole, streamed):
        thinking, text = message.content
        assert thinking.type == "thinking"
        assert (thinking.thinking, thinking.signature) == (THOUGHT, "unsigned")
        assert text.type == "text"
        assert text.text == ANSWER
    assert kinds.index("thinking") < kinds.index("signature") < kinds.index("text")
    assert f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}" in prompt_text(gateway)


@pytest.mark.parametrize(
    ("thinking", "pieces", "kinds"),
    [
        ({"type": "disabled"}, ("Yes.",), ["text"]),
        ({"type": "adaptive"}, PIECES, ["thinking", "text"]),
        ({"type": "adaptive", "display": "omitted"}, PIECES, ["text"]),
    ],
)
def test_thinking_is_switched_in_messages(
    qwen: Tokenizer, thinking: dict[str, str], pieces: tuple[str, ...], kinds: list[str]
) -> None:
    gateway = gateway_of(qwen, pieces)
    body = {"model": "tiny", "max_tokens": 9, "messages": HI, "thinking": thinking}
    answer = request(gateway, "POST", "/v1/messages", body)

    assert [block["type"] for block in answer.json()["content"]] == kinds
    assert ("</think>" in prompt_text(gateway)) is (thinking["type"] == "disabled")
    assert "x-hearth-ignored-fields" not in answer.headers


# Ollama's chat and generate.


def test_ollamas_client_reads_thinking(qwen: Tokenizer) -> None:
    gateway = gateway_of(qwen)

    async def ask(http: httpx.AsyncClient) -> None:
        client = ollama.AsyncClient("http://localhost")
        await client._client.aclose()
        client._client = http
        whole = await client.chat("tiny", HI, think=True)
        assert (whole.message.thinking, whole.message.content) == (THOUGHT, ANSWER)
        pieces = [piece.message async for piece in await client.chat("tiny", HI, stream=True)]
        assert "".join(piece.thinking or "" for piece in pieces) == THOUGHT
        assert "".join(piece.content or "" for piece in pieces) == ANSWER
        written = await client.generate("tiny", "Hi", think="low")
        assert (written.thinking, written.response) == (THOUGHT, ANSWER)
        assert gateway.requests[-1].prompt.extra == {"enable_thinking": True, "reasoning_effort": "low"}  # type: ignore[union-attr] # of a chat
        parts = [piece async for piece in await client.generate("tiny", "Hi", stream=True)]
        assert "".join(part.thinking or "" for part in parts) == THOUGHT
        assert "".join(part.response or "" for part in parts) == ANSWER
        await client.chat("tiny", [*HI, whole.message, *HI])
        assert f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}" in prompt_text(gateway)
        await client.chat("tiny", HI, think=False)
        assert prompt_text(gateway).endswith("<think>\n\n</think>\n\n")

    with_http(gateway, ask)


def test_to_think_is_refused_as_ollama_does_for_a_model_that_does_not(
    tokenizers: dict[str, Tokenizer],
) -> None:
    gateway = FakeGateway(tokenizers["plain"])
    for path, fields in (("chat", {"messages": HI}), ("generate", {"prompt": "Hi"})):
        refused = request(gateway, "POST", f"/api/{path}", {"model": "tiny", "think": True, **fields})
        assert refused.status_code == 400
        assert "`tiny` does not support thinking" in refused.json()["error"]


def test_a_reasoning_model_is_shown_as_one(qwen: Tokenizer) -> None:
    shown = request(FakeGateway(qwen), "POST", "/api/show", {"name": "tiny"}).json()

    assert shown["capabilities"] == ["completion", "tools", "thinking", "embedding"]
    assert json.dumps(shown["template"]) == json.dumps(QWEN)

"""Official clients against a tiny model whose prompts begin to think: a budget ends it, a schema waits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import ollama
import pytest

from tests.service.checkpoints import write_with_template
from tests.service.harness import PATIENCE_S, Service, Shelf
from tests.text.reasoning_templates import DEEPSEEK

if TYPE_CHECKING:
    from anthropic.types import MessageParam
    from openai.types.chat import ChatCompletionMessageParam

pytestmark = pytest.mark.e2e

MODEL, BUDGET = "thinker", 6
HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]
OUTPUT = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", autouse=True)
def thinker(service: Service, shelf: Shelf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    place = write_with_template(shelf.places["tiny-a"], tmp_path_factory.mktemp("models") / MODEL, DEEPSEEK)
    deployed = service.deploy(place, MODEL)
    assert deployed.status_code == 200, deployed.text
    yield
    assert service.http.delete(f"/hearth/models/{MODEL}").is_success


@pytest.mark.client("openai", "reasoning with `thinking_token_budget`, also streamed")
def test_a_budget_ends_the_thinking(service: Service) -> None:
    fields = {"model": MODEL, "messages": HI, "temperature": 0, "max_tokens": 20}
    body = {"thinking_token_budget": BUDGET}
    with service.client() as client:
        whole = client.chat.completions.create(**fields, extra_body=body)  # type: ignore[call-overload] # plain
        stream = client.chat.completions.create(**fields, extra_body=body, stream=True)  # type: ignore[call-overload] # plain
        deltas = [chunk.choices[0].delta for chunk in stream]

    message = whole.choices[0].message
    num_marks = len(
        service.http.post("/tokenize", json={"model": MODEL, "prompt": "</think>"}).json()["tokens"]
    )
    assert whole.usage.completion_tokens_details.reasoning_tokens == BUDGET + num_marks
    assert whole.usage.completion_tokens == 20
    assert message.reasoning
    assert message.content
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == message.reasoning
    assert "".join(delta.content or "" for delta in deltas) == message.content


@pytest.mark.client("openai", "`response_format` of a reasoning model")
def test_a_schema_holds_the_answer_and_not_the_thinking(service: Service) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": OUTPUT}}
    with service.client() as client:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=HI,
            response_format=schema,  # type: ignore[arg-type] # plain
            max_tokens=60,
            extra_body={"thinking_token_budget": BUDGET},
        )

    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert choice.message.reasoning  # type: ignore[attr-defined] # as vLLM names it
    assert json.loads(choice.message.content or "")["city"] in ("Paris", "Rome")


@pytest.mark.client("openai", "responses of a reasoning model, streamed")
def test_a_response_has_an_item_of_reasoning(service: Service) -> None:
    body = {"thinking_token_budget": BUDGET, "temperature": 0}
    with (
        service.client() as client,
        client.responses.stream(model=MODEL, input="Hi", max_output_tokens=20, extra_body=body) as stream,
    ):
        events = list(stream)

    kinds, last = {event.type for event in events}, events[-1]
    assert last.type == "response.incomplete"
    assert [item.type for item in last.response.output] == ["reasoning", "message"]
    assert {"response.reasoning_text.delta", "response.output_text.delta"} <= kinds


@pytest.mark.client("anthropic", "thinking with `budget_tokens`, streamed; `disabled`")
def test_a_message_has_a_block_of_thinking(service: Service) -> None:
    import anthropic

    asked: list[MessageParam] = [{"role": "user", "content": "Hi"}]
    with anthropic.Anthropic(
        base_url=service.url, api_key="none", max_retries=0, timeout=PATIENCE_S
    ) as client:
        with client.messages.stream(
            model=MODEL,
            max_tokens=20,
            messages=asked,
            thinking={"type": "enabled", "budget_tokens": BUDGET},
            extra_body={"temperature": 0},
        ) as stream:
            thought = stream.get_final_message()
        plain = client.messages.create(
            model=MODEL,
            max_tokens=9,
            messages=asked,
            thinking={"type": "disabled"},
            extra_body={"temperature": 0},
        )

    assert [block.type for block in thought.content] == ["thinking", "text"]
    assert [block.type for block in plain.content] == ["text"]


@pytest.mark.client("ollama", "`think`, also streamed")
def test_thinking_is_told_apart_and_switched_off(service: Service) -> None:
    client = ollama.Client(service.url, timeout=PATIENCE_S)
    try:
        options = {"temperature": 0, "num_predict": 12}
        thought = client.chat(MODEL, [{"role": "user", "content": "Hi"}], think=True, options=options)
        pieces = list(client.generate(MODEL, "Hi", think=True, options=options, stream=True))
        plain = client.chat(MODEL, [{"role": "user", "content": "Hi"}], think=False, options=options)
        with pytest.raises(ollama.ResponseError, match="does not support thinking"):
            client.chat("tiny-a", [{"role": "user", "content": "Hi"}], think=True)
        assert "thinking" in (client.show(MODEL).capabilities or [])
    finally:
        client._client.close()

    assert (bool(thought.message.thinking), thought.message.content) == (True, "")
    assert "".join(piece.thinking or "" for piece in pieces) == thought.message.thinking
    assert (plain.message.thinking, bool(plain.message.content)) == (None, True)

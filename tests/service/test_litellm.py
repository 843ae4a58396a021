"""litellm against SmolLM2, as a proxy or a program has it: any server of OpenAI's API by its address."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.service.harness import PATIENCE_S, Service

pytestmark = [
    pytest.mark.e2e,
    # Its types of other providers, which pydantic builds when the first chunk of a stream comes.
    pytest.mark.filterwarnings("ignore:Item 'summary' on TypedDict class:UserWarning"),
]

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(autouse=True)
def _loop() -> Iterator[None]:
    """Have a loop closed that litellm takes from the thread; one that it makes itself it never closes."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    asyncio.set_event_loop(None)
    loop.close()


@pytest.fixture
def complete(service: Service, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it asks the network when it is imported
    import litellm

    def complete(
        messages: list[dict[str, object]] = QUESTION,  # type: ignore[assignment]
        model: str = "smollm2",
        **options: object,
    ) -> Any:
        given = {"temperature": 0, "max_tokens": 8, "timeout": PATIENCE_S, "num_retries": 0, **options}
        return litellm.completion(
            f"openai/{model}", messages, api_base=f"{service.url}/v1", api_key="none", **given
        )

    return complete


@pytest.mark.client("litellm", "chat")
def test_a_chat_is_answered_and_counted(complete: Any) -> None:
    answer = complete()

    assert "Paris" in answer.choices[0].message.content
    assert 0 < answer.usage.completion_tokens <= 8


@pytest.mark.client("litellm", "chat, streamed")
def test_a_streamed_chat_comes_in_pieces(complete: Any) -> None:
    whole = complete(model="tiny-a").choices[0].message.content
    pieces = [chunk.choices[0].delta.content or "" for chunk in complete(model="tiny-a", stream=True)]

    assert whole
    assert "".join(pieces) == whole
    assert len(pieces) > 1


@pytest.mark.client("litellm", "`tool_choice` `required`, and the result sent back")
def test_a_tool_is_called_and_its_result_sent_back(complete: Any) -> None:
    asked = complete(model="tiny-a", tools=[WEATHER], tool_choice="required", max_tokens=40)
    (call,) = asked.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")

    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    answer = complete([*QUESTION, asked.choices[0].message.model_dump(), result], "tiny-a", tools=[WEATHER])
    assert answer.choices[0].message.content or answer.choices[0].message.tool_calls


@pytest.mark.client("aider", "what it sends through litellm: edits streamed, a commit message whole")
def test_aider_gets_its_answers(service: Service, monkeypatch: pytest.MonkeyPatch, complete: Any) -> None:
    """aider pins versions of all that it needs, so the calls of its `send_completion` stand for it."""
    import litellm

    monkeypatch.setenv("OPENAI_API_BASE", f"{service.url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    asked = [
        {"role": "system", "content": "You answer in one word."},
        {"role": "user", "content": "Change the greeting."},
        {"role": "assistant", "content": "Ok."},
        *QUESTION,
    ]
    common = {"model": "openai/smollm2", "temperature": 0, "timeout": 600}

    pieces = litellm.completion(messages=asked, stream=True, **common)
    edits = "".join(chunk.choices[0].delta.content or "" for chunk in pieces)
    message = litellm.completion(messages=QUESTION, stream=False, **common, max_tokens=8)

    assert edits
    assert "Paris" in message.choices[0].message.content

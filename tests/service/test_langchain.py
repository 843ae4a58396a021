"""langchain-openai against SmolLM2 and a tiny model: chats, structured output by both methods, tools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import pytest
from pydantic import BaseModel, Field, SecretStr

from tests.service.harness import PATIENCE_S, Service

if TYPE_CHECKING:
    from langchain_openai import ChatOpenAI

pytestmark = pytest.mark.e2e

QUESTION = "What is the capital of France? Answer in one word."


class City(BaseModel):
    """A city and what is known of it."""

    name: Literal["Paris", "London", "Rome"]
    districts: int = Field(ge=1, le=99)


@pytest.fixture
def model(service: Service) -> ChatOpenAI:
    return chatting(service, "smollm2")


@pytest.fixture
def tiny(service: Service) -> ChatOpenAI:
    """A model that knows nothing, and answers in milliseconds, for answers whose form is dictated."""
    return chatting(service, "tiny-a")


def chatting(service: Service, name: str) -> ChatOpenAI:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        model=name,
        base_url=f"{service.url}/v1",
        api_key=SecretStr("none"),
        temperature=0,
        max_completion_tokens=40,
        timeout=PATIENCE_S,
        max_retries=0,
    )


@pytest.mark.client("langchain-openai", "chat")
def test_a_chat_is_answered(model: ChatOpenAI) -> None:
    answer = model.invoke(QUESTION)

    assert "Paris" in str(answer.content)
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] > 0


@pytest.mark.client("langchain-openai", "chat, streamed")
def test_a_streamed_chat_comes_in_pieces(tiny: ChatOpenAI) -> None:
    whole = tiny.invoke(QUESTION).content
    pieces = [str(chunk.content) for chunk in tiny.stream(QUESTION)]

    assert whole
    assert "".join(pieces) == whole
    assert len(pieces) > 1


@pytest.mark.client("langchain-openai", "structured output by `function_calling`")
def test_structured_output_by_a_call(tiny: ChatOpenAI) -> None:
    found = tiny.with_structured_output(City, method="function_calling").invoke(QUESTION)

    assert isinstance(found, City)


@pytest.mark.client("langchain-openai", "structured output by `json_schema`")
def test_structured_output_by_a_schema(tiny: ChatOpenAI) -> None:
    found = tiny.with_structured_output(City, method="json_schema").invoke(QUESTION)

    assert isinstance(found, City)


@pytest.mark.client("langchain-openai", "`bind_tools`, and the result sent back")
def test_a_tool_is_called_and_its_result_sent_back(tiny: ChatOpenAI) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    bound = tiny.bind_tools([City], tool_choice="any")
    asked = bound.invoke(QUESTION)
    (call,) = asked.tool_calls
    assert call["name"] == "City"

    history = [HumanMessage(QUESTION), asked, ToolMessage("noted", tool_call_id=call["id"])]
    assert tiny.invoke(history).content

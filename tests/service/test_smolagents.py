"""smolagents against a tiny model: chat, and an agent whose tool must be called."""

from __future__ import annotations

from typing import Any

import pytest

from tests.service.harness import PATIENCE_S, Service

pytestmark = pytest.mark.e2e

QUESTION = "What is the capital of France? Answer in one word."


def model(service: Service, name: str, **options: object) -> Any:
    from smolagents import OpenAIModel

    clients = {"timeout": PATIENCE_S, "max_retries": 0}
    return OpenAIModel(
        name, api_base=f"{service.url}/v1", api_key="none", client_kwargs=clients, temperature=0, **options
    )


@pytest.mark.client("smolagents", "chat, also streamed")
def test_a_chat_is_the_same_in_pieces(service: Service) -> None:
    asked = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
    llm = model(service, "smollm2", max_tokens=8)

    whole = llm.generate(asked).content
    pieces = [delta.content or "" for delta in llm.generate_stream(asked)]

    assert "Paris" in whole
    assert "".join(pieces) == whole
    assert len(pieces) > 1


@pytest.mark.client("smolagents", "`ToolCallingAgent`")
def test_an_agent_calls_one_of_its_tools(service: Service) -> None:
    from smolagents import ToolCallingAgent

    agent = ToolCallingAgent(
        tools=[], model=model(service, "smollm2", max_tokens=60), max_steps=1, verbosity_level=0
    )
    agent.run(QUESTION)

    (call,) = agent.memory.steps[1].tool_calls
    assert call.name == "final_answer"

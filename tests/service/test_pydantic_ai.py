"""pydantic-ai against SmolLM2 and a tiny model: an agent answers in text, by a tool and by a schema."""

from __future__ import annotations

import asyncio
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.service.harness import Service

pytestmark = pytest.mark.e2e


class City(BaseModel):
    name: Literal["Paris", "London", "Rome"]
    districts: int = Field(ge=1, le=99)


def answer(service: Service, model: str, output_type: object = str) -> object:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_ai.settings import ModelSettings

    async def run() -> object:
        async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
            agent = Agent(
                OpenAIChatModel(model, provider=OpenAIProvider(openai_client=client)),
                output_type=output_type,  # type: ignore[arg-type]  # of any kind
                model_settings=ModelSettings(temperature=0, max_tokens=40),
                retries=0,
            )
            return (await agent.run("What is the capital of France? Answer in one word.")).output

    return asyncio.run(run())


@pytest.mark.client("pydantic-ai", "chat")
def test_an_agent_answers_in_text(service: Service) -> None:
    assert "Paris" in str(answer(service, "smollm2"))


@pytest.mark.client("pydantic-ai", "structured output by a tool, its default")
def test_an_agent_answers_by_its_output_tool(service: Service) -> None:
    assert isinstance(answer(service, "tiny-a", City), City)


@pytest.mark.client("pydantic-ai", "structured output by `NativeOutput`")
def test_an_agent_answers_by_a_schema(service: Service) -> None:
    from pydantic_ai import NativeOutput

    assert isinstance(answer(service, "tiny-a", NativeOutput(City)), City)

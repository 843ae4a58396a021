"""OpenAI's agents in their default mode, which asks /v1/responses: tools, types, streams, conversations."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Literal, TypeVar

import openai
import pytest
from pydantic import BaseModel, Field

from tests.service.harness import PATIENCE_S, Service

pytestmark = pytest.mark.e2e

T = TypeVar("T")


class Drink(BaseModel):
    kind: Literal["tea", "coffee"]
    num_cups: int = Field(ge=0, le=9)


def run(service: Service, work: Coroutine[None, None, T]) -> T:
    """Run agents that know no other address, and tell nobody what they do."""
    import agents

    async def configured() -> T:
        async with openai.AsyncOpenAI(
            base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
        ) as client:
            agents.set_tracing_disabled(True)
            agents.set_default_openai_client(client, use_for_tracing=False)
            return await work

    return asyncio.run(configured())


@pytest.mark.client("openai-agents", "tools in the default mode, also streamed")
@pytest.mark.parametrize("is_stream", [False, True])
def test_an_agent_calls_its_tool_and_goes_on_with_the_result(service: Service, is_stream: bool) -> None:
    from agents import Agent, ModelSettings, Runner, function_tool

    cities: list[str] = []

    @function_tool
    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """Ask for the weather in a city."""
        cities.append(city)
        return f"It is sunny in {city}."

    agent = Agent(
        name="Weather",
        instructions="Use your tool.",
        model="smollm2-tools",  # the framework refuses an answer that does not come to its end
        tools=[get_weather],
        # Demanded of the first answer alone: the framework takes it back after a call.
        model_settings=ModelSettings(
            tool_choice="required", parallel_tool_calls=False, temperature=0, max_tokens=32
        ),
    )

    async def ask() -> str:
        if not is_stream:
            return str((await Runner.run(agent, "How is the weather in Paris?")).final_output)
        result = Runner.run_streamed(agent, "How is the weather in Paris?")
        kinds = [event.type async for event in result.stream_events()]
        assert "raw_response_event" in kinds
        return str(result.final_output)

    assert run(service, ask())
    assert cities
    assert set(cities) <= {"Paris", "Rome"}


@pytest.mark.client("openai-agents", "`output_type`")
def test_an_agent_answers_with_a_type(service: Service) -> None:
    from agents import Agent, ModelSettings, Runner

    agent = Agent(
        name="Waiter",
        instructions="Bring a drink.",
        model="tiny-a",
        output_type=Drink,
        model_settings=ModelSettings(temperature=0),
    )
    result = run(service, Runner.run(agent, "Tea, two cups."))
    assert isinstance(result.final_output, Drink)


@pytest.mark.client("openai-agents", "`previous_response_id`")
def test_an_agent_continues_a_conversation_that_the_service_has_stored(service: Service) -> None:
    from agents import Agent, ModelSettings, Runner

    agent = Agent(
        name="Talker",
        instructions="Be brief.",
        model="tiny-a",
        model_settings=ModelSettings(temperature=0, max_tokens=4, store=True),
    )

    async def talk() -> tuple[int, int]:
        first = await Runner.run(agent, "My name is Ann.")
        second = await Runner.run(agent, "Who am I?", previous_response_id=first.last_response_id)
        usages = (first.raw_responses[0].usage, second.raw_responses[0].usage)
        return usages[0].input_tokens, usages[1].input_tokens

    first_tokens, second_tokens = run(service, talk())
    assert second_tokens > first_tokens  # it was sent less, and has read more

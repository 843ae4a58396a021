"""The official client against the API on a real server."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import openai
import pytest

from hearth.core.errors import NoCapacity, Overloaded
from hearth.text.tokenizer import Tokenizer
from tests.api.conftest import served_app
from tests.api.fake import FakeGateway, FakeKeys, tokens_of, with_logprobs

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture
def gateway(tokenizers: dict[str, Tokenizer]) -> FakeGateway:
    return FakeGateway(tokenizers["hermes"], keys=FakeKeys())


@pytest.fixture
def client(gateway: FakeGateway) -> Iterator[openai.OpenAI]:
    with (
        served_app(gateway) as url,
        openai.OpenAI(api_key="user-key", base_url=f"{url}/v1", max_retries=0) as client,
    ):
        yield client


HI: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]


def test_models_chat_and_completions(client: openai.OpenAI) -> None:
    models = client.models.list().data
    chat = client.chat.completions.create(model="tiny", messages=HI, n=2)
    completion = client.completions.create(model="tiny", prompt=["Hi", "Ho"])

    assert [model.id for model in models] == ["tiny", "small"]
    assert [choice.message.content for choice in chat.choices] == ["Hello", "Hello"]
    assert chat.usage is not None
    assert chat.usage.prompt_tokens_details is not None
    assert chat.usage.prompt_tokens_details.cached_tokens == 2
    assert [choice.text for choice in completion.choices] == ["Hello", "Hello"]
    assert chat._request_id == "r0,r1"


def test_streams(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=HI, stream=True, stream_options={"include_usage": True}
        )
    )

    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 2


def test_tools_and_logprobs(client: openai.OpenAI, gateway: FakeGateway) -> None:
    tools: list[openai.types.chat.ChatCompletionToolUnionParam] = [
        {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    ]
    gateway.script = lambda stream: stream.put(with_logprobs(tokens_of(CALL)))
    answer = client.chat.completions.create(model="tiny", messages=HI, tools=tools, logprobs=True)
    with client.chat.completions.stream(model="tiny", messages=HI, tools=tools) as stream:
        streamed = stream.get_final_completion()

    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].logprobs is not None
    for choice in (answer.choices[0], streamed.choices[0]):
        assert choice.message.tool_calls is not None
        (call,) = choice.message.tool_calls
        assert call.type == "function"
        assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Rome"}')


def test_errors_have_their_classes(client: openai.OpenAI, gateway: FakeGateway) -> None:
    with pytest.raises(openai.NotFoundError, match="no model named `none`"):
        client.chat.completions.create(model="none", messages=HI)
    with pytest.raises(openai.BadRequestError, match="less than or equal to 2, given: 3"):
        client.chat.completions.create(model="tiny", messages=HI, temperature=3)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    gateway.refusal = Overloaded("full", 1)
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model="tiny", messages=HI)


def test_a_failure_in_mid_stream_is_raised(client: openai.OpenAI, gateway: FakeGateway) -> None:
    def script(stream: object) -> None:
        gateway.streams[-1].put(tokens_of("Hel", finish=None))
        gateway.streams[-1].fail(NoCapacity("gone"))

    gateway.script = script
    with pytest.raises(openai.APIError, match="gone"):
        list(client.chat.completions.create(model="tiny", messages=HI, stream=True))


def test_a_client_that_hangs_up_stops_its_request(client: openai.OpenAI, gateway: FakeGateway) -> None:
    is_cancelled = threading.Event()
    gateway.on_cancel = is_cancelled.set
    gateway.script = lambda stream: stream.put(tokens_of("Hel", finish=None))

    stream = client.chat.completions.create(model="tiny", messages=HI, stream=True)
    next(iter(stream))
    stream.close()

    assert is_cancelled.wait(timeout=30)
    assert gateway.cancelled == ["r0"]

"""llama-index against SmolLM2, by its class for servers like OpenAI's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.service.harness import PATIENCE_S, Service

if TYPE_CHECKING:
    from llama_index.llms.openai_like import OpenAILike

pytestmark = pytest.mark.e2e

QUESTION = "What is the capital of France? Answer in one word."


def model(service: Service, *, is_chat: bool) -> OpenAILike:
    from llama_index.llms.openai_like import OpenAILike

    return OpenAILike(
        model="smollm2",
        api_base=f"{service.url}/v1",
        api_key="none",
        is_chat_model=is_chat,
        temperature=0,
        max_tokens=8,
        timeout=PATIENCE_S,
        max_retries=0,
    )


@pytest.mark.client("llama-index", "chat")
def test_a_chat_is_answered(service: Service) -> None:
    from llama_index.core.llms import ChatMessage

    answer = model(service, is_chat=True).chat([ChatMessage(role="user", content=QUESTION)])

    assert "Paris" in (answer.message.content or "")


@pytest.mark.client("llama-index", "chat, streamed")
def test_a_streamed_chat_comes_in_pieces(service: Service) -> None:
    from llama_index.core.llms import ChatMessage

    chunks = list(model(service, is_chat=True).stream_chat([ChatMessage(role="user", content=QUESTION)]))

    assert "Paris" in "".join(chunk.delta or "" for chunk in chunks)
    assert len(chunks) > 1


@pytest.mark.client("llama-index", "completion, also streamed")
def test_a_completion_is_the_same_in_pieces(service: Service) -> None:
    plain = model(service, is_chat=False)

    whole = plain.complete("The sun rises in the").text
    chunks = list(plain.stream_complete("The sun rises in the"))
    assert whole
    assert "".join(chunk.delta or "" for chunk in chunks) == whole

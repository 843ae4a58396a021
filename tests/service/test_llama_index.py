"""llama-index against SmolLM2, by its class for servers like OpenAI's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.service.harness import PATIENCE_S, Service

if TYPE_CHECKING:
    from llama_index.llms.openai_like import OpenAILike

pytestmark = pytest.mark.e2e

QUESTION = "What is the capital of France? Answer in one word."


@contextmanager
def model(service: Service, *, is_chat: bool, name: str = "smollm2") -> Iterator[OpenAILike]:
    """Yield a model whose connections are closed in the end: it would leave that to chance."""
    from llama_index.llms.openai_like import OpenAILike

    with httpx.Client(timeout=PATIENCE_S) as connections:
        yield OpenAILike(
            model=name,
            api_base=f"{service.url}/v1",
            api_key="none",
            is_chat_model=is_chat,
            temperature=0,
            max_tokens=8,
            timeout=PATIENCE_S,
            max_retries=0,
            http_client=connections,
        )


@pytest.mark.client("llama-index", "chat")
def test_a_chat_is_answered(service: Service) -> None:
    from llama_index.core.llms import ChatMessage

    with model(service, is_chat=True) as smollm2:
        answer = smollm2.chat([ChatMessage(role="user", content=QUESTION)])

    assert "Paris" in (answer.message.content or "")


@pytest.mark.client("llama-index", "chat, streamed")
def test_a_streamed_chat_comes_in_pieces(service: Service) -> None:
    from llama_index.core.llms import ChatMessage

    asked = [ChatMessage(role="user", content=QUESTION)]
    with model(service, is_chat=True, name="tiny-a") as tiny:
        whole = tiny.chat(asked).message.content
        chunks = list(tiny.stream_chat(asked))

    assert whole
    assert "".join(chunk.delta or "" for chunk in chunks) == whole
    assert len(chunks) > 1


@pytest.mark.client("llama-index", "completion, also streamed")
def test_a_completion_is_the_same_in_pieces(service: Service) -> None:
    with model(service, is_chat=False, name="tiny-a") as plain:
        whole = plain.complete("The sun rises in the").text
        chunks = list(plain.stream_complete("The sun rises in the"))
    assert whole
    assert "".join(chunk.delta or "" for chunk in chunks) == whole

"""Haystack against SmolLM2, by its components for OpenAI."""

from __future__ import annotations

import pytest

from tests.service.harness import PATIENCE_S, Service

pytestmark = pytest.mark.e2e


@pytest.mark.client("haystack-ai", "`OpenAIChatGenerator`, also streamed")
def test_a_chat_is_the_same_in_pieces(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAYSTACK_TELEMETRY_ENABLED", "False")
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.utils import Secret

    generator = OpenAIChatGenerator(
        model="smollm2",
        api_base_url=f"{service.url}/v1",
        api_key=Secret.from_token("none"),
        generation_kwargs={"max_tokens": 8, "temperature": 0},
        timeout=PATIENCE_S,
        max_retries=0,
    )
    asked = [ChatMessage.from_user("What is the capital of France? Answer in one word.")]
    pieces: list[str] = []

    (whole,) = generator.run(asked)["replies"]
    (streamed,) = generator.run(asked, streaming_callback=lambda chunk: pieces.append(chunk.content))[
        "replies"
    ]

    assert "Paris" in (whole.text or "")
    assert streamed.text == whole.text == "".join(pieces)
    assert len(pieces) > 1


@pytest.mark.client("haystack-ai", "`OpenAITextEmbedder`")
def test_a_text_is_embedded(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAYSTACK_TELEMETRY_ENABLED", "False")
    from haystack.components.embedders import OpenAITextEmbedder
    from haystack.utils import Secret

    embedder = OpenAITextEmbedder(
        model="smollm2", api_base_url=f"{service.url}/v1", api_key=Secret.from_token("none"), max_retries=0
    )
    vector = embedder.run("Hello")["embedding"]

    assert sum(one * one for one in vector) == pytest.approx(1.0, abs=1e-3)

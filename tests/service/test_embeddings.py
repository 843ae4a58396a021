"""Embeddings and prompt logprobs of SmolLM2 by OpenAI's own client, judged by transformers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache

import httpx
import openai
import pytest
import torch

from tests.service.harness import Service, Shelf

pytestmark = pytest.mark.e2e

MODEL = "smollm2"
TEXTS = ["The hearth is warm.", "A stove heats the room.", "Stocks fell on Monday."]


@pytest.fixture
def client(service: Service) -> Iterator[openai.OpenAI]:
    with service.client() as client:
        yield client


@pytest.fixture(scope="module")
def states(shelf: Shelf) -> list[torch.Tensor]:
    """The last hidden states of the texts, by transformers' AutoModel."""
    from transformers import AutoModel, AutoTokenizer

    place = shelf.places[MODEL]
    tokenizer, model = AutoTokenizer.from_pretrained(place), AutoModel.from_pretrained(place, dtype="float32")
    with torch.inference_mode():
        return [model(torch.tensor([tokenizer(text).input_ids])).last_hidden_state[0] for text in TEXTS]

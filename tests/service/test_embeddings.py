"""Embeddings and prompt logprobs of SmolLM2 by OpenAI's own client, judged by transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import httpx
import numpy as np
import openai
import pytest
import torch

from hearth.models.layout import layout_of
from hearth.models.weights import bind, contiguous_places
from hearth.store.format.manifest import WEIGHTS, read_manifest
from hearth.text.tokenizer import Tokenizer
from tests.service.harness import Service, Shelf

if TYPE_CHECKING:
    from transformers import PreTrainedModel

pytestmark = pytest.mark.e2e

MODEL = "smollm2"
TEXTS = ["The hearth is warm.", "A stove heats the room.", "Stocks fell on Monday."]


@pytest.fixture
def client(service: Service) -> Iterator[openai.OpenAI]:
    with service.client() as client:
        yield client


@pytest.fixture(scope="module")
def tokens(shelf: Shelf) -> list[list[int]]:
    return [Tokenizer.load(shelf.places[MODEL]).encode(text) for text in TEXTS]


@pytest.fixture(scope="module")
def reference(shelf: Shelf) -> PreTrainedModel:
    """SmolLM2 in transformers, with the weights as they were deployed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    manifest = read_manifest(shelf.places[MODEL])
    arch, layout = manifest.arch, layout_of(manifest.arch, manifest.dtype)
    (rope,) = arch.ropes
    config = LlamaConfig(
        vocab_size=arch.vocab_size,
        hidden_size=arch.hidden_size,
        num_hidden_layers=arch.num_layers,
        num_attention_heads=arch.num_heads,
        num_key_value_heads=arch.num_kv_heads,
        intermediate_size=arch.intermediate_size,
        rms_norm_eps=arch.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": rope.theta},
        tie_word_embeddings=arch.tied_head,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    stored = np.memmap(shelf.places[MODEL] / WEIGHTS, mode="c", dtype=np.uint8)
    weights = bind(arch, layout, contiguous_places(layout, torch.from_numpy(stored)[: layout.num_bytes]))
    assert weights.embed is not None
    assert weights.final_norm is not None
    named = {"model.embed_tokens.weight": weights.embed, "model.norm.weight": weights.final_norm.weight}
    sizes = arch.dimensions
    for number, layer in enumerate(weights.layers):
        q, k, v = layer.qkv.weight.split([sizes.q_size, sizes.kv_size, sizes.kv_size])
        gate, up = layer.up.weight.chunk(2)
        assert layer.attn_norm is not None
        assert layer.mlp_norm is not None
        parts = {
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": layer.o.weight,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.down.weight,
            "input_layernorm": layer.attn_norm.weight,
            "post_attention_layernorm": layer.mlp_norm.weight,
        }
        named |= {f"model.layers.{number}.{name}.weight": part for name, part in parts.items()}
    named["lm_head.weight"] = weights.embed
    model.load_state_dict(named, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


@pytest.mark.client("openai", "embeddings of texts and token ids, as floats and base64")
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_the_last_hidden_states_of_transformers(
    client: openai.OpenAI, reference: PreTrainedModel, tokens: list[list[int]], pooling: str
) -> None:
    given = {"pooling": pooling}
    by_text = client.embeddings.create(model=MODEL, input=TEXTS, extra_body=given)  # base64, by its default
    by_token = client.embeddings.create(model=MODEL, input=tokens, encoding_format="float", extra_body=given)
    with torch.inference_mode():
        states = [reference.base_model(torch.tensor([one])).last_hidden_state[0] for one in tokens]
    for index, state in enumerate(states):
        expected = state[-1] if pooling == "last" else state.mean(0)
        for answer in (by_text, by_token):
            assert answer.data[index].index == index
            vector = torch.tensor(answer.data[index].embedding)
            torch.testing.assert_close(vector, expected / expected.norm(), atol=1e-4, rtol=1e-3)
    num_tokens = sum(map(len, tokens))
    assert (by_text.usage.prompt_tokens, by_text.usage.total_tokens) == (num_tokens, num_tokens)


def test_without_a_word_the_last_token_is_taken_and_explained(
    client: openai.OpenAI, service: Service
) -> None:
    response = client.embeddings.with_raw_response.create(model=MODEL, input=TEXTS[0])
    answer = response.parse()
    last = client.embeddings.create(model=MODEL, input=TEXTS[0], extra_body={"pooling": "last"})
    assert answer.data[0].embedding == pytest.approx(last.data[0].embedding, abs=1e-5)
    explained = httpx.get(f"{service.url}/hearth/requests/{response.headers['x-request-id']}")
    assert explained.json()["num_output_tokens"] == 0
    assert explained.json()["outcome"] == "stop"


@pytest.mark.client("openai", "embeddings of other `dimensions`", refused="`dimensions` is not supported")
def test_dimensions_are_refused(client: openai.OpenAI, refusal: str) -> None:
    with pytest.raises(openai.BadRequestError, match=refusal):
        client.embeddings.create(model=MODEL, input="Hi", dimensions=64)


@pytest.mark.client("openai", "completion, `echo` with `logprobs`, `max_tokens` of 0")
def test_a_prompt_is_scored_as_evaluation_harnesses_do(
    client: openai.OpenAI, reference: PreTrainedModel, tokens: list[list[int]]
) -> None:
    """With no token of an answer or one, which a harness cuts off; also where the prompt is known."""
    prompt = tokens[0]
    with torch.inference_mode():
        scores = reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
    expected = [float(row[token]) for row, token in zip(scores, prompt[1:], strict=False)]
    for max_tokens in (0, 1):
        answer = client.completions.create(
            model=MODEL, prompt=prompt, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0
        )
        (choice,) = answer.choices
        told = choice.logprobs
        assert told is not None
        assert told.token_logprobs is not None
        assert told.top_logprobs is not None
        assert told.token_logprobs[0] is None
        assert told.token_logprobs[1 : len(prompt)] == pytest.approx(expected, abs=2e-3)
        best = [max(one.values()) for one in told.top_logprobs[1 : len(prompt)]]
        assert best == pytest.approx(scores.max(-1).values[:-1].tolist(), abs=2e-3)
        assert len(told.tokens or ()) == len(prompt) + max_tokens
        assert choice.text.startswith(TEXTS[0])
        assert answer.usage is not None
        assert answer.usage.completion_tokens == max_tokens


def test_a_chat_tells_the_logprobs_of_its_prompt(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hi"}],
        max_completion_tokens=1,
        extra_body={"prompt_logprobs": 2},
    )
    assert answer.usage is not None
    told = (answer.model_extra or {})["prompt_logprobs"]
    assert len(told) == answer.usage.prompt_tokens
    assert told[0] is None
    assert all({one["rank"] for one in place.values()} >= {1, 2} for place in told[1:])


def test_a_text_is_tokenised_and_is_text_again(service: Service, tokens: list[list[int]]) -> None:
    told = httpx.post(f"{service.url}/tokenize", json={"model": MODEL, "prompt": TEXTS[0]}).json()
    assert (told["tokens"], told["count"]) == (tokens[0], len(tokens[0]))
    chat = {"model": MODEL, "messages": [{"role": "user", "content": TEXTS[0]}]}
    assert httpx.post(f"{service.url}/tokenize", json=chat).json()["count"] > len(tokens[0])
    back = httpx.post(f"{service.url}/detokenize", json={"model": MODEL, "tokens": told["tokens"]})
    assert back.json() == {"prompt": TEXTS[0]}

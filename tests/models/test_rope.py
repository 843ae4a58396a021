from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from hearth.models.arch import Llama3Scaling, LongRope, Rope, YarnScaling
from hearth.models.rope import cos_sin_table

CPU = torch.device("cpu")
#: As in Llama-3.1-8B.
LLAMA31 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
CASES: list[tuple[Rope, Mapping[str, object]]] = [
    (Rope(theta=10000.0, dim=64), {"rope_type": "default", "rope_theta": 10000.0}),
    (Rope(theta=5e6, dim=20), {"rope_type": "default", "rope_theta": 5e6}),
    (
        Rope(theta=10000.0, dim=64, linear_factor=2.5),
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
    ),
    (
        Rope(theta=500000.0, dim=128, llama3=LLAMA31),
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    (
        Rope(theta=10000.0, dim=64, yarn=YarnScaling(8.0, 32.0, 1.0, False, 512), magnitude=0.75),
        {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "truncate": False,
            "attention_factor": 0.75,
            "original_max_position_embeddings": 512,
        },
    ),
]


def reference(parameters: Mapping[str, object], dim: int, positions: torch.Tensor) -> torch.Tensor:
    """The same table by transformers, for these positions."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=2 * dim,
        num_attention_heads=2,
        head_dim=dim,
        max_position_embeddings=131072,
        rope_parameters=dict(parameters),
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    half = dim // 2
    return torch.stack([cos[0, :, :half], sin[0, :, :half]], dim=1)


@pytest.mark.parametrize(("rope", "parameters"), CASES, ids=["default", "odd", "linear", "llama3", "yarn"])
def test_angles_are_those_of_transformers(rope: Rope, parameters: Mapping[str, object]) -> None:
    expected = reference(parameters, rope.dim, torch.arange(4096))

    table = cos_sin_table(rope, 4096, CPU)

    assert (table.shape, table.dtype) == ((4096, 2, rope.dim // 2), torch.float32)
    torch.testing.assert_close(table, expected, rtol=0, atol=5e-4)


def test_angles_of_a_long_context_are_those_of_transformers() -> None:
    """A float32 angle of 1e5 is exact to 8e-3 only, where the last bit of a frequency is rounded apart."""
    rope, parameters = CASES[3]
    positions = torch.tensor([8191, 8192, 65536, 131071])
    expected = reference(parameters, rope.dim, positions)

    table = cos_sin_table(rope, 131072, CPU)

    torch.testing.assert_close(table[positions], expected, rtol=0, atol=1e-2)


def test_llama3_keeps_high_frequencies_and_slows_low_ones() -> None:
    plain = cos_sin_table(Rope(theta=500000.0, dim=128), 2, CPU)[1, 1]
    slowed = cos_sin_table(Rope(theta=500000.0, dim=128, llama3=LLAMA31), 2, CPU)[1, 1]

    assert torch.equal(slowed[:20], plain[:20])
    torch.testing.assert_close(slowed[-20:], plain[-20:] / 8)


@pytest.mark.parametrize("num_positions", [128, 129])
def test_longrope_has_other_frequencies_for_a_context_beyond_the_original_one(num_positions: int) -> None:
    short, long = (1.0, 1.25, 1.5, 4.0), (1.0, 2.0, 8.0, 64.0)
    parameters = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": list(short),
        "long_factor": list(long),
        "attention_factor": 1.5,
        "original_max_position_embeddings": 128,
    }
    rope = Rope(10000.0, 8, longrope=LongRope(short, long, 128), magnitude=1.5)
    expected = reference(parameters, rope.dim, torch.arange(num_positions))

    table = cos_sin_table(rope, num_positions, CPU)

    torch.testing.assert_close(table, expected, rtol=0, atol=5e-5)

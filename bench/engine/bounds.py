"""The least time that a device needs for a step of a shape: its weights and KV read, its products computed.

On an H200 a device copy moves 4.2 TB/s, and the products of a long prompt run at 660 TFLOP/s in cuBLAS.
"""

from __future__ import annotations

import math

from bench.shape import Shape
from hearth.models.formats import LINEARS
from hearth.models.layout import canonical_shapes

BYTES_PER_S = 4.2e12
FLOPS_PER_S = 660e12


def decode_s(shape: Shape, num_rows: int, context: int) -> float:
    """Return the seconds of a step that gives each of so many rows, with so much context, one token."""
    num_bytes = _read_bytes(shape) + num_rows * context * shape.kv_bytes_per_token
    flops = 2 * num_rows * (_layer_parameters(shape) + _head_parameters(shape))
    return max(num_bytes / BYTES_PER_S, flops / FLOPS_PER_S)


def prompts_s(shape: Shape, num_prompts: int, length: int) -> float:
    """Return the seconds of the prompts, up to the first token of each; attention sees half of all pairs."""
    pairs = length * (length + 1) // 2
    attention = 4 * pairs * shape.arch.num_heads * shape.arch.head_dim * shape.arch.num_layers
    flops = num_prompts * (2 * length * _layer_parameters(shape) + attention + 2 * _head_parameters(shape))
    return max(_read_bytes(shape) / BYTES_PER_S, flops / FLOPS_PER_S)


def answers_s(shape: Shape, num_requests: int, length: int, num_new: int) -> float:
    """Return the seconds of requests that come at once: all prompts, then the other tokens, one by one."""
    decodes_s = sum(decode_s(shape, num_requests, length + at) for at in range(1, num_new))
    return prompts_s(shape, num_requests, length) + decodes_s


def _read_bytes(shape: Shape) -> int:
    """Return the bytes of all weights; of an embedding that is no head as well, only a row is read."""
    return sum(
        spec.nbytes for spec in shape.layout.tensors if spec.name != "embed.weight" or shape.arch.tied_head
    )


def _layer_parameters(shape: Shape) -> int:
    return sum(
        math.prod(size)
        for name, size in canonical_shapes(shape.arch)
        if name.startswith("layers.") and name.endswith(".weight") and name.split(".")[-2] in LINEARS
    )


def _head_parameters(shape: Shape) -> int:
    return shape.arch.vocab_size * shape.arch.embed_size

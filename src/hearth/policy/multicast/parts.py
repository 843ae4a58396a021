"""How a model is cut into parts for multicast. Pure: reads no weights.

A part is the unit that nodes send to each other and the smallest stage that a node can run. Many small parts
keep all links busy, few large ones pay the latency of a link less often.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

#: Of a send, besides the latency of the link: to ask for the chunks of a part.
SEND_S = 0.002


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive layers and all chunks with bytes of them; neighbours share a chunk that straddles both."""

    chunks: range
    layers: range


def choose_num_parts(
    num_bytes: int,
    num_layers: int,
    num_receivers: int,
    bytes_per_s: float,
    latency_s: float,
    num_sources: int = 1,
) -> int:
    """Return the number of parts that minimises the time until the receivers together hold the model.

    With one source, this is also the time until each of them holds it.
    """
    num_groups = min(num_sources, num_receivers)
    num_doublings = (-(-num_receivers // num_groups)).bit_length()  # ceil(log2) of a group with its source

    def first_model_s(num_parts: int) -> float:
        num_rounds = -(-num_parts // num_groups) + num_doublings - 1
        return num_rounds * (num_bytes / num_parts / bytes_per_s + latency_s)

    return min(range(1, num_layers + 1), key=first_model_s)


def cut_parts(layer_chunks: Sequence[range], num_parts: int) -> tuple[Part, ...]:
    """Cut a model into at most `num_parts` parts, of which the largest has as few chunks as possible.

    Args:
        layer_chunks: The chunks of each layer. The first layer has the embedding, too, the last one the head.
        num_parts: At least 1. Fewer parts are returned if more would not make the largest one smaller.
    """
    num_chunks = layer_chunks[-1].stop - layer_chunks[0].start
    max_chunks = bisect_left(
        range(num_chunks),
        True,
        lo=max(map(len, layer_chunks)),
        key=lambda most: len(_fill(layer_chunks, most)) <= num_parts,
    )
    return tuple(_fill(layer_chunks, max_chunks))


def _fill(layer_chunks: Sequence[range], max_chunks: int) -> list[Part]:
    """Put as many layers into each part as `max_chunks` allows."""
    parts: list[Part] = []
    for layer, chunks in enumerate(layer_chunks):
        if parts and chunks.stop - parts[-1].chunks.start <= max_chunks:
            begun = parts.pop()
            parts.append(Part(range(begun.chunks.start, chunks.stop), range(begun.layers.start, layer + 1)))
        else:
            parts.append(Part(chunks, range(layer, layer + 1)))
    return parts

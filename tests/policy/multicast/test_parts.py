"""Parts cover a model, are as even as its layers allow, and are as many as its links reward."""

from __future__ import annotations

from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.policy.multicast.parts import choose_num_parts, cut_parts


def chunks_of_layers(layers_bytes: list[int], chunk_bytes: int) -> list[range]:
    ends = [0, *accumulate(layers_bytes)]
    return [range(begin // chunk_bytes, -(-end // chunk_bytes)) for begin, end in pairwise(ends)]


models = st.builds(chunks_of_layers, st.lists(st.integers(1, 40), min_size=1, max_size=9), st.integers(1, 30))


@given(models, st.integers(1, 10))
def test_parts_cover_all_layers_once_with_all_their_chunks(layers: list[range], num_parts: int) -> None:
    parts = cut_parts(layers, num_parts)

    assert [layer for part in parts for layer in part.layers] == list(range(len(layers)))
    for part in parts:
        assert part.chunks == range(layers[part.layers[0]].start, layers[part.layers[-1]].stop)
    assert {chunk for part in parts for chunk in part.chunks} == set(range(layers[-1].stop))


@given(models, st.integers(1, 10))
def test_no_other_cut_makes_the_largest_part_smaller(layers: list[range], num_parts: int) -> None:
    parts = cut_parts(layers, num_parts)

    def largest(cut: tuple[int, ...]) -> int:
        bounds = pairwise((0, *cut, len(layers)))
        return max(layers[end - 1].stop - layers[begin].start for begin, end in bounds)

    counts = range(min(num_parts, len(layers)))
    cuts = (cut for count in counts for cut in combinations(range(1, len(layers)), count))
    assert len(parts) <= num_parts
    assert max(len(part.chunks) for part in parts) == min(map(largest, cuts))


def test_neighbours_share_the_chunk_that_straddles_them() -> None:
    first, second = cut_parts(chunks_of_layers([25, 25], chunk_bytes=10), num_parts=2)
    assert (first.chunks, second.chunks) == (range(3), range(2, 5))


@pytest.mark.parametrize(
    ("num_receivers", "num_sources", "latency_s", "num_parts"),
    [
        (1, 1, 0.001, 1),  # nothing to forward
        (7, 1, 0.0, 80),  # as many as there are layers
        (7, 1, 0.01, 20),  # sqrt(2 * 2 s / 0.01 s)
        (7, 1, 0.1, 6),
        (4, 4, 0.01, 4),  # each source begins with a quarter
        (28, 4, 0.01, 40),
    ],
)
def test_parts_become_fewer_as_latency_grows(
    num_receivers: int, num_sources: int, latency_s: float, num_parts: int
) -> None:
    chosen = choose_num_parts(
        num_bytes=20_000_000_000,
        num_layers=80,
        num_receivers=num_receivers,
        bytes_per_s=10e9,
        latency_s=latency_s,
        num_sources=num_sources,
    )
    assert chosen == num_parts

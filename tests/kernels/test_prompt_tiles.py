from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hearth.kernels.prompt_tiles import PrefillSpan, PromptTiles

Chunks = list[tuple[int, int]]
CHUNKS = st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 700)), max_size=12)


@given(CHUNKS, st.sampled_from([32, 64, 128]))
def test_tiles_cover_every_token_once_and_the_longest_context_comes_first(
    chunks: Chunks, tile_tokens: int
) -> None:
    spans, begin = [], 3
    for start, num_tokens in chunks:
        spans.append(PrefillSpan(begin, num_tokens, start))
        begin += num_tokens

    tiles = PromptTiles.of(spans, tile_tokens, "cpu").items.tolist()

    covered, contexts = [], []
    for first_row, num_tokens, start, first in tiles:
        assert PrefillSpan(first_row, num_tokens, start) in spans
        assert first % tile_tokens == 0
        last = min(first + tile_tokens, num_tokens)
        covered += range(first_row + first, first_row + last)
        contexts.append(start + last)
    assert sorted(covered) == list(range(3, begin))
    assert contexts == sorted(contexts, reverse=True)

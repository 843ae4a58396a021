"""Where the factors of an adapter lie, for any choice of projections and ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hearth.core.sizes import Dimensions
from hearth.models.adapter import (
    FACTOR_ALIGNMENT_BYTES,
    MAX_RANK,
    AdapterLayout,
    AdapterSlice,
    AdapterTarget,
    Projection,
    projection_shape,
)
from hearth.models.layout import COMPUTED_DTYPES, STORED_ITEM_BYTES

SIZES = Dimensions(
    num_layers=4,
    num_heads=6,
    num_kv_heads=2,
    head_dim=20,
    hidden_size=72,
    embed_size=72,
    intermediate_size=112,
    vocab_size=99,
    rope_dim=20,
    is_gated=True,
    is_parallel=False,
)
_PARTS = {
    Projection.QKV: ((0, 120), (120, 40), (160, 40)),
    Projection.O: ((0, 72),),
    Projection.UP: ((0, 112), (112, 112)),
    Projection.DOWN: ((0, 72),),
}


@st.composite
def targets(draw: st.DrawFn) -> list[AdapterTarget]:
    """Some projections of some layers, with factors for some of their parts."""
    places = [(layer, projection) for layer in range(SIZES.num_layers) for projection in Projection]
    chosen = draw(st.sets(st.sampled_from(places), min_size=1))
    made = []
    for layer, projection in places:
        if (layer, projection) in chosen:
            parts = draw(st.sets(st.sampled_from(_PARTS[projection]), min_size=1))
            ranks = st.integers(1, MAX_RANK)
            slices = tuple(AdapterSlice(begin, size, draw(ranks)) for begin, size in sorted(parts))
            num_inputs = projection_shape(SIZES, projection)[1]
            made.append(AdapterTarget(layer, projection, num_inputs, slices))
    return made


@given(targets(), st.sampled_from(COMPUTED_DTYPES))
def test_factors_lie_apart_aligned_and_within_their_layer(chosen: list[AdapterTarget], dtype: str) -> None:
    layout = AdapterLayout.of(chosen, dtype)
    item_bytes = STORED_ITEM_BYTES[dtype]
    ranges = dict(layout.layers)
    end = 0
    for place in layout.places:
        target = place.target
        sizes = [target.rank * target.num_inputs, *(part.row_size * part.rank for part in target.slices)]
        for offset, size in zip((place.a, *place.b), sizes, strict=True):
            assert offset % FACTOR_ALIGNMENT_BYTES == 0
            assert end <= offset < end + FACTOR_ALIGNMENT_BYTES
            end = offset + size * item_bytes
            assert ranges[target.layer].begin <= offset
            assert end <= ranges[target.layer].end
    assert [place.target for place in layout.places] == chosen
    assert end <= layout.num_bytes < end + FACTOR_ALIGNMENT_BYTES
    assert layout.layers[0][1].begin == 0
    assert layout.layers[-1][1].end == layout.num_bytes
    assert [one.end for _, one in layout.layers[:-1]] == [one.begin for _, one in layout.layers[1:]]

"""Names of graphs in snapshots are those that engines give."""

from __future__ import annotations

import pytest

from hearth.core.errors import GraphUnreadable
from hearth.core.sizes import StepLimits
from hearth.engine.step_shape import PaddedSizes
from hearth.snapshot.graph_names import graph_names, is_for_adapters, kind_of, num_rows_of

SIZES = PaddedSizes.of(StepLimits(max_batch_tokens=512, max_seqs=64, block_tokens=16))


@pytest.mark.parametrize("has_adapters", [False, True])
def test_a_name_tells_of_its_graph(has_adapters: bool) -> None:
    names = SIZES.all_names(has_adapters=has_adapters)
    for shape in SIZES.all_shapes(has_adapters=has_adapters):
        for key in shape.keys:
            assert key.name in names
            assert (is_for_adapters(key.name), num_rows_of(key.name)) == (has_adapters, key.size)
            assert key.name == f"{kind_of(key.name)}-{key.size}"


def test_sections_that_are_no_graphs_are_left_out() -> None:
    assert graph_names(["cost", "graph/decode-8", "memory"]) == ["decode-8"]
    with pytest.raises(GraphUnreadable, match="no number of rows"):
        num_rows_of("nothing")

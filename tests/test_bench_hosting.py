"""The count of models that a budget can host."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bench.hosting import hosted
from hearth.policy.fleet.profile import Footprint

FOOTPRINTS = st.builds(
    lambda weights, workspace, tables, kv: Footprint(weights + workspace + tables, kv, kv, workspace, tables),
    *[st.integers(1, 100)] * 4,
)


@given(FOOTPRINTS, st.integers(0, 50), st.integers(0, 10_000))
def test_as_many_are_hosted_as_the_budget_holds_and_never_fewer_for_being_charged_less(
    taken: Footprint, optional_bytes: int, budget_bytes: int
) -> None:
    counts = hosted(taken, optional_bytes, budget_bytes)
    num = counts["one_workspace"]
    own_bytes = taken.weights_bytes + taken.tables_bytes + taken.min_kv_bytes
    assert num == 0 or taken.workspace_bytes + num * own_bytes <= budget_bytes
    assert taken.workspace_bytes + (num + 1) * own_bytes > budget_bytes
    assert counts["own_workspace_and_all_tables"] <= counts["own_workspace"] <= num

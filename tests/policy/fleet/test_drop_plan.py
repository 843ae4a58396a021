from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hearth.policy.fleet.drop_plan import merge_groups
from hearth.policy.fleet.profile import MAX_STAGES


def test_the_smallest_groups_are_merged_until_enough_is_free() -> None:
    assert merge_groups(8, 1, 32) == [1, 1, 1, 1, 1, 1, 2]
    assert merge_groups(8, 4, 32) == [2, 2, 2, 2]
    assert merge_groups(8, 5, 32) == [2, 2, 4]
    assert merge_groups(8, 7, 32) == [8]


def test_group_sizes_divide_the_layers() -> None:
    assert merge_groups(3, 2, 30) == [3]
    assert merge_groups(4, 3, 30) == [2, 2], "four stages would not be equal"
    assert merge_groups(2, 1, 7) == [1, 1]


@given(st.integers(1, 16), st.integers(0, 20), st.integers(1, 80))
def test_every_replica_is_in_one_group_and_no_more_are_merged_than_needed(
    num_replicas: int, num_copies: int, num_layers: int
) -> None:
    sizes = merge_groups(num_replicas, num_copies, num_layers)
    assert sum(sizes) == num_replicas
    assert all(num_layers % size == 0 and size <= MAX_STAGES for size in sizes)
    assert num_replicas - len(sizes) <= num_copies
    assert merge_groups(num_replicas, num_copies + 1, num_layers) != sizes or (
        num_replicas - len(sizes) == num_copies or merge_groups(num_replicas, 99, num_layers) == sizes
    )

"""A ranking against the same pairs, sorted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hearth.policy.fleet.ranking import Ranking

CHANGES = st.lists(st.tuples(st.sampled_from("abcdef"), st.none() | st.integers(-3, 3)))


@given(CHANGES, st.integers(-4, 4))
def test_a_ranking_is_always_sorted_by_rank_and_id(
    changes: list[tuple[str, int | None]], threshold: int
) -> None:
    ranking: Ranking[str, int] = Ranking()
    ranks: dict[str, int] = {}
    for id_, rank in changes:
        if rank is None:
            ranking.drop(id_)
            ranks.pop(id_, None)
        else:
            ranking.put(id_, rank)
            ranks[id_] = rank
    order = sorted(ranks, key=lambda id_: (ranks[id_], id_))
    enough = [id_ for id_ in order if ranks[id_] >= threshold]
    assert list(ranking) == order
    assert list(ranking.from_rank(threshold)) == enough
    assert list(ranking.down_to_rank(threshold)) == enough[::-1]
    assert ranking.highest == max(ranks.values(), default=None)
    assert {id_: ranking.rank(id_) for id_ in "abcdef" if id_ in ranking} == ranks
    assert len(ranking) == len(ranks)

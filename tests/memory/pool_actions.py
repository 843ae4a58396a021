"""What may happen to a pool, one action after the other, for property tests. Knows no kind of pool."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from hearth.core.types import AdapterId, Hold, ModelId, SamplingTable
from tests.memory.pool_caller import PoolCaller, Sample

Action = tuple[object, ...]  #: a name and its arguments
ADAPTERS = tuple(AdapterId(f"{name}" * 64) for name in "ef0")


def actions(names: Sequence[ModelId], max_bytes: int) -> st.SearchStrategy[Action]:
    """One action; `max_bytes` is the most that is taken at once."""
    models = st.sampled_from(names)
    return st.one_of(
        st.tuples(st.just("begin"), models),
        st.tuples(st.just("end"), models, st.booleans()),
        st.tuples(st.just("host"), models),
        st.tuples(st.just("front"), models, st.integers(0, max_bytes), st.booleans()),
        st.tuples(st.just("hold"), models, st.sampled_from(Hold)),
        st.tuples(st.just("take"), st.integers(0, max_bytes), st.sampled_from(Hold)),
        st.tuples(
            st.just("grow"), models, st.integers(0, 12), st.integers(0, 8), st.none() | st.integers(1, 20)
        ),
        st.tuples(st.just("shrink"), models, st.none() | st.integers(1, 12)),
        st.tuples(
            st.just("place_table"), models, st.sampled_from(SamplingTable), st.integers(1, max_bytes // 2)
        ),
        st.tuples(st.just("drop_table"), models, st.sampled_from(SamplingTable)),
        st.tuples(
            st.just("place_pieces"),
            st.sampled_from(ADAPTERS),
            st.lists(st.integers(1, max_bytes // 8), min_size=1, max_size=4),
        ),
        st.tuples(st.just("drop_pieces"), st.sampled_from(ADAPTERS)),
        st.tuples(st.just("retire"), models),
        st.tuples(st.just("drop"), models),
        st.tuples(st.just("change"), models),
    )


def carry_out(caller: PoolCaller, action: Action, changed: Sample) -> None:
    """`changed`: what a model is after an action that changes it."""
    match action:
        case ("begin", str(model)):
            caller.begin(ModelId(model))
        case ("end", str(model), bool(is_whole)):
            caller.end(ModelId(model), is_whole=is_whole)
        case ("host", str(model)):
            caller.host(ModelId(model))
        case ("front", str(model), int(num_bytes), bool(is_whole)):
            caller.front(ModelId(model), num_bytes, is_whole=is_whole)
        case ("hold", str(model), Hold() as hold):
            caller.holds.by_model[ModelId(model)] = hold
        case ("take", int(num_bytes), Hold() as most):
            caller.take(num_bytes, most)
        case ("grow", str(model), int(num_blocks), int(ahead_blocks), (int() | None) as max_blocks):
            caller.grow(ModelId(model), num_blocks, ahead_blocks, max_blocks)
        case ("shrink", str(model), (int() | None) as most_blocks):
            caller.shrink(ModelId(model), most_blocks)
        case ("place_table", str(model), SamplingTable() as table, int(num_bytes)):
            caller.place_table(ModelId(model), table, num_bytes)
        case ("drop_table", str(model), SamplingTable() as table):
            caller.drop_table(ModelId(model), table)
        case ("place_pieces", str(adapter), list() as sizes):
            caller.place_pieces(AdapterId(adapter), sizes)
        case ("drop_pieces", str(adapter)):
            caller.drop_pieces(AdapterId(adapter))
        case ("retire", str(model)):
            caller.retire(ModelId(model))
        case ("drop", str(model)):
            caller.drop(ModelId(model))
        case ("change", str(model)):
            if model not in caller.gaps:
                caller.retire(ModelId(model))
                caller.samples[ModelId(model)] = changed
        case _:
            raise AssertionError(f"no such action: {action}")

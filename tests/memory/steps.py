"""What may happen to a pool, one step after the other, for property tests. Knows no kind of pool."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from hearth.types import Hold, ModelId
from tests.memory.tenancy import Sample, Tenancy

Step = tuple[object, ...]  #: a name and its arguments


def steps(names: Sequence[ModelId], max_bytes: int) -> st.SearchStrategy[Step]:
    """One step; `max_bytes` is the most that is taken at once."""
    models = st.sampled_from(names)
    return st.one_of(
        st.tuples(st.just("begin"), models),
        st.tuples(st.just("end"), models, st.booleans()),
        st.tuples(st.just("host"), models),
        st.tuples(st.just("hold"), models, st.sampled_from(Hold)),
        st.tuples(st.just("take"), st.integers(0, max_bytes), st.sampled_from(Hold)),
        st.tuples(st.just("grow"), models, st.integers(0, 12), st.integers(0, 8)),
        st.tuples(st.just("shrink"), models),
        st.tuples(st.just("vacate"), models),
        st.tuples(st.just("drop"), models),
        st.tuples(st.just("change"), models),
    )


def carry_out(tenancy: Tenancy, step: Step, changed: Sample) -> None:
    """`changed`: what a model is after a step that changes it."""
    match step:
        case ("begin", str(model)):
            tenancy.begin(ModelId(model))
        case ("end", str(model), bool(is_whole)):
            tenancy.end(ModelId(model), is_whole=is_whole)
        case ("host", str(model)):
            tenancy.host(ModelId(model))
        case ("hold", str(model), Hold() as hold):
            tenancy.holds.by_model[ModelId(model)] = hold
        case ("take", int(num_bytes), Hold() as most):
            tenancy.take(num_bytes, most)
        case ("grow", str(model), int(num_blocks), int(ahead_blocks)):
            tenancy.grow(ModelId(model), num_blocks, ahead_blocks)
        case ("shrink", str(model)):
            tenancy.shrink(ModelId(model))
        case ("vacate", str(model)):
            tenancy.retire(ModelId(model))
        case ("drop", str(model)):
            tenancy.drop(ModelId(model))
        case ("change", str(model)):
            if model not in tenancy.gaps:
                tenancy.retire(ModelId(model))
                tenancy.samples[ModelId(model)] = changed
        case _:
            raise AssertionError(f"no such step: {step}")

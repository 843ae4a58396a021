from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hearth.engine.step_times import MAX_KINDS, NUM_KEPT, StepSamples, TimedStep

steps = st.builds(
    TimedStep,
    num_tokens=st.integers(1, 1 << 20),
    num_rows=st.integers(1, 1 << 20),
    context_tokens=st.integers(1, 1 << 30),
    seconds=st.floats(1e-9, 100.0),
)


def test_the_typical_step_of_a_kind_is_the_median_of_the_last() -> None:
    samples = StepSamples()
    for seconds in (9.0, 9.0, 9.0, 0.3, 0.1, 0.2, 0.5, 0.4):
        samples.keep(TimedStep(4, 4, 100, seconds))
    samples.keep(TimedStep(8, 8, 100, 7.0))
    assert NUM_KEPT == 5
    assert {(step.num_rows, step.seconds) for step in samples.typical()} == {(4, 0.3), (8, 7.0)}


@given(st.lists(steps, max_size=300))
def test_samples_are_steps_that_were_made_and_never_too_many(made: list[TimedStep]) -> None:
    samples = StepSamples()
    for step in made:
        samples.keep(step)
    typical = samples.typical()
    assert len(typical) <= MAX_KINDS
    assert set(typical) <= set(made)
    assert bool(typical) == bool(made)
    assert samples.last is (made[-1] if made else None)

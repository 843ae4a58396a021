"""Busy models share a worker by time: nobody starves, and being idle neither saves up nor costs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hearth.core.types import ModelId
from hearth.policy.batch.step_sharing import MAX_EARLY_S, MAX_LEAD_S, BusyModel, StepReadiness, StepSharing

A, B, C = ModelId("a"), ModelId("b"), ModelId("c")
STEP_S = st.floats(0.001, 0.5)


def test_the_one_that_has_had_less_goes_next() -> None:
    sharing = StepSharing()
    assert sharing.next([A, B]) == A
    sharing.stepped(A, 0.1)
    assert sharing.next([A, B]) == B
    sharing.stepped(B, 0.3)

    order = []
    for _ in range(3):
        order.append(sharing.next([A, B]))
        sharing.stepped(order[-1], 0.1)

    assert order == [A, A, B]


def test_one_that_was_idle_has_saved_up_nothing() -> None:
    sharing = StepSharing()
    for _ in range(100):
        sharing.stepped(sharing.next([A]), 1.0)

    order = []
    for _ in range(4):
        order.append(sharing.next([A, B]))
        sharing.stepped(order[-1], 1.0)

    assert order == [B, A, B, A]


def test_going_idle_for_a_moment_does_not_pay() -> None:
    sharing = StepSharing()
    assert sharing.next([A, B]) == A
    sharing.stepped(A, 0.4)
    for _ in range(5):
        sharing.stepped(sharing.next([B]), 0.04)

    assert sharing.next([A, B]) == B


def test_a_step_counts_that_was_made_without_asking() -> None:
    """A later stage runs a step that it has prepared as soon as its hidden states come."""
    sharing = StepSharing()
    sharing.next([A])
    sharing.stepped(B, 1.0)
    assert sharing.next([A, B]) == A


def test_after_all_were_idle_nobody_is_behind() -> None:
    sharing = StepSharing()
    sharing.next([A])
    sharing.stepped(A, 100.0)
    sharing.next([B])
    sharing.stepped(B, 1.0)

    assert sharing.next([A, B]) == A


def test_a_first_token_goes_first_but_nobody_lives_on_first_tokens() -> None:
    sharing = StepSharing()
    sharing.next([A, B])
    sharing.stepped(A, 0.01)
    assert sharing.next([A, B], urgent=[A]) == A

    steps = []
    for _ in range(200):
        steps.append(sharing.next([A, B], urgent=[A]))
        sharing.stepped(steps[-1], 0.01)

    assert set(steps[:8]) == {A}
    num_more = steps.count(A) - steps.count(B)
    assert num_more * 0.01 <= MAX_EARLY_S + 0.02


def test_whoever_is_in_front_of_a_first_token_on_the_device_steps_before_that_is_waited_for() -> None:
    sharing = StepSharing()
    sharing.next([A, B])
    sharing.stepped(A, 0.005)
    assert sharing.next([A, B], urgent=[B]) == B
    sharing.stepped(B, 0.001)  # launches its prompt

    assert sharing.next([A, B], urgent=[B]) == B  # where the device is done with it
    assert sharing.next([A, B], urgent=[B], computed=[B]) == A
    sharing.stepped(A, 0.005)
    assert sharing.next([A, B], urgent=[B], computed=[B]) == B  # the next step of A is behind it


def test_first_tokens_of_two_models_are_waited_for_in_the_order_of_the_device() -> None:
    sharing = StepSharing()
    sharing.next([A, B, C])
    for model, step_s in ((A, 0.005), (B, 0.002), (C, 0.001)):  # B and C launch their prompts
        sharing.stepped(model, step_s)

    order = []
    for computed in ([B, C], [B, C], [C]):
        order.append(sharing.next([A, B, C], urgent=[B, C] if B in computed else [C], computed=computed))
        sharing.stepped(order[-1], 0.005)
    assert order == [A, B, C]


@given(st.lists(st.tuples(STEP_S, st.booleans()), max_size=60))
def test_a_first_token_that_is_computed_waits_for_one_step_of_each_other_model(
    rounds: list[tuple[float, bool]],
) -> None:
    """Whatever the others had, as long as it goes first at all."""
    sharing, between = StepSharing(), list[ModelId]()
    for step_s, is_computed in rounds:
        model = sharing.next([A, B, C], urgent=[A], computed=[A] if is_computed else [])
        between = [] if model == A else [*between, model]
        sharing.stepped(model, 0.0 if model == A else step_s)  # so A is never ahead
        assert len(between) == len(set(between))


def test_a_model_that_comes_back_under_its_name_is_new() -> None:
    sharing = StepSharing()
    sharing.next([A, B])
    sharing.stepped(A, 50.0)
    sharing.forget(A)
    sharing.next([B])
    sharing.stepped(B, 1.0)

    sharing.next([A, B])
    sharing.stepped(B, 1.0)
    assert sharing.next([A, B]) == A


@given(compiled_s=st.floats(0.5, 60.0), step_s=st.floats(0.001, 0.1), is_away=st.booleans())
def test_a_model_whose_kernels_were_compiled_does_not_wait_as_long(
    compiled_s: float, step_s: float, is_away: bool
) -> None:
    """Neither for its next step, nor when it comes back after a pause."""
    sharing, waited_s = StepSharing(), 0.0
    assert sharing.next([A, B]) == A
    sharing.stepped(A, compiled_s)
    if is_away:
        sharing.stepped(sharing.next([B]), step_s)

    while sharing.next([A, B]) != A:
        sharing.stepped(B, step_s)
        waited_s += step_s

    assert waited_s <= MAX_LEAD_S + step_s + 1e-9


@given(st.dictionaries(st.sampled_from([A, B, C]), st.lists(STEP_S, min_size=40, max_size=40), min_size=2))
def test_models_that_stay_busy_differ_by_at_most_one_step(steps: dict[ModelId, list[float]]) -> None:
    sharing, spent = StepSharing(), dict.fromkeys(steps, 0.0)
    longest_s = max(max(times) for times in steps.values())
    taken = dict.fromkeys(steps, 0)
    for _ in range(40):
        model = sharing.next(list(steps))
        step_s = steps[model][taken[model]]
        taken[model] += 1
        sharing.stepped(model, step_s)
        spent[model] += step_s
        assert max(spent.values()) - min(spent.values()) <= longest_s + 1e-9


@given(st.lists(st.tuples(st.sets(st.sampled_from([A, B, C]), min_size=1), STEP_S), max_size=60))
def test_whoever_comes_and_goes_a_busy_one_steps(rounds: list[tuple[set[ModelId], float]]) -> None:
    """A is always busy: it never waits longer than the others need to catch up with it, and one step."""
    sharing, waited_s, longest_s = StepSharing(), 0.0, max((step_s for _, step_s in rounds), default=0.0)
    for others, step_s in rounds:
        busy = sorted(others | {A})
        model = sharing.next(busy)
        assert model in busy
        sharing.stepped(model, step_s)
        waited_s = 0.0 if model == A else waited_s + step_s
        assert waited_s <= 4 * longest_s + 1e-9


# --- Who may step ---


def busy(model: ModelId, *, is_loaded: bool = True, can_follow_load: bool = False) -> BusyModel:
    return BusyModel(model, is_loaded, can_follow_load)


def test_one_that_is_still_loaded_steps_only_while_no_other_can() -> None:
    readiness, arriving = StepReadiness(), busy(B, is_loaded=False, can_follow_load=True)
    assert readiness.ready([busy(A), arriving], generation=0) == [A]
    assert readiness.ready([arriving], generation=0) == [B]

    readiness.starved(A, generation=0)
    assert readiness.ready([busy(A), arriving], generation=0) == [B]


def test_one_whose_bytes_are_far_away_does_not_step() -> None:
    assert StepReadiness().ready([busy(A, is_loaded=False)], generation=0) == []


def test_one_that_lacks_kv_steps_again_when_some_may_have_come_or_something_was_heard() -> None:
    readiness = StepReadiness()
    readiness.starved(A, generation=3)
    assert readiness.ready([busy(A)], generation=3) == []
    assert readiness.ready([busy(A)], generation=4) == [A]
    readiness.recheck()
    assert readiness.ready([busy(A)], generation=3) == [A]


def test_only_one_that_lacks_kv_is_hopeless() -> None:
    readiness = StepReadiness()
    readiness.starved(B, generation=0)
    assert readiness.hopeless([busy(A)]) is None
    assert readiness.hopeless([busy(A), busy(B)]) == B


EVENTS = st.lists(
    st.tuples(st.sampled_from(["step", "starve", "room", "heard"]), st.sets(st.sampled_from([A, B, C]))),
    max_size=60,
)


@given(st.dictionaries(st.sampled_from([A, B, C]), st.booleans(), min_size=1), EVENTS)
def test_whoever_is_loaded_and_has_kv_is_ready_and_no_other_before_it(
    is_loaded: dict[ModelId, bool], events: list[tuple[str, set[ModelId]]]
) -> None:
    """Against a plain account of which models lack KV; those that are not loaded could follow their load."""
    readiness, generation, lacking = StepReadiness(), 0, set[ModelId]()
    models = [busy(model, is_loaded=there, can_follow_load=not there) for model, there in is_loaded.items()]
    for event, chosen in events:
        match event:
            case "starve":
                for model in chosen:
                    readiness.starved(model, generation)
                lacking |= chosen
            case "room":
                generation += 1
                lacking.clear()
            case "heard":
                readiness.recheck()
                lacking.clear()
        ready = set(readiness.ready(models, generation))
        awake = is_loaded.keys() - lacking
        loaded = {model for model in awake if is_loaded[model]}
        assert ready == (loaded or awake)


@given(st.lists(st.sampled_from([A, B, C]), min_size=90, max_size=90))
def test_nobody_starves_who_is_ready(starving: list[ModelId]) -> None:
    """Each round one model's step finds no KV, and room comes at the end of it: all others go on."""
    readiness, sharing, steps = StepReadiness(), StepSharing(), dict.fromkeys([A, B, C], 0)
    for generation, short in enumerate(starving):
        model = sharing.next(readiness.ready([busy(one) for one in (A, B, C)], generation))
        sharing.stepped(model, 1.0)
        if model == short:
            readiness.starved(model, generation)
        steps[model] += 1
    assert min(steps.values()) >= 90 // 3 - 1

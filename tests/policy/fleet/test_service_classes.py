"""Interactive and batch requests of one fleet: who goes first, and for how long."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hearth.core.types import BATCH_PATIENCE_S, ModelId, RequestId, WorkerId
from hearth.policy.fleet.audit import audit
from hearth.policy.fleet.brain import step
from hearth.policy.fleet.events import (
    Action,
    BrainConfig,
    Dispatch,
    Event,
    ModelDeployed,
    ModelReady,
    Reject,
    RejectReason,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    TimerFired,
    WorkerJoined,
)
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.routing import explain_wait
from tests.policy.fleet.world import profile

A, B, W = ModelId("a"), ModelId("b"), WorkerId("w")


class Scene:
    """A worker that has the model `a`. Mutable."""

    def __init__(self, max_seqs: int = 1, config: BrainConfig | None = None) -> None:
        self.fleet, self.now_s = Fleet(config or BrainConfig(patience_s=2.0)), 0.0
        for model in (A, B):
            self.tell(ModelDeployed(0.0, profile(model, fixed_bytes=60, max_seqs=max_seqs)))
        self.tell(WorkerJoined(0.0, W, "cuda", 100))

    def tell(self, event: Event) -> list[Action]:
        actions = step(self.fleet, event)
        audit(self.fleet)
        return actions

    def ask(self, name: str, *, batch: bool = False, model: ModelId = A) -> list[Action]:
        event = RequestArrived(self.now_s, RequestId(name), model, 10, None, is_batch=batch)
        actions = self.tell(event)
        if name == "first":
            actions += self.tell(ModelReady(self.now_s, W, model, (), 1.0))
        return actions

    def end(self, name: str) -> list[str]:
        """End a request; return who runs next."""
        return dispatched(self.tell(RequestFinished(self.now_s, RequestId(name), 5)))

    def fire(self) -> list[str]:
        return dispatched(self.tell(TimerFired(self.now_s)))


def dispatched(actions: list[Action]) -> list[str]:
    return [action.request_id for action in actions if isinstance(action, Dispatch)]


def test_a_batch_request_says_that_free_slots_are_kept_for_others() -> None:
    scene = Scene(max_seqs=4)
    scene.ask("first")
    while dispatched(scene.ask(name := f"b{len(scene.fleet.queues.requests)}", batch=True)):
        pass
    assert (
        explain_wait(scene.fleet, RequestId(name)) == f"{W}: its free slots are kept for interactive requests"
    )


def test_an_interactive_request_goes_before_batch_requests_that_wait() -> None:
    scene = Scene()
    scene.ask("first")
    for name in ("b1", "b2"):
        scene.ask(name, batch=True)
    scene.now_s = BATCH_PATIENCE_S - 1
    scene.ask("i1")
    assert scene.end("first") == ["i1"]
    assert scene.end("i1") == ["b1"]


def test_a_batch_request_gives_way_to_nobody_who_came_after_its_patience() -> None:
    scene = Scene()
    scene.ask("first")
    scene.ask("b1", batch=True)
    scene.now_s = BATCH_PATIENCE_S + 1
    scene.ask("i1")
    assert scene.end("first") == ["b1"]


def test_batch_requests_leave_a_quarter_of_the_slots_to_interactive_ones_while_they_give_way() -> None:
    scene = Scene(max_seqs=8)
    scene.ask("first", batch=True)
    for number in range(6):
        scene.ask(f"b{number}", batch=True)
    assert len(scene.fleet.queues.requests) - scene.fleet.queues.num_waiting == 6
    assert dispatched(scene.ask("i0")) == ["i0"]
    scene.now_s = BATCH_PATIENCE_S
    assert scene.fire() == ["b5"]


def test_where_there_is_no_quarter_a_batch_request_may_have_all_slots() -> None:
    scene = Scene(max_seqs=1)
    assert dispatched(scene.ask("first", batch=True)) == ["first"]


def test_a_quarter_of_the_queue_is_kept_for_interactive_requests() -> None:
    scene = Scene(config=BrainConfig(max_queue=4))
    scene.ask("first")
    for number in range(3):
        scene.ask(f"b{number}", batch=True)
    (refused,) = [one for one in scene.ask("b3", batch=True) if isinstance(one, Reject)]
    assert refused.reason is RejectReason.QUEUE_FULL
    assert "3 requests wait for room or a free slot, the limit for batch requests: 3" in refused.message
    assert not any(isinstance(one, Reject) for one in scene.ask("i0"))
    assert any(isinstance(one, Reject) for one in scene.ask("i1"))


def test_nobody_is_drained_for_a_batch_request_before_its_patience_is_over() -> None:
    scene = Scene()
    scene.ask("first")
    scene.ask("b1", batch=True, model=B)
    scene.now_s = 3.0
    scene.fire()
    assert not scene.fleet.drains
    scene.now_s = BATCH_PATIENCE_S
    scene.fire()
    assert list(scene.fleet.drains) == [B]


def test_a_batch_request_keeps_room_from_those_behind_it_until_its_drain_would_be_in_vain() -> None:
    scene = Scene(config=BrainConfig(patience_s=2.0, max_drain_s=5.0))
    scene.ask("first")
    scene.ask("b1", batch=True, model=B)
    assert scene.fleet.kept_until_s == BATCH_PATIENCE_S + 5.0
    scene.ask("i1", model=B)
    assert scene.fleet.kept_until_s == 2.0 + 5.0


#: (time since the one before, what)
MOVES = st.lists(
    st.tuples(
        st.floats(0.0, 12.0), st.sampled_from(["interactive", "interactive", "batch", "end", "cancel"])
    ),
    max_size=60,
)


@given(MOVES, st.sampled_from([1, 2, 4, 9]))
def test_whoever_starts_before_a_batch_request_that_waits_came_within_its_patience(
    moves: list[tuple[float, str]], max_seqs: int
) -> None:
    """The bound on what batch requests wait for: all that came before, and what comes for 30 s."""
    scene = Scene(max_seqs)
    came_s: dict[str, float] = {}
    waiting: list[str] = []
    running: list[str] = []
    for number, (later_s, kind) in enumerate(moves):
        scene.now_s += later_s
        if kind in ("interactive", "batch"):
            name = f"{kind}-{number}"
            came_s[name] = scene.now_s
            waiting.append(name)
            event: Event = RequestArrived(scene.now_s, RequestId(name), A, 10, None, is_batch=kind == "batch")
        elif not running:
            continue
        elif kind == "end":
            event = RequestFinished(scene.now_s, RequestId(running.pop(0)), 5)
        else:
            event = RequestCancelled(scene.now_s, RequestId(running.pop()))
        for started in dispatched(scene.tell(event)):
            waiting.remove(started)
            running.append(started)
            for left in waiting:
                patience_s = BATCH_PATIENCE_S if left.startswith("batch") else 0.0
                given_s = BATCH_PATIENCE_S if started.startswith("batch") else 0.0
                assert came_s[started] + given_s <= came_s[left] + patience_s
    while running:
        running += dispatched(scene.tell(RequestFinished(scene.now_s, RequestId(running.pop(0)), 5)))
        scene.now_s += 1.0
    assert not scene.fleet.queues.requests, "somebody waits for ever"

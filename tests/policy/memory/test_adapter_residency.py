"""Which adapters are on the device: every rule as an example, then any arrivals, however popular one is."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from hearth.core.types import AdapterId, ModelId
from hearth.policy.memory.adapter_residency import AdapterResidency, AdapterState

A, B, C, D = (AdapterId(name) for name in "abcd")
BASE, OTHER = ModelId("base"), ModelId("other")


@dataclass
class Line:
    """A residency with prices and active bases that a test writes."""

    costs: dict[AdapterId, float] = field(default_factory=dict)
    active: set[ModelId] = field(default_factory=lambda: {BASE})
    in_pieces: set[ModelId] = field(default_factory=set)  #: bases whose weights are not all there
    num_runs: int = 0
    is_promise_short: bool = False

    def __post_init__(self) -> None:
        self.residency = AdapterResidency(
            lambda adapter: self.costs.get(adapter, 1.0),
            lambda base: base in self.active,
            lambda: self.is_promise_short,
            lambda base: base not in self.in_pieces,
        )

    def ask(
        self, adapter: AdapterId, base: ModelId = BASE, *, is_pinned: bool = False, is_ahead: bool = False
    ) -> int:
        self.num_runs += 1
        self.residency.asked(
            adapter, self.num_runs, base, float(self.num_runs), is_pinned=is_pinned, is_ahead=is_ahead
        )
        self.residency.found(adapter)
        self.residency.check()
        return self.num_runs

    def bring(self, adapter: AdapterId, num_bytes: int = 10) -> list[int]:
        """Have an adapter come; return the requests that start."""
        self.residency.placed(adapter, num_bytes)
        self.residency.loaded(adapter)
        return self.start()

    def start(self) -> list[int]:
        runs = self.residency.startable()
        for run in runs:
            self.residency.started(run)
        self.residency.check()
        return runs

    def idle_there(self, *adapters: AdapterId, is_pinned: bool = False) -> None:
        """Have adapters be there that were asked for and are not any more."""
        for adapter in adapters:
            run = self.ask(adapter, is_pinned=is_pinned)
            self.bring(adapter)
            self.residency.ended(run)


def test_the_last_running_request_of_an_adapter_says_which_it_was() -> None:
    line = Line()
    first, second, waiting = line.ask(A), line.ask(A, OTHER), line.ask(B)
    line.bring(A)
    assert line.residency.ended(first) is None, "another runs"
    assert line.residency.ended(second) == A
    assert line.residency.ended(waiting) is None, "it had not started"
    assert line.residency.ended(99) is None
    line.residency.check()


def test_an_adapter_that_is_there_takes_requests_at_once() -> None:
    line = Line()
    line.idle_there(A)

    run = line.ask(A)

    assert line.residency.startable() == [run]
    assert line.residency.next() is None


def test_the_oldest_waiting_request_says_which_adapter_comes_next() -> None:
    line = Line()
    first = line.ask(B)
    line.ask(A)
    line.ask(B)
    assert line.residency.next() == B

    line.residency.ended(first)
    assert line.residency.next() == A


def test_who_comes_takes_all_that_wait_for_it() -> None:
    line = Line()
    runs = [line.ask(A), line.ask(A)]
    line.ask(B)

    assert line.bring(A) == runs


def test_one_that_is_not_found_yet_holds_up_nobody() -> None:
    line = Line()
    line.residency.asked(B, 99, BASE, 0.0, is_pinned=False)
    line.ask(A)
    assert line.residency.next() == A

    line.residency.found(B)
    assert line.residency.next() == B


def test_the_cheapest_idle_adapter_gives_way_and_none_that_is_used_or_pinned() -> None:
    line = Line(costs={A: 3.0, B: 1.0, C: 2.0})
    line.idle_there(A, B, C)
    line.idle_there(D, is_pinned=True)
    assert line.residency.idle() == [B, C, A]

    run = line.ask(B)
    assert line.residency.idle() == [C, A, B], "somebody waits for it, so it goes last"
    line.residency.started(run)
    assert line.residency.idle() == [C, A]


def test_where_all_are_in_use_the_cheapest_drain_until_the_room_is_there() -> None:
    line = Line(costs={A: 3.0, B: 1.0})
    runs = {adapter: line.ask(adapter) for adapter in (A, B)}
    for adapter in (A, B):
        line.bring(adapter)
    waiting = line.ask(C)

    assert line.residency.drain(5)
    late = {adapter: line.ask(adapter) for adapter in (A, B)}

    assert line.start() == [late[A]], "one drains, and the room of one is enough"
    line.residency.ended(runs[B])
    assert line.residency.idle() == [B]
    line.residency.left(B)
    assert line.bring(C) == [waiting]
    assert line.residency.next() == B


def test_an_adapter_takes_requests_again_when_nobody_needs_its_room_any_more() -> None:
    line = Line()
    line.ask(A)
    line.bring(A)
    gone = line.ask(B)
    line.residency.drain(5)
    waiting = line.ask(A)
    assert line.start() == []

    line.residency.ended(gone)

    assert line.start() == [waiting]


def test_pinned_adapters_do_not_drain() -> None:
    line = Line()
    line.ask(A, is_pinned=True)
    line.bring(A)
    line.ask(B)

    assert not line.residency.drain(5)
    run = line.ask(A)
    assert line.residency.startable() == [run]


def test_none_comes_or_takes_requests_while_a_model_waits_for_room_that_it_is_promised() -> None:
    """Also not when a request ends: the others must end as well."""
    line = Line()
    ending = line.ask(A)
    for adapter in (A, B):
        line.ask(adapter)
        line.bring(adapter)
    line.is_promise_short = True
    waiting = [line.ask(adapter) for adapter in (A, B, C)]
    line.ask(D, OTHER)

    line.residency.ended(ending)

    assert line.start() == []
    assert (line.residency.next(), line.residency.early()) == (None, [])
    line.is_promise_short = False
    assert line.start() == waiting[:2]
    assert (line.residency.next(), line.residency.early()) == (C, [D])


def test_pinned_adapters_give_way_to_what_is_promised_and_last() -> None:
    line = Line(costs={A: 0.0})
    line.idle_there(A, is_pinned=True)
    line.idle_there(B)
    assert line.residency.idle() == [B]
    assert line.residency.idle(is_promised=True) == [B, A]

    line.ask(A, is_pinned=True)
    line.start()
    assert line.residency.idle(is_promised=True) == [B]
    assert line.residency.last_in_use() == A


def test_adapters_without_bytes_and_requests_are_told_once() -> None:
    """Nobody need look through a thousand that are there."""
    line = Line()
    line.idle_there(A, B)
    assert line.residency.take_unused() == []
    waiting = line.ask(C)
    line.residency.ended(waiting)
    line.residency.left(A)
    line.residency.left(B)
    line.ask(B)

    assert line.residency.take_unused() == [C, A], "B is asked for again"
    assert line.residency.take_unused() == []
    line.residency.check()


def test_an_adapter_that_was_replaced_is_pinned_no_more() -> None:
    line = Line()
    line.idle_there(A, is_pinned=True)

    line.residency.unpin(A)
    line.residency.unpin(B)  # which is unknown

    assert line.residency.idle() == [A]


def lacking_both(line: Line) -> None:
    """Have running requests of a base lack two adapters, which gave way while it had no turn."""
    line.active = {BASE, OTHER}
    for adapter in (A, B):
        line.ask(adapter, OTHER)
        line.bring(adapter)
    line.active = {BASE}
    for adapter in line.residency.idle():
        line.residency.left(adapter)
    line.active = {BASE, OTHER}


def test_adapters_that_running_requests_lack_come_before_those_that_older_ones_wait_for() -> None:
    line = Line()
    line.ask(C)
    lacking_both(line)

    assert line.residency.next() == A
    line.bring(A)
    assert line.residency.next() == B
    line.bring(B)
    assert line.residency.next() == C


def test_an_adapter_drains_for_nobody_while_its_base_lacks_another() -> None:
    """Its requests never end, for the base makes no step: whoever waited for it would wait forever."""
    line = Line()
    lacking_both(line)
    line.bring(A)

    assert not line.residency.drain(5)
    assert line.residency.last_in_use() is None
    assert line.residency.idle() == [], "one would take the other's place over and over"
    assert line.residency.idle(is_promised=True) == [A]
    line.bring(B)
    assert line.residency.drain(5)
    assert line.residency.last_in_use() == B


def test_an_adapter_is_in_nobodys_way_for_good_while_its_base_waits_for_its_own_weights() -> None:
    """Weights may need the very room that the adapter has; it comes back before the base steps."""
    line = Line()
    line.ask(A)
    line.bring(A)
    assert line.residency.last_in_use() == A

    line.in_pieces = {BASE}
    assert line.residency.last_in_use() is None
    assert not line.residency.drain(5)
    assert line.residency.idle() == [], "it goes for nothing but what is promised"
    assert line.residency.idle(is_promised=True) == [A]

    line.residency.left(A)
    assert line.residency.lacking(BASE)
    assert line.residency.next() == A


def test_adapters_of_running_requests_are_told_by_base_wherever_they_are() -> None:
    line = Line(active={BASE, OTHER})
    line.ask(A, OTHER)
    line.bring(A)
    line.ask(B)
    line.bring(B)
    line.ask(C)
    assert (line.residency.run_by(BASE), line.residency.run_by(OTHER)) == ({B}, {A})

    line.active = {BASE}
    line.residency.left(A)
    assert line.residency.run_by(OTHER) == {A}


def test_adapters_of_a_model_that_waits_for_its_turn_give_way_and_come_back_before_its_step() -> None:
    line = Line(active={BASE, OTHER})
    line.ask(A, OTHER)
    line.bring(A)
    assert line.residency.idle() == []

    line.active = {BASE}
    assert line.residency.idle() == [A]
    line.residency.left(A)
    assert line.residency.next() is None
    assert line.residency.early() == [A]

    line.active = {OTHER}
    assert line.residency.lacking(OTHER)
    assert line.residency.next() == A
    line.bring(A)
    assert not line.residency.lacking(OTHER)


def test_requests_of_a_model_that_is_not_there_yet_wait_for_no_room() -> None:
    line = Line()
    line.ask(A, OTHER)
    line.ask(B)

    assert line.residency.next() == B
    assert line.residency.early() == [A]


# --- Any arrivals ---


@dataclass
class Request:
    adapter: AdapterId
    num_steps: int
    #: Adapters with requests that are older and wait when this one arrives, and its own.
    older: frozenset[AdapterId]
    placed: list[AdapterId] = field(default_factory=list)  #: while it waited, and its own was not coming
    waited_steps: int = 0


class Device:
    """Room for so many bytes, on which requests run for some steps and loads take some: as a worker does."""

    def __init__(self, room_bytes: int, sizes: dict[AdapterId, int], load_steps: int) -> None:
        self.line, self.room_bytes, self.sizes, self.load_steps = Line(), room_bytes, sizes, load_steps
        self.waiting: dict[int, Request] = {}
        self.running: dict[int, int] = {}  #: steps that are left
        self.loading: dict[AdapterId, int] = {}
        self.there: set[AdapterId] = set()

    def arrive(self, adapter: AdapterId, num_steps: int) -> None:
        older = frozenset(one.adapter for one in self.waiting.values())
        run = self.line.ask(adapter)
        self.waiting[run] = Request(adapter, num_steps, older | {adapter})
        self.settle()

    def step(self) -> None:
        for run in list(self.running):
            self.running[run] -= 1
            if not self.running[run]:
                del self.running[run]
                self.line.residency.ended(run)
        for adapter in list(self.loading):
            self.loading[adapter] -= 1
            if self.loading[adapter] <= 0:
                del self.loading[adapter]
                self.line.residency.loaded(adapter)
                self.there.add(adapter)
        self.settle()
        for request in self.waiting.values():
            request.waited_steps += 1

    def settle(self) -> None:
        self.start()
        while (adapter := self.line.residency.next()) is not None:
            lack_bytes = self.lack_bytes(adapter)
            for idle in self.line.residency.idle():
                if lack_bytes > 0:
                    self.line.residency.left(idle)
                    self.there.remove(idle)
                    lack_bytes = self.lack_bytes(adapter)
            if lack_bytes > 0:
                self.line.residency.drain(lack_bytes)
                break
            self.line.residency.placed(adapter, self.sizes[adapter])
            self.loading[adapter] = self.load_steps
            for request in self.waiting.values():
                if request.adapter not in self.loading:
                    request.placed.append(adapter)
            self.start()
        self.line.residency.check()

    def lack_bytes(self, adapter: AdapterId) -> int:
        used_bytes = sum(self.sizes[one] for one in {*self.there, *self.loading})
        return used_bytes + self.sizes[adapter] - self.room_bytes

    def start(self) -> None:
        for run in self.line.start():
            request = self.waiting.pop(run)
            assert request.adapter in self.there
            self.running[run] = request.num_steps
            self.check(request)

    def check(self, request: Request) -> None:
        """The bound: each adapter with older requests came once, and no other did."""
        assert len(set(request.placed)) == len(request.placed), f"an adapter came twice before {request}"
        assert set(request.placed) <= request.older, f"a younger one came before {request}"
        rounds = len(request.older)
        assert request.waited_steps <= rounds * (MAX_STEPS + self.load_steps + 1), f"{request}"


MAX_STEPS = 6


@given(
    st.integers(10, 30),
    st.integers(1, 3),
    st.lists(st.sampled_from([A, B]), max_size=2),
    st.lists(st.tuples(st.sampled_from([A, B, C, D]), st.integers(1, MAX_STEPS), st.integers(0, 3))),
)
def test_no_adapter_is_so_popular_that_another_starves(
    room_bytes: int,
    load_steps: int,
    popular: list[AdapterId],
    arrivals: list[tuple[AdapterId, int, int]],
) -> None:
    """Popular ones are asked for at every step, by requests that last."""
    device = Device(room_bytes, {A: 10, B: 5, C: 7, D: 10}, load_steps)

    def step() -> None:
        for adapter in popular:
            device.arrive(adapter, MAX_STEPS)
        device.step()

    for adapter, num_steps, num_pauses in arrivals:
        device.arrive(adapter, num_steps)
        for _ in range(num_pauses):
            step()
    for _ in range(5 * (MAX_STEPS + load_steps + 1)):
        step()
    assert not {C, D} & {request.adapter for request in device.waiting.values()}
    for _ in range(10 * (MAX_STEPS + load_steps + 1)):
        device.step()
    assert not device.waiting
    assert not device.running
    assert all(device.line.residency.state(adapter) is AdapterState.LOADED for adapter in device.there)


def test_nothing_is_evicted_for_a_request_that_is_ahead_however_old() -> None:
    line = Line()
    ahead, confirmed = line.ask(A, is_ahead=True), line.ask(B)

    assert (line.residency.next(), line.residency.early()) == (B, [A])
    assert line.bring(A) == []
    assert line.residency.idle() == [A]
    line.residency.left(A)
    assert line.bring(B) == [confirmed]

    line.residency.confirmed(ahead)
    line.residency.confirmed(99)  # it has ended
    assert line.residency.next() == A
    assert line.bring(A) == [ahead]


def test_an_adapter_drains_for_no_request_that_is_ahead() -> None:
    """That request may wait, where it begins, for the very requests that this adapter takes here."""
    line = Line()
    line.ask(A)
    line.bring(A)
    line.ask(B, is_ahead=True)
    wanting = line.ask(C)
    assert line.residency.drain(5)
    newer = line.ask(A)
    assert line.start() == []

    line.residency.ended(wanting)
    assert line.start() == [newer]


def test_only_eligible_adapters_in_use_are_given_up() -> None:
    line = Line()
    line.ask(A)
    line.bring(A)
    line.ask(B)
    line.bring(B)

    assert line.residency.last_in_use(lambda adapter: adapter != B) == A
    assert line.residency.last_in_use(lambda adapter: False) is None

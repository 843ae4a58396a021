"""Who is in turn: one rule at a time."""

from __future__ import annotations

import math

from hearth.core.types import ModelId, Pace, RequestId, TurnEnd
from hearth.policy.fleet.profile import Promise
from hearth.policy.turns.turn_policy import BeginTurn, EndTurn, TurnChange, TurnPolicy, TurnRules, WeightsView

A, B, C = ModelId("a"), ModelId("b"), ModelId("c")
RULES = TurnRules()
BATCH = Pace(tokens_per_s=0.0)


class Table:
    """A policy for models of which two large ones do not fit together, and what is missing of each."""

    def __init__(self, sizes: dict[ModelId, int] | None = None, budget_bytes: int = 100) -> None:
        self.sizes = sizes or {A: 80, B: 80}
        self.adapter_bytes: dict[ModelId, int] = {}
        self.policy = TurnPolicy(budget_bytes, adapter_bytes=lambda model: self.adapter_bytes.get(model, 0))
        self.all_s = 0.1
        self.missing = dict.fromkeys(self.sizes, 0.1)
        for model, num_bytes in self.sizes.items():
            self.policy.hosted(model, Promise(num_bytes, 0))

    def ask(self, model: ModelId, now_s: float, name: str = "r", pace: Pace | None = None) -> RequestId:
        request_id = RequestId(f"{model}-{name}")
        self.policy.arrived(model, request_id, pace or Pace(), now_s, 0.0, 0)
        return request_id

    def decide(self, now_s: float) -> list[TurnChange]:
        return self.policy.decide(now_s, lambda model: WeightsView(self.missing[model], self.all_s))

    def load(self, model: ModelId, now_s: float) -> None:
        self.missing[model] = 0.0
        self.policy.loaded(model, now_s)

    def send(self, request_id: RequestId, now_s: float, num_tokens: int = 1) -> None:
        for _ in range(num_tokens):
            self.policy.sent(ModelId(request_id.split("-")[0]), [request_id], now_s)


def running(table: Table, now_s: float = 0.0) -> RequestId:
    """Have model A in turn, loaded, with a request that has its first token."""
    request_id = table.ask(A, now_s)
    assert table.decide(now_s) == [BeginTurn(A)]
    table.load(A, now_s)
    table.send(request_id, now_s)
    return request_id


def test_a_model_that_fits_begins_at_once() -> None:
    table = Table({A: 40, B: 40})
    table.ask(A, 0.0)
    assert table.decide(0.0) == [BeginTurn(A)]
    table.load(A, 0.1)
    table.ask(B, 0.1)
    assert table.decide(0.1) == [BeginTurn(B)]


def test_a_model_that_is_awaited_is_loaded_without_requests_and_gives_way_then() -> None:
    table = Table({A: 40, B: 40})
    table.policy.awaited(A, 0.0)
    assert table.decide(0.0) == [BeginTurn(A)]
    table.load(A, 0.1)
    assert table.decide(0.1) == [EndTurn(A, TurnEnd.IDLE)]


def test_no_turn_ends_for_a_model_that_is_awaited_without_requests() -> None:
    table = Table()
    running(table)
    table.policy.awaited(B, 0.1)
    assert table.decide(10.0) == []
    table.policy.ended(A, RequestId("a-r"))
    assert table.decide(11.0) == [EndTurn(A, TurnEnd.IDLE), BeginTurn(B)]


def test_only_one_model_is_loaded_at_a_time_but_what_is_there_begins() -> None:
    table = Table({A: 30, B: 30, C: 30})
    table.missing[C] = 0.0
    for model in (A, B, C):
        table.ask(model, 0.0)
    assert table.decide(0.0) == [BeginTurn(A), BeginTurn(C)]
    table.load(A, 0.1)
    assert table.decide(0.1) == [BeginTurn(B)]


def test_a_load_that_takes_very_long_holds_up_no_other() -> None:
    table = Table({A: 30, B: 30})
    table.ask(A, 0.0)
    table.decide(0.0)
    table.ask(B, 0.1)
    assert table.decide(0.1) == []
    assert table.policy.wake_s == RULES.max_turn_s
    assert table.decide(RULES.max_turn_s) == [BeginTurn(B)]


def test_a_model_gives_way_when_it_has_had_its_time_and_is_ahead() -> None:
    table = Table()
    request_id = running(table)
    table.send(request_id, 0.1, num_tokens=50)
    table.ask(B, 0.1)
    assert table.decide(0.1) == []
    assert table.policy.wake_s == RULES.min_turn_s
    assert table.decide(RULES.min_turn_s) == [EndTurn(A, TurnEnd.AHEAD), BeginTurn(B)]


def test_a_model_that_is_not_ahead_goes_on_until_its_quantum_is_over_which_grows_if_it_is_late() -> None:
    table = Table()
    running(table)
    table.ask(B, 0.1)
    assert table.decide(0.59) == []
    assert table.decide(0.61) == [EndTurn(A, TurnEnd.TIME), BeginTurn(B)]  # due at 0.6: it is late
    table.load(B, 1.0)
    table.send(RequestId("b-r"), 1.0, num_tokens=200)
    assert table.decide(1.3) == [EndTurn(B, TurnEnd.AHEAD), BeginTurn(A)]
    table.load(A, 1.4)
    table.send(RequestId("a-r"), 1.4)
    table.ask(B, 1.4, "new")
    assert table.decide(1.4 + RULES.quantum_s) == []
    grown_s = RULES.quantum_s * RULES.growth
    assert EndTurn(A, TurnEnd.TIME) in table.decide(1.4 + grown_s + 0.01)


def test_everyone_who_waited_gets_a_token_but_later_arrivals_do_not_prolong_a_turn() -> None:
    table = Table()
    first, second = table.ask(A, 0.0, "1"), table.ask(A, 0.0, "2")
    table.decide(0.0)
    table.load(A, 0.1)
    table.send(first, 0.2, num_tokens=99)
    table.ask(B, 0.2)
    assert table.decide(1.0) == []
    table.ask(A, 1.0, "3")
    table.send(second, 1.0, num_tokens=99)
    assert table.decide(1.0) == [EndTurn(A, TurnEnd.AHEAD), BeginTurn(B)]


def test_waiting_for_first_tokens_has_an_end() -> None:
    table = Table()
    first = table.ask(A, 0.0, "1")
    table.ask(A, 0.0, "2")
    table.decide(0.0)
    table.load(A, 0.0)
    table.send(first, 0.2, num_tokens=99)
    table.ask(B, 0.2)
    assert table.decide(1.9) == []
    assert table.policy.wake_s == RULES.max_turn_s
    assert EndTurn(A, TurnEnd.TIME) in table.decide(RULES.max_turn_s)


def test_who_is_left_out_of_two_turns_is_waited_for_longer() -> None:
    """Its KV may be lost with each pause, and then a long prompt is begun anew in each turn."""
    table = Table()
    reader = table.ask(A, 0.0, "reader")
    long = table.ask(A, 0.0, "long")
    table.decide(0.0)
    table.load(A, 0.0)
    now_s = 0.0
    for number, wait_s in enumerate((2.0, 2.0, 4.0, 8.0, 16.0, 16.0)):
        table.send(reader, now_s, num_tokens=500)
        other = table.ask(B, now_s, str(number))
        assert table.decide(now_s + wait_s - 0.1) == []
        assert math.isclose(table.policy.wake_s, now_s + wait_s)
        assert BeginTurn(B) in table.decide(now_s + wait_s)
        table.load(B, now_s + wait_s)
        table.send(other, now_s + wait_s, num_tokens=500)
        now_s += wait_s + RULES.quantum_s
        assert BeginTurn(A) in table.decide(now_s)
        table.policy.ended(B, other)
    table.send(reader, now_s, num_tokens=500)
    table.send(long, now_s, num_tokens=500)
    table.ask(B, now_s, "last")
    assert BeginTurn(B) in table.decide(now_s + RULES.max_turn_s)


def test_a_turn_goes_on_for_as_long_as_it_took_to_compute_the_kv_of_paused_requests_anew() -> None:
    table = Table()
    request_id = running(table)
    other = table.ask(B, 0.1)
    assert BeginTurn(B) in table.decide(1.0)
    table.load(B, 1.0)
    table.send(other, 1.0, num_tokens=500)
    assert BeginTurn(A) in table.decide(2.0)
    table.ask(B, 2.0, "new")
    table.send(request_id, 4.5)
    assert table.decide(6.9) == []
    assert math.isclose(table.policy.wake_s, 7.0)
    assert BeginTurn(B) in table.decide(7.0)


def test_a_turn_that_has_brought_nobody_on_does_not_end() -> None:
    table = Table()
    request_id = table.ask(A, 0.0)
    table.decide(0.0)
    table.load(A, 0.0)
    table.ask(B, 0.0)
    assert table.decide(60.0) == []
    table.send(request_id, 60.0)
    assert EndTurn(A, TurnEnd.TIME) in table.decide(60.0)


def test_nobody_gives_way_to_a_request_that_is_ahead_before_it_has_to_come_back() -> None:
    table = Table()
    running(table)
    request_id = table.ask(B, 0.0)
    table.decide(RULES.quantum_s)
    table.load(B, 1.0)
    table.send(request_id, 1.0, num_tokens=5)
    table.send(RequestId("a-r"), 1.0, num_tokens=100)  # so it may pause until 2.5
    table.missing[A] = 0.1
    assert table.decide(2.0) == []
    assert math.isclose(table.policy.wake_s, 2.5 - 0.1 - RULES.lead_s)
    assert EndTurn(B, TurnEnd.TIME) in table.decide(2.3)


def test_pinned_models_never_give_way_and_want_a_turn_without_requests() -> None:
    table = Table()
    running(table)
    table.policy.pin(A, 0.0, is_pinned=True)
    table.ask(B, 0.0)
    assert table.decide(100.0) == []
    table.policy.ended(A, RequestId("a-r"))
    assert table.decide(200.0) == []
    table.policy.pin(A, 200.0, is_pinned=False)
    assert table.decide(200.0) == [EndTurn(A, TurnEnd.IDLE), BeginTurn(B)]


def test_batch_requests_give_way_first() -> None:
    table = Table({A: 45, B: 45, C: 45})
    batch = table.ask(A, 0.0, pace=BATCH)
    reader = table.ask(B, 0.0)
    table.missing = dict.fromkeys(table.missing, 0.0)
    table.decide(0.0)
    table.send(batch, 0.1)
    table.send(reader, 0.1, num_tokens=500)
    table.ask(C, 0.1)
    assert table.decide(1.0) == [EndTurn(A, TurnEnd.AHEAD), BeginTurn(C)]


def test_a_small_model_does_not_slip_past_a_large_one_whose_room_it_would_take() -> None:
    table = Table({A: 60, B: 90, C: 40, ModelId("d"): 10})
    running(table)
    table.ask(B, 0.1)
    table.ask(C, 0.1)
    table.ask(ModelId("d"), 0.1)
    assert table.decide(0.1) == [BeginTurn(ModelId("d"))]


def test_many_small_models_leave_a_large_one_its_room_together() -> None:
    small = [ModelId(f"small-{number}") for number in range(5)]
    table = Table({A: 50, B: 80, **dict.fromkeys(small, 10)})
    table.missing.update(dict.fromkeys(small, 0.0))
    running(table)
    table.ask(B, 0.1)
    for model in small:
        table.ask(model, 0.1)
    assert table.decide(0.1) == [BeginTurn(small[0]), BeginTurn(small[1])]


def test_overdue_models_go_by_how_long_they_wait() -> None:
    table = Table({A: 80, B: 80, C: 80})
    running(table)
    table.ask(B, 0.1, pace=Pace(first_token_s=5.0))
    table.ask(C, 0.2)
    assert table.policy.next_in_line(0.3) == [C, B]
    assert table.policy.next_in_line(6.0) == [B, C]


def test_where_others_wait_too_a_lone_model_has_longer() -> None:
    table = Table({A: 80, B: 80, C: 80})
    request_id = running(table)
    table.all_s = table.missing[B] = table.missing[C] = 0.4
    table.ask(B, 0.0)
    table.ask(C, 0.0)
    table.send(request_id, 0.1, num_tokens=500)
    table.send(request_id, 1.1)
    assert table.decide(1.1) == []  # as long as its bytes take, and twice as long again for the third model
    assert math.isclose(table.policy.wake_s, 3 * 0.4)
    assert EndTurn(A, TurnEnd.AHEAD) in table.decide(3 * 0.4)


def test_a_request_that_comes_from_a_lost_worker_is_late_by_its_age() -> None:
    table = Table()
    table.policy.arrived(A, RequestId("a-r"), Pace(), now_s=100.0, age_s=7.0, num_tokens=20)
    assert table.policy.due_s(A) == 93.0 + 0.5 + 2.0


def test_a_model_without_requests_ends_its_turn_and_one_that_is_gone_is_forgotten() -> None:
    table = Table()
    request_id = running(table)
    table.policy.ended(A, request_id)
    assert table.decide(0.1) == [EndTurn(A, TurnEnd.IDLE)]
    table.ask(B, 0.2)
    table.decide(0.2)
    table.policy.forget(B)
    assert not table.policy.is_in_turn(B)
    assert table.policy.memory.bound_bytes() == 0
    table.policy.ended(B, RequestId("b-r"))


def test_a_model_out_of_turn_keeps_what_stands_and_no_workspace_of_its_own() -> None:
    promise = Promise(own_bytes=50, workspace_bytes=20, standing_bytes=5)
    for shares_workspace in (True, False):
        policy = TurnPolicy(200, shares_workspace=shares_workspace)
        for model in (A, B):
            policy.hosted(model, promise)
            policy.arrived(model, RequestId(f"{model}-r"), Pace(), 0.0, 0.0, 0)
        assert policy.memory.bound_bytes() == 0
        policy.decide(0.0, lambda _: WeightsView(0.0, 0.1))
        assert policy.memory.bound_bytes() == 50 + 50 + (20 if shares_workspace else 20 + 20)
        policy.ended(B, RequestId("b-r"))
        policy.decide(0.0, lambda _: WeightsView(0.0, 0.1))
        assert policy.memory.bound_bytes() == 50 + 5 + 20


def test_bytes_of_the_next_in_line_come_early_unless_another_is_being_loaded() -> None:
    table = Table({A: 80, B: 80, C: 80})
    running(table)
    assert table.policy.next_prefetch(table.policy.next_in_line(0.0), lambda model: True) is None, (
        "nobody waits"
    )
    table.ask(B, 0.1)
    table.ask(C, 0.0)
    assert table.decide(0.2) == []
    assert table.policy.next_prefetch(table.policy.next_in_line(0.2), lambda model: True) == C, (
        "it is due first"
    )
    assert table.policy.next_prefetch(table.policy.next_in_line(0.2), lambda model: model == B) == B
    assert table.policy.next_prefetch(table.policy.next_in_line(0.2), lambda model: False) is None

    assert table.decide(2.0)[-1] == BeginTurn(C)
    assert table.policy.next_prefetch(table.policy.next_in_line(2.0), lambda model: True) is None, (
        "another is being loaded"
    )
    table.load(C, 2.1)
    assert table.policy.next_prefetch(table.policy.next_in_line(2.1), lambda model: True) in (A, B)


def test_early_bytes_come_in_portions_and_not_by_a_few() -> None:
    policy = TurnPolicy(100, rules=TurnRules(front_bytes=64))
    assert policy.front_bytes(1000, 1000) == 64
    assert policy.front_bytes(40, 1000) == 40
    assert policy.front_bytes(1000, 10) == 10
    assert policy.front_bytes(1000, 3) == 0, "less than a sixteenth"
    assert policy.front_bytes(2, 2) == 2, "all that is missing"
    assert policy.front_bytes(2, 1) == 0


def test_a_decision_stands_until_a_timer_or_a_token_that_lets_a_turn_end() -> None:
    table = Table()
    first = table.ask(A, 0.0)
    table.decide(0.0)
    table.load(A, 0.1)
    table.ask(B, 0.2)
    assert table.decide(0.2) == []
    assert table.policy.stands_s == 0.7, "B is late then, and stands in line by its wait from then on"

    assert table.policy.sent(A, [first], 0.25), "now its turn may end"
    assert table.decide(0.25) == []
    assert table.policy.stands_s == 0.1 + RULES.min_turn_s == table.policy.wake_s
    assert not table.policy.sent(A, [first], 0.3), "one token more is no reason to decide anew"


def test_while_tokens_may_bring_a_model_ahead_of_its_pace_no_decision_stands_for_long() -> None:
    table = Table()
    table.all_s = 1.0
    table.missing[B] = 1.0
    running(table)
    table.ask(B, 0.0)
    assert table.decide(0.0) == []
    assert table.policy.stands_s < table.policy.wake_s, "A is not ahead by two reloads yet, and may be"


def test_models_whose_running_requests_have_adapters_are_in_turn_together_only_if_those_fit_too() -> None:
    for own, others in ((30, 0), (0, 30), (15, 15)):
        table = Table({A: 40, B: 40})
        table.adapter_bytes = {A: own, B: others}
        running(table)
        table.ask(B, 0.1)
        assert table.decide(0.1) == []
        assert table.decide(100.0) == [EndTurn(A, TurnEnd.TIME), BeginTurn(B)]

    table = Table({A: 40, B: 40})
    table.adapter_bytes = {A: 10, B: 10}
    running(table)
    table.ask(B, 0.1)
    assert table.decide(0.1) == [BeginTurn(B)]


def test_adapters_keep_no_model_from_a_turn_alone_or_beside_pinned_models() -> None:
    table = Table({A: 40, B: 40})
    table.adapter_bytes = {B: 1000}
    table.ask(B, 0.0)
    assert table.decide(0.0) == [BeginTurn(B)]

    table = Table({A: 40, B: 40})
    table.adapter_bytes = {B: 1000}
    table.policy.pin(A, 0.0, is_pinned=True)
    assert table.decide(0.0) == [BeginTurn(A)]
    table.load(A, 0.1)
    table.ask(B, 0.1)
    assert table.decide(0.1) == [BeginTurn(B)]

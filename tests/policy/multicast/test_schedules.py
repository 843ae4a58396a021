"""Schedules bring every part to every node once, within their bounds, also if a node is lost."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bench.cluster.schedules import chain, one_by_one, tree
from hearth.policy.multicast.schedules import Schedule, Send, multicast, rotated_orders

num_nodes = st.integers(1, 40)
num_parts = st.integers(1, 24)
schedules = st.one_of(
    st.builds(multicast, st.integers(1, 6), st.integers(0, 30), num_parts),
    *(st.builds(build, num_nodes, num_parts) for build in (chain, tree, one_by_one)),
)


def log2_up(number: int) -> int:
    return (number - 1).bit_length()


def count_nodes(schedule: Schedule) -> int:
    return sum(map(len, schedule.groups))


def pulls_of(schedule: Schedule, node: int) -> tuple[Send, ...]:
    """Return the sends to a node, in the order in which it asks their sources for the parts."""
    return tuple(send for send in schedule.sends if send.target == node)


def play(schedule: Schedule, duration: Callable[[Send], float] = lambda send: 1) -> list[list[float]]:
    """Return when each node has each part, by node and part; in rounds unless `duration` gives seconds."""
    arrivals = [[inf] * schedule.num_parts for _ in range(count_nodes(schedule))]
    for group in schedule.groups:
        arrivals[group[0]] = [0] * schedule.num_parts
    up_free, down_free = [0.0] * count_nodes(schedule), [0.0] * count_nodes(schedule)
    for send in schedule.sends:
        start = max(arrivals[send.source][send.part], up_free[send.source], down_free[send.target])
        end = start + duration(send)
        arrivals[send.target][send.part] = up_free[send.source] = down_free[send.target] = end
    return arrivals


def rounds(schedule: Schedule) -> float:
    return max(map(max, play(schedule)))


@st.composite
def durations(draw: st.DrawFn) -> Callable[[Send], float]:
    """Draw how long sends take, unequal by link and part."""
    numbers = draw(st.lists(st.integers(1, 9), min_size=1, max_size=20))
    return lambda send: numbers[(send.source * 7 + send.target * 3 + send.part) % len(numbers)]


@given(schedules)
def test_every_node_gets_every_part_once(schedule: Schedule) -> None:
    receivers = [node for group in schedule.groups for node in group[1:]]
    wanted = [(node, part) for node in receivers for part in range(schedule.num_parts)]
    assert sorted((send.target, send.part) for send in schedule.sends) == sorted(wanted)
    nodes = sorted(node for group in schedule.groups for node in group)
    assert nodes == list(range(count_nodes(schedule)))


@given(schedules, st.one_of(st.just(lambda send: 1), durations()))
def test_nodes_send_what_they_have_one_up_and_one_down_at_a_time(
    schedule: Schedule, duration: Callable[[Send], float]
) -> None:
    arrivals = play(schedule, duration)
    up_free, down_free = [0.0] * count_nodes(schedule), [0.0] * count_nodes(schedule)
    by_end = sorted(schedule.sends, key=lambda send: arrivals[send.target][send.part])
    for send in by_end:
        end = arrivals[send.target][send.part]
        start = end - duration(send)
        assert start >= arrivals[send.source][send.part]
        assert start >= up_free[send.source]
        assert start >= down_free[send.target]
        up_free[send.source] = down_free[send.target] = end


@given(schedules)
def test_a_node_pulls_each_part_in_the_order_of_its_arrivals(schedule: Schedule) -> None:
    arrivals = play(schedule)
    for group in schedule.groups:
        assert pulls_of(schedule, group[0]) == ()
        for node in group[1:]:
            times = [arrivals[node][pull.part] for pull in pulls_of(schedule, node)]
            assert times == sorted(times)
            assert len(times) == schedule.num_parts


@given(st.integers(2, 80), num_parts)
def test_a_binomial_pipeline_takes_the_least_rounds_possible(num_nodes: int, num_parts: int) -> None:
    num_rounds = rounds(multicast(1, num_nodes - 1, num_parts))
    assert num_rounds == num_parts + log2_up(num_nodes) - 1


@given(st.integers(2, 40), num_parts)
def test_baselines_take_their_known_rounds(num_nodes: int, num_parts: int) -> None:
    assert rounds(chain(num_nodes, num_parts)) == num_parts + num_nodes - 2
    assert rounds(one_by_one(num_nodes, num_parts)) == num_parts * (num_nodes - 1)
    depth = num_nodes.bit_length() - 1
    assert num_parts + depth - 1 <= rounds(tree(num_nodes, num_parts)) <= 2 * (num_parts + depth - 1)


@given(st.integers(1, 6), st.integers(1, 30), num_parts)
def test_every_group_of_a_multicast_takes_the_least_rounds_possible(
    num_sources: int, num_receivers: int, num_parts: int
) -> None:
    schedule = multicast(num_sources, num_receivers, num_parts)
    assert max(map(len, schedule.groups)) - 1 == -(-num_receivers // min(num_sources, num_receivers))
    assert rounds(schedule) == num_parts + log2_up(max(map(len, schedule.groups))) - 1


@given(st.integers(1, 12), num_parts)
def test_rotated_orders_begin_with_all_parts_between_them(num_orders: int, num_parts: int) -> None:
    orders = rotated_orders(num_orders, num_parts)
    assert all(sorted(order) == list(range(num_parts)) for order in orders)
    num_first = -(-num_parts // num_orders)
    assert {part for order in orders for part in order[:num_first]} == set(range(num_parts))


def test_seconds_follow_from_the_links() -> None:
    slow = {(0, 1): 4.0}
    arrivals = play(chain(3, 2), lambda send: slow.get((send.source, send.target), 1.0))
    assert arrivals == [[0, 0], [4, 8], [5, 9]]


@given(schedules, st.data())
def test_the_loss_of_any_node_at_any_time_is_survived(schedule: Schedule, data: st.DataObject) -> None:
    lost = data.draw(st.integers(0, count_nodes(schedule) - 1), label="lost")
    lost_after = data.draw(st.integers(0, int(rounds(schedule))), label="lost after round")
    held = {
        node: {part for part, arrival in enumerate(times) if arrival <= lost_after}
        for node, times in enumerate(play(schedule))
        if node != lost
    }
    assume(set[int]().union(*held.values()) == set(range(schedule.num_parts)))

    pull_the_rest(schedule, held)

    assert all(len(parts) == schedule.num_parts for parts in held.values())


def pull_the_rest(schedule: Schedule, held: dict[int, set[int]]) -> None:
    """Let nodes pull what they lack from the planned source, or from any holder if that is lost.

    Each pulls its parts in order, and each sends to one node at a time.
    """
    while any(len(parts) < schedule.num_parts for parts in held.values()):
        sends: dict[int, Send] = {}
        for node, parts in held.items():
            pull = next((pull for pull in pulls_of(schedule, node) if pull.part not in parts), None)
            if pull is None:
                continue
            sources = [pull.source] if pull.source in held else list(held)
            free = (one for one in sources if pull.part in held[one] and one not in sends)
            if (source := next(free, None)) is not None:
                sends[source] = Send(pull.part, source, node)
        if not sends:
            pytest.fail(f"nodes wait for each other: {held}")
        for send in sends.values():
            held[send.target].add(send.part)

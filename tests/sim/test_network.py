"""Machines of a simulated service fetch models from each other."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from hearth.core.types import LOCAL, ModelId, NodeId
from hearth.sim.network import Fetched, SimulatedNetwork
from hearth.sim.run import simulate
from hearth.sim.setting import SimulationSetting
from hearth.sim.traces import TracedRequest
from tests.sim.small_machine import MACHINE, MEMORY_BYTES, SHAPES, trace_of

NODES = (LOCAL, NodeId("n1"), NodeId("n2"), NodeId("n3"))
WANTED = st.lists(
    st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(NODES[1:]), st.integers(0, 10)), max_size=8
)


@given(WANTED, st.integers(1, 100))
def test_a_node_sends_and_receives_one_model_at_a_time_and_only_what_it_has(
    wanted: list[tuple[str, NodeId, float]], num_bytes: int
) -> None:
    network = SimulatedNetwork(NODES, bytes_per_s=10.0)
    has_s: dict[tuple[ModelId, NodeId], float] = {}
    fetches: list[tuple[NodeId, tuple[str, float], Fetched]] = []
    for name, node, now_s in sorted(wanted, key=lambda one: one[2]):
        model = ModelId(name)
        if network.arrived_s(model, node) is not None:
            continue
        one = network.fetch(model, node, num_bytes, now_s)
        assert one.source == LOCAL or has_s[model, one.source] <= one.began_s
        assert one.began_s >= now_s
        assert network.arrived_s(model, node) == one.arrived_s
        has_s[model, node] = one.arrived_s
        fetches.append((node, (name, now_s), one))
    for at, (node, asked, one) in enumerate(fetches):
        for other_node, other_asked, other in fetches[at + 1 :]:
            if node != other_node and asked == other_asked and one.began_s == other.began_s:
                copy_s = num_bytes / 10.0
                assert max(one.arrived_s, other.arrived_s) <= one.began_s + copy_s * 17 / 16 + 1e-9, (
                    "passed on"
                )
            elif node == other_node or one.source == other.source:
                assert one.arrived_s <= other.began_s or other.arrived_s <= one.began_s
    assert network.bytes_fetched == num_bytes * len(fetches)


def test_models_that_other_machines_lack_are_fetched_once_and_slow_links_delay_answers() -> None:
    workload = trace_of([TracedRequest(0.1 * n, "abcd"[n % 4], 100, 20) for n in range(40)])
    one_node = SimulationSetting(SHAPES, MEMORY_BYTES, num_workers=2)
    one = simulate(workload, one_node, MACHINE)
    fast, slow = (
        simulate(workload, replace(one_node, num_nodes=2, link_bytes_per_s=speed), MACHINE)
        for speed in (1e12, 1e9)
    )
    assert one.bytes_fetched == 0
    assert fast.bytes_fetched > 0
    assert slow.bytes_fetched > 0
    assert one.num_refused == fast.num_refused == slow.num_refused == 0
    assert slow.first_token_s is not None
    assert fast.first_token_s is not None
    assert slow.first_token_s.max > fast.first_token_s.max

"""Machines of a simulated service fetch models from each other."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.core.types import LOCAL, ModelId, NodeId, Rung
from hearth.policy.multicast.parts import SEND_S
from hearth.sim.network import SimulatedNetwork, Transfers
from hearth.sim.report import report_of
from hearth.sim.run import simulate
from hearth.sim.service import SimulatedService
from hearth.sim.setting import SimulationSetting
from hearth.sim.traces import TracedRequest
from tests.sim.small_machine import MACHINE, MEMORY_BYTES, SHAPES, trace_of

NODES = (LOCAL, NodeId("n1"), NodeId("n2"), NodeId("n3"))
A, NUM_LAYERS = ModelId("a"), 28
WANTED = st.lists(
    st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(NODES[1:]), st.integers(0, 10)), max_size=8
)


@given(WANTED, st.integers(1, 100), st.sampled_from([None, 7.0, 20.0]))
def test_a_node_has_one_part_on_each_wire_at_a_time_and_sends_only_what_it_has(
    wanted: list[tuple[str, NodeId, float]], num_bytes: int, disk_bytes_per_s: float | None
) -> None:
    network = SimulatedNetwork(Transfers(10.0, disk_bytes_per_s), NUM_LAYERS)
    num_fetched = 0
    for (now_s, name), nodes in groupby(sorted({(at, name, node) for name, node, at in wanted}), _when):
        model = ModelId(name)
        lacking = [node for _, _, node in nodes if network.find(model, node, now_s) is None]
        if not lacking:
            continue
        num_fetched += len(lacking)
        for node, one in network.fetch(model, lacking, num_bytes, now_s).items():
            assert network.find(model, node, now_s) is one
            assert one.began_s >= now_s
            fastest = 10.0 if one.source is not None else disk_bytes_per_s
            assert fastest is not None
            assert one.arrived_s - one.began_s >= num_bytes / fastest * 0.999
            if one.source is not None:
                source = network.find(model, one.source, now_s)
                assert source is not None
                assert source.stage_s(0.0, 1.0) <= one.arrived_s, "the source has all parts first"
    assert network.bytes_fetched + network.bytes_read == num_bytes * num_fetched


def _when(wanted: tuple[float, str, NodeId]) -> tuple[float, str]:
    return wanted[:2]


@pytest.mark.parametrize("num_nodes", [2, 3, 4, 6, 8, 16, 64])
def test_nodes_that_fetch_together_have_a_model_within_the_bound(num_nodes: int) -> None:
    nodes = [LOCAL, *(NodeId(f"n{number}") for number in range(1, num_nodes))]
    network = SimulatedNetwork(Transfers(1e9), NUM_LAYERS)
    network.find(A, LOCAL, 0.0)
    fetched = network.fetch(A, nodes[1:], 10**10, 0.0)
    num_parts = len(fetched[nodes[1]].parts_s)
    num_rounds = num_parts + (num_nodes - 1).bit_length() - 1
    part_s = 10.0 / num_parts + SEND_S
    assert max(one.arrived_s for one in fetched.values()) <= num_rounds * part_s + 1e-9
    assert num_nodes == 2 or min(one.arrived_s for one in fetched.values()) >= num_parts * part_s - 1e-9


def test_a_node_that_comes_later_gets_the_parts_that_another_one_is_receiving() -> None:
    network = SimulatedNetwork(Transfers(1e9), NUM_LAYERS)
    first = network.fetch(A, [NODES[1]], 10**10, 0.0)[NODES[1]]
    second = network.fetch(A, [NODES[2]], 10**10, 0.5)[NODES[2]]
    assert (first.source, second.source) == (LOCAL, NODES[1])
    assert first.arrived_s == pytest.approx(10.0, rel=1e-3)
    assert first.arrived_s < second.arrived_s < first.arrived_s + 10.0 / NUM_LAYERS * 2


def test_host_memory_keeps_a_model_for_a_while_and_the_origin_for_ever() -> None:
    network = SimulatedNetwork(Transfers(1e9, keep_s=5.0), NUM_LAYERS)
    network.fetch(A, [NODES[1]], 10**9, 0.0)
    for node in NODES[:2]:
        network.keep(A, node, until_s=10.0)
    assert network.find(A, NODES[1], 9.9) is not None
    assert network.find(A, NODES[1], 10.0) is None
    assert network.find(A, LOCAL, 10.0) is not None


def test_models_that_other_machines_lack_are_fetched_once_and_slow_links_delay_answers() -> None:
    workload = trace_of([TracedRequest(0.1 * n, "abcd"[n % 4], 100, 20) for n in range(40)])
    one_node = SimulationSetting(SHAPES, MEMORY_BYTES, num_workers=2)
    one = simulate(workload, one_node, MACHINE)
    fast, slow = (
        simulate(workload, replace(one_node, num_nodes=2, transfers=Transfers(speed)), MACHINE)
        for speed in (1e12, 1e9)
    )
    assert one.bytes_fetched == 0
    assert fast.bytes_fetched > 0
    assert slow.bytes_fetched > 0
    assert one.num_refused == fast.num_refused == slow.num_refused == 0
    assert slow.first_token_s is not None
    assert fast.first_token_s is not None
    assert slow.first_token_s.max > fast.first_token_s.max


def test_little_host_memory_is_never_exceeded_and_models_come_from_disk() -> None:
    workload = trace_of([TracedRequest(2.0 * n, "abcd"[n % 4], 100, 20) for n in range(24)])
    sizes = [MACHINE.shape(shape).weights_bytes for shape in SHAPES.values()]
    reports = []
    for host_bytes in (sum(sizes), sum(sizes) // 2, 10**9):
        transfers = Transfers(disk_bytes_per_s=3e9, host_bytes=host_bytes)
        report = simulate(workload, SimulationSetting(SHAPES, MEMORY_BYTES, transfers=transfers), MACHINE)
        assert report.host_bytes <= host_bytes
        assert sum(report.cold_starts.values()) >= len(SHAPES)
        reports.append(report)
    whole, half, little = reports
    assert whole.bytes_read == 0 < min(half.bytes_read, little.bytes_read)
    assert Rung.DISK not in whole.cold_starts
    assert little.cold_starts[Rung.DISK] >= half.cold_starts[Rung.DISK] > 0
    assert whole.first_token_s is not None
    assert little.first_token_s is not None
    assert whole.first_token_s.p50 < little.first_token_s.p50


def test_devices_are_held_until_their_models_are_retained_and_then_go_to_others() -> None:
    setting = SimulationSetting(
        SHAPES,
        MEMORY_BYTES,
        num_workers=2,
        num_nodes=2,
        gives_back=True,
        keep_alive_s=3.0,
        transfers=Transfers(1e12, keep_s=1.0),
        device_hour_price=3600.0,
    )
    service = SimulatedService(setting, MACHINE)
    service.ask(trace_of([TracedRequest(at, "a", 100, 20) for at in (0.0, 100.0)]).requests)
    service.run()
    report = report_of(service)
    run_s = report.simulated_s - 100.0
    assert report.num_loads == 2, "another device, with empty memory, takes the place of the first"
    assert report.most_gpus == 1
    assert report.gpu_s == pytest.approx(3.0 + 2 * run_s, abs=0.1)
    assert report.cost == report.gpu_s
    first, second = service.fleet.gpu_time.gaps_s
    assert first == math.inf
    assert second == pytest.approx(97.0 - run_s, abs=0.1)

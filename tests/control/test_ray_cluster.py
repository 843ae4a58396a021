"""Which nodes of Ray get an agent, and under which names."""

from __future__ import annotations

import pytest

from hearth.control.ray_cluster import RayNode, bundles_of, check_auth, departed, usable
from hearth.core.config import ClusterConfig
from hearth.core.errors import ConfigError


def ray_node(name: str, *, is_alive: bool = True, **resources: float) -> dict[str, object]:
    return {
        "NodeID": f"id of {name}",
        "Alive": is_alive,
        "NodeManagerAddress": "10.0.0.2",
        "NodeName": name,
        "Resources": resources,
    }


def test_only_nodes_with_gpus_get_an_agent_unless_cpus_are_asked_for() -> None:
    nodes = [ray_node("10.0.0.2", GPU=8.0, CPU=64.0), ray_node("big", CPU=64.0), ray_node("small", CPU=2.0)]
    gpu, big = RayNode("id of 10.0.0.2", "10.0.0.2", "10-0-0-2", 8.0, 64.0), "big"
    assert usable(nodes, 0) == [gpu]
    assert [node.name for node in usable(nodes, 64)] == [gpu.name, big]


def test_a_node_that_ray_has_lost_gets_none() -> None:
    assert usable([ray_node("gone", is_alive=False, GPU=1.0)], 0) == []


def test_a_machine_that_is_back_with_another_id_has_not_departed() -> None:
    first, second = (RayNode(ray_id, "10.0.0.1", "one", 1.0, 8.0) for ray_id in ("1", "2"))
    other = RayNode("3", "10.0.0.3", "three", 1.0, 8.0)
    assert departed({first, second, other}, {second}) == {"three"}, "both lives were listed for a while"
    assert departed({first}, {second}) == set()


def test_the_autoscaler_is_asked_for_one_more_machine_like_the_largest() -> None:
    small, large = (
        RayNode("1", "10.0.0.1", "one", num_gpus=1.0, num_cpus=8.0),
        RayNode("2", "10.0.0.2", "two", num_gpus=8.0, num_cpus=64.0),
    )
    whole = {"GPU": 8.0, "CPU": 64.0}
    assert bundles_of({small, large}, 3, 0) == [{"GPU": 1.0, "CPU": 8.0}, whole, whole]
    assert bundles_of({small, large}, 2, 0) == [{"GPU": 1.0, "CPU": 8.0}, whole], "the last one has come"


def test_the_first_machine_has_a_gpu_unless_cpus_are_asked_for() -> None:
    assert bundles_of((), 1, 0) == [{"GPU": 1}]
    assert bundles_of((), 1, 16) == [{"CPU": 16}]
    assert bundles_of((), 0, 16) == []


def test_ray_must_authenticate_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ConfigError, match="CVE-2023-48022"):
        check_auth(ClusterConfig())
    check_auth(ClusterConfig(ray_without_auth=True))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    check_auth(ClusterConfig())


def test_another_manager_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`cluster.manager` is `ray` or `ray:HOST:PORT`.*'slurm'"):
        ClusterConfig(manager="slurm")

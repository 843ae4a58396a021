"""Which nodes of Ray get an agent, and under which names."""

from __future__ import annotations

import pytest

from hearth.control.ray_cluster import RayNode, check_auth, usable
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

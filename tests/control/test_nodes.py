"""When requests are refused because no machine has workers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from hearth.control.nodes import NO_NODE_S, Nodes, RemoteNode
from hearth.core.config import HearthConfig
from hearth.core.node_messages import VERSION, NodeHello, NodePulse, WorkerStatus
from hearth.core.types import NodeId, WorkerId
from hearth.node.devices import Devices
from hearth.node.local_node import LocalNode
from tests.node.test_link import Record


@pytest.mark.parametrize("can_grow", [False, True])
def test_requests_wait_a_while_for_a_machine_and_are_then_refused(
    monkeypatch: pytest.MonkeyPatch, can_grow: bool
) -> None:
    now_s = 100.0
    monkeypatch.setattr("hearth.control.nodes.time.monotonic", lambda: now_s)
    local: Any = SimpleNamespace(
        supervisor=SimpleNamespace(seats=[], outage=lambda: None), trouble=lambda: None
    )
    found = Nodes(local, can_grow=can_grow)
    assert found.outage() is None
    now_s += NO_NODE_S - 1
    hello = NodeHello(VERSION, "one", "cpu", ("cpu",), 0, 7610)
    channel: Any = None
    node = found.others[NodeId("one")] = RemoteNode(NodeId("one"), hello, channel)
    now_s += 2
    assert found.outage() is None, "it has just joined, and its workers start"
    failing = WorkerStatus(WorkerId("one/w0"), "failing", 0, 3, None, "no memory")
    for workers in ((failing,), (failing, msgspec.structs.replace(failing, state="starting"))):
        now_s += 1
        node.pulse = NodePulse(workers, 0)
        assert found.outage() is None
    del found.others[NodeId("one")]
    now_s += NO_NODE_S - 1
    assert found.outage() is None, "it was there until a moment ago"
    now_s += 2
    outage = found.outage()
    if can_grow:
        assert outage is None, "the request may bring a machine"
    else:
        assert outage is not None
        assert "no machine has joined" in str(outage)


def test_the_report_of_a_worker_whose_node_was_just_lost_is_charged_by_a_head_without_workers(
    tmp_path: Path,
) -> None:
    async def scene() -> None:
        local = LocalNode(HearthConfig(), Devices("cpu", (0,), 0), tmp_path, tmp_path, None, Record())
        assert Nodes(local).device_share(WorkerId("gone/w0")) == 1.0

    asyncio.run(scene())

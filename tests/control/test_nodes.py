"""When requests are refused because no machine has workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hearth.control.nodes import NO_NODE_S, Nodes
from hearth.core.types import NodeId


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
    other: Any = SimpleNamespace(workers=lambda: [SimpleNamespace(state="ready")], trouble=lambda: None)
    found.others[NodeId("one")] = other
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

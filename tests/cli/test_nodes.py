"""The table of `hearth nodes`."""

from __future__ import annotations

from hearth.cli.nodes import _row
from hearth.control.observe.views import NodeView


def test_nothing_is_claimed_about_a_node_that_is_down() -> None:
    row = _row(NodeView(name="gpu-2", state="down", reason="it closed the connection"))
    assert row == ["gpu-2", "-", "down", *["-"] * 7]

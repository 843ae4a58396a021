"""The table of `hearth nodes`."""

from __future__ import annotations

from hearth.cli.nodes import _row
from hearth.control.observe.views import NodeView
from tests.cli.fake_service import FakeService
from tests.cli.shell import Hearth


def test_nothing_is_claimed_about_a_node_that_is_down() -> None:
    row = _row(NodeView(name="gpu-2", state="down", reason="it closed the connection"))
    assert row == ["gpu-2", "-", "down", *["-"] * 7]


def test_from_whom_a_node_receives_a_model_is_told_below_the_table(
    service: FakeService, hearth: Hearth
) -> None:
    service.nodes = [NodeView("local", "up"), NodeView("gpu-2", "up", receives={"smol": ("local", "gpu-3")})]
    shown = hearth("nodes", "--url", service.url)
    assert (shown.code, shown.out.splitlines()[-1]) == (0, "gpu-2 receives smol from local, gpu-3")

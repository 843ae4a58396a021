"""The benchmark of routing by prefixes, on a small machine and for a short time."""

from __future__ import annotations

from random import Random

import pytest

from bench.prefix_routing import AIM, UnawareService, draw_conversations, serve
from tests.sim.small_machine import MACHINE

pytestmark = pytest.mark.slow


def test_four_replicas_find_as_many_prefixes_as_one_only_if_the_brain_knows_of_them() -> None:
    drawn = draw_conversations(num_users=12, length_s=60.0, chooser=Random(1))
    one, four = serve(drawn.trace, 1, MACHINE), serve(drawn.trace, 4, MACHINE)
    unaware = serve(drawn.trace, 4, MACHINE, UnawareService)

    assert 0.9 * drawn.ideal_share < one.report.cached_share <= drawn.ideal_share
    assert four.report.cached_share >= AIM * one.report.cached_share
    assert unaware.report.cached_share < AIM * one.report.cached_share
    assert max(four.step_shares) < 0.8, "they share the work"

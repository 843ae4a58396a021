"""Processes that a node starts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import pytest
import uvloop

from hearth.core.messages import ProcessAnswer
from hearth.node import processes


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_process_gets_no_ctrl_c_and_competes_by_niceness_with_the_others_of_the_node(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def start() -> tuple[int, int, int]:
        process = await processes.spawn("json.tool", ProcessAnswer(), None)  # it reads until its input ends
        try:
            return process.pid, os.getpgid(process.pid), os.getsid(process.pid)
        finally:
            await processes.end(process)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        pid, group, session = runner.run(start())
    assert group == pid, "a terminal signals the group of the parent"
    assert session == os.getsid(0), "the scheduler may give each session the same share"

"""A cluster of two machines, and the event loops that it runs on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import uvloop

from tests.node.tls_cluster import Cluster, Scene, new_cluster, play_on

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "uvloop": uvloop.new_event_loop,
    "asyncio": asyncio.new_event_loop,
}


@pytest.fixture(params=LOOPS)
def play(request: pytest.FixtureRequest) -> Scene:
    return partial(play_on, LOOPS[request.param])


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return new_cluster(tmp_path)

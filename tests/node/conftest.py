"""A cluster of two machines, and the event loop that head and nodes run on."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import uvloop

from tests.node.tls_cluster import Cluster, Scene, new_cluster, play_on


@pytest.fixture
def play() -> Scene:
    return partial(play_on, uvloop.new_event_loop)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return new_cluster(tmp_path)

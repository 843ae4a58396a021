"""Servers for the tests of the store: `s3`, a real one for all; `server`, which behaves as it is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.bad_server import BadServer
from tests.store.s3_server import start_s3
from tests.store.stored import serving

__all__ = ["server", "start_s3"]


@pytest.fixture
def server(source: Path) -> Iterator[BadServer]:
    """Of the model in the directory that the module's fixture `source` gives."""
    with serving(source) as server:
        yield server

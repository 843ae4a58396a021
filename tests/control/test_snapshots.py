"""Snapshots as the gateway orders and follows them, with a worker that only keeps what it is sent."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from hearth.control.snapshots import Snapshots
from hearth.errors import HearthError, SnapshotError
from hearth.messages import (
    HostModel,
    MakeSnapshot,
    ModelLoaded,
    SnapshotLooked,
    SnapshotMade,
    SnapshotProgress,
)
from hearth.types import ModelId, SnapshotOutcome
from tests.control.conftest import data_dir_with_tiny  # noqa: F401

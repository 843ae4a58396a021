"""A process whose driver meets a bug of the brain. Asserts nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

#: A driver with one worker and a bug; without an end by the bug the process ends well after a while.
_PROGRAM = """
import asyncio, sys
from pathlib import Path
from hearth.control.driver import Driver
from hearth.control.journal import Journal
from hearth.control.observe.metrics import Metrics
from hearth.control.observe.observer import Observer
from hearth.control.observe.pool_reports import PoolReports
from hearth.control.snapshots import Snapshots
from hearth.policy.fleet.events import BrainConfig, SetTimer, WorkerJoined
from hearth.policy.fleet.fleet import Fleet

JOINED = WorkerJoined(1.0, "w", "cpu", 100)

async def post_from_a_task(driver):
    driver.post(JOINED)

async def main(path):
    journal = Journal(path, BrainConfig(), 1 << 20)
    metrics = Metrics()
    observer, pools, snapshots = Observer(metrics), PoolReports(), Snapshots(metrics)
    driver = Driver(Fleet(BrainConfig()), journal, observer, pools, snapshots, None, list)
    driver.post(JOINED)
    {bug}
    await asyncio.sleep(5.0)

asyncio.run(main(Path(sys.argv[1])))
"""


def run_broken_driver(journal: Path, bug: str) -> subprocess.CompletedProcess[str]:
    """Return how a process ends that runs `bug`, a statement on its `driver`."""
    command = [sys.executable, "-c", _PROGRAM.format(bug=bug), str(journal)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)

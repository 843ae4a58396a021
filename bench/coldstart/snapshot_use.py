"""Tells whether models have started with their snapshots, by what a service counts and logs."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.coldstart.start_log import Restoring, restorings
from bench.service.client import metrics_of
from bench.service.process import Service
from hearth.cli import local_models
from hearth.control.datadir import DataDir
from hearth.core.types import SnapshotOutcome
from hearth.snapshot.directory import SnapshotDirectory

_GRAPH = "graph/"  #: how names of sections begin that hold one
_COUNT = re.compile(r'hearth_snapshots_total\{outcome="(\w+)"\}')
#: Graphs are restored beside the first requests.
_RESTORE_PATIENCE_S, _LOOK_S = 5.0, 0.05


@dataclass(frozen=True, slots=True)
class SnapshotUse:
    """What came of snapshots while somebody looked."""

    num_starts: int  #: of models, each of which should have used its own
    has_graphs: bool  #: all of which should have been restored
    counts: Mapping[str, int]  #: by outcome
    restored: list[Restoring]

    @property
    def problem(self) -> str | None:
        """Why not all starts of models had their snapshots; None: they had."""
        others = {
            name: count for name, count in self.counts.items() if count and name not in ("used", "made")
        }
        if others or self.counts.get(SnapshotOutcome.USED, 0) != self.num_starts:
            return f"snapshots should have been used {self.num_starts} times, and were: {dict(self.counts)}"
        if self.has_graphs and sum(one.is_whole for one in self.restored) != self.num_starts:
            return f"graphs should have been restored {self.num_starts} times, and were: {self.restored}"
        return None

    def as_json(self) -> dict[str, object]:
        return {"counts": dict(self.counts), "restored": [asdict(one) for one in self.restored]}


class SnapshotWatch:
    """Looks at what comes of snapshots in a service, from when it is made on."""

    def __init__(self, service: Service, *, has_graphs: bool) -> None:
        """`has_graphs`: where steps are captured."""
        self._service, self._has_graphs, self._began_s = service, has_graphs, time.time()
        self._before = snapshot_counts(service)

    def use(self, num_starts: int) -> SnapshotUse:
        """Return what came of so many starts of models, once all have their graphs, or a while has passed."""
        log = DataDir(self._service.data_dir).log_path
        deadline_s = time.monotonic() + (_RESTORE_PATIENCE_S if self._has_graphs else 0.0)
        while len(found := restorings(log, self._began_s)) < num_starts and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)
        now = snapshot_counts(self._service)
        counts = {name: now[name] - self._before.get(name, 0) for name in now}
        return SnapshotUse(num_starts, self._has_graphs, counts, found)


def snapshot_counts(service: Service) -> dict[str, int]:
    """Return what a service counts of snapshots, by outcome."""
    with asyncio.Runner() as runner:
        metrics = runner.run(metrics_of(service.port))
    found = ((_COUNT.fullmatch(name), value) for name, value in metrics.items())
    return {match[1]: int(value) for match, value in found if match is not None}


def graphs_in(data_dir: Path, model: str) -> int:
    """Return how many graphs the snapshot of a model holds that was used last."""
    directory = SnapshotDirectory.open(DataDir(data_dir).snapshots_path, quota_bytes=0)
    opened = directory.newest(local_models.find(data_dir, model).digest)
    if opened is None:
        return 0
    with opened:
        return sum(name.startswith(_GRAPH) for name in opened)

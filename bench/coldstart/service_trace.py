"""Has gateway and worker of a service note what they do, for whoever measures the service. Measures nothing.

All processes of such a service import this when they start (`environment`), and only these two do anything
by it: a worker traces the functions of `in_worker`, the gateway those of `gateway_trace`. Each writes what it
has noted when it is told to (`notes_of`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.coldstart.ring import Noted

ROOT = Path(__file__).resolve().parents[2]
#: Variable of the service's processes: where notes go.
_PLACE = "BENCH_TRACE_PLACE"
_PATIENCE_S, _LOOK_S = 30.0, 0.02


def environment(place: Path) -> dict[str, str]:
    """Return the variables with which a service is traced; notes go to the directory `place`."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "sitecustomize.py").write_text(
        "from bench.coldstart import service_trace\n\nservice_trace.await_owners()\n"
    )
    path = os.pathsep.join([str(place), str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path.rstrip(os.pathsep), _PLACE: str(place)}


def notes_of(pid: int, place: Path) -> list[Noted]:
    """Have a process write what it has noted so far, and return that. Raises RuntimeError if it does not."""
    from bench.coldstart.ring import Noted

    path = _path(place, pid)
    path.unlink(missing_ok=True)
    os.kill(pid, signal.SIGUSR1)
    deadline_s = time.monotonic() + _PATIENCE_S
    while not path.exists():
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"the process {pid} has written no notes within {_PATIENCE_S:g} s")
        time.sleep(_LOOK_S)
    return [Noted(*json.loads(line)) for line in path.read_text().splitlines()]


def await_owners() -> None:
    """Have this process traced, if it ever imports what makes it a worker or a gateway."""
    for owner in OWNERS:
        sys.meta_path.insert(0, _OwnerFinder(owner))


@dataclass(frozen=True, slots=True)
class Owner:
    """A class of which a process makes one if it is to be traced, before anybody asks it for anything."""

    module: str
    name: str
    trace: Callable[[], None]  #: all that the process does


class _OwnerFinder(MetaPathFinder):
    """Finds one module, as it would be found without this."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._owner.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None, f"{name} is not there"
        assert spec.loader is not None, f"{name} has no loader"
        execute = spec.loader.exec_module

        def execute_and_trace(module: ModuleType) -> None:
            execute(module)
            _trace_when_made(getattr(module, self._owner.name), self._owner.trace)

        spec.loader.exec_module = execute_and_trace  # type: ignore[method-assign] # of this one module
        return spec


def _trace_when_made(owner: Any, trace: Callable[[], None]) -> None:
    """Trace a process from when its owner is made: a template imports the same, and is no worker yet."""
    make = owner.__init__

    def traced(made: Any, *given: Any, **named: Any) -> None:
        owner.__init__ = make
        trace()
        make(made, *given, **named)

    owner.__init__ = traced


def _trace_worker() -> None:
    # Not at the top: these need the worker's modules, and this is imported before all of them.
    from bench.coldstart.in_worker import hasten_snapshots, trace_worker
    from bench.coldstart.ring import Ring

    ring = Ring(1 << 18)
    hasten_snapshots()
    trace_worker(ring)
    write_when_told(ring.all, Path(os.environ[_PLACE]))


def _trace_gateway() -> None:
    from bench.coldstart.gateway_trace import trace_gateway
    from bench.coldstart.ring import Ring

    ring = Ring(1 << 18)
    trace_gateway(ring)
    write_when_told(ring.all, Path(os.environ[_PLACE]))


OWNERS = (
    Owner("hearth.worker.worker_loop", "WorkerLoop", _trace_worker),
    Owner("hearth.control.driver", "Driver", _trace_gateway),
)


def write_when_told(notes: Callable[[], Sequence[Noted]], place: Path) -> None:
    """Have this process write its notes for `notes_of`. Called by its main thread."""

    def write(*_: object) -> None:
        path = _path(place, os.getpid())
        draft = path.with_suffix(".draft")
        found = ((one.thread, one.what, one.begin_s, one.end_s) for one in notes())
        draft.write_text("".join(f"{json.dumps(one)}\n" for one in found))
        draft.rename(path)  # so that nobody finds a part

    signal.signal(signal.SIGUSR1, write)


def _path(place: Path, pid: int) -> Path:
    return place / f"{pid}.notes"

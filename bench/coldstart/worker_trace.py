"""Has the worker of a service note what its threads do, for whoever measures the service. Measures nothing.

All processes of such a service import this when they start (`environment`), and only a worker does anything
by it: it traces the functions of `in_worker`, and writes what it has noted when it is told to (`notes_of`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.coldstart.held_up import Noted

ROOT = Path(__file__).resolve().parents[2]
_LOOP = "hearth.worker.worker_loop"
_PLACE = "BENCH_TRACE_PLACE"  #: a variable of the service's processes: where notes go
_PATIENCE_S, _LOOK_S = 30.0, 0.02


def environment(place: Path) -> dict[str, str]:
    """Return the variables with which a service's workers are traced; notes go to the directory `place`."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "sitecustomize.py").write_text(
        "from bench.coldstart import worker_trace\n\nworker_trace.await_loop()\n"
    )
    path = os.pathsep.join([str(place), str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path.rstrip(os.pathsep), _PLACE: str(place)}


def notes_of(pid: int, place: Path) -> list[Noted]:
    """Have a worker write what it has noted so far, and return that. Raises RuntimeError if it does not."""
    from bench.coldstart.held_up import Noted

    path = _path(place, pid)
    path.unlink(missing_ok=True)
    os.kill(pid, signal.SIGUSR1)
    deadline_s = time.monotonic() + _PATIENCE_S
    while not path.exists():
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"the worker {pid} has written no notes within {_PATIENCE_S:g} s")
        time.sleep(_LOOK_S)
    return [Noted(*json.loads(line)) for line in path.read_text().splitlines()]


def await_loop() -> None:
    """Have the step loop of this process traced, if it ever imports it."""
    sys.meta_path.insert(0, _LoopFinder())


class _LoopFinder(MetaPathFinder):
    """Finds one module, as it would be found without this."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _LOOP:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None, f"{name} is not there"
        assert spec.loader is not None, f"{name} has no loader"
        execute = spec.loader.exec_module

        def execute_and_trace(module: ModuleType) -> None:
            execute(module)
            _trace_when_made(module.WorkerLoop)

        spec.loader.exec_module = execute_and_trace  # type: ignore[method-assign] # of this one module
        return spec


def _trace_when_made(loop_class: Any) -> None:
    """Trace a worker from when its loop is made: before it is ready, and long after all imports."""
    make = loop_class.__init__

    def traced(loop: Any, *given: Any) -> None:
        loop_class.__init__ = make
        _trace(Path(os.environ[_PLACE]))
        make(loop, *given)

    loop_class.__init__ = traced


def _trace(place: Path) -> None:
    # Not at the top: these need the worker's modules, and this is imported before all of them.
    from bench.coldstart.held_up import Ring
    from bench.coldstart.in_worker import hasten_snapshots, trace_worker

    ring = Ring(1 << 18)
    hasten_snapshots()
    trace_worker(ring)
    write_when_told(ring.all, place)


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

"""A service that a benchmark runs beside itself, and what its processes cost. Asks it nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hearth.cli.client import Client
from hearth.control.datadir import DataDir, running_service
from hearth.core.errors import Unreached

ROOT = Path(__file__).resolve().parents[2]
START_S = 300.0
STOP_S = 60.0
IDLE_S = 60.0
_LOOK_S = 0.05
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_SCHEDULER_CLOCK = 2  #: Linux's number for the clock of a process that counts in nanoseconds


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process, told from a later one with the same number by its start."""

    pid: int
    started_ticks: int

    @property
    def is_alive(self) -> bool:
        return started_ticks(self.pid) == self.started_ticks


@dataclass(frozen=True, slots=True)
class Service:
    url: str
    data_dir: Path
    process: subprocess.Popen[bytes]
    client: Client

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def pids(self) -> dict[str, int]:
        """Return the processes that are there now, by what they are."""
        workers = {worker.worker: worker.pid for worker in self.client.ps().workers if worker.pid}
        others = [pid for pid in children(self.process.pid) if pid not in workers.values()]
        keepers = [pid for pid in others if "hearth.store.keeper" in command_of(pid)]
        return {"gateway": self.process.pid, **dict(zip(["keeper"], keepers, strict=False)), **workers}

    def cpu_s(self) -> dict[str, float]:
        """Processor time that each process has taken so far."""
        return {name: cpu_s(pid) for name, pid in self.pids().items()}

    def wait_ready(self, num_workers: int = 1) -> None:
        """Wait until so many workers can host models."""
        deadline_s = time.monotonic() + START_S
        while self.client.health().num_ready_workers < num_workers:
            _give_up_after(deadline_s, self.data_dir)
            time.sleep(_LOOK_S)

    def wait_idle(self) -> None:
        """Wait until no request runs or waits."""
        deadline_s = time.monotonic() + IDLE_S
        while (now := self.client.ps()).num_running or now.num_waiting:
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"requests still run or wait after {IDLE_S:.0f} s: {_log(self.data_dir)}")
            time.sleep(_LOOK_S)


@contextmanager
def serving(
    data_dir: Path,
    flags: Sequence[str],
    *,
    num_workers: int = 1,
    command: Sequence[str] = ("hearth",),
    port: int = 0,
    errors: IO[bytes] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Service]:
    """Run `hearth serve` until the context ends. `command`: another module that does; `port`: 0 for any
    free one; `errors`: a file for what it writes to standard error; `environment`: variables besides ours.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", *command, "serve", "--port", str(port), "--data-dir", str(data_dir), *flags],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        env={**os.environ, **(environment or {})},
    )
    try:
        deadline_s = time.monotonic() + START_S
        while (found := running_service(data_dir)) is None:
            if process.poll() is not None:
                raise RuntimeError(f"`hearth serve` ended with {process.returncode}: {_log(data_dir)}")
            _give_up_after(deadline_s, data_dir)
            time.sleep(_LOOK_S)
        with Client(found.url, DataDir(data_dir).read_admin_token()) as client:
            service = Service(found.url, data_dir, process, client)
            _wait_answering(service, deadline_s)
            service.wait_ready(num_workers)
            yield service
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


def deploy(data_dir: Path, source: str | Path, name: str, *flags: str) -> None:
    """Run `hearth deploy`, through a service where one runs on the directory."""
    command = ["deploy", str(source), "--name", name, "--data-dir", str(data_dir), *flags]
    done = subprocess.run(
        [sys.executable, "-m", "hearth", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"`hearth {' '.join(command)}` ended with {done.returncode}: {done.stderr}")


def cpu_s(pid: int) -> float:
    """Processor time of a process and its threads, those that ended included; 0 if it is gone.

    By the process's own clock, as `clock_getcpuclockid` numbers it: /proc counts in steps of 10 ms.
    """
    try:
        return time.clock_gettime(~pid << 3 | _SCHEDULER_CLOCK)
    except OSError:
        return 0.0


def machine_cpu_s() -> float:
    """Return the processor time that all processes of the machine have taken."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    idle = (3, 4)  # and waiting for a disk
    return sum(int(ticks) for at, ticks in enumerate(fields[:8]) if at not in idle) / _TICKS_PER_S


def children(pid: int) -> list[int]:
    """Return the processes that a process has started, by any of its threads, and that still run."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            found += [int(child) for child in (task / "children").read_text().split()]
        except (FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            continue
    return found


def command_of(pid: int) -> str:
    """Return the command line of a process; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def started_ticks(pid: int) -> int | None:
    """Return when a process started, since the machine did; None if it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state == "Z" else int(fields[18])


def descent(pid: int) -> dict[str, ProcessId]:
    """Return a process and all that descends from it, by command."""
    found, pids = {}, [pid]
    for each in pids:  # grows as it goes
        if (ticks := started_ticks(each)) is not None:
            found[f"{command_of(each)} ({each})"] = ProcessId(each, ticks)
            pids += children(each)
    return found


def _wait_answering(service: Service, deadline_s: float) -> None:
    while True:
        try:
            service.client.health()
        except Unreached:
            _give_up_after(deadline_s, service.data_dir)
            time.sleep(_LOOK_S)
        else:
            return


def _give_up_after(deadline_s: float, data_dir: Path) -> None:
    if time.monotonic() > deadline_s:
        raise RuntimeError(f"the service was not ready after {START_S:.0f} s: {_log(data_dir)}")


def _log(data_dir: Path) -> str:
    path = data_dir / "logs" / "service.log"
    return path.read_text(errors="replace")[-4000:] if path.exists() else "it has no log"

"""A service as its users have it: `hearth serve` in a process of its own, asked over HTTP and by the command
line. Looks inside no part of it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx
import openai
import psutil
from prometheus_client.parser import text_string_to_metric_families

from hearth.control.journal import replay

T = TypeVar("T")

#: How long a test waits for something before it says that it will not happen. Others may use the machine too.
PATIENCE_S = 120.0
#: The same for forecasts: their process has the lowest priority, and begins when nobody else wants a core.
FORECAST_S = 400.0
#: Between the first looks at something that has no event to wait for.
LOOK_S = 0.02
#: Between later ones, which get rarer: each takes a few milliseconds of the service's core.
LATER_LOOK_S = 0.1
#: The same for workers, which take seconds to start: the looks would take a good part of a core from them.
START_LOOK_S = 0.1
#: Small engines: most of a tiny model's memory would otherwise be its workspace.
SMALL = ("--set", "engine.max_seqs=16", "--set", "engine.max_batch_tokens=256")

Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None

#: Those that run now, so that a failed test can show their logs.
running_services: list[Service] = []


def eventually(
    what: str, look: Callable[[], T | None], every_s: float = LOOK_S, patience_s: float = PATIENCE_S
) -> T:
    """What `look` returns, once that is something true."""
    deadline_s = time.monotonic() + patience_s
    while True:
        if found := look():
            return found
        if time.monotonic() > deadline_s:
            raise AssertionError(f"{what}: not within {patience_s:g} s")
        time.sleep(every_s)
        every_s = max(every_s, min(1.1 * every_s, LATER_LOOK_S))


@dataclass(frozen=True, slots=True)
class Shelf:
    """Models that were deployed once, for any number of services."""

    root: Path  #: a data directory
    places: Mapping[str, Path]  #: converted models by name

    def copy(self, data_dir: Path) -> Path:
        """A data directory with the same models; their weights stay where they are."""
        data_dir.mkdir(mode=0o700)
        for name in ("VERSION", "registry.db"):
            shutil.copy(self.root / name, data_dir / name)
        return data_dir


class Service:
    """One process and its children. Mutable; used by one test at a time."""

    def __init__(self, data_dir: Path, *flags: str) -> None:
        self.data_dir = data_dir
        self._is_told_to_end = False
        self._output = data_dir.parent / f"{data_dir.name}.out"
        with self._output.open("ab") as output:
            self.process = subprocess.Popen(
                hearth("serve", "--data-dir", str(data_dir), "--port", "0", "--device", "cpu", *flags),
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        running_services.append(self)
        self.http = httpx.Client(timeout=PATIENCE_S, trust_env=False)
        told = eventually("the service tells where it is", self._service_file)
        self.url = str(told["url"])
        self.admin_token = (data_dir / "run" / "admin_token").read_text()
        self.http.base_url = httpx.URL(self.url)
        self.http.headers["Authorization"] = f"Bearer {self.admin_token}"
        self.wait_for_workers()

    # Asking it.

    def client(self, key: str = "none", *, is_strict: bool = False) -> openai.OpenAI:
        """A strict one refuses answers that are not as its types say, which do not allow for streams of
        completions as OpenAI itself sends them.
        """
        return openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key=key,
            max_retries=0,
            timeout=PATIENCE_S,
            _strict_response_validation=is_strict,
        )

    def get(self, path: str) -> dict[str, Json]:
        answer = self.http.get(path)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert isinstance(found, dict)
        return found

    def cli(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return run_hearth(*argv, "--data-dir", str(self.data_dir))

    def deploy(self, source: Path | str, name: str, **settings: object) -> httpx.Response:
        return self.http.post(
            "/hearth/models",
            json={"source": str(source), "name": name, **settings},
            headers={"Accept": "application/json"},
        )

    def explain(self, answer_id: str) -> dict[str, Json]:
        return self.get(f"/hearth/requests/{answer_id}")

    def unload(self, model: str, *, free: bool) -> None:
        answer = self.http.post(f"/hearth/models/{model}/unload", json={"free": free})
        assert answer.is_success, answer.text

    def residents(self) -> dict[str, dict[str, Json]]:
        """By name; of a model on several workers the last."""
        found = self.get("/hearth/ps")["models"]
        assert isinstance(found, list)
        return {str(one["model"]): one for one in found if isinstance(one, dict)}

    def hosted(self) -> set[str]:
        """Models that are promised memory; of others some may be left."""
        return {name for name, resident in self.residents().items() if resident["is_hosted"]}

    def states(self) -> dict[str, str]:
        return {name: str(one["state"]) for name, one in self.residents().items()}

    def workers(self) -> list[dict[str, Json]]:
        found = self.get("/hearth/ps")["workers"]
        assert isinstance(found, list)
        return [one for one in found if isinstance(one, dict)]

    def metrics(self) -> dict[str, float]:
        """By name; labels are added up, buckets left out."""
        answer = self.http.get("/metrics")
        assert answer.status_code == 200, answer.text
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                if not sample.name.endswith(("_bucket", "_created")):
                    sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        return sums

    def output(self) -> str:
        """All that it has written to standard output and error."""
        return self._output.read_text(errors="replace")

    def logs(self) -> str:
        """All that its processes have written anywhere."""
        paths = [self._output, *(self.data_dir / "logs").rglob("*")]
        return "\n".join(path.read_text(errors="replace") for path in paths if path.is_file())

    def tail(self) -> str:
        text = self._output.read_text(errors="replace")
        log = self.data_dir / "logs" / "service.log"
        if log.exists():
            text += log.read_text(errors="replace")
        return text[-8000:]

    # Its processes.

    def wait_for_workers(self) -> None:
        def are_ready() -> bool:
            assert self.process.poll() is None, f"it ended with code {self.process.returncode}"
            try:
                health = self.http.get("/health").json()
            except httpx.TransportError:
                return False
            return bool(health["status"] == "ok" and health["num_ready_workers"] == health["num_workers"])

        eventually("all workers are ready", are_ready, START_LOOK_S)

    def worker_of(self, model: str) -> psutil.Process:
        """The process that holds a model."""
        name = self.residents()[model]["worker"]
        return next(_process(one) for one in self.workers() if one["worker"] == name)

    def keeper(self) -> psutil.Process | None:
        return keeper_of(self.process.pid)

    def template(self) -> psutil.Process | None:
        """The process that workers are forked from."""
        return next((one for one in self.children() if "hearth.worker.template" in command_of(one)), None)

    def children(self) -> list[psutil.Process]:
        return list(psutil.Process(self.process.pid).children(recursive=True))

    def stop(self) -> int:
        """End it as an operator would, wait, and check what must hold of every run."""
        if self not in running_services:
            assert self.process.returncode is not None
            return self.process.returncode
        children = self.children() if self.process.poll() is None else []
        self.terminate()
        try:
            code = self.process.wait(PATIENCE_S)
        finally:
            self.abandon()
        assert_ended(children)
        self.assert_journal_replays()
        return code

    def terminate(self) -> None:
        """Send SIGTERM, but only once: a second one ends the requests that run."""
        if not self._is_told_to_end:
            self._is_told_to_end = True
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """As the kernel does when memory is short: nothing is cleaned up."""
        children = self.children()
        self.process.kill()
        self.process.wait(PATIENCE_S)
        self.abandon()
        assert_ended(children)

    def assert_journal_replays(self) -> None:
        found = replay(self.data_dir / "logs" / "events.jsonl")
        assert found.num_events > 0
        assert found.first_difference is None, found.first_difference

    def abandon(self) -> None:
        """Whatever state it is in, it must not outlive the tests."""
        if self in running_services:
            running_services.remove(self)
        self.http.close()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(PATIENCE_S)

    def _service_file(self) -> dict[str, Json] | None:
        assert self.process.poll() is None, f"it ended with code {self.process.returncode}"
        try:
            found = json.loads((self.data_dir / "run" / "service.json").read_text())
        except FileNotFoundError:
            return None
        assert isinstance(found, dict)
        return found if found["pid"] == self.process.pid else None


@contextmanager
def serving(data_dir: Path, *flags: str) -> Iterator[Service]:
    """A service that ends with the context, and well."""
    service = Service(data_dir, *flags)
    try:
        yield service
    except BaseException:
        service.abandon()
        raise
    code = service.stop()
    assert code == 0, f"the service ended with code {code}:\n{service.tail()}"


def hearth(*argv: str) -> list[str]:
    return [sys.executable, "-m", "hearth", *argv]


def run_hearth(*argv: str) -> subprocess.CompletedProcess[str]:
    """A command as a shell would run it, to its end."""
    return subprocess.run(hearth(*argv), capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def assert_ended(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert not alive, f"still running: {[command_of(process) for process in alive]}"


def keeper_of(pid: int) -> psutil.Process | None:
    """Return the keeper that a service or a node runs now."""
    children = psutil.Process(pid).children(recursive=True)
    return next((one for one in children if "hearth.store.keeper" in command_of(one)), None)


def command_of(process: psutil.Process) -> list[str]:
    """Empty for one that is ending."""
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:
        return []


def _process(worker: Mapping[str, Json]) -> psutil.Process:
    pid = worker["pid"]
    assert isinstance(pid, int)
    return psutil.Process(pid)

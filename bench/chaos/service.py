"""The service under test: its models, its lives one after the other, and its processes. Harms nothing."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

from bench.chaos.nodes import NAMES, Nodes, free_port
from bench.random_model import write_random
from bench.service.client import metrics_of
from bench.service.process import ProcessId, Service, children, command_of, descent, serving
from bench.soak.setting import CONFIG, NUM_WORKERS, budget_bytes, flags
from hearth.control.datadir import DataDir
from hearth.control.deploy.deploy import DeployOrder
from hearth.control.deploy.deployer import carry_out
from hearth.control.deploy.registry import Registry
from hearth.control.journal import previous, replay
from hearth.control.keys import keys
from hearth.core.errors import DataDirError

LOCAL_MODELS = tuple(f"near{number}" for number in range(6))
FAR_MODELS = tuple(f"far{number}" for number in range(3))  #: in the object store
CALLING_MODEL = "calls"  #: knows tools
#: A template by which it writes calls as Qwen does.
TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}{{ message.content or '' }}{% endfor %}
Write: <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>"""
SPARE_MODEL = "spare"  #: deployed and removed while the service runs
LONG_CONFIG = {**CONFIG, "max_position_embeddings": 2560}  #: with room for long calls of tools
SETTINGS = (
    *("--set", "service.heartbeat_s=0.2"),  # a worker that hangs is found after thirty of these
    # Room for one chunk: far models drive each other from the disk, and are fetched again and again.
    *("--set", f"store.disk_bytes={1 << 20}"),
)


@dataclass(frozen=True, slots=True)
class Models:
    """Sources of the models on disk, converted."""

    near: Path
    far: Path

    @staticmethod
    def write(place: Path) -> Models:
        """Write all models below `place`; far ones go to a directory for the object store."""
        models = Models(place / "near", place / "far")
        names = [(models.near, name) for name in (*LOCAL_MODELS, CALLING_MODEL, SPARE_MODEL)]
        names += [(models.far, name) for name in FAR_MODELS]
        for seed, (folder, name) in enumerate(names):
            template = TEMPLATE if name == CALLING_MODEL else None
            write_random(folder / name, LONG_CONFIG, "float32", seed, torch.device("cpu"), template)
        return models

    def deploy(self, data_dir: DataDir, object_url: str) -> None:
        sources = {name: str(self.near / name) for name in (*LOCAL_MODELS, CALLING_MODEL)}
        sources |= {name: f"{object_url}/{name}" for name in FAR_MODELS}
        with Registry(data_dir) as registry:
            for name, source in sources.items():
                registry.add(carry_out(DeployOrder(source, name), data_dir, lambda *_: None))


@dataclass(frozen=True, slots=True)
class Keys:
    """API keys of those who ask."""

    honest: str
    hostile: str

    @staticmethod
    def make(data_dir: DataDir) -> Keys:
        return Keys(*(keys.add(data_dir.keys_path, name, "user").key for name in ("honest", "hostile")))


@dataclass(slots=True)
class Absence:
    """A time in which no gateway was there. Mutable; written by `ServiceUnderTest`."""

    began_s: float
    ended_s: float = float("inf")


class ServiceUnderTest:
    """A service that is started again when its gateway was killed. Mutable; used on the event loop alone."""

    def __init__(self, data_dir: DataDir, place: Path, nodes: Nodes | None) -> None:
        self.data_dir, self.nodes = data_dir, nodes
        self.port = free_port()
        self.absences: list[Absence] = []
        self.is_up = asyncio.Event()
        self.violations: list[str] = []
        self._journals = place / "journals"
        self._journals.mkdir()
        self._log: IO[bytes] = (place / "service.err").open("ab")
        self._life: ExitStack | None = None
        self._service: Service | None = None

    def start(self) -> None:
        """Start a life, and wait until all workers are ready."""
        life, nodes = ExitStack(), self.nodes
        self._service = life.enter_context(
            serving(
                self.data_dir.path,
                [*flags(self.data_dir), *SETTINGS, *(() if nodes is None else nodes.head_flags)],
                num_workers=NUM_WORKERS if nodes is None else 1,
                port=self.port,
                errors=self._log,
            )
        )
        self._life = life

    def stop(self) -> None:
        """End the last life as an operator would."""
        assert self._life is not None, "it was started"
        ids = descent(self.service.process.pid)
        if self.nodes is not None:
            ids |= {name: one for pid in self.nodes.pids() for name, one in descent(pid).items()}
            self.violations += self.nodes.stop()
        self._life.close()
        self._log.close()
        self.check_gone(ids)
        if code := self.service.process.returncode:
            self.violations.append(f"the service ended with {code}, must be 0")
        self._keep_journal(self.data_dir.journal_path)

    @property
    def service(self) -> Service:
        assert self._service is not None, "it was started"
        return self._service

    def was_absent(self, began_s: float, ended_s: float) -> bool:
        """True if the gateway was not there at some time in between."""
        return any(each.began_s <= ended_s and began_s <= each.ended_s for each in self.absences)

    async def kill_gateway(self) -> None:
        """Kill the gateway, start the next one, and check that nothing of the first is left."""
        ids = descent(self.service.process.pid)
        absence = Absence(time.perf_counter())
        self.absences.append(absence)
        self.is_up.clear()
        self.service.process.kill()
        try:
            await asyncio.to_thread(self._begin_again)
        finally:
            absence.ended_s = time.perf_counter()
            self.is_up.set()
        self.check_gone(ids)
        sockets = [path.name for path in self.data_dir.run_path.glob("sockets-*")]
        if sockets != [f"sockets-{self.service.process.pid}"]:
            self.violations.append(f"sockets after a killed gateway: {sockets}, must be those of the new one")
        self._keep_journal(previous(self.data_dir.journal_path))

    def processes(self) -> dict[str, list[int]]:
        """Return the processes that are there now, by role."""
        gateway, agents = self.service.process.pid, [] if self.nodes is None else self.nodes.pids()
        found: dict[str, list[int]] = {"gateway": [gateway], "keeper": [], "worker": [], "agent": agents}
        for parent in (gateway, *agents):
            for pid in children(parent):
                command = command_of(pid)
                if "hearth.store.keeper" in command:
                    found["keeper"].append(pid)
                elif "hearth.worker" in command and "hearth.worker.template" not in command:
                    found["worker"].append(pid)
        return found

    async def num_tasks(self) -> int:
        """Return how many tasks the gateway's event loop has."""
        metrics = await metrics_of(self.port, self.data_dir.read_admin_token())
        return int(metrics["hearth_gateway_tasks"])

    def journals(self) -> list[Path]:
        """Return the journals of all lives that have ended."""
        return sorted(self._journals.iterdir())

    def journal_differences(self) -> Iterator[str]:
        """Yield what the events of each life do not give again. Takes a while."""
        for path in self.journals():
            try:
                found = replay(path)
            except DataDirError as error:
                yield f"a journal cannot be replayed: {error}"
            else:
                if found.first_difference is not None:
                    yield f"the event log does not give the same actions again: {found.first_difference}"

    def _begin_again(self) -> None:
        self.service.process.wait()
        assert self._life is not None, "it was started"
        self._life.close()
        self.start()

    def check_gone(self, ids: Mapping[str, ProcessId]) -> None:
        """Note what outlived a gateway or agent. Host memory has no name, and is gone with its processes."""
        self.violations += [
            f"{name} outlived its gateway or agent" for name, one in ids.items() if one.is_alive
        ]

    def _keep_journal(self, path: Path) -> None:
        shutil.copy(path, self._journals / f"{len(self.journals()):03}.jsonl")


@contextmanager
def running(
    place: Path, models: Models, object_url: str, *, is_cluster: bool
) -> Iterator[tuple[ServiceUnderTest, Keys]]:
    """Run a service of all models on a data directory below `place`; it ends with the context, and well.

    `is_cluster`: with one worker, and nodes beside it.
    """
    data_dir = DataDir.open(place / "data")
    models.deploy(data_dir, object_url)
    made = Keys.make(data_dir)
    memory = ("--memory", str(budget_bytes(data_dir)), "--host-memory", "64MiB")
    join = ("--device", "cpu", *memory, *SETTINGS)
    nodes = Nodes(place, data_dir.path, join) if is_cluster else None
    service = ServiceUnderTest(data_dir, place, nodes)
    service.start()
    service.is_up.set()
    try:
        if nodes is not None:
            for name in NAMES:
                nodes.start(name)
            service.service.wait_ready(1 + len(NAMES))
        yield service, made
    finally:
        service.stop()

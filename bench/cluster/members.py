"""A head and a node as their users start them, with random models deployed. Measures nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import torch

from bench.random_model import TINY, write_random
from bench.report import step
from bench.service.process import ROOT, STOP_S, Service, children, serving
from hearth.control.datadir import DataDir
from hearth.control.deploy.deploy import DeployOrder
from hearth.control.deploy.deployer import carry_out
from hearth.control.deploy.registry import Registry
from hearth.core.types import LOCAL

#: 109 MB in float32.
SMALL: Mapping[str, object] = {
    **TINY,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
}
NODE = "other"
_FLAGS = ("--device", "cpu", "--memory", "2GiB")
_LOOK_S = 0.05
#: Time for a worker of the node to be ready.
_READY_S = 60.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a member runs."""

    host: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()  #: of its commands


@dataclass(slots=True)
class Members:
    """A head that runs, and a node that may. Mutable; used by one thread."""

    service: Service
    folder: Path
    invitation: tuple[str, ...]
    place: Place = Place()  #: of the node
    name: str = NODE
    node: subprocess.Popen[bytes] | None = field(default=None)

    @property
    def node_dir(self) -> Path:
        return self.folder / self.name

    def start_node(self) -> None:
        """Run `hearth join`, the first time with the token."""
        words = () if self.node_dir.exists() else (*self.invitation, "--name", self.name)
        command = ("join", *words, "--data-dir", str(self.node_dir), *_FLAGS)
        self.node = subprocess.Popen(
            [
                *self.place.prefix,
                *(sys.executable, "-m", "hearth", *command),
                *("--set", f"cluster.listen={self.place.host}:0"),
            ],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def wait_for_node(self) -> None:
        """Wait until a worker of the node is ready."""
        deadline_s = time.monotonic() + _READY_S
        while not any(one.name == self.name and one.num_ready_workers for one in self.service.client.nodes()):
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"no worker of the node was ready after {_READY_S:.0f} s: {self._log()}")
            time.sleep(_LOOK_S)

    def stop_node(self) -> None:
        """End it as an operator would."""
        assert self.node is not None, "it runs"
        self.node.send_signal(signal.SIGTERM)
        if self.node.wait(STOP_S):
            raise RuntimeError(f"`hearth join` ended with {self.node.returncode}: {self._log()}")
        self.node = None

    def signal_node(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the node, the agent first."""
        assert self.node is not None, "it runs"
        for pid in _with_descendants(self.node.pid):
            os.kill(pid, number)

    def kill_node(self) -> None:
        if self.node is not None:
            self.signal_node(signal.SIGKILL)
            self.node.wait()
            self.node = None

    def use(self, name: str) -> None:
        """Have all new requests go to the node, or to the head's own worker."""
        for each in (NODE, LOCAL):
            self.service.client.drain_node(each, undo=each == name)

    def logged_s(self, words: str) -> float:
        """Return when the head last logged a line with these words, in seconds since the epoch."""
        lines = (self.service.data_dir / "logs" / "service.log").read_text().splitlines()
        stamp = next(line for line in reversed(lines) if words in line)[: len("2000-01-01 00:00:00,000")]
        return datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S,%f").timestamp()

    def _log(self) -> str:
        path = self.node_dir / "logs" / "service.log"
        return path.read_text(errors="replace")[-4000:] if path.exists() else "it has no log"


@contextmanager
def members(
    configs: Mapping[str, Mapping[str, object]],
    *,
    num_workers: int,
    host: str = "127.0.0.1",
    place: Place = Place(),
    settings: Sequence[str] = (),
) -> Iterator[Members]:
    """Run a head with `num_workers` of its own, and random models by name. The node is yet to be started.

    `host`: the address of the head for the node, whose place is `place`. `settings`: of the head.
    """
    with tempfile.TemporaryDirectory(prefix="hearth-bench-") as scratch:
        folder = Path(scratch)
        head = DataDir.open(folder / "head")
        with step(f"writing {len(configs)} random models"), Registry(head) as registry:
            for seed, (name, config) in enumerate(configs.items()):
                source = write_random(folder / name, config, "float32", seed, torch.device("cpu"))
                registry.add(carry_out(DeployOrder(str(source), name), head, lambda *_: None))
        address = f"{host}:{_free_port()}"
        words = ("cluster", "init", "--address", address, "--data-dir", str(head.path))
        made = subprocess.run(
            [sys.executable, "-m", "hearth", *words], cwd=ROOT, capture_output=True, text=True, check=True
        )
        _, _, *invitation = made.stdout.split()  # hearth join ...
        flags = [*_FLAGS, "--workers", str(num_workers), "--set", f"cluster.listen={address}"]
        flags += [word for setting in settings for word in ("--set", setting)]
        with serving(head.path, flags, num_workers=num_workers, errors=subprocess.DEVNULL) as service:
            both = Members(service, folder, tuple(invitation), place)
            try:
                yield both
            finally:
                both.kill_node()


def _with_descendants(pid: int) -> list[int]:
    return [pid, *(each for child in children(pid) for each in _with_descendants(child))]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])

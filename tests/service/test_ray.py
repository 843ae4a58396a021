"""Nodes that Ray runs: a Ray of two machines, each a network namespace, and `hearth serve` in the first."""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.service.harness import (
    PATIENCE_S,
    SMALL,
    Service,
    Shelf,
    assert_ended,
    eventually,
    hearth,
    serving,
)

_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)
GCS_PORT = 6379
ADDRESSES = ("10.77.0.1", "10.77.0.2")


class Namespaces:
    """Two network namespaces with a cable between them. Mutable; used by one test at a time."""

    def __init__(self) -> None:
        """Raises CalledProcessError where they are not permitted, OSError where `ip` is not installed."""
        unique = secrets.token_hex(3)
        self.names = tuple(f"hearth-{unique}-{number}" for number in (1, 2))
        for name in self.names:
            _ip("netns", "add", name)

    def connect(self) -> None:
        first, second = self.names
        _ip("link", "add", "cable", "netns", first, "type", "veth", "peer", "cable", "netns", second)
        for name, address in zip(self.names, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            for device in ("cable", "lo"):
                _ip("-n", name, "link", "set", device, "up")

    @contextmanager
    def inside(self, index: int) -> Iterator[None]:
        """Open connections and start processes there; only this thread does."""
        with open("/proc/thread-self/ns/net") as ours, open(f"/run/netns/{self.names[index]}") as theirs:
            _enter(theirs.fileno())
            try:
                yield
            finally:
                _enter(ours.fileno())

    def end_processes(self) -> None:
        """Kill what runs in there: `ray stop` would end every Ray of this machine."""
        for name in self.names:
            for pid in _ip("netns", "pids", name).split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)

    def close(self) -> None:
        for name in self.names:
            _ip("netns", "del", name)


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def _enter(namespace: int) -> None:
    if _LIBC.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


@pytest.fixture(scope="module")
def namespaces() -> Iterator[Namespaces]:
    try:
        made = Namespaces()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces are not permitted here: {getattr(error, 'stderr', None) or error}")
    try:
        made.connect()
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def two_machines(namespaces: Namespaces) -> Iterator[Namespaces]:
    """Ray runs in the first, which offers nothing, and starts in the second; both have a token."""
    root = tempfile.mkdtemp(prefix="ray-")  # a Unix socket's path must be short
    head, other = ADDRESSES
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        patch.setenv("RAY_ADDRESS", f"{head}:{GCS_PORT}")  # of other Rays on this machine it finds files
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        try:
            where = ("--head", f"--port={GCS_PORT}", f"--temp-dir={root}", "--include-dashboard=false")
            with _starting_ray(namespaces, 0, f"--node-ip-address={head}", "--num-cpus=0", *where):
                pass
            join = (f"--address={head}:{GCS_PORT}", "--num-cpus=1", "--node-name=second")
            with _starting_ray(namespaces, 1, f"--node-ip-address={other}", *join):
                yield namespaces
        finally:
            namespaces.end_processes()
            shutil.rmtree(root, ignore_errors=True)


@contextmanager
def _starting_ray(namespaces: Namespaces, index: int, *flags: str) -> Iterator[None]:
    """`ray start` returns when Ray runs, at the end of the context at the latest."""
    with namespaces.inside(index):
        starting = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats", *flags],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    yield
    assert starting.wait(PATIENCE_S) == 0


@pytest.fixture
def service(two_machines: Namespaces, shelf: Shelf, tmp_path: Path) -> Iterator[Service]:
    """The head is in the first namespace, as is the test, and has no worker of its own."""
    settings = (
        *("--workers", "0", "--memory", "1GiB", "--host-memory", "256MiB"),
        *("--set", "cluster.ray_cpus=1", "--set", f"cluster.node_data_dir={tmp_path / 'node'}"),
    )
    with (
        two_machines.inside(0),
        serving(
            shelf.copy(tmp_path / "head"), "--cluster", f"ray:{ADDRESSES[0]}:{GCS_PORT}", *SMALL, *settings
        ) as running,
    ):
        yield running


def answer(service: Service) -> tuple[str, str]:
    """The text, and the worker that made it."""
    made = service.client().completions.create(model="tiny-a", prompt="Once", max_tokens=8, temperature=0.0)
    return made.choices[0].text, str(service.explain(made.id)["worker"])


def names_of(service: Service) -> list[str]:
    return [str(one["worker"]) for one in service.workers()]


@pytest.mark.e2e
@pytest.mark.slow
def test_a_node_of_ray_answers_and_ray_replaces_its_agent(service: Service) -> None:
    text, worker = answer(service)
    assert worker == "second/w0"
    assert names_of(service) == ["second/w0"], "one agent, on the second machine"
    agent = psutil.Process(int(str(service.workers()[0]["pid"]))).parent()
    assert agent is not None
    children = agent.children(recursive=True)
    agent.kill()
    assert_ended(children)  # keeper, template and worker
    assert answer(service) == (text, "second.1/w0"), "the request waits for the next life"
    assert "ray_agent_failed" not in service.logs(), "Ray itself has started the agent again"
    asking = next(one for one in service.children() if "hearth.control.ray_process" in one.cmdline())
    asking.kill()  # its actor ends with it
    eventually("the next one asks again", lambda: "second.2/w0" in names_of(service))
    assert answer(service) == (text, "second.2/w0")


@pytest.mark.e2e
@pytest.mark.slow
def test_a_ray_without_authentication_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    command = hearth(
        "serve", "--cluster", "ray", "--device", "cpu", "--port", "0", "--data-dir", str(tmp_path)
    )
    refused = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert refused.returncode == 2
    assert "Ray runs without authentication" in refused.stderr
    assert "RAY_AUTH_MODE=token" in refused.stderr
    assert not (tmp_path / "cluster").exists(), "no cluster is made for it"

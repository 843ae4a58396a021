"""Nodes that Ray runs: a Ray of two machines, each a network namespace, and `hearth serve` in the first."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from bench.cluster.netlab import end_processes, entered, obstacle, pids_in, shaped_links
from hearth.node.credentials import Authority
from tests.service.harness import (
    PATIENCE_S,
    SMALL,
    Service,
    Shelf,
    assert_ended,
    command_of,
    eventually,
    hearth,
    serving,
)

GCS_PORT = 6379
ADDRESSES = ("10.77.0.1", "10.77.0.2")
NODE_FLAGS = (
    *(f"--address={ADDRESSES[0]}:{GCS_PORT}", f"--node-ip-address={ADDRESSES[1]}"),
    *("--num-cpus=1", "--node-name=second", "--include-log-monitor=false"),
)


@contextmanager
def machines(**environment: str) -> Iterator[tuple[str, str]]:
    """Two network namespaces, and an environment for Ray. What runs in them ends with the context."""
    unique = secrets.token_hex(2)
    names = (f"{unique}-1", f"{unique}-2")
    if (reason := obstacle()) is not None:
        pytest.skip(reason)
    with (
        shaped_links(dict.fromkeys(names, 1000)),
        ExitStack() as stack,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name in names:
            stack.callback(end_processes, name)  # `ray stop` would end every Ray of this machine
        settings = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_ADDRESS": f"{ADDRESSES[0]}:{GCS_PORT}",  # of other Rays on this machine it finds files
            "PYTHONPATH": os.pathsep.join(sys.path),
            "RAY_prestart_worker_first_driver": "0",  # nor would any driver here use them
            **environment,
        }
        for name, value in settings.items():
            patch.setenv(name, value)
        yield names


def head_flags(root: str) -> tuple[str, ...]:
    where = (f"--node-ip-address={ADDRESSES[0]}", f"--port={GCS_PORT}", f"--temp-dir={root}")
    return ("--head", "--num-cpus=0", "--include-dashboard=false", "--include-log-monitor=false", *where)


@pytest.fixture(scope="module")
def two_machines() -> Iterator[tuple[str, str]]:
    """Ray runs in the first, which offers nothing, and starts in the second; both have a token."""
    with machines() as names, short_directory() as root:
        with _starting_ray(names[0], *head_flags(root)):
            pass
        with _starting_ray(names[1], *NODE_FLAGS):
            yield names


@contextmanager
def short_directory() -> Iterator[str]:
    """The path of a Unix socket in it must be short."""
    root = tempfile.mkdtemp(prefix="ray-")
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


@contextmanager
def _starting_ray(name: str, *flags: str) -> Iterator[None]:
    """`ray start` returns when Ray runs, at the end of the context at the latest."""
    with entered(name):
        starting = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats", *flags],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    yield
    assert starting.wait(PATIENCE_S) == 0


@pytest.fixture(scope="module")
def growing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A Ray without machines, whose autoscaler starts and ends one with a CPU."""
    config = tmp_path_factory.mktemp("autoscaler") / "config.json"
    machine = {"resources": {"CPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": 1}
    provider = {
        "type": "fake_multinode",  # raylets on this machine
        "gcs_address": f"{ADDRESSES[0]}:{GCS_PORT}",
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
        "use_node_id_as_ip": True,
    }
    commands = ("setup", "initialization", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
    config.write_text(
        json.dumps(
            {
                "cluster_name": "growing",
                "max_workers": 1,
                "idle_timeout_minutes": 0.05,
                "provider": provider,
                "auth": {},
                "head_node_type": "ray.head.default",
                "available_node_types": {
                    "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
                    "cpu": machine,
                },
                **{f"{name}_commands": [] for name in commands},
                "file_mounts": {},
                "cluster_synced_files": [],
                "file_mounts_sync_continuously": False,
            }
        )
    )
    with machines(RAY_FAKE_CLUSTER="1", AUTOSCALER_UPDATE_INTERVAL_S="1") as names, short_directory() as root:
        with _starting_ray(names[0], *head_flags(root), f"--autoscaling-config={config}"):
            pass
        yield names


@contextmanager
def serving_with_ray(names: tuple[str, str], shelf: Shelf, path: Path, *settings: str) -> Iterator[Service]:
    """The head is in the first namespace, as is the test, and has no worker of its own."""
    flags = (
        *("--cluster", f"ray:{ADDRESSES[0]}:{GCS_PORT}", "--workers", "0", *SMALL),
        *("--memory", "1GiB", "--host-memory", "256MiB", "--set", "cluster.ray_cpus=1"),
        *("--set", f"cluster.node_data_dir={path / 'node'}"),
    )
    with entered(names[0]), serving(shelf.copy(path / "head"), *flags, *settings) as running:
        yield running


@pytest.fixture(scope="class")
def service(
    two_machines: tuple[str, str], shelf: Shelf, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    with serving_with_ray(two_machines, shelf, tmp_path_factory.mktemp("ray")) as running:
        yield running


def answer(service: Service) -> tuple[str, str]:
    """The text, and the worker that made it."""
    with service.client() as client:
        made = client.completions.create(model="tiny-a", prompt="Once", max_tokens=8, temperature=0.0)
    return made.choices[0].text, str(service.explain(made.id)["worker"])


def names_of(service: Service) -> list[str]:
    return [str(one["worker"]) for one in service.workers()]


@pytest.mark.e2e
@pytest.mark.slow
class TestTwoMachines:
    """One service, in this order: the second machine stops last."""

    def test_a_node_of_ray_answers_and_ray_replaces_its_agent(self, service: Service) -> None:
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
        asking = next(one for one in service.children() if "hearth.control.ray_process" in command_of(one))
        asking.kill()  # its actor ends with it
        eventually("the next one asks again", lambda: "second.2/w0" in names_of(service))
        assert answer(service) == (text, "second.2/w0")

    def test_a_machine_that_returns_to_ray_stays_a_member(
        self, two_machines: tuple[str, str], service: Service
    ) -> None:
        text, worker = answer(service)
        end_processes(two_machines[1])
        with _starting_ray(two_machines[1], *NODE_FLAGS):
            pass
        eventually("its agent runs again", lambda: names_of(service) not in ([], [worker]))
        eventually("Ray drops the life before", lambda: "ray_node_gone name=second" in service.logs())
        assert Authority.open(service.data_dir / "cluster").names() == ["second"]
        assert answer(service)[0] == text


def num_raylets(name: str) -> int:
    """Those of a namespace, the head's own included."""
    pids = pids_in(name)
    return sum(one.pid in pids and one.info["name"] == "raylet" for one in psutil.process_iter(["name"]))


@pytest.mark.e2e
@pytest.mark.slow
def test_machines_come_with_requests_and_go_when_idle(
    growing: tuple[str, str], shelf: Shelf, tmp_path: Path
) -> None:
    """The autoscaler is Ray's own, its machines are raylets on this one."""
    settings = (
        *("--set", "cluster.min_nodes=0", "--set", "cluster.scale_out_after_s=1"),
        *("--set", "cluster.scale_in_after_s=3", "--set", f"cluster.listen={ADDRESSES[0]}:7610"),
    )
    with serving_with_ray(growing, shelf, tmp_path, *settings) as service:
        assert names_of(service) == []
        text, worker = answer(service)
        assert worker == "127-0-0-1/w0"
        eventually("the node is given back", lambda: not names_of(service))
        eventually("Ray's autoscaler takes the machine away", lambda: num_raylets(growing[0]) == 1)
        assert "worker_lost worker=127-0-0-1/w0" in service.logs()
        assert not re.search("ERROR .* worker_lost", service.logs()), "it was given back"
        assert answer(service) == (text, "127-0-0-1.1/w0"), "on the next machine"
        assert service.output().count("ray_asked bundles=[{'CPU': 1}]") == 2


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

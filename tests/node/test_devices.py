from __future__ import annotations

import ctypes
import subprocess
import sys
from typing import Literal

import pytest

from hearth.core.config import CPU_HOST_BYTES, ServiceConfig, StoreConfig
from hearth.core.errors import ConfigError, DeviceError
from hearth.node import devices
from hearth.node.devices import Devices, Gpu, check_host_memory, gpus, resolve

TWO = [Gpu(0, "one", 1 << 30), Gpu(1, "two", 1 << 30)]


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two of them and a torch for them."""
    monkeypatch.setattr(devices, "gpus", lambda: TWO)
    monkeypatch.setattr(devices, "_torch_has_cuda", lambda: True)


def test_a_machine_without_a_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(name: str) -> ctypes.CDLL:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", no_library)
    assert gpus() == []


def test_without_gpus_there_is_one_worker_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpus", list)
    assert resolve(ServiceConfig()) == Devices("cpu", (0,), 1)
    with pytest.raises(DeviceError, match="`cuda` was asked for, but the driver shows no CUDA device; use"):
        resolve(ServiceConfig(device="cuda"))


@pytest.mark.usefixtures("two_gpus")
def test_each_gpu_gets_a_worker_unless_told_otherwise() -> None:
    assert resolve(ServiceConfig()) == Devices("cuda", (0, 1), 2)
    assert resolve(ServiceConfig(workers=3)) == Devices("cuda", (0, 1), 3)
    assert resolve(ServiceConfig(device="cpu", workers=2)) == Devices("cpu", (0,), 2)
    assert resolve(ServiceConfig(workers=0)) == Devices("cuda", (0, 1), 0)


@pytest.mark.usefixtures("two_gpus")
def test_a_torch_without_cuda_means_the_cpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(devices, "_torch_has_cuda", lambda: False)
    assert resolve(ServiceConfig()) == Devices("cpu", (0,), 1)
    assert "fallback device=cpu reason=`torch was built without CUDA`" in caplog.text
    with pytest.raises(DeviceError, match="but torch was built without CUDA"):
        resolve(ServiceConfig(device="cuda"))


@pytest.mark.parametrize(
    ("num_workers", "memory_bytes", "complaint"),
    [
        pytest.param(1, 8 << 30, None, id="all of it"),
        pytest.param(
            1,
            (8 << 30) + 1,
            r"at most 8\.00 GiB .* given: 8\.00 GiB \(8589934593 bytes\); lower it",
            id="more",
        ),
        pytest.param(1, 900 << 30, r"of this machine or its cgroup, given: 900\.00 GiB", id="far more"),
        pytest.param(4, 2 << 30, None, id="all of it together"),
        pytest.param(4, 3 << 30, r"at most 2\.00 GiB .* which 4 workers share", id="more together"),
    ],
)
def test_memory_that_the_machine_never_has_is_refused(
    num_workers: int, memory_bytes: int, complaint: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "machine_bytes", lambda: 8 << 30)
    service = ServiceConfig(device="cpu", workers=num_workers, memory_bytes=memory_bytes)
    if complaint is None:
        assert resolve(service).num_workers == num_workers
    else:
        with pytest.raises(ConfigError, match=complaint):
            resolve(service)


@pytest.mark.usefixtures("two_gpus")
def test_memory_that_a_gpu_never_has_is_refused() -> None:
    assert resolve(ServiceConfig(memory_bytes=1 << 30)).kind == "cuda"
    with pytest.raises(ConfigError, match=r"at most 1\.00 GiB .* CUDA device 0, given: 2\.00 GiB"):
        resolve(ServiceConfig(memory_bytes=2 << 30))
    with pytest.raises(ConfigError, match=r"at most 0\.50 GiB .* which 2 workers share"):
        resolve(ServiceConfig(memory_bytes=1 << 30, workers=4))


def test_host_memory_for_gpus_that_the_machine_never_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "machine_bytes", lambda: 8 << 30)
    store = StoreConfig(host_bytes=900 << 30)
    with pytest.raises(ConfigError, match=r"at most 8\.00 GiB .* given: 900\.00 GiB"):
        check_host_memory(store, Devices("cuda", (0,), 1))
    check_host_memory(store, Devices("cpu", (0,), 1))  # which takes little of it


@pytest.mark.parametrize(
    ("kind", "store", "is_told"),
    [
        ("cpu", StoreConfig(host_bytes=64 << 30), True),
        ("cpu", StoreConfig(host_bytes=CPU_HOST_BYTES), False),
        ("cpu", StoreConfig(), False),
        ("cuda", StoreConfig(host_bytes=64 << 30), False),
    ],
)
def test_who_asks_for_host_memory_that_a_cpu_does_not_use_is_told(
    kind: Literal["cpu", "cuda"],
    store: StoreConfig,
    is_told: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "machine_bytes", lambda: 128 << 30)
    check_host_memory(store, Devices(kind, (0,), 1))

    assert ("raise service.memory_bytes instead" in caplog.text) == is_told


@pytest.mark.parametrize(("num_workers", "num_threads"), [(1, 7), (2, 3), (1000, 1)])
def test_workers_share_the_usable_cores_and_each_has_one(
    num_workers: int, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "num_usable_cores", lambda: 7)
    assert Devices("cpu", (0,), num_workers).threads_per_worker == num_threads


def test_none_of_what_gateway_and_deployer_import_loads_torch() -> None:
    modules = (
        "core.config",
        "control.datadir",
        "control.deploy.registry",
        "control.keys.keys",
        "node.devices",
        "control.deploy.deployer",
        "control.deploy.sources",
        "policy.fleet.footprint",
    )
    imports = "; ".join(f"import hearth.{module}" for module in modules)
    code = f"{imports}; import sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

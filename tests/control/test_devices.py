from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from hearth.config import ServiceConfig
from hearth.control import devices
from hearth.control.devices import Devices, Gpu, gpus, resolve
from hearth.errors import DeviceError

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


@pytest.mark.usefixtures("two_gpus")
def test_a_torch_without_cuda_means_the_cpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(devices, "_torch_has_cuda", lambda: False)
    assert resolve(ServiceConfig()) == Devices("cpu", (0,), 1)
    assert "fallback device=cpu reason=`torch was built without CUDA`" in caplog.text
    with pytest.raises(DeviceError, match="but torch was built without CUDA"):
        resolve(ServiceConfig(device="cuda"))


@pytest.mark.parametrize(("num_workers", "num_threads"), [(1, 7), (2, 3), (1000, 1)])
def test_workers_share_the_usable_cores_and_each_has_one(
    num_workers: int, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "num_usable_cores", lambda: 7)
    assert Devices("cpu", (0,), num_workers).threads_per_worker == num_threads


def test_none_of_what_gateway_and_deployer_import_loads_torch() -> None:
    modules = (
        *("config", "control.datadir", "control.registry", "control.keys", "control.devices"),
        *("control.deploy", "control.deployer", "control.sources", "policy.fleet.footprint"),
    )
    imports = "; ".join(f"import hearth.{module}" for module in modules)
    code = f"{imports}; import sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

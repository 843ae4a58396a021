"""A template on a machine with a GPU: workers forked from it compute there, and it must not itself."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

FORKS = """
import ctypes, os
from hearth.worker.template import import_worker, obstacle

import_worker()
assert obstacle() is None, obstacle()
for _ in range(2):
    child = os.fork()
    if child == 0:
        import torch
        ones = torch.ones(64, 64, dtype=torch.bfloat16, device="cuda")
        os._exit(0 if (ones @ ones).sum().item() == 64**3 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert obstacle() is None, obstacle()
ctypes.CDLL("libcuda.so.1").cuInit(0)
print(obstacle())
"""


def test_workers_use_a_gpu_that_their_template_has_not_touched() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", FORKS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("it must touch no device, and ")


def test_a_driver_that_is_up_is_seen_also_when_no_device_is_open() -> None:
    """The descriptors may be closed by then, or be hidden from the process."""
    script = "\n".join(
        [
            "import ctypes",
            "from hearth.worker import template",
            "assert not template._is_driver_initialised()",
            'driver = ctypes.CDLL("libcuda.so.1")',
            "assert not template._is_driver_initialised()",
            "assert driver.cuInit(0) == 0",
            "assert template._is_driver_initialised()",
        ]
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

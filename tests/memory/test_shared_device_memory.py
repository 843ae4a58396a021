"""Memory of one GPU in two processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hearth.core.errors import DeviceError
from hearth.memory.shared_device_memory import DeviceMapping, create

pytestmark = pytest.mark.gpu

DEVICE, NUM_BYTES = torch.device("cuda", 0), (3 << 20) + 4096

OTHER = """
import sys, torch
from hearth.memory.shared_device_memory import DeviceMapping
mapping = DeviceMapping(torch.device("cuda", 0), int(sys.argv[2]), int(sys.argv[1]))
mapping.content.add_(1)
torch.cuda.synchronize()
del mapping.content
mapping.free()
"""


def test_two_processes_see_the_same_bytes_also_when_the_first_mapping_is_gone() -> None:
    descriptor = create(DEVICE, NUM_BYTES)
    try:
        mapping = DeviceMapping(DEVICE, NUM_BYTES, descriptor)
        expected = torch.randint(0, 255, (NUM_BYTES,), dtype=torch.uint8, device=DEVICE)
        mapping.content.copy_(expected)
        torch.cuda.synchronize()
        mapping.free()
        command = [sys.executable, "-c", OTHER, str(descriptor), str(NUM_BYTES)]
        subprocess.run(command, pass_fds=(descriptor,), check=True)
        again = DeviceMapping(DEVICE, NUM_BYTES, descriptor)
        torch.testing.assert_close(again.content, expected + 1, rtol=0, atol=0)
        again.free()
    finally:
        os.close(descriptor)


def test_a_descriptor_of_something_else_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file, pytest.raises(DeviceError, match="cuMemImport"):
        DeviceMapping(DEVICE, NUM_BYTES, file.fileno())


def test_memory_that_the_device_lacks_is_refused() -> None:
    with pytest.raises(DeviceError, match="cuMemCreate"):
        create(DEVICE, 1 << 45)

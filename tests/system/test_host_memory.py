"""Memory by machine and cgroups, read from trees like the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from hearth.system.host_memory import machine_bytes
from tests.system.test_cpus import V2, Kernel

V1 = "35 33 0:32 / @/memory rw - cgroup cgroup rw,memory\n"


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


@pytest.mark.parametrize(
    ("of_job", "of_slice", "limit_bytes"),
    [("1048576", "max", 1 << 20), ("max", "2097152", 2 << 20), ("4194304", "2097152", 2 << 20)],
)
def test_the_least_limit_of_all_cgroups_counts(
    kernel: Kernel, of_job: str, of_slice: str, limit_bytes: int
) -> None:
    kernel.has("0::/slice/job\n", V2)
    kernel.write("cgroup/slice/job/memory.max", of_job)
    kernel.write("cgroup/slice/memory.max", of_slice)
    assert machine_bytes(kernel.proc) == limit_bytes


def test_a_limit_of_version_1_counts(kernel: Kernel) -> None:
    kernel.has("5:memory:/job\n", V1)
    kernel.write("memory/job/memory.limit_in_bytes", "1048576")
    kernel.write("memory/memory.limit_in_bytes", "9223372036854771712")
    assert machine_bytes(kernel.proc) == 1 << 20


def test_without_limits_it_is_the_memory_of_the_machine(kernel: Kernel) -> None:
    kernel.has("0::/job\n", V2)
    kernel.write("cgroup/job/memory.max", "max")
    assert machine_bytes(kernel.proc) > 16 << 20

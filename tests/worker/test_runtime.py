"""What a worker finds of its device, as far as it needs none for it."""

from __future__ import annotations

import pytest

from hearth.worker.runtime import processor_name

INTEL = "processor\t: 0\nmodel\t\t: 106\nmodel name\t: Intel(R) Xeon(R) CPU\n\nprocessor\t: 1\n"
NEOVERSE = "processor\t: 0\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU part\t: 0xd0c\n"


@pytest.mark.parametrize(
    ("information", "machine", "name"),
    [
        (INTEL, "x86_64", "Intel(R) Xeon(R) CPU"),
        (NEOVERSE, "aarch64", "aarch64 0x41 0xd0c"),
        (NEOVERSE.replace("0xd0c", "0xd4f"), "aarch64", "aarch64 0x41 0xd4f"),
        ("", "riscv64", "riscv64"),
    ],
)
def test_processors_of_other_kinds_have_other_names(information: str, machine: str, name: str) -> None:
    assert processor_name(information, machine) == name

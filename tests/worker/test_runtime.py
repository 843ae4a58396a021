"""What a worker finds of its device, as far as it needs none for it."""

from __future__ import annotations

import pytest

from hearth.core.types import ModelId
from hearth.snapshot.memory_profile import MemoryProfile
from hearth.worker.runtime import SPARE_BYTES, TorchLimit, processor_name

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


GUESS_BYTES = 10 << 30
A, B = ModelId("a"), ModelId("b")
SMALL, LARGE = MemoryProfile(1 << 30, 0, 0), MemoryProfile(16 << 30, 1 << 30, 0)


def test_a_guess_stands_in_until_all_engines_are_measured() -> None:
    limits: list[int] = []
    limit = TorchLimit(GUESS_BYTES, limits.append)
    limit.follow({A: SMALL})
    limit.follow({A: SMALL, B: None})
    limit.follow({A: SMALL, B: LARGE})
    limit.follow({B: LARGE, A: SMALL})
    limit.follow({})
    both_bytes = (1 << 30) + (16 << 30) + SPARE_BYTES
    assert limits == [GUESS_BYTES, (1 << 30) + SPARE_BYTES, GUESS_BYTES, both_bytes, GUESS_BYTES]
    assert (limit.num_bytes, limit.is_measured) == (GUESS_BYTES, False)

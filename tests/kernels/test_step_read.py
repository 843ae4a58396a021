from __future__ import annotations

import pytest
import torch

from hearth.kernels.step_read import read_step, read_step_reference, read_step_triton
from tests.kernels.cases import DEVICES

TABLE = (9, 700)


def on_host(rows: torch.Tensor, device: str) -> torch.Tensor:
    return rows.pin_memory() if device == "cuda" else rows


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_writes", [None, 1, 130, 1024, 5000])
@pytest.mark.parametrize("count", [2, 1024, 2600])
def test_kernel_equals_reference(device: str, count: int, num_writes: int | None) -> None:
    source = on_host(torch.arange(10, 10 + count + 3, dtype=torch.int32), device)
    writes = None
    if num_writes is not None:
        places = torch.randperm(TABLE[0] * TABLE[1], generator=torch.Generator().manual_seed(count))
        values = torch.arange(1, 1 + num_writes)
        writes = on_host(torch.stack([places[:num_writes], values]).int(), device)
    found = []
    for read in (read_step_reference, read_step_triton):
        out = torch.zeros(count + 3, dtype=torch.int32, device=device)
        table = torch.zeros(TABLE, dtype=torch.int32, device=device)
        read(out, source, count, table=table, writes=writes)
        found.append((out.tolist(), table.tolist()))

    assert found[0] == found[1]
    assert found[0][0] == [*range(10, 10 + count), 0, 0, 0]
    assert sum(value != 0 for row in found[0][1] for value in row) == (num_writes or 0)


def test_writes_without_values_are_our_bug() -> None:
    numbers = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(AssertionError, match=r"writes\.shape=torch\.Size\(\[1, 4\]\)"):
        read_step(numbers, numbers, 4, table=numbers, writes=numbers.view(1, 4))

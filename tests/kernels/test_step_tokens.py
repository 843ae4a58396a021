from __future__ import annotations

import pytest
import torch

from hearth.kernels.step_tokens import gather_tokens_reference, gather_tokens_triton
from tests.kernels.cases import DEVICES


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("num_rows", "num_decode"), [(1, 0), (1, 1), (7, 3), (300, 0), (300, 256), (513, 513)]
)
def test_kernel_equals_reference(device: str, num_rows: int, num_decode: int) -> None:
    sent = torch.arange(1000, 1000 + num_rows, dtype=torch.int32, device=device)
    slots = (torch.arange(num_rows, dtype=torch.int32, device=device) * 7) % 11
    last_tokens = torch.arange(50, 61, device=device)
    count = torch.tensor([num_decode], dtype=torch.int32, device=device)
    expected = torch.zeros(num_rows, dtype=torch.int32, device=device)
    gather_tokens_reference(sent, slots, count, last_tokens, out=expected)
    out = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)

    gather_tokens_triton(sent, slots, count, last_tokens, out=out[:num_rows])

    assert torch.equal(out[:num_rows], expected)
    assert out[:num_decode].tolist() == [50 + row * 7 % 11 for row in range(num_decode)]
    assert out[num_decode:].tolist() == [*range(1000 + num_decode, 1000 + num_rows), 0]

from __future__ import annotations

import pytest
import torch

from hearth.kernels.activation import activate_reference, activate_triton
from tests.kernels.cases import DTYPES, assert_close, random


@pytest.mark.parametrize(("device", "dtype"), DTYPES)
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (3, 1025), (2, 11008)])
def test_kernel_equals_reference(
    device: str, dtype: torch.dtype, kind: str, gated: bool, rows: int, size: int
) -> None:
    x = 3 * random(rows, 2 * size if gated else size, device=device, dtype=dtype)
    expected = torch.empty(rows, size, device=device)
    activate_reference(x.float(), kind, gated=gated, out=expected)
    out = torch.full((rows, size), float("nan"), device=device, dtype=dtype)

    activate_triton(x, kind, gated=gated, out=out)

    assert_close(out, expected)

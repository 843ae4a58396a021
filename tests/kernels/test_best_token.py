from __future__ import annotations

import math

import pytest
import torch

from hearth.core.sizes import sampler_buffers
from hearth.kernels.best_token import best_tokens_reference, best_tokens_triton
from tests.kernels.cases import DEVICES


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 1), (3, 160), (5, 2049), (2, 8192), (2, 25_001)])
def test_kernels_equal_the_reference(device: str, dtype: torch.dtype, num_rows: int, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    # A strided piece, with many that are equal, and rows that are broken or forbidden.
    logits = (torch.randn(num_rows + 3, vocab_size + 16, generator=generator) * 2).round()[:, :vocab_size]
    logits[num_rows, vocab_size // 2 :] = math.nan
    logits[num_rows + 1, vocab_size - 1] = math.inf
    logits[num_rows + 2] = -math.inf
    slots = torch.randperm(num_rows + 8, generator=generator).int()
    max_seqs = len(logits) + 2
    found = []
    for best_tokens in (best_tokens_reference, best_tokens_triton):
        chosen = torch.full((len(logits), 2), -1, dtype=torch.int32, device=device)
        last_tokens = torch.full((num_rows + 9,), -1, device=device)
        parts = torch.zeros(
            sampler_buffers(max_seqs, vocab_size)["parts"].shape, dtype=torch.int32, device=device
        )
        best_tokens(
            logits.to(device, dtype), slots.to(device), chosen=chosen, last_tokens=last_tokens, parts=parts
        )
        found.append((chosen[:, 0].tolist(), chosen[:, 1].view(torch.float32).cpu(), last_tokens.tolist()))

    (tokens, best, last), (expected_tokens, expected_best, expected_last) = found[1], found[0]
    assert tokens == expected_tokens
    torch.testing.assert_close(best, expected_best, rtol=0, atol=0, equal_nan=True)
    assert last == expected_last

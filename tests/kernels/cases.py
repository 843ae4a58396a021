"""Random inputs for kernel tests: paged KV in recycled memory, odd shapes, every device and dtype.

On the CPU the Triton kernels run in Triton's interpreter, which is right in float32 and float16 only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from _pytest.mark import ParameterSet

from hearth.kernels.paged import Heads, PagedRows

DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [
    pytest.param("cpu", torch.float32),
    pytest.param("cpu", torch.float16),
    pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
    pytest.param("cuda", torch.float16, marks=pytest.mark.gpu),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def crossed(
    cases: Sequence[tuple[object, ...]], halves_on_cpu: Sequence[tuple[object, ...]]
) -> list[ParameterSet]:
    """Every case with every device and dtype, but float16 in the interpreter only with some of the cases.

    There it takes seconds and differs from float32 in how numbers are rounded; a GPU runs all of them.
    """
    return [
        pytest.param(*case, *dtype.values, marks=dtype.marks)
        for case in cases
        for dtype in DTYPES
        if dtype.values != ("cpu", torch.float16) or case in halves_on_cpu
    ]


def random(*shape: int, device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Relative error of the whole, as a norm, and no NaN: a reference in float32 decides."""
    assert not found.isnan().any(), f"{int(found.isnan().sum())} NaN"
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error < TOLERANCE[found.dtype], f"{error=}"


@dataclass(frozen=True, slots=True)
class Paged:
    """Sequences in shuffled blocks of a cache whose every other byte is 0xFF, which reads as NaN."""

    kv: torch.Tensor  #: [blocks, 2, block_tokens, kv heads, dim], strided as one layer of several
    block_table: torch.Tensor
    slots: torch.Tensor

    @staticmethod
    def build(
        lengths: list[int],
        heads: Heads,
        device: str,
        dtype: torch.dtype,
        *,
        block_tokens: int = 16,
        layers: int = 2,
    ) -> Paged:
        per_seq = [-(-length // block_tokens) for length in lengths]
        num_blocks = sum(per_seq) + 1
        raw = torch.full(
            (num_blocks, layers, 2, block_tokens, heads.num_kv, heads.dim * dtype.itemsize),
            0xFF,
            dtype=torch.uint8,
        )
        kv = raw.view(dtype).to(device)[:, 1]
        order = (torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(1)) + 1).tolist()
        table = torch.zeros(len(lengths) + 1, max(per_seq), dtype=torch.int32)
        slots = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(2))
        for slot, count in zip(slots.tolist(), per_seq, strict=True):
            for index in range(count):
                table[slot, index] = order.pop()
        return Paged(kv, table.to(device), slots.to(device, torch.int32))

    def rows(self, positions: torch.Tensor) -> PagedRows:
        """One row of each sequence."""
        return PagedRows(positions, self.slots, self.block_table)

    def fill(self, lengths: list[int], seed: int = 3) -> None:
        """Write random k and v at every position below each sequence's length."""
        block_tokens = self.kv.shape[2]
        for slot, length in zip(self.slots.tolist(), lengths, strict=True):
            at = torch.arange(length, device=self.kv.device)
            values = random(
                length,
                2,
                *self.kv.shape[3:],
                device=str(self.kv.device),
                dtype=self.kv.dtype,
                seed=seed + slot,
            )
            self.kv[self.block_table[slot, at // block_tokens].long(), :, at % block_tokens] = values

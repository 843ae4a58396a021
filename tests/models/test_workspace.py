from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from hearth.core.sizes import StepSize, counter_buffer
from hearth.models.buffers import zeros
from hearth.models.families import read_arch
from hearth.models.workspace import Workspace
from tests.models.zoo import build

SIZES = [StepSize(1, 1, 1), StepSize(7, 3, 5), StepSize(64, 8, 132)]
NAMES = ["llama-gqa", "smollm2", "opt-350m", "falcon-7b"]
DTYPES = [torch.float32, torch.bfloat16]


def bound(name: str, dtype: torch.dtype, size: StepSize) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The bytes, 0xFF before they are bound, and every buffer in them by name."""
    arch = read_arch(build(name).directory)
    base = torch.full((Workspace.num_bytes(arch, dtype, size),), 0xFF, dtype=torch.uint8)
    counters = zeros(counter_buffer(arch.dimensions, size.max_samples), base.device)
    workspace = Workspace.bind(arch, dtype, size, base, counters)
    holders = (workspace, workspace.scratch)
    parts = {f.name: getattr(holder, f.name) for holder in holders for f in fields(holder)}
    return base, {name: part for name, part in parts.items() if isinstance(part, torch.Tensor)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_buffers_lie_in_the_bytes_aligned_and_apart(name: str, size: StepSize, dtype: torch.dtype) -> None:
    base, buffers = bound(name, dtype, size)
    del buffers["counters"]
    buffers = {name: buffer for name, buffer in buffers.items() if buffer.nbytes}

    end = 0
    for buffer in sorted(buffers.values(), key=torch.Tensor.data_ptr):
        begin = buffer.data_ptr() - base.data_ptr()
        assert begin >= end
        assert begin % 256 == 0
        assert buffer.is_contiguous()
        end = begin + buffer.nbytes
    assert end <= len(base)
    assert len(base) - sum(buffer.nbytes for buffer in buffers.values()) < 256 * len(buffers)


def test_every_buffer_has_the_rows_of_the_largest_step() -> None:
    _, buffers = bound("llama-gqa", torch.bfloat16, StepSize(max_tokens=7, max_samples=3, num_programs=5))

    assert buffers["qkv"].shape == (7, (4 + 2 * 2) * 16)
    assert buffers["up"].shape == (7, 2 * 112)
    assert buffers["kept_attended"].shape == (3, 64)
    assert buffers["logits"].shape == buffers["head_out"].shape == (3, 160)
    assert (buffers["logits"].dtype, buffers["head_out"].dtype) == (torch.float32, torch.bfloat16)


def test_binding_writes_nothing_to_the_bytes() -> None:
    base, _ = bound("llama-gqa", torch.float32, SIZES[1])

    assert bool((base == 0xFF).all())


def test_counters_survive_what_another_model_does_to_the_same_bytes() -> None:
    base, buffers = bound("llama-gqa", torch.float32, SIZES[1])

    base.fill_(0x7F)

    assert not buffers["counters"].any()

from __future__ import annotations

import pytest
import torch

from hearth.kernels.host_read import read_host, read_host_reference, read_host_triton
from tests.kernels.cases import DEVICES

DTYPES = [torch.int32, torch.int64, torch.float32]


def numbers(length: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """On the host, pinned where a device is to read them; every bit pattern counts."""
    source = torch.randint(-(2**31), 2**31 - 1, (length,), generator=torch.Generator().manual_seed(length))
    source = source.float() if dtype == torch.float32 else (source * 2**20 + 7).to(dtype)
    return source.pin_memory() if device == "cuda" else source


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [0, 1, 7, 1000, 1024, 100_000])
def test_kernel_equals_reference(device: str, dtype: torch.dtype, length: int) -> None:
    source = numbers(length, dtype, device)
    expected = torch.zeros(length, dtype=dtype, device=device)
    read_host_reference(expected, source)
    out = torch.zeros(length + 1, dtype=dtype, device=device)

    read_host_triton(out[:length], source)

    assert torch.equal(out[:length], expected)
    assert out[length] == 0


@pytest.mark.parametrize("device", DEVICES)
def test_rows_are_read_whole(device: str) -> None:
    source = numbers(12, torch.int32, device).view(3, 4)
    out = torch.zeros(3, 4, dtype=torch.int32, device=device)

    read_host(out, source)

    assert torch.equal(out.cpu(), source.cpu())


def test_lengths_that_differ_are_our_bug() -> None:
    with pytest.raises(AssertionError, match=r"out\.shape=torch\.Size\(\[3\]\)"):
        read_host_triton(torch.zeros(3), torch.zeros(4))


@pytest.mark.gpu
@pytest.mark.parametrize("num_rounds", [50])
def test_memory_that_is_written_again_after_a_wait_is_read_anew(num_rounds: int) -> None:
    pinned = torch.zeros(5000, dtype=torch.int32).pin_memory()
    out = torch.empty(5000, dtype=torch.int32, device="cuda")
    for number in range(num_rounds):
        pinned.fill_(number)
        read_host_triton(out, pinned)
        assert bool((out == number).all())


@pytest.mark.gpu
def test_a_read_overtakes_copies_that_are_queued(capsys: pytest.CaptureFixture[str]) -> None:
    """Reports how long either way takes behind 32 copies of 16 MiB; what must hold is only the outcome."""
    bulk = torch.empty(16 << 20, dtype=torch.uint8).pin_memory()
    target = torch.empty_like(bulk, device="cuda")
    source, out = numbers(5000, torch.int32, "cuda"), torch.empty(5000, dtype=torch.int32, device="cuda")
    read_host_triton(out, source)
    loading = torch.cuda.Stream()
    for name, read in (("copy", read_host_reference), ("kernel", read_host_triton)):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        with torch.cuda.stream(loading):
            for _ in range(32):
                target.copy_(bulk, non_blocking=True)
        begin.record()
        read(out, source)
        end.record()
        torch.cuda.synchronize()
        with capsys.disabled():
            print(f"\n{name} behind 512 MiB: {begin.elapsed_time(end):.3f} ms")
        assert torch.equal(out.cpu(), source)

"""Pages of a GPU: the same promises as on the host, and what only a device can show."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hearth.core.errors import DeviceError
from hearth.core.types import ModelId
from hearth.memory.cuda_pages import BASE_ADDRESS, FIXED_ADDRESSES, SPACE_BYTES, CudaPages
from hearth.memory.pool import EvictionTermsOf
from hearth.memory.vmm import MappedPool
from hearth.policy.memory.space_slots import NUM_SLOTS
from tests.memory.pool_actions import Action, actions, carry_out
from tests.memory.pool_caller import Audited, Holds, PoolCaller, Sample, sample, wipe

pytestmark = pytest.mark.gpu

PAGE_BYTES = 2 << 20
DEVICE = torch.device("cuda", 0)
A, B, C, D = (ModelId(name) for name in "abcd")
SAMPLES: dict[ModelId, Sample] = {
    A: sample([1, 2, 3, 4, 5], PAGE_BYTES, digest=1, block_bytes=700_000),
    B: sample([1, 2, 3, 7, 8, 9], PAGE_BYTES, digest=253, workspace_bytes=3 * PAGE_BYTES, max_blocks=5),
    C: sample([3, 11, 12], PAGE_BYTES, digest=2, cut_bytes=PAGE_BYTES - 4096, block_bytes=3_000_000),
    D: sample(
        [21, 22, 23], 2 * PAGE_BYTES, digest=3, cut_bytes=8192, workspace_bytes=0, block_bytes=PAGE_BYTES
    ),
}
CHANGED = sample([1, 2, 1, 31, 5], PAGE_BYTES, digest=9, block_bytes=900_000)

ADDRESSES = """
import torch
from hearth.memory.cuda_pages import CudaPages
from hearth.memory.vmm import MappedPool
from tests.memory.pool_caller import Holds, sample
pool = MappedPool(CudaPages(torch.device("cuda", 0), 32 << 20, 2 << 20), Holds().eviction_terms)
space = pool.place("a", sample([1, 2], 2 << 20, digest=0xABCDEF).shape)
print(space.places["t0"].base.data_ptr(), space.kv.data_ptr(), space.workspace.data_ptr())
pool.close()
"""


@contextmanager
def mapped(eviction_terms: EvictionTermsOf) -> Iterator[Audited]:
    pages = CudaPages(DEVICE, 20 * PAGE_BYTES, PAGE_BYTES)
    with closing(MappedPool(pages, eviction_terms, wipe=wipe)) as pool:
        yield pool


@settings(max_examples=20)
@given(st.lists(actions(tuple(SAMPLES), 12 * PAGE_BYTES), max_size=20))
def test_what_is_there_is_intact_whatever_is_done_around_it(done: list[Action]) -> None:
    holds = Holds()
    with mapped(holds.eviction_terms) as pool:
        caller = PoolCaller(pool, holds, SAMPLES)
        for action in done:
            carry_out(caller, action, CHANGED)
            caller.check()


def test_addresses_are_the_same_in_every_process() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", ADDRESSES]
    first, second = (
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    )

    assert first == second
    assert int(first.split()[0]) == BASE_ADDRESS + 0xABCDEF % NUM_SLOTS * SPACE_BYTES


def test_every_fixed_address_is_to_be_had() -> None:
    with closing(CudaPages(DEVICE, PAGE_BYTES, PAGE_BYTES)) as pages:
        wanted = list(FIXED_ADDRESSES[::SPACE_BYTES])
        got = [pages.reserve(address) for address in wanted]
        for address in got:
            pages.free(address)
    assert list(map(hex, got)) == list(map(hex, wanted))


def test_pages_can_be_exported_where_the_device_can() -> None:
    with closing(CudaPages(DEVICE, 2 * PAGE_BYTES, PAGE_BYTES)) as pages:
        if not pages.is_exportable:
            assert pages.fallbacks["export"] == 1
            return
        fd = pages.export(1)
        assert os.fstat(fd)
        os.close(fd)


def test_a_linear_on_shuffled_pages_gives_what_it_gives_elsewhere() -> None:
    size = 2048
    num_pages = size * size * 2 // PAGE_BYTES
    plain = torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16)
    inputs = torch.randn(8, size, device=DEVICE, dtype=torch.bfloat16)
    with closing(CudaPages(DEVICE, num_pages * PAGE_BYTES, PAGE_BYTES)) as pages:
        address = pages.reserve(None)
        places = [address + index * PAGE_BYTES for index in range(num_pages)]
        for index, place in enumerate(places):
            pages.map(place, (index * 3 + 1) % num_pages)
        weight = pages.bytes_at(address, num_pages * PAGE_BYTES).view(torch.bfloat16).view(size, size)
        weight.copy_(plain)

        mapped = torch.nn.functional.linear(inputs, weight)

        assert torch.equal(mapped, torch.nn.functional.linear(inputs, plain))
        torch.cuda.synchronize()
        for place in places:
            pages.unmap(place)
        pages.free(address)


def test_a_mapping_is_the_same_memory_at_both_addresses() -> None:
    with closing(CudaPages(DEVICE, PAGE_BYTES, PAGE_BYTES)) as pages:
        address = pages.reserve(None)
        for place in (address, address + 4 * PAGE_BYTES):
            pages.map(place, 0)
        view = pages.bytes_at(address, 5 * PAGE_BYTES)
        view[:PAGE_BYTES] = 42

        assert (view[4 * PAGE_BYTES :] == 42).all()
        torch.cuda.synchronize()
        for place in (address, address + 4 * PAGE_BYTES):
            pages.unmap(place)
        pages.free(address)


def test_a_refused_call_says_which_it_was() -> None:
    with closing(CudaPages(DEVICE, PAGE_BYTES, PAGE_BYTES)) as pages:
        address = pages.reserve(None)
        with pytest.raises(DeviceError, match=r"cuMemMap\(.*\): CUDA_ERROR_"):
            pages.map(address + 1, 0)  # no beginning of a page
        pages.free(address)


def test_a_budget_that_the_device_does_not_have_is_refused_before_any_memory_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CudaPages, "_create", lambda pages: pytest.fail("takes memory of other processes"))
    with pytest.raises(DeviceError, match=rf"has only \d+ of the {1 << 42} bytes"):
        CudaPages(DEVICE, 1 << 42, 1 << 30)


def test_pages_of_an_odd_size_are_refused() -> None:
    with pytest.raises(DeviceError, match=r"multiples of \d+ bytes, given: 4096"):
        CudaPages(DEVICE, 1 << 20, 4096)

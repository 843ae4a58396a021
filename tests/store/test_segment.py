"""The host memory's slots, seen from this process and from another."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from hearth.errors import DeviceError
from hearth.store.segment import Segment

NUM_SLOTS, SLOT_BYTES = 5, 8192

#: Sends the bytes of the second slot back, and fills the first with sevens.
OTHER_PROCESS = f"""
import mmap, sys
memory = mmap.mmap(int(sys.argv[1]), {NUM_SLOTS * SLOT_BYTES})
sys.stdout.buffer.write(memory[{SLOT_BYTES}:{2 * SLOT_BYTES}])
memory[:{SLOT_BYTES}] = bytes([7]) * {SLOT_BYTES}
"""


@pytest.fixture
def segment() -> Iterator[Segment]:
    segment = Segment.create(NUM_SLOTS, SLOT_BYTES)
    yield segment
    segment.close()


def test_slots_do_not_overlap(segment: Segment) -> None:
    for slot in range(NUM_SLOTS):
        segment.tensor(slot, SLOT_BYTES).fill_(slot + 1)
    filled = [bytes(segment.memory(slot, SLOT_BYTES)) for slot in range(NUM_SLOTS)]
    assert filled == [bytes([slot + 1]) * SLOT_BYTES for slot in range(NUM_SLOTS)]


def test_a_tensor_and_a_view_of_memory_are_the_same_bytes(segment: Segment) -> None:
    segment.memory(3, 100)[:] = bytes(range(100))
    assert segment.tensor(3, 50).tolist() == list(range(50))


@pytest.mark.parametrize(("slot", "num_bytes"), [(-1, 1), (NUM_SLOTS, 1), (0, SLOT_BYTES + 1), (0, -1)])
def test_there_is_nothing_outside_a_slot(segment: Segment, slot: int, num_bytes: int) -> None:
    with pytest.raises(AssertionError, match="slot"):
        segment.tensor(slot, num_bytes)


def test_slots_lie_on_pages_for_direct_reads(segment: Segment) -> None:
    assert [segment.tensor(slot, 1).data_ptr() % 4096 for slot in range(NUM_SLOTS)] == [0] * NUM_SLOTS


def test_memory_that_nobody_touched_costs_nothing() -> None:
    segment = Segment.create(1024, 1 << 20)
    assert os.fstat(segment.fd).st_blocks == 0
    segment.close()


def test_another_process_maps_the_same_bytes(segment: Segment) -> None:
    written = torch.arange(SLOT_BYTES).to(torch.uint8)
    segment.tensor(1, SLOT_BYTES).copy_(written)
    seen = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS, str(segment.fd)],
        pass_fds=[segment.fd],
        capture_output=True,
        check=True,
    )
    assert seen.stdout == written.numpy().tobytes()
    assert set(segment.tensor(0, SLOT_BYTES).tolist()) == {7}


def test_a_view_outlives_the_segment() -> None:
    segment = Segment.create(NUM_SLOTS, SLOT_BYTES)
    tensor, memory = segment.tensor(2, SLOT_BYTES), segment.memory(2, SLOT_BYTES)
    tensor.fill_(9)
    segment.close()
    del segment
    assert bytes(memory) == bytes([9]) * SLOT_BYTES
    assert int(tensor.sum()) == 9 * SLOT_BYTES


def test_closing_again_closes_nobody_elses_file() -> None:
    segment = Segment.create(NUM_SLOTS, SLOT_BYTES)
    segment.close()
    spare = os.open(os.devnull, os.O_RDONLY)
    os.dup2(spare, segment.fd)
    segment.close()
    for fd in {spare, segment.fd}:
        os.close(fd)  # fails if it is closed already


def test_a_segment_without_slots_can_be_made() -> None:
    segment = Segment.create(0, SLOT_BYTES)
    assert (segment.num_bytes, segment.pinned_bytes) == (0, 0)
    segment.close()


def test_more_memory_than_can_be_had_is_refused() -> None:
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(DeviceError, match=r"4611686018427387904 bytes .* lower `store.host_bytes`"):
        Segment.create(1 << 40, 1 << 22)
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_touching_its_pages_changes_nothing_in_them() -> None:
    segment = Segment.create(4, 1 << 16)
    segment.tensor(2, 5).copy_(torch.tensor([1, 2, 3, 4, 5], dtype=torch.uint8))
    segment.touch_in_background()
    segment.wait_pinned()
    resident = [page for page in range(4) if segment.tensor(page, 1 << 16).any()]
    written = segment.tensor(2, 5).tolist()
    segment.close()
    assert (resident, written) == ([2], [1, 2, 3, 4, 5])

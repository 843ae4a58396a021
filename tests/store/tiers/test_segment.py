"""The host memory's cells, seen from this process and from another."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from hearth.core.errors import DeviceError
from hearth.store.tiers.segment import Segment

NUM_CELLS, CELL_BYTES = 5, 8192

#: Sends the bytes of the second cell back, and fills the first with sevens.
OTHER_PROCESS = f"""
import mmap, sys
memory = mmap.mmap(int(sys.argv[1]), {NUM_CELLS * CELL_BYTES})
sys.stdout.buffer.write(memory[{CELL_BYTES}:{2 * CELL_BYTES}])
memory[:{CELL_BYTES}] = bytes([7]) * {CELL_BYTES}
"""


@pytest.fixture
def segment() -> Iterator[Segment]:
    segment = Segment.create(NUM_CELLS, CELL_BYTES)
    yield segment
    segment.close()


def test_cells_do_not_overlap(segment: Segment) -> None:
    for cell in range(NUM_CELLS):
        segment.memory(cell, CELL_BYTES)[:] = bytes([cell + 1]) * CELL_BYTES
    filled = [bytes(segment.memory(cell, CELL_BYTES)) for cell in range(NUM_CELLS)]
    assert filled == [bytes([cell + 1]) * CELL_BYTES for cell in range(NUM_CELLS)]


def test_two_views_of_a_cell_are_the_same_bytes(segment: Segment) -> None:
    segment.memory(3, 100)[:] = bytes(range(100))
    assert bytes(segment.memory(3, 50)) == bytes(range(50))


@pytest.mark.parametrize(("cell", "num_bytes"), [(-1, 1), (NUM_CELLS, 1), (0, CELL_BYTES + 1), (0, -1)])
def test_there_is_nothing_outside_a_cell(segment: Segment, cell: int, num_bytes: int) -> None:
    with pytest.raises(AssertionError, match="cell"):
        segment.memory(cell, num_bytes)


def test_cells_lie_on_pages_for_direct_reads(segment: Segment) -> None:
    views = [torch.frombuffer(segment.memory(cell, 1), dtype=torch.uint8) for cell in range(NUM_CELLS)]
    assert [view.data_ptr() % 4096 for view in views] == [0] * NUM_CELLS


def test_memory_that_nobody_touched_costs_nothing() -> None:
    segment = Segment.create(1024, 1 << 20)
    assert os.fstat(segment.fd).st_blocks == 0
    segment.close()


def test_what_is_given_back_is_nobodys_memory_and_can_be_used_again() -> None:
    segment = Segment.create(4, 1 << 16)
    other = Segment(os.dup(segment.fd), 4, 1 << 16)
    for cell in range(4):
        segment.memory(cell, 1 << 16)[:] = bytes([9]) * (1 << 16)
        assert set(other.memory(cell, 1 << 16)) == {9}  # another mapping has touched it too
    segment.give_back()
    assert os.fstat(segment.fd).st_blocks == 0
    segment.memory(1, 1 << 16)[:] = bytes([5]) * (1 << 16)
    assert set(other.memory(1, 1 << 16)) == {5}
    other.close()
    segment.close()


def test_another_process_maps_the_same_bytes(segment: Segment) -> None:
    written = bytes(number % 251 for number in range(CELL_BYTES))
    segment.memory(1, CELL_BYTES)[:] = written
    seen = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS, str(segment.fd)],
        pass_fds=[segment.fd],
        capture_output=True,
        check=True,
    )
    assert seen.stdout == written
    assert set(segment.memory(0, CELL_BYTES)) == {7}


def test_a_view_outlives_the_segment() -> None:
    segment = Segment.create(NUM_CELLS, CELL_BYTES)
    memory = segment.memory(2, CELL_BYTES)
    tensor = torch.frombuffer(segment.memory(2, CELL_BYTES), dtype=torch.uint8)
    tensor.fill_(9)
    segment.close()
    del segment
    assert bytes(memory) == bytes([9]) * CELL_BYTES
    assert int(tensor.sum()) == 9 * CELL_BYTES


def test_closing_again_closes_nobody_elses_file() -> None:
    segment = Segment.create(NUM_CELLS, CELL_BYTES)
    segment.close()
    spare = os.open(os.devnull, os.O_RDONLY)
    os.dup2(spare, segment.fd)
    segment.close()
    for fd in {spare, segment.fd}:
        os.close(fd)  # fails if it is closed already


def test_a_segment_without_cells_can_be_made() -> None:
    segment = Segment.create(0, CELL_BYTES)
    assert (segment.num_bytes, segment.pinned_bytes) == (0, 0)
    segment.close()


def test_more_memory_than_can_be_had_is_refused() -> None:
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(DeviceError, match=r"4611686018427387904 bytes .* lower `store.host_bytes`"):
        Segment.create(1 << 40, 1 << 22)
    assert len(os.listdir("/proc/self/fd")) <= num_open


def test_touching_its_pages_changes_nothing_in_them() -> None:
    segment = Segment.create(4, 1 << 16)
    segment.memory(2, 5)[:] = bytes([1, 2, 3, 4, 5])
    segment.touch_in_background()
    segment.wait_pinned()
    resident = [page for page in range(4) if any(segment.memory(page, 1 << 16))]
    written = list(segment.memory(2, 5))
    segment.close()
    assert (resident, written) == ([2], [1, 2, 3, 4, 5])

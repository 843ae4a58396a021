"""Bytes that move within one memory arrive as they were, also where source and target overlap."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hearth.core.errors import DeviceError
from hearth.memory import contiguous
from hearth.memory.contiguous import ContiguousMemory
from hearth.models.layout import ALIGNMENT_BYTES
from tests.memory.resident_pages import PAGE_BYTES as PAGE
from tests.memory.resident_pages import resident_pages

NUM_BYTES = 200
MOVES = st.tuples(st.integers(0, NUM_BYTES), st.integers(0, NUM_BYTES), st.integers(0, NUM_BYTES)).filter(
    lambda move: max(move[0], move[1]) + move[2] <= NUM_BYTES
)


def filled(wiped: list[int] | None = None) -> ContiguousMemory:
    def wipe(part: torch.Tensor) -> None:
        assert wiped is not None
        wiped.extend(part.tolist())

    memory = ContiguousMemory(torch.device("cpu"), NUM_BYTES, None if wiped is None else wipe)
    memory.bytes.copy_(torch.arange(NUM_BYTES))
    return memory


@given(MOVES)
def test_a_move_copies_all_bytes_whatever_they_overlap(move: tuple[int, int, int]) -> None:
    source, target, num_bytes = move
    memory = filled()
    memory.move(source, target, num_bytes)

    expected = list(range(NUM_BYTES))
    expected[target : target + num_bytes] = range(source, source + num_bytes)
    assert memory.bytes.tolist() == expected


@pytest.mark.parametrize("staged_bytes", [1, 7, 64, 1000])
@given(MOVES)
def test_a_move_in_pieces_is_the_same_move(staged_bytes: int, move: tuple[int, int, int]) -> None:
    source, target, num_bytes = move
    memory = filled()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contiguous, "STAGED_BYTES", staged_bytes)
        memory._copy_in_pieces(source, target, num_bytes)  # as on CUDA

    expected = list(range(NUM_BYTES))
    expected[target : target + num_bytes] = range(source, source + num_bytes)
    assert memory.bytes.tolist() == expected


@given(MOVES)
def test_what_a_move_leaves_is_wiped_and_nothing_else(move: tuple[int, int, int]) -> None:
    source, target, num_bytes = move
    wiped: list[int] = []
    filled(wiped).move(source, target, num_bytes)

    left = set(range(source, source + num_bytes)) - set(range(target, target + num_bytes))
    # A byte's value is where it was; in the part that is left nothing has been written.
    assert sorted(wiped) == sorted(left)


def test_pages_that_are_given_back_leave_memory_and_their_neighbours_stay() -> None:
    memory = ContiguousMemory(torch.device("cpu"), 8 * PAGE, None)
    memory.bytes.fill_(7)

    memory.give_back(PAGE - 1, 4 * PAGE + 1)
    memory.give_back(6 * PAGE + 1, 7 * PAGE + 1)  # a part of two pages is none

    assert resident_pages(memory.bytes) == [True, False, False, False, True, True, True, True]
    memory.bytes[3 * PAGE] = 1  # may be used again
    assert set(memory.bytes[:PAGE].tolist()) | set(memory.bytes[4 * PAGE :].tolist()) == {7}


def test_memory_begins_at_a_boundary() -> None:
    assert filled().bytes.data_ptr() % ALIGNMENT_BYTES == 0


def test_a_device_that_has_less_says_so() -> None:
    with pytest.raises(DeviceError, match=r"a pool of \d+ bytes was asked for"):
        ContiguousMemory(torch.device("cpu"), 1 << 61, None)

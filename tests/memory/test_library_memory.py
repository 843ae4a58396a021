"""Memory of libraries at a fixed address: on mapped pages of the host, and under torch on a device."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from bench.host_pages import HostPages
from hearth.memory.library_memory import LibraryMemory
from hearth.memory.vmm import MappedPool
from tests.memory.pool_caller import Holds

PAGE = 4 << 20


@contextmanager
def library(num_pages: int) -> Iterator[LibraryMemory]:
    pages = HostPages(num_pages, PAGE)
    memory = LibraryMemory(pages)
    yield memory
    pages.unmap(memory.address, num_pages)
    pages.free(memory.address)
    pages.close()


def test_it_lies_before_the_spaces_of_all_models_and_is_zero() -> None:
    with library(2) as memory, closing(MappedPool(HostPages(1, PAGE), Holds().eviction_terms)):
        assert memory.address == HostPages.base_address - 32 * 512 * PAGE
        assert memory.num_fallbacks == 0
        assert not HostPages.bytes_at(HostPages(1, PAGE), memory.address, 2 * PAGE).any()


def test_what_is_taken_lies_at_the_same_places_in_the_same_order() -> None:
    with library(2) as memory:
        taken = [memory.take(num_bytes) for num_bytes in (1, 2 << 20, (2 << 20) + 1)]
        assert taken == [memory.address, memory.address + (2 << 20), memory.address + (4 << 20)]


def test_more_than_there_is_is_refused_and_takes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with library(1) as memory:
        assert memory.take(PAGE + 1) is None
        assert memory.take(PAGE) == memory.address
        assert memory.take(1) is None
    assert caplog.text.count("library_memory_full") == 2


def test_another_address_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    with library(1) as first, library(1) as second:
        assert (first.num_fallbacks, second.num_fallbacks) == (0, 1)
        assert second.take(1) == second.address != first.address
    assert "fallback library_address=" in caplog.text


@pytest.mark.gpu
def test_captured_steps_take_nothing_but_what_lies_there_and_in_every_process_at_the_same_place() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.memory.capture_addresses", *names],
            cwd=Path(__file__).parents[2],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for names in (["llama-gqa", "opt-pre"], ["opt-pre", "llama-gqa"])  # another model first
    ]
    told = []
    for process in processes:
        out, err = process.communicate()
        assert process.returncode == 0, err
        told.append(sorted(out.splitlines()))

    assert told[0] == told[1]
    assert len([line for line in told[0] if " allocations 0 captures " in line]) == 2

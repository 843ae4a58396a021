"""Threads that spin notice what they wait for, and what they were not told of in time."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from queue import Empty

import pytest

from hearth.system import spin
from hearth.system.native_code import native_library
from hearth.system.spin import Spin, SpinningQueue, native_spin


@pytest.fixture
def native() -> Spin:
    return Spin(native_library(Path(spin.__file__).with_suffix(".c")))


def test_a_queue_whose_reader_spins_loses_nothing(native: Spin) -> None:
    queue, others = SpinningQueue[int](), 3

    def put(first: int) -> None:
        for number in range(200):
            queue.put(first + number * others)

    threads = [threading.Thread(target=put, args=(first,)) for first in range(others)]
    for thread in threads:
        thread.start()
    found = set[int]()
    while len(found) < 200 * others:
        queue.expect_more(native)
        found.add(queue.get(timeout=60.0))
    for thread in threads:
        thread.join()
    assert found == set(range(200 * others))
    assert queue.empty()


@pytest.mark.parametrize("spins", [True, False])
def test_a_queue_is_waited_for_no_longer_than_asked(native: Spin, spins: bool) -> None:
    queue = SpinningQueue[int]()
    queue.expect_more(native if spins else None)
    with pytest.raises(Empty):
        queue.get(timeout=0.001)


def test_a_spin_ends_when_a_socket_has_something_or_is_closed(native: Spin) -> None:
    near, far = socket.socketpair()
    with near:
        native.until_readable(near.fileno())  # gives up
        far.send(b"x")
        native.until_readable(near.fileno())
        assert near.recv(1, socket.MSG_DONTWAIT) == b"x"
        far.close()
        native.until_readable(near.fileno())
        assert near.recv(1, socket.MSG_DONTWAIT) == b""


def test_nothing_spins_on_few_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a container has them, whatever the machine has."""
    monkeypatch.setattr(spin, "num_usable_cores", lambda: spin.MIN_CORES - 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(64))
    native_spin.cache_clear()
    assert native_spin() is None
    native_spin.cache_clear()

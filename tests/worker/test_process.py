"""Heaps of threads: none grows page by page, beside those who have the kernel find pages."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from hearth.worker import process
from hearth.worker.process import Predecessor

#: In a process of its own, as heaps stay as they are. Prints how many bytes of a thread's heap can be used.
_PROGRAM = """
import ctypes, sys, threading

if sys.argv[1] == "pieces":
    from hearth.worker.process import grow_by_pieces
    grow_by_pieces()

def look():
    malloc = ctypes.CDLL(None).malloc
    malloc.restype = ctypes.c_void_p
    address = malloc(1000)
    for line in open("/proc/self/maps"):
        begin, end = (int(one, 16) for one in line.split()[0].split("-"))
        if begin <= address < end:
            print(end - begin)

thread = threading.Thread(target=look)
thread.start()
thread.join()
"""


def heap_bytes(way: str) -> int:
    done = subprocess.run([sys.executable, "-c", _PROGRAM, way], stdout=subprocess.PIPE, check=True)
    return int(done.stdout)


def test_all_of_a_threads_heap_can_be_used_from_the_beginning() -> None:
    assert heap_bytes("pages") < 1 << 20
    assert heap_bytes("pieces") >= 60 << 20


def test_a_c_library_without_such_heaps_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process.ctypes, "CDLL", lambda _: object())
    process.grow_by_pieces()


def test_the_end_of_a_process_is_waited_for_and_seen() -> None:
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    predecessor = Predecessor(process.pid)
    assert not predecessor.is_gone
    waiting = threading.Thread(target=predecessor.wait, daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    assert process.stdin is not None
    process.stdin.close()
    waiting.join(60.0)
    assert not waiting.is_alive()
    assert predecessor.is_gone
    process.wait()
    assert Predecessor(process.pid).is_gone, "it was reaped before"


def test_nobody_is_waited_for_where_there_was_nobody() -> None:
    assert Predecessor(None).is_gone
    Predecessor(None).wait()

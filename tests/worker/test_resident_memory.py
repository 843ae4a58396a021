from __future__ import annotations

import ctypes
import mmap
import os

from hearth.worker.resident_memory import process_bytes, resident_bytes

PAGE = mmap.PAGESIZE


def test_only_pages_that_were_touched_are_resident() -> None:
    with mmap.mmap(-1, 64 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapped:
        mapped.madvise(mmap.MADV_NOHUGEPAGE)
        address = ctypes.addressof(view := ctypes.c_char.from_buffer(mapped))
        assert resident_bytes(address, 64 * PAGE) == 0
        mapped[3 * PAGE] = mapped[9 * PAGE] = 1
        assert resident_bytes(address, 64 * PAGE) == 2 * PAGE
        assert resident_bytes(address + 3 * PAGE, PAGE) == PAGE
        assert resident_bytes(address + 4 * PAGE, 5 * PAGE) == 0
        del view


def test_what_a_process_takes_grows_by_what_it_touches() -> None:
    before = process_bytes(os.getpid())
    with mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapped:
        mapped.write(bytes(64 << 20))
        assert process_bytes(os.getpid()) - before > 48 << 20

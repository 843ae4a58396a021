"""A driver of CUDA in C whose device memory is host memory, for machines without a GPU. Has no tests."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from hearth.system.cuda.driver import CudaDriver
from hearth.system.native_code import native_library


class _Call(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
        ("third", ctypes.c_uint64),
    )


class FakeCuda:
    """One driver at a time: what it notes is the library's."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        library.fake_reset()
        self.driver = CudaDriver(0, library)

    def set_times(self, *, pass_ns: int = 0, map_ns: int = 0) -> None:
        """Say how long after the event before each event passes, and how long mapping a page takes."""
        self._number("fake_pass_ns").value, self._number("fake_map_ns").value = pass_ns, map_ns

    def refuse(self, name: str, num_before: int, code: int = 1) -> None:
        """Have a call be refused once so many of its kind have succeeded."""
        (ctypes.c_char * 64).in_dll(self.library, "fake_refused").value = name.encode()
        self._number("fake_num_before").value = num_before
        ctypes.c_int.in_dll(self.library, "fake_code").value = code

    @property
    def calls(self) -> list[tuple[str, int, int, int]]:
        """All calls that were noted, with the arguments that matter."""
        noted = (_Call * self._number("fake_num_calls").value).in_dll(self.library, "fake_calls")
        return [(one.name.decode(), one.first, one.second, one.third) for one in noted]

    @property
    def num_pages(self) -> int:
        """Pages that are mapped."""
        return self._number("fake_num_pages").value

    @property
    def num_events(self) -> int:
        """Events that were made and not given back."""
        return self._number("fake_num_events").value

    @property
    def max_queued(self) -> int:
        """Most chunks that were under way at a time."""
        return self._number("fake_max_queued").value

    def _number(self, name: str) -> ctypes.c_int64:
        return ctypes.c_int64.in_dll(self.library, name)


@cache
def _library() -> ctypes.CDLL:
    return native_library(Path(__file__).with_suffix(".c"))


def fake_cuda() -> FakeCuda:
    return FakeCuda(_library())

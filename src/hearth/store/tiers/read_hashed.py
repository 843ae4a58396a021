"""Reads a part of a file into memory and hashes it on the way. Judges nothing: the caller compares.

The reading is C (`read_hashed.c`), compiled in a fraction of a second by the C compiler that Triton needs as
well, once per process. Where there is none, the interpreter does the same in pieces, slower when many read.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import xxhash

from hearth.system.native_code import native_library, remedy_for

#: Bytes that are read and hashed at a time, in C: what fits into a core's own cache beside its copy.
CACHED_PIECE_BYTES = 256 << 10

_SOURCE = Path(__file__).with_suffix(".c")
#: Readers start at the same moment, and the compiler once.
_COMPILING = threading.Lock()

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HashedRead:
    num_bytes: int  #: fewer than wanted where the file has ended
    xxh3: str  #: of these bytes, in hexadecimal
    hash_s: float


class _HashFunctions(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("create", "reset", "update", "digest", "destroy"))


class _Result(ctypes.Structure):
    _fields_ = (("low", ctypes.c_uint64), ("high", ctypes.c_uint64), ("hash_s", ctypes.c_double))


def read_hashed(fd: int, offset: int, buffer: memoryview, piece_bytes: int, block_bytes: int) -> HashedRead:
    """Fill `buffer` from `offset` on, in reads of at most `piece_bytes`.

    Ends early where the file does, or behind a read that is not a multiple of `block_bytes`. Raises OSError.
    """
    return (_native() or _read_interpreted)(fd, offset, buffer, piece_bytes, block_bytes)


def is_native() -> bool:
    return _native() is not None


Read = Callable[[int, int, memoryview, int, int], HashedRead]


def _native() -> Read | None:
    with _COMPILING:
        return _compiled_reader()


@cache
def _compiled_reader() -> Read | None:
    """Return the reader in C; None, logged once, where it cannot be had."""
    try:
        call = native_library(_SOURCE).hearth_read_hashed
        call.restype = ctypes.c_int64
        call.argtypes = (
            ctypes.c_int,
            ctypes.c_int64,
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.POINTER(_HashFunctions),
            ctypes.POINTER(_Result),
        )
        for functions in _hash_functions():
            reader = partial(_read_natively, call, functions)
            if _is_right(reader):
                return reader
        raise OSError("no library of this machine computes xxh3 as Python's xxhash does")
    except (OSError, AttributeError, ImportError) as error:
        log.warning(
            "fallback reader=interpreted reason=`%s` remedy=`%s`",
            str(error).partition("\n")[0],
            remedy_for(error),
        )
        return None


def _read_natively(
    call: Callable[..., int],
    functions: _HashFunctions,
    fd: int,
    offset: int,
    buffer: memoryview,
    piece_bytes: int,
    block_bytes: int,
) -> HashedRead:
    target, result = ctypes.c_char.from_buffer(buffer), _Result()
    done = call(
        fd,
        offset,
        ctypes.addressof(target),
        len(buffer),
        piece_bytes,
        block_bytes,
        ctypes.byref(functions),
        ctypes.byref(result),
    )
    if done < 0:
        raise OSError(-done, os.strerror(-done))
    return HashedRead(done, f"{result.high:016x}{result.low:016x}", result.hash_s)


def _is_right(reader: Read) -> bool:
    """True if a reader finds the hash that Python's xxhash finds: both are compared with each other later."""
    data = bytes(number % 251 for number in range(10_000))
    fd = os.memfd_create("hearth-check", os.MFD_CLOEXEC)
    try:
        os.write(fd, data)
        buffer = bytearray(len(data))
        found = reader(fd, 0, memoryview(buffer), 4096, 1)
    finally:
        os.close(fd)
    return (found.xxh3, bytes(buffer)) == (xxhash.xxh3_128_hexdigest(data), data)


def _hash_functions() -> Iterator[_HashFunctions]:
    """Yield xxh3's functions: the system's, if they use all that the processor has, then Python's xxhash's.

    That package is built for the oldest processors: 12 GB/s against 28 with AVX-512 (docs/log).
    """
    with suppress(OSError, AttributeError):
        yield _functions_of(ctypes.CDLL("libxxhash.so.0"), "128bits_update_dispatch")
    path = importlib.import_module("xxhash._xxhash").__file__
    yield _functions_of(ctypes.CDLL(str(path)), "128bits_update")


def _functions_of(library: ctypes.CDLL, update: str) -> _HashFunctions:
    names = ("createState", "128bits_reset", update, "128bits_digest", "freeState")
    return _HashFunctions(*(ctypes.cast(getattr(library, f"XXH3_{name}"), ctypes.c_void_p) for name in names))


def _read_interpreted(
    fd: int, offset: int, buffer: memoryview, piece_bytes: int, block_bytes: int
) -> HashedRead:
    # Each call that ends waits for the interpreter: few calls beat hashing what a core's cache still holds.
    piece_bytes = len(buffer) if piece_bytes == CACHED_PIECE_BYTES else piece_bytes
    hasher, hash_s, done = xxhash.xxh3_128(), 0.0, 0
    while done < len(buffer):
        num_bytes = os.preadv(fd, [buffer[done : done + piece_bytes]], offset + done)
        if num_bytes == 0:
            break
        read_at_s = time.perf_counter()
        hasher.update(buffer[done : done + num_bytes])
        hash_s += time.perf_counter() - read_at_s
        done += num_bytes
        if num_bytes % block_bytes:
            break
    return HashedRead(done, hasher.hexdigest(), hash_s)

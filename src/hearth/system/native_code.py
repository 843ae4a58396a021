"""C files of the package as libraries, made by the machine's C compiler. Knows none of them, logs nothing.

Each lies beside the module that calls it, which does the same in Python where there is no compiler. That is
the one that Triton needs as well; a file takes it a tenth of a second. No header of CUDA is needed: the few
functions of a driver or library that such a file calls are passed to it as addresses.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import stat
import subprocess
import sysconfig
import tempfile
from contextlib import suppress
from pathlib import Path

#: Longest time for the compiler, which takes a tenth of a second; on a busy machine much longer.
COMPILER_S = 60.0
_FLAGS = ("-O2", "-shared", "-fPIC")


class NativeCodeUnavailable(OSError):
    """Compiled code cannot be had on this machine; `remedy` says what can be done about it."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.remedy = remedy


def remedy_for(error: Exception) -> str:
    """Return what can be done about an error for which Python has to do what compiled code would."""
    return error.remedy if isinstance(error, NativeCodeUnavailable) else "mend what the reason says"


def native_library(source: Path, cache: Path | None = None) -> ctypes.CDLL:
    """Return the library made of a C file. Its calls let go of the interpreter's lock.

    With `cache`, a directory of this user alone, the library is kept there and found again, by the source's
    contents, the compiler and the machine. Without one no file stays.

    Raises:
        NativeCodeUnavailable: there is no compiler, or it refuses the file or takes too long, or the cache is
            open to others.
        OSError: the library cannot be kept or loaded.
    """
    compiler = os.environ.get("CC") or "cc"
    if cache is None:
        with tempfile.TemporaryDirectory(prefix="hearth-") as folder:
            return ctypes.CDLL(str(_compiled(compiler, source, Path(folder))))
    _check_private(cache)
    kept = cache / f"{source.stem}-{_key(compiler, source)}.so"
    with suppress(OSError):  # none yet, or one of another machine
        library = ctypes.CDLL(str(kept))
        os.utime(kept)  # what nobody uses is removed some day
        return library
    with tempfile.TemporaryDirectory(prefix=".native-", dir=cache) as folder:
        made = _compiled(compiler, source, Path(folder))
        _write_through(made)
        # Under its name it is always whole, whoever else is making it now, and whenever the machine stops.
        return ctypes.CDLL(str(made.replace(kept)))


def _compiled(compiler: str, source: Path, folder: Path) -> Path:
    """Return a library that lies in a folder."""
    library = folder / f"{source.stem}.so"
    command = [compiler, *_FLAGS, "-o", str(library), str(source)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=COMPILER_S, check=False)
    except subprocess.TimeoutExpired as error:
        reason = f"{compiler} took more than {COMPILER_S:g} s for {source.name}"
        raise NativeCodeUnavailable(reason, "start again when the machine is less busy") from error
    except OSError as error:
        raise NativeCodeUnavailable(f"{compiler}: {error.strerror}", "install a C compiler (cc)") from error
    if done.returncode:
        reason = f"{compiler} failed: {done.stderr.decode(errors='replace').strip()[:200]}"
        raise NativeCodeUnavailable(reason, "install another C compiler, and name it in CC")
    return library


def _write_through(path: Path) -> None:
    """Have a file's bytes on disk: code of which a part is zeros may load, and would end the process."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _key(compiler: str, source: Path) -> str:
    """Return a name for all that decides what a library is."""
    told = "\0".join((compiler, *_FLAGS, sysconfig.get_platform())).encode()
    return hashlib.sha256(told + b"\0" + source.read_bytes()).hexdigest()[:32]


def _check_private(cache: Path) -> None:
    """Raise OSError where another user could put a library in place of ours."""
    found = cache.stat()
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
        reason = f"others than user {os.geteuid()} may write to {cache}, and a library is code"
        raise NativeCodeUnavailable(reason, f"make {cache} this user's own, with mode 700")

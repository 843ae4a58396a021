"""C files of the package, compiled to libraries by the machine's C compiler, which Triton needs too.

Each is beside the module that calls it, which does without where there is no compiler. A file takes a tenth
of a second. No CUDA headers are needed: functions of the driver are passed as addresses.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import stat
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

#: Time limit of the compiler, which usually takes a tenth of a second.
COMPILER_S = 60.0
_FLAGS = ("-O2", "-shared", "-fPIC")


class NativeCodeUnavailable(OSError):
    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.remedy = remedy


def remedy_for(error: Exception) -> str:
    return error.remedy if isinstance(error, NativeCodeUnavailable) else "fix the cause given in the reason"


def native_library(source: Path, cache: Path | None = None, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """Compile a C file to a library. Its calls release the interpreter's lock.

    With `cache`, a private directory, the library is kept there by the source's contents, the compiler and
    the platform, so `flags` must be for any machine of that. Raises NativeCodeUnavailable, also if other
    users can write to the cache, and OSError.
    """
    compiler = os.environ.get("CC") or "cc"
    if cache is None:
        with tempfile.TemporaryDirectory(prefix="hearth-") as folder:
            return ctypes.CDLL(str(_compiled(compiler, source, Path(folder), flags)))
    _check_private(cache)
    kept = cache / f"{source.stem}-{_key(compiler, source)}.so"
    with suppress(OSError):  # none yet, or of another machine
        library = ctypes.CDLL(str(kept))
        os.utime(kept)  # unused files are pruned
        return library
    with tempfile.TemporaryDirectory(prefix=".native-", dir=cache) as folder:
        made = _compiled(compiler, source, Path(folder), flags)
        _write_through(made)
        # Renamed when it is on disk, so that the file is always whole.
        return ctypes.CDLL(str(made.replace(kept)))


def _compiled(compiler: str, source: Path, folder: Path, flags: Sequence[str]) -> Path:
    library = folder / f"{source.stem}.so"
    command = [compiler, *_FLAGS, *flags, "-o", str(library), str(source)]
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
    """Flush a file: a library with missing blocks may load, and would crash the process."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _key(compiler: str, source: Path) -> str:
    build = "\0".join((compiler, *_FLAGS, sysconfig.get_platform())).encode()
    return hashlib.sha256(build + b"\0" + source.read_bytes()).hexdigest()[:32]


def _check_private(cache: Path) -> None:
    found = cache.stat()
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
        reason = f"users other than {os.geteuid()} can write to {cache}, and a library is code"
        raise NativeCodeUnavailable(reason, f"chown {cache} to this user, with mode 700")

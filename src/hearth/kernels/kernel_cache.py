"""The directory of compiled kernels that restarts and other processes share. Compiles nothing.

    ENTRY/...           Triton's: a compiled variant, or the C code that launches it
    lists/KEY.json      the variants of one model under one configuration, once all of them are compiled
    lists/KEY.lock      held by whoever compiles them
    compiler.json       the hash of Triton by which entries are named, and the state of its files then
    NAME-KEY.so         a C file of Hearth, compiled (`system/native_code.py`)

Entries are code that this process will run, so nobody else may write here.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import secrets
import shutil
import stat
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hearth.core.errors import DeviceError
from hearth.kernels.compilations import COMPILATIONS
from hearth.kernels.jit import HAS_TRITON, triton
from hearth.kernels.variants import Variant

#: Where Triton would look by itself; whoever sets it knows why.
_TRITONS_VARIABLE = "TRITON_CACHE_DIR"
_LISTS = "lists"
_COMPILER = "compiler.json"
#: Entries that nobody has loaded for so long are removed.
MAX_IDLE_S = 30 * 86400.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CachedVariant:
    """A variant and the directory that Triton keeps it in."""

    variant: Variant
    entry: str

    @staticmethod
    def of(variant: Variant, compiled: Any) -> CachedVariant:
        """Note where a variant is that was compiled just now."""
        return CachedVariant(variant, Path(next(iter(compiled.metadata_group.values()))).parent.name)


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """The place that a kernel cache takes."""

    path: str
    num_entries: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class KernelCache:
    """A directory of compiled kernels."""

    path: Path

    @staticmethod
    def directory(wanted: Path) -> Path:
        """Return where kernels are kept: the wanted place, unless the user has told Triton of another."""
        return Path(os.environ.get(_TRITONS_VARIABLE) or wanted).expanduser().absolute()

    @staticmethod
    def open(wanted: Path) -> KernelCache:
        """Have Triton keep all kernels of this process in the directory, which is made where there is none.

        Raises:
            DeviceError: the directory cannot be used, or belongs to somebody else.
        """
        path = KernelCache.directory(wanted)
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            (path / _LISTS).mkdir(mode=0o700, exist_ok=True)
            found = path.stat()
            if found.st_uid != os.geteuid():
                raise DeviceError(
                    f"the kernel cache `{path}` belongs to user {found.st_uid}, this process is user "
                    f"{os.geteuid()}, and kernels are code: remove it, or set {_TRITONS_VARIABLE} to another"
                )
            if (mode := stat.S_IMODE(found.st_mode)) & 0o022:
                log.warning("kernel_cache_closed path=%s mode=%o reason=others_could_write", path, mode)
                path.chmod(0o700)
        except OSError as error:
            raise DeviceError(
                f"the kernel cache `{path}` cannot be used: {error}; set {_TRITONS_VARIABLE} to another place"
            ) from error
        if HAS_TRITON:
            _set_up_triton(path)
        return KernelCache(path)

    def find(self, key: str) -> list[CachedVariant] | None:
        """Return the variants of a list whose entries are all there; None: they have to be compiled."""
        try:
            raw = json.loads(self._list_path(key).read_bytes())
            found = [CachedVariant(Variant(**one["variant"]), _entry_name(one["entry"])) for one in raw]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("kernel_list_broken key=%s reason=%r", key, error)
            return None
        return found if all((self.path / one.entry).is_dir() for one in found) else None

    def load(self, key: str) -> int | None:
        """Bring the variants of a list onto the current device, so that launches find them there.

        Returns how many there are; None: they have to be compiled. One that cannot be loaded, such as a file
        that was not whole on disk when the machine stopped, is removed with the list.
        """
        found = self.find(key)
        if found is None:
            return None
        for one in found:
            try:
                with COMPILATIONS.ahead():
                    _bring_to_device(one.variant)
            except (ValueError, RuntimeError) as error:
                log.warning("kernel_list_broken key=%s kernel=%s reason=`%s`", key, one.variant.kernel, error)
                self._remove(self._list_path(key))
                self._remove(self.path / one.entry)
                return None
        for path in (self._list_path(key), *(self.path / one.entry for one in found)):
            with suppress(OSError):  # nobody will miss it who has it in memory
                os.utime(path)
        return len(found)

    def save(self, key: str, variants: Sequence[CachedVariant]) -> None:
        """Write a list, all of whose variants are compiled."""
        path = self._list_path(key)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            temporary.write_text(json.dumps([asdict(one) for one in variants]), encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    @contextmanager
    def compiling(self, key: str) -> Iterator[None]:
        """Hold a list alone, waiting while another process compiles its variants."""
        lock = os.open(
            self._list_path(key).with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def prune(self, now_s: float | None = None) -> int:
        """Remove what nobody has used for `MAX_IDLE_S`, and return how much; others may use the rest.

        A directory that the user has chosen may be shared with other programs, and is left as it is.
        """
        if os.environ.get(_TRITONS_VARIABLE):
            return 0
        idle_since_s = (time.time() if now_s is None else now_s) - MAX_IDLE_S
        num_removed = 0
        for path in (*self.path.iterdir(), *(self.path / _LISTS).iterdir()):
            if path.name == _LISTS:
                continue
            with suppress(OSError):  # another process removes it as well
                if _last_used_s(path) < idle_since_s:
                    self._remove(path)
                    num_removed += 1
        return num_removed

    def _remove(self, path: Path) -> None:
        """Remove an entry or a list, if it is there; whoever looks finds all of it or nothing."""
        with suppress(FileNotFoundError):
            doomed = path.rename(self.path / f".stale.{secrets.token_hex(8)}")
            shutil.rmtree(doomed) if doomed.is_dir() else doomed.unlink()

    def _list_path(self, key: str) -> Path:
        return self.path / _LISTS / f"{key}.json"


def _bring_to_device(variant: Variant) -> None:
    """Load a variant; if the device cannot run it, whoever launches it is told, and the others run.

    Raises:
        ValueError: there is no such kernel, or what describes it is broken.
        RuntimeError: the driver takes no such binary.
    """
    compiled = variant.compiled()
    try:
        compiled._init_handles()  # has no public name in Triton 3.6 to 3.9; does nothing a second time
    except triton.errors.TritonError as error:
        log.warning("kernel_not_loaded kernel=%s reason=`%s`", variant.kernel, error)
    except RuntimeError:
        variant.forget()
        raise


def _entry_name(name: str) -> str:
    """Return the name of an entry, which names nothing outside of the directory."""
    if name in ("", ".", "..", _LISTS) or Path(name).name != name:
        raise ValueError(f"no name of an entry: {name!r}")
    return name


def _set_up_triton(path: Path) -> None:
    knobs = triton.knobs
    # Not into the environment as well: there nobody could tell it from the user's own.
    before, knobs.propagate_env = knobs.propagate_env, False
    try:
        knobs.cache.dir = str(path)
        # The other stages are for people who debug a compiler, and take longer to load than the kernel.
        knobs.compilation.store_binary_only = True
    finally:
        knobs.propagate_env = before


def know_compiler(cache: KernelCache) -> threading.Thread | None:
    """Have Triton know the hash of itself by which compiled kernels are named, as found by a process before.

    Triton reads all of its own files for that, 500 MB, once in a process: 0.4 s that the first kernel waits
    for, and twice as much beside other threads. If nobody has found it, or a file has changed since, a thread
    does, which is returned, and keeps it. No device is touched.
    """
    if not HAS_TRITON:
        return None
    try:
        state = _compiler_state(Path(triton.__file__).parent)
        known = json.loads((cache.path / _COMPILER).read_bytes())
        if known["state"] == state and isinstance(key := known["key"], str):
            triton.runtime.cache.triton_key = lambda: key  # as Triton does for processes that it starts
            return None
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("compiler_hash_broken reason=%r", error)
    thread = threading.Thread(target=_hash_compiler, args=(cache,), name="hearth-hash", daemon=True)
    thread.start()
    return thread


def _compiler_state(root: Path) -> str:
    """Return a hash of the names, sizes and times of all files of Triton that are code."""
    found = hashlib.sha256()
    for directory, names, files in os.walk(root, followlinks=True):
        names.sort()
        for name in sorted(files):
            if name.endswith((".py", ".so")):
                path = os.path.join(directory, name)
                one = os.stat(path)
                state = (path, one.st_size, one.st_mtime_ns, one.st_ctime_ns, one.st_ino, one.st_dev)
                found.update(repr(state).encode())
    return found.hexdigest()


def _hash_compiler(cache: KernelCache) -> None:
    path = cache.path / _COMPILER
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        state = _compiler_state(Path(triton.__file__).parent)  # first: what changes meanwhile is seen later
        key = triton.runtime.cache.triton_key()  # keeps its result
        temporary.write_text(json.dumps({"state": state, "key": key}), encoding="utf-8")
        temporary.replace(path)
    except (AttributeError, OSError) as error:  # the first kernel meets the same, or needs none of it
        log.info("compiler_not_hashed reason=%r", error)
    finally:
        temporary.unlink(missing_ok=True)


def prepare_to_load() -> None:
    """Find out what Triton asks once before it loads kernels to the current device: its compiler's version.

    That takes a process of its own.
    """
    try:
        target = triton.runtime.driver.active.get_current_target()
        triton.compiler.make_backend(target).hash()  # keeps the version
    except (AttributeError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        log.info("loading_not_prepared reason=%r", error)  # as above


def usage_of(path: Path) -> CacheUsage:
    """Count the entries and bytes of a directory of kernels, which need not be there."""
    num_entries = num_bytes = 0
    for directory, _, names in os.walk(path):
        num_entries += Path(directory).parent == path and Path(directory).name != _LISTS
        for name in names:
            with suppress(OSError):
                num_bytes += (Path(directory) / name).stat().st_size
    return CacheUsage(str(path), num_entries, num_bytes)


def _last_used_s(path: Path) -> float:
    """Return when an entry or a list was last written, read or loaded, as far as the file system notes it."""
    if path.is_file():
        found = path.stat()
        return max(found.st_mtime, found.st_atime)
    return max((path.stat().st_mtime, *map(_last_used_s, path.iterdir())))

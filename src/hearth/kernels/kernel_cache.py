"""The directory of compiled kernels that restarts and other processes share. Compiles nothing.

    ENTRY/...           Triton's: a compiled variant, or the C code that launches it
    lists/KEY.json      the variants of one model under one configuration, once all of them are compiled
    lists/KEY.lock      held by the process that compiles them
    NAME-KEY.so         a C file of Hearth, compiled (`system/native_code.py`)

Triton looks an entry up only at a launch. A list names all entries of a model, so that they are loaded before
its first step. Entries are code: only the owner may write here.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hearth.core.atomic_file import write_file
from hearth.core.errors import DeviceError
from hearth.kernels.compilations import COMPILATIONS
from hearth.kernels.jit import HAS_TRITON, triton
from hearth.kernels.variants import Variant

#: Triton's own setting of the directory; it wins over Hearth's.
_TRITONS_VARIABLE = "TRITON_CACHE_DIR"
_LISTS = "lists"
#: Entries that were not loaded for so long are removed.
MAX_IDLE_S = 30 * 86400.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CachedVariant:
    variant: Variant
    entry: str

    @staticmethod
    def of(variant: Variant, compiled: Any) -> CachedVariant:
        return CachedVariant(variant, Path(next(iter(compiled.metadata_group.values()))).parent.name)


@dataclass(frozen=True, slots=True)
class CacheUsage:
    path: str
    num_entries: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class KernelCache:
    path: Path

    @staticmethod
    def directory(wanted: Path) -> Path:
        """Return where kernels are kept: `wanted`, unless the user has set Triton's directory."""
        return Path(os.environ.get(_TRITONS_VARIABLE) or wanted).expanduser().absolute()

    @staticmethod
    def open(wanted: Path) -> KernelCache:
        """Create the directory if needed, and have Triton keep its kernels there. Raises DeviceError."""
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
        try:
            raw = json.loads(self._list_path(key).read_bytes())
            found = [CachedVariant(Variant(**one["variant"]), one["entry"]) for one in raw]
            return found if all((self.path / one.entry).is_dir() for one in found) else None
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("kernel_list_broken key=%s reason=%r", key, error)
            return None

    def load(self, key: str) -> int | None:
        """Load the variants of a list onto the current device; None: they have to be compiled. A variant that
        cannot be loaded, such as a file that was not flushed before a power loss, is removed with the list.
        """
        found = self.find(key)
        if found is None:
            return None
        for one in found:
            try:
                with COMPILATIONS.ahead():
                    _load_to_device(one.variant)
            except (ValueError, RuntimeError) as error:
                log.warning("kernel_list_broken key=%s kernel=%s reason=`%s`", key, one.variant.kernel, error)
                self._remove(self._list_path(key))
                self._remove(self.path / one.entry)
                return None
        for path in (self._list_path(key), *(self.path / one.entry for one in found)):
            with suppress(OSError):
                os.utime(path)
        return len(found)

    def save(self, key: str, variants: Sequence[CachedVariant]) -> None:
        _write_json(self._list_path(key), [asdict(one) for one in variants])

    @contextmanager
    def compiling(self, key: str) -> Iterator[None]:
        lock = os.open(
            self._list_path(key).with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def prune(self) -> int:
        """Remove what was not used for `MAX_IDLE_S`, and return how much. A directory that the user has set
        for Triton is left alone: other programs may share it.
        """
        if os.environ.get(_TRITONS_VARIABLE):
            return 0
        idle_since_s = time.time() - MAX_IDLE_S
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
        with suppress(FileNotFoundError):  # renamed first: other processes see all of it or nothing
            renamed = path.rename(self.path / f".stale.{secrets.token_hex(8)}")
            shutil.rmtree(renamed) if renamed.is_dir() else renamed.unlink()

    def _list_path(self, key: str) -> Path:
        return self.path / _LISTS / f"{key}.json"


def _load_to_device(variant: Variant) -> None:
    """Load a variant. One that exceeds the device's resources is logged, and fails when it is launched.
    Raises ValueError if its description is damaged, and RuntimeError if the driver rejects the binary.
    """
    compiled = variant.compiled()
    try:
        compiled._init_handles()  # has no public name in Triton 3.6 to 3.9; does nothing a second time
    except triton.errors.TritonError as error:
        log.warning("kernel_not_loaded kernel=%s reason=`%s`", variant.kernel, error)
    except RuntimeError:
        variant.forget()
        raise


def _set_up_triton(path: Path) -> None:
    knobs = triton.knobs
    # Not in the environment, where it would look like the user's own setting.
    before, knobs.propagate_env = knobs.propagate_env, False
    try:
        knobs.cache.dir = str(path)
        # The other stages serve to debug a compiler, and take longer to load than the kernel.
        knobs.compilation.store_binary_only = True
    finally:
        knobs.propagate_env = before


def hash_compiler() -> None:
    """Have Triton hash itself, once in a process: entries are named by it. Takes 0.4 s, touches no device."""
    try:
        triton.runtime.cache.triton_key()  # keeps the hash
    except (AttributeError, OSError) as error:  # the first kernel fails alike, or does not need it
        log.info("compiler_not_hashed reason=%r", error)


def prepare_to_load() -> None:
    """Have Triton find out the version of its assembler, which it does once, by a process of its own."""
    try:
        target = triton.runtime.driver.active.get_current_target()
        triton.compiler.make_backend(target).hash()  # keeps the version
    except (AttributeError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        log.info("loading_not_prepared reason=%r", error)  # as above


def usage_of(path: Path) -> CacheUsage:
    num_entries = num_bytes = 0
    for directory, _, names in os.walk(path):
        num_entries += Path(directory).parent == path and Path(directory).name != _LISTS
        for name in names:
            with suppress(OSError):
                num_bytes += (Path(directory) / name).stat().st_size
    return CacheUsage(str(path), num_entries, num_bytes)


def _last_used_s(path: Path) -> float:
    if path.is_file():
        found = path.stat()
        return max(found.st_mtime, found.st_atime)
    return max((path.stat().st_mtime, *map(_last_used_s, path.iterdir())))


def _write_json(path: Path, value: object) -> None:
    write_file(path, [json.dumps(value).encode()], mode=0o666, syncs=False)

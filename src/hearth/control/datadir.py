"""The data directory: all files of the service, and which service uses it now. Reads no model.

VERSION             of this layout
registry.db         deployed models (`registry.py`)
keys.json           API keys (`keys.py`)
usage.json          usage by key (`key_usage.py`)
request_history     requests by model and time (`request_history.py`)
models/ chunks/     the store's: converted models, chunks from object storage
hashes/             the store's: digests of files that this machine has verified
downloads/          checkpoints on their way to models/
kernels/            compiled kernels (`kernels/kernel_cache.py`)
snapshots/          snapshots of models, and the key that authenticates them (`snapshot/`)
logs/               of the service, its processes and its events
run/lock            held by the running service; released by the kernel when it dies
run/deploying       held by running deployments
run/service.json    the service's address and instance; valid only while the lock is held
run/admin_token     authenticates commands of the directory's owner
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from hearth.core.atomic_file import write_file
from hearth.core.errors import DataDirError

#: Of the layout and of the models in it. A directory of any other version is refused.
VERSION = 2

#: A command that looks for a service holds the lock for microseconds: a starting service tries again.
_LOCK_TRIES, _LOCK_DELAY_S = 10, 0.05


@dataclass(frozen=True, slots=True)
class ServiceFile:
    """The address of the service that runs on a data directory. Holds no secret."""

    pid: int
    url: str
    instance_id: str  #: of this life of the service; `/health` at `url` has the same, unless another answers
    keys_path: str  #: the file of the API keys that it asks for, which need not exist


class DataDir:
    """The paths of a data directory, and its lock. Immutable."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.registry_path = path / "registry.db"
        self.keys_path = path / "keys.json"
        self.usage_path = path / "usage.json"
        self.request_history_path = path / "request_history"
        self.models_path = path / "models"
        self.downloads_path = path / "downloads"
        self.kernels_path = path / "kernels"
        self.snapshots_path = path / "snapshots"
        self.logs_path = path / "logs"
        self.log_path = self.logs_path / "service.log"
        self.access_log_path = self.logs_path / "access.log"
        self.journal_path = self.logs_path / "events.jsonl"
        self.cluster_path = path / "cluster"
        self.run_path = path / "run"
        self._lock_path = self.run_path / "lock"
        self._service_path = self.run_path / "service.json"
        self._admin_token_path = self.run_path / "admin_token"
        self._version_path = path / "VERSION"

    @staticmethod
    def open(path: str | Path) -> DataDir:
        """Open the directory; a missing one is created, for its owner alone. Raises DataDirError."""
        data_dir = DataDir(Path(path).expanduser().absolute())
        with _translated(data_dir.path):
            data_dir.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            data_dir._check_version()
            for part in ("models", "downloads", "logs", "run"):
                (data_dir.path / part).mkdir(mode=0o700, exist_ok=True)
        return data_dir

    @staticmethod
    @contextmanager
    def hold(path: str | Path) -> Iterator[DataDir]:
        """Hold the directory for one service, until the context or the process ends. Raises DataDirError."""
        data_dir = DataDir.open(path)
        with _translated(data_dir.path):
            # Processes that the service starts do not inherit it, or they could outlive it with the lock.
            lock = os.open(data_dir._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not _locks(lock):
                raise DataDirError(_occupied(data_dir))
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
            data_dir.withdraw()  # what a service has left that was killed
            try:
                yield data_dir
            finally:
                data_dir.withdraw()
        finally:
            os.close(lock)

    def announce(self, service: ServiceFile, admin_token: str) -> None:
        with _translated(self.path):
            write_file(self._admin_token_path, [admin_token.encode()])
            write_file(self._service_path, [json.dumps(asdict(service)).encode()])

    def withdraw(self) -> None:
        for path in (self._service_path, self._admin_token_path):
            with suppress(OSError):  # it means nothing once the lock is free
                path.unlink(missing_ok=True)

    def read_admin_token(self) -> str | None:
        with _translated(self.path):
            try:
                return self._admin_token_path.read_text(encoding="utf-8")
            except FileNotFoundError:
                return None

    @property
    def has_registry(self) -> bool:
        with _translated(self.path):
            return self.registry_path.exists()

    def _check_version(self) -> None:
        if not self._version_path.exists():
            write_file(self._version_path, [f"{VERSION}\n".encode()])
        text = self._version_path.read_text(encoding="utf-8", errors="replace").strip()
        if text != str(VERSION):
            raise DataDirError(
                f"`{self.path}` has format version {text[:40]!r}, this Hearth supports version {VERSION} "
                "only; choose another directory with `--data-dir` and deploy the models again, or use the "
                "Hearth version that wrote it"
            )


def running_service(path: str | Path) -> ServiceFile | None:
    """Return the service that runs on the directory and can be reached; None: there is none."""
    data_dir = DataDir(Path(path).expanduser().absolute())
    return _read_service(data_dir) if is_held(path) else None


def is_held(path: str | Path) -> bool:
    """True if a service holds the directory, also one that cannot be reached. Raises DataDirError."""
    data_dir = DataDir(Path(path).expanduser().absolute())
    with _translated(data_dir.path):
        return is_locked(data_dir._lock_path)


def is_locked(path: Path) -> bool:
    try:
        lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _locks(lock: int) -> bool:
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOCK_DELAY_S)
        else:
            return True
    return False


def _occupied(data_dir: DataDir) -> str:
    service = _read_service(data_dir)
    if service is None:
        who = f"process {data_dir._lock_path.read_text(errors='replace')[:20]}, which is starting or ending"
    else:
        who = f"process {service.pid} at {service.url}"
    return (
        f"a service runs on `{data_dir.path}` already: {who}; use that one, stop it, or choose another "
        "directory with `--data-dir`"
    )


def _read_service(data_dir: DataDir) -> ServiceFile | None:
    path = data_dir._service_path
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataDirError(f"`{path}` cannot be read: {error}; name the service by `--url`") from error
    if not isinstance(raw, dict) or set(raw) != {field.name for field in fields(ServiceFile)}:
        given = ", ".join(sorted(map(str, raw))) if isinstance(raw, dict) else type(raw).__name__
        raise DataDirError(
            f"`{path}` was not written by a service of this Hearth, it holds: {given:.80}; restart that one"
        )
    return ServiceFile(int(raw["pid"]), str(raw["url"]), str(raw["instance_id"]), str(raw["keys_path"]))


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        remedy = _permission_remedy(path) if isinstance(error, PermissionError) else "check it"
        raise DataDirError(
            f"the data directory `{path}` cannot be used: {error}; {remedy}, or choose another: `--data-dir`"
        ) from error


def _permission_remedy(path: Path) -> str:
    with suppress(OSError, KeyError):  # it cannot be looked at either, or its owner has no name
        if path.stat().st_uid != os.geteuid():
            return f"run this as its owner, like `sudo -u {path.owner()} hearth ...`"
    return "check it"

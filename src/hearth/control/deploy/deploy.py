"""Deploying: an order goes to a process of its own, events come back. Converts nothing itself.

Converting needs torch and minutes, so `deployer.py` does the work. The two exchange lines of JSON:

    to the process    Task, one line; then its standard input stays open as long as the result is wanted
    from it           {"event": "progress", "phase": ..., "done_bytes": ..., "total_bytes": ...}, some
                      {"event": "done", "deployed": {...}}, or "adapter" instead of "deployed", or
                      {"event": "error", "label": ..., "reason": ...}

Each deployment has a directory of its own, models/NAME-<8 hex digits>. The old one is deleted when the
registry names the new one, so a failure leaves the old model in place. Leftovers of a killed deployment are
in no registry and are deleted when the service starts.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from hearth.control.datadir import DataDir, is_locked
from hearth.control.deploy.deployed import Deployed, DeployedAdapter, ModelLocation
from hearth.control.deploy.names import listed
from hearth.control.deploy.registry import Registry
from hearth.core.errors import DataDirError, ServiceError, StoreError, error_of
from hearth.snapshot.directory import keep_quota, remove_others, remove_unfinished
from hearth.store.format.writer import LOCK

#: Time for a cancelled process to delete what it has written.
_CLEARING_S = 30.0
#: The directories that a deployment makes: a model, and an unfinished one.
_MADE = re.compile(r"[^.].*-[0-9a-f]{8}")
_STAGED = re.compile(r"\..*-[0-9a-f]{8}\.converting")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeployOrder:
    source: str  #: a directory, a GGUF file, hf:ORG/NAME[:FILE][@REVISION], or a URL of what was converted
    name: str | None = None  #: None: derived from the source
    dtype: str = "auto"  #: float32 for a CPU, else the source's own
    quant: str = "auto"  #: auto: as the source gives weights
    kind: str = "cpu"  #: of the devices that the model will run on
    overwrite: bool = False  #: replace a model of that name
    base: str | None = None  #: the model that the source is an adapter of; None: its config names it
    is_adapter: bool = False  #: the source must be an adapter, as it must where there is a base
    aliases: Mapping[str, str] = field(default_factory=dict)  #: names of models, by their other names
    labels: tuple[str, ...] = ()  #: that nodes must have to run the model


@dataclass(frozen=True, slots=True)
class DeployProgress:
    phase: str  #: downloading, converting, verifying, fetching
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class DeployDone:
    """A model or an adapter whose files are in place, not registered yet."""

    deployed: Deployed | DeployedAdapter


DeployEvent = DeployProgress | DeployDone


@dataclass(frozen=True, slots=True)
class Registered:
    replaced: ModelLocation | None  #: the files of what had its name before
    warning: str | None  #: adapters that were trained on other weights than their base has; what is refused


@dataclass(frozen=True, slots=True)
class Task:
    order: DeployOrder
    data_dir: str


async def deploying(
    order: DeployOrder, data_dir: DataDir, errors: int | None = None
) -> AsyncGenerator[DeployEvent, None]:
    """Carry out an order; the last event is DeployDone. Closing the generator cancels it.

    The consumer registers the model before it asks for more after DeployDone, or the files are deleted.
    `errors`: where the process logs to; None: to the log file of the data directory. Raises HearthError: it
    cannot be done; nothing has changed then.
    """
    done = None
    with _under_way(data_dir) as lock, data_dir.log_path.open("ab") as log_file:
        process = await asyncio.create_subprocess_exec(
            *_COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log_file if errors is None else errors,
            env=_environment(),
            pass_fds=(lock,),
            start_new_session=True,  # Ctrl-C is for this process alone, which then closes the other's input
        )
        assert process.stdin is not None, "asked for as a pipe"
        assert process.stdout is not None, "asked for as a pipe"
        try:
            process.stdin.write(msgspec.json.encode(Task(order, str(data_dir.path))) + b"\n")
            async for line in process.stdout:
                event = _event_of(line)
                if isinstance(event, DeployProgress):
                    yield event
                else:
                    done = event
            if done is None:
                raise _died(await process.wait(), data_dir)
            yield done
        finally:
            process.stdin.close()
            try:
                with suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), _CLEARING_S)
            finally:  # also when cancelled; `collect` then deletes what was made
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            if done is not None:
                await asyncio.to_thread(_clear_refused, done.deployed, data_dir)


def deploying_here(order: DeployOrder, data_dir: DataDir) -> Generator[DeployEvent, None, None]:
    events = deploying(order, data_dir)
    with asyncio.Runner() as runner:
        try:
            while (event := runner.run(anext(events, None))) is not None:
                yield event
        except GeneratorExit:
            runner.run(events.aclose())
            raise


def register(
    deployed: Deployed | DeployedAdapter, overwrite: bool, registry: Registry, data_dir: DataDir
) -> Registered:
    """Register a model or an adapter, and delete the files of what had its name.

    Raises:
        NameTaken: another deployment was faster.
        HasAdapters, UnknownModel: as `Registry.replace`.
        StoreError: files cannot be deleted.
    """
    with registry.transaction():
        registered = switch(deployed, overwrite, registry)
    if registered.replaced is not None:
        remove_files(registered.replaced, data_dir)
        collect_snapshots(data_dir, registry)
    return registered


def switch(deployed: Deployed | DeployedAdapter, overwrite: bool, registry: Registry) -> Registered:
    """Register a model or an adapter within a transaction. Raises as `register` does."""
    before, outdated = registry.location(deployed.name), registry.outdated_adapters(deployed)
    if overwrite:
        registry.replace(deployed)
    else:
        registry.add(deployed)
    warnings = []
    if outdated:
        warnings.append(
            f"`{deployed.name}` has changed, but adapters trained on its previous weights are still "
            f"deployed: {listed(outdated)}; redeploy them with `--overwrite`, or remove them with `hearth rm`"
        )
    if isinstance(deployed, Deployed) and deployed.facts.is_text_part:
        warnings.append(f"`{deployed.name}` answers texts only: images in requests are refused")
    return Registered(before, "; ".join(warnings) or None)


def remove_files(location: ModelLocation, data_dir: DataDir) -> None:
    """Delete the files of a model that has left the registry, if they lie in the data directory.

    Files that another registered model needs stay. Raises StoreError if files cannot be deleted.
    """
    directory = Path(location.directory)
    if directory.is_symlink() or directory.resolve().parent != data_dir.models_path.resolve():
        return
    with Registry(data_dir) as registry:
        if directory.resolve() in _named(registry):
            return
    try:
        shutil.rmtree(directory)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreError(f"`{directory}` cannot be deleted: {error}; delete it by hand") from error


def collect(data_dir: DataDir, registry: Registry) -> None:
    """Delete directories that are not registered, unless a deployment runs. Called when a service starts."""
    with _opened_lock(data_dir) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        named = _named(registry)
        for path in sorted(data_dir.models_path.iterdir()):
            if path.is_symlink() or path.resolve() in named:
                continue
            if _STAGED.fullmatch(path.name) and not is_locked(path / LOCK):
                log.info("remains_removed directory=%s", path)
                shutil.rmtree(path, ignore_errors=True)
            # Without weights it may be the local copy of a URL's manifest, or not Hearth's.
            elif _MADE.fullmatch(path.name) and (path / "weights.bin").exists():
                log.info("orphan_removed directory=%s", path)
                shutil.rmtree(path, ignore_errors=True)


def collect_snapshots(data_dir: DataDir, registry: Registry, quota_bytes: int | None = None) -> None:
    """Delete the snapshots of models that are not registered.

    With a quota, given when a service starts, also those beyond it and unfinished ones.
    """
    path = data_dir.snapshots_path
    try:
        num_removed = remove_others(path, {deployed.digest for deployed in registry.all()})
        if quota_bytes is not None:
            num_removed += keep_quota(path, quota_bytes)
            remove_unfinished(path)
    except OSError as error:  # they do no harm
        log.warning("snapshots_left reason=%s", error)
    else:
        if num_removed:
            log.info("snapshots_removed number=%d", num_removed)


def clear_snapshots(data_dir: DataDir) -> None:
    """Delete the snapshots of models that are not registered, from any thread."""
    with Registry(data_dir) as registry:
        collect_snapshots(data_dir, registry)


def _clear_refused(deployed: Deployed | DeployedAdapter, data_dir: DataDir) -> None:
    if deployed.source != deployed.directory:
        remove_files(deployed.location, data_dir)


def _named(registry: Registry) -> set[Path]:
    return {Path(location.directory).resolve() for location in registry.locations()}


@contextmanager
def _under_way(data_dir: DataDir) -> Iterator[int]:
    """Keep unregistered files from being collected while the descriptor, or an inherited one, is open."""
    with _opened_lock(data_dir) as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)  # waits for a service that is starting, never for one that serves
        yield lock


@contextmanager
def _opened_lock(data_dir: DataDir) -> Iterator[int]:
    path = data_dir.run_path / "deploying"
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise DataDirError(f"`{path}` cannot be opened: {error}; check its permissions") from error
    try:
        yield lock
    finally:
        os.close(lock)


#: The deploying process; -P: without modules from the directory that the program was started in.
_COMMAND = (sys.executable, "-P", "-m", "hearth.control.deploy.deployer")


def _environment() -> dict[str, str]:
    """Return an environment without GPUs: a context would take memory from the workers."""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ""}


def _event_of(line: bytes) -> DeployEvent:
    match msgspec.json.decode(line):
        case {"event": "progress", "phase": str(phase), "done_bytes": int(done), "total_bytes": int(total)}:
            return DeployProgress(phase, done, total)
        case {"event": "done", "deployed": deployed}:
            return DeployDone(msgspec.convert(deployed, Deployed))
        case {"event": "done", "adapter": adapter}:
            return DeployDone(msgspec.convert(adapter, DeployedAdapter))
        case {"event": "error", "label": str(label), "reason": str(reason)}:
            raise error_of(label, reason)
    raise ServiceError(f"the deploying process sent an invalid line: {line[:200]!r}")


def _died(code: int, data_dir: DataDir) -> ServiceError:
    return ServiceError(
        f"the deploying process ended with code {code} and no result; see `{data_dir.log_path}`, and "
        "check whether the machine ran out of memory"
    )

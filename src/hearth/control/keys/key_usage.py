"""Usage of each API key since it was made, across restarts of the service. Limits nothing.

Counts are written to a file of the data directory a few seconds after they change, atomically. A killed
service loses its last seconds. An unreadable file is replaced.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from hearth.control.keys.keys import KeyInfo
from hearth.control.observe.metrics import Metrics
from hearth.control.requests.caller import Caller, KeyId, Role, ServiceClass
from hearth.core.atomic_file import write_file
from hearth.core.errors import ConfigError

#: The time from a change to its being written.
WRITE_S = 5.0

log = logging.getLogger(__name__)


@dataclass(slots=True)
class KeyUse:
    num_requests: int = 0  #: that were let in and have ended, however they did
    prompt_tokens: int = 0
    output_tokens: int = 0
    last_used_at_s: float | None = None  #: since the epoch; None: never


@dataclass(slots=True)
class UsageRecord:
    since_s: float = field(default_factory=time.time)  #: since the epoch: nothing before that is counted
    keys: dict[KeyId, KeyUse] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KeyView:
    """A key, its limits and its usage, as they are shown."""

    name: str
    role: Role
    group: str | None
    created_at_s: float
    requests_per_min: int | None
    tokens_per_min: int | None
    concurrent: int | None
    models: tuple[str, ...] | None
    service_class: ServiceClass
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    last_used_at_s: float | None
    counted_since_s: float | None  #: None: nothing is counted yet


def view_of(key: KeyInfo, usage: UsageRecord) -> KeyView:
    limits, use = key.terms.limits, usage.keys.get(key.key_id, KeyUse())
    return KeyView(
        name=key.name,
        role=key.role,
        group=key.group,
        created_at_s=key.created_at_s,
        requests_per_min=limits.requests_per_min,
        tokens_per_min=limits.tokens_per_min,
        concurrent=limits.concurrent,
        models=key.terms.models,
        service_class=key.terms.service_class,
        num_requests=use.num_requests,
        prompt_tokens=use.prompt_tokens,
        output_tokens=use.output_tokens,
        last_used_at_s=use.last_used_at_s,
        counted_since_s=max(usage.since_s, key.created_at_s) if usage.keys else None,
    )


def read_usage(path: Path) -> UsageRecord:
    """Return what a service has counted; empty if there is no file. Raises ConfigError if it is invalid."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=UsageRecord)
    except FileNotFoundError:
        return UsageRecord()
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        raise ConfigError(
            f"`{path}` cannot be read as the use of API keys: {error}; move it away to count anew"
        ) from error


class KeyUsage:
    """Mutable; used on the event loop alone. Files are written on another thread."""

    def __init__(self, path: Path, known_ids: Callable[[], set[KeyId]], metrics: Metrics) -> None:
        """`known_ids` returns the existing keys, the only ones kept, or raises ConfigError."""
        self._path, self._known_ids, self._metrics = path, known_ids, metrics
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None
        self._fault: str | None = None  #: why the file was not written, as was logged; None: it was
        try:
            self.record = read_usage(path)
        except ConfigError as error:
            log.warning("key_usage_begun_anew reason=%s", error)
            metrics.fallbacks.labels("key_usage_lost").inc()
            self.record = UsageRecord()

    def count(self, caller: Caller, prompt_tokens: int, output_tokens: int) -> None:
        if caller.key_id is None:
            return
        use = self.record.keys.setdefault(caller.key_id, KeyUse())
        use.num_requests += 1
        use.prompt_tokens += prompt_tokens
        use.output_tokens += output_tokens
        use.last_used_at_s = time.time()
        label = self._metrics.key_label(caller.name)
        self._metrics.key_requests.labels(label).inc()
        self._metrics.key_prompt_tokens.labels(label).inc(prompt_tokens)
        self._metrics.key_output_tokens.labels(label).inc(output_tokens)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WRITE_S, self._write_soon)

    @property
    def note(self) -> str | None:
        if self._fault is None:
            return None
        return (
            f"the use of API keys cannot be written: {self._fault}; `hearth keys list` shows what was before"
        )

    async def close(self) -> None:
        if self._writing is not None:
            await self._writing
        if self._timer is not None:
            self._timer.cancel()
            await self._write()

    def _write_soon(self) -> None:
        if self._writing is not None and not self._writing.done():  # a slow disk
            self._timer = asyncio.get_running_loop().call_later(WRITE_S, self._write_soon)
            return
        self._timer = None
        self._writing = asyncio.get_running_loop().create_task(self._write())

    async def _write(self) -> None:
        try:
            known = self._known_ids()
            self.record.keys = {key: use for key, use in self.record.keys.items() if key in known}
        except ConfigError:
            pass  # the guard has logged why: then all are kept
        content = msgspec.json.encode(self.record)
        try:
            await asyncio.to_thread(write_file, self._path, [content])
            self._fault = None
        except OSError as error:
            self._metrics.fallbacks.labels("key_usage_unwritten").inc()
            if self._fault != str(error):  # once, not every few seconds
                self._fault = str(error)
                log.error("key_usage_unwritten path=%s reason=%s", self._path, error)

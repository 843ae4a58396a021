"""Asks the keeper of the store about models, from an event loop. Leases no chunks and imports no torch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hearth.core.errors import HearthError, StoreError, error_of
from hearth.core.types import Digest
from hearth.store.transfer.lease_messages import (
    AskReport,
    CountRequests,
    Done,
    ForgetModel,
    KeeperReport,
    KnownModels,
    LookUpstream,
    Message,
    ModelOpened,
    ModelPrefetched,
    OpenModel,
    PrefetchModel,
    Refused,
    UpstreamSeen,
    encode,
    parse,
)

T = TypeVar("T")

#: The longest answer: some hundred bytes for each of thousands of models.
MAX_LINE_BYTES = 16 << 20
ANSWER_S = 10.0
#: How long the version of an upstream is cached.
UPSTREAM_CACHE_S = 30.0
#: The longest time to bring a model to host memory.
PREFETCH_S = 3600.0


@dataclass(frozen=True, slots=True)
class _UpstreamLookup:
    began_s: float
    task: asyncio.Task[str | HearthError]


class KeeperClient:
    """Asks the keeper at a socket, over a connection for each question: the keeper may have been replaced.

    Mutable; used on the event loop alone. Raises StoreError where no keeper answers.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        #: By source: running, or begun within `UPSTREAM_CACHE_S`.
        self._lookups: dict[str, _UpstreamLookup] = {}

    async def report(self) -> KeeperReport:
        return await self._ask(AskReport(), KeeperReport)

    async def count_requests(self, num_by_digest: Mapping[Digest, int]) -> None:
        """Tell how many requests have come for models since the last call."""
        await self._ask(CountRequests(dict(num_by_digest)), Done)

    async def set_known_models(self, where_by_digest: Mapping[Digest, str]) -> None:
        """Tell where the models are that other nodes may ask for, in the place of all told before."""
        await self._ask(KnownModels(dict(where_by_digest)), Done)

    async def forget(self, where: str) -> None:
        await self._ask(ForgetModel(where), Done)

    async def upstream_version(self, source: str, max_age_s: float) -> str:
        """Return the version of a model's source, from a lookup that runs or began within `max_age_s`.

        Each source has at most one lookup at a time, and failures are cached, too: lookups use the service's
        credentials. Raises HearthError.
        """
        now_s = asyncio.get_running_loop().time()
        self._lookups = {
            known: lookup
            for known, lookup in self._lookups.items()
            if not lookup.task.done() or now_s - lookup.began_s < UPSTREAM_CACHE_S
        }
        lookup = self._lookups.get(source)
        if lookup is None or (lookup.task.done() and now_s - lookup.began_s >= max_age_s):
            lookup = _UpstreamLookup(now_s, asyncio.create_task(self._version_or_error(source)))
            self._lookups[source] = lookup
        outcome = await asyncio.shield(lookup.task)  # a cancelled caller does not end it for the others
        if isinstance(outcome, HearthError):
            raise outcome.with_traceback(None)  # or the traceback would grow with every caller
        return outcome

    async def _version_or_error(self, source: str) -> str | HearthError:
        try:
            return await self.look_upstream(source)
        except HearthError as error:
            return error

    async def look_upstream(self, source: str) -> str:
        """Return the version that a model's source has now, within seconds. Raises HearthError."""
        return (await self._ask(LookUpstream(source), UpstreamSeen)).version

    async def prefetch(self, where: str, weight: float) -> None:
        """Bring a model into host memory, behind all loads. Arguments as in `OpenModel`."""
        async with self._connected(PREFETCH_S) as connection:
            opened = await connection.ask(OpenModel(where, weight), ModelOpened)
            await connection.ask(PrefetchModel(opened.digest, opened.directory), ModelPrefetched)

    async def _ask(self, question: Message, kind: type[T]) -> T:
        async with self._connected(ANSWER_S) as connection:
            return await connection.ask(question, kind)

    @asynccontextmanager
    async def _connected(self, max_s: float) -> AsyncIterator[_Connection]:
        try:
            async with asyncio.timeout(max_s):
                try:
                    reader, writer = await asyncio.open_unix_connection(self._path, limit=MAX_LINE_BYTES)
                except OSError as error:
                    raise StoreError(
                        f"no keeper answers at `{self._path}`: {error}; start it again"
                    ) from error
                try:
                    await reader.readline()  # its hello; the segment that comes with it is not for us
                    yield _Connection(self._path, reader, writer)
                except (OSError, ValueError) as error:  # ValueError: a line without an end
                    raise StoreError(f"the keeper at `{self._path}` broke off: {error}") from error
                finally:
                    writer.close()
        except TimeoutError:
            raise StoreError(f"the keeper at `{self._path}` has not answered for {max_s:g} s") from None


@dataclass(frozen=True, slots=True)
class _Connection:
    path: Path
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def ask(self, question: Message, kind: type[T]) -> T:
        self.writer.write(encode(question))
        line = await self.reader.readline()
        answer = parse(line) if line else None
        if isinstance(answer, kind):
            return answer
        if isinstance(answer, Refused):
            raise error_of(answer.error, answer.reason)
        said = "nothing" if answer is None else type(answer).__name__
        raise StoreError(f"the keeper at `{self.path}` answered {said}")

"""Asks the keeper about models, from an event loop. Borrows nothing and never imports torch."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from hearth.core.errors import StoreError
from hearth.core.types import Digest, Rung
from hearth.store.transfer.lease_messages import (
    BytesCounted,
    CountBytes,
    CountRequests,
    ForgetModel,
    HostMeasured,
    LookUpstream,
    MeasureHost,
    Message,
    ModelForgotten,
    ModelRequests,
    Refused,
    RequestsCounted,
    UpstreamSeen,
    encode,
    error_of,
    parse,
)

#: The longest answer: some hundred bytes for each of thousands of models.
MAX_LINE_BYTES = 16 << 20
#: How long an answer may take.
ANSWER_S = 10.0


class KeeperClient:
    """Asks the keeper at a socket, over a connection for each question.

    Questions are rare, and the keeper may be another process by the next.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    async def count(self, digests: Sequence[str]) -> dict[str, Mapping[Rung, int]]:
        """Return bytes by rung of each model that the keeper has opened; a chunk counts on each of its rungs.

        Raises:
            StoreError: nobody answers.
        """
        match await self._ask(CountBytes(tuple(map(Digest, digests)))):
            case BytesCounted(models):
                return {one.model: {Rung.HOST: one.host_bytes, Rung.DISK: one.disk_bytes} for one in models}
            case other:
                raise self._failure(other)

    async def host_memory(self) -> HostMeasured:
        """Return how much of host memory holds chunks. Raises StoreError as `count`."""
        match await self._ask(MeasureHost()):
            case HostMeasured() as measured:
                return measured
            case other:
                raise self._failure(other)

    async def count_requests(self, num_by_digest: Mapping[str, int]) -> None:
        """Tell how many requests have come for models since the last call. Raises StoreError as `count`."""
        models = tuple(ModelRequests(Digest(digest), num) for digest, num in num_by_digest.items())
        match await self._ask(CountRequests(models)):
            case RequestsCounted():
                return
            case other:
                raise self._failure(other)

    async def forget(self, where: str) -> None:
        """Tell the keeper that a model is no longer deployed. Raises StoreError as `count`."""
        match await self._ask(ForgetModel(where)):
            case ModelForgotten():
                return
            case other:
                raise self._failure(other)

    async def look_upstream(self, source: str) -> str:
        """Return the version that the source of a model has now, which takes seconds at most.

        Raises:
            HearthError: the keeper or upstream does not answer, or there is nothing any more.
        """
        match await self._ask(LookUpstream(source)):
            case UpstreamSeen(version):
                return version
            case other:
                raise self._failure(other)

    async def _ask(self, question: Message) -> Message | None:
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._answer(question)
        except TimeoutError:
            raise StoreError(f"the keeper at `{self._path}` has not answered for {ANSWER_S:g} s") from None

    async def _answer(self, question: Message) -> Message | None:
        try:
            reader, writer = await asyncio.open_unix_connection(self._path, limit=MAX_LINE_BYTES)
        except OSError as error:
            raise StoreError(f"no keeper answers at `{self._path}`: {error}; start it again") from error
        try:
            await reader.readline()  # its hello; the segment that comes with it is not for us
            writer.write(encode(question))
            line = await reader.readline()
        except (OSError, ValueError) as error:  # ValueError: a line without an end
            raise StoreError(f"the keeper at `{self._path}` broke off: {error}") from error
        finally:
            writer.close()
        return parse(line) if line else None

    def _failure(self, answer: Message | None) -> Exception:
        if isinstance(answer, Refused):
            return error_of(answer)
        said = "nothing" if answer is None else type(answer).__name__
        return StoreError(f"the keeper at `{self._path}` answered {said}")

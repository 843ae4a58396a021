"""Looks at what models were deployed from: one at a time for each source. Notes nothing on disk.

A look goes out to object storage or to the Hugging Face Hub, with the service's own credentials. So callers
who may only ask models cannot have it done as often as they like.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from hearth.core.errors import HearthError
from hearth.store.keeper_client import KeeperClient

#: How long an answer is kept for those to whom it is new enough.
KEPT_S = 30.0


@dataclass(frozen=True, slots=True)
class _Look:
    """A look that is under way, or has ended with a version or with what was in its way."""

    began_s: float
    task: asyncio.Task[str | HearthError]


class UpstreamLooks:
    """Mutable; used on the event loop alone."""

    def __init__(self, keeper: KeeperClient) -> None:
        self._keeper = keeper
        self._by_source: dict[str, _Look] = {}  #: under way, or begun within `KEPT_S`

    async def version(self, source: str, max_age_s: float) -> str:
        """Return the version that a source has, by a look that is under way or began within `max_age_s`.

        Raises:
            HearthError: as `KeeperClient.look_upstream`; to fail is an answer, too.
        """
        now_s = asyncio.get_running_loop().time()
        self._by_source = {
            known: look
            for known, look in self._by_source.items()
            if not look.task.done() or now_s - look.began_s < KEPT_S
        }
        look = self._by_source.get(source)
        if look is None or (look.task.done() and now_s - look.began_s >= max_age_s):
            look = _Look(now_s, asyncio.create_task(self._outcome(source)))
            self._by_source[source] = look
        outcome = await asyncio.shield(look.task)  # whoever leaves does not end it for others
        if isinstance(outcome, HearthError):
            raise outcome.with_traceback(None)  # which would grow with everybody who is told
        return outcome

    async def _outcome(self, source: str) -> str | HearthError:
        try:
            return await self._keeper.look_upstream(source)
        except HearthError as error:
            return error

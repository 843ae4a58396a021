"""Stored responses, in memory, by group.

At the total limit, the group that holds the most loses its least recently used response, so that no group can
evict the responses of smaller ones.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from hearth.api.responses.items import Item, from_stored
from hearth.control.requests.caller import GroupId
from hearth.core.errors import UnknownResponse

#: Responses per group, and the time after its last use that one is kept.
MAX_RESPONSES = 1024
MAX_AGE_S = 24 * 3600.0
#: Counted for each response besides its JSON.
OVERHEAD_BYTES = 1024


@dataclass(frozen=True, slots=True)
class StoredResponse:
    id: str
    model: str
    previous_id: str | None  #: the response that it continues
    body: bytes  #: the response, as JSON
    input_items: bytes  #: of its own request, as a JSON list
    used_s: float = 0.0  #: when it was stored or last used

    @property
    def num_bytes(self) -> int:
        return len(self.body) + len(self.input_items) + OVERHEAD_BYTES

    def items(self) -> list[Item]:
        # Not by msgspec: the body repeats what its client sent, which may hold lone surrogates.
        return from_stored(json.loads(self.input_items) + json.loads(self.body)["output"])


class ResponseStore:
    """Keeps responses by group and id. Mutable; used on the event loop alone."""

    def __init__(self, max_bytes: int, now_s: Callable[[], float] = time.monotonic) -> None:
        """`max_bytes`: of all groups in total; 0: nothing is stored."""
        self.max_bytes = max_bytes
        self._now_s = now_s
        #: least recently used first; a group without responses is absent
        self._groups: dict[GroupId, OrderedDict[str, StoredResponse]] = {}
        self._bytes_by_group: dict[GroupId, int] = {}

    @property
    def num_bytes(self) -> int:
        return sum(self._bytes_by_group.values())

    def keep(self, group: GroupId, response: StoredResponse) -> bool:
        """Store a response, evicting others if needed. Returns False if it is too large."""
        if response.num_bytes > self.max_bytes:
            return False
        self._drop_old()
        responses = self._groups.setdefault(group, OrderedDict())
        responses[response.id] = replace(response, used_s=self._now_s())
        self._bytes_by_group[group] = self._bytes_by_group.get(group, 0) + response.num_bytes
        if len(responses) > MAX_RESPONSES:
            self._drop_first(group)
        while self.num_bytes > self.max_bytes:
            self._drop_first(max(self._bytes_by_group, key=lambda one: self._bytes_by_group[one]))
        return response.id in responses

    def find(self, group: GroupId, response_id: str) -> StoredResponse:
        self._drop_old()
        return self._use(group, response_id)

    def conversation(self, group: GroupId, last_id: str) -> list[StoredResponse]:
        """Return a response and all that it continues, oldest first. Raises UnknownResponse."""
        found = [self.find(group, last_id)]
        while (previous_id := found[-1].previous_id) is not None:
            found.append(self._use(group, previous_id))
        return found[::-1]

    def remove(self, group: GroupId, response_id: str) -> None:
        self.find(group, response_id)
        self._drop(group, response_id)

    def _use(self, group: GroupId, response_id: str) -> StoredResponse:
        responses = self._groups.get(group, OrderedDict())
        if response_id not in responses:
            raise self.unknown(response_id)
        found = responses[response_id] = replace(responses[response_id], used_s=self._now_s())
        responses.move_to_end(response_id)
        return found

    def _drop_old(self) -> None:
        oldest_s = self._now_s() - MAX_AGE_S
        for group in list(self._groups):
            while group in self._groups and next(iter(self._groups[group].values())).used_s < oldest_s:
                self._drop_first(group)

    def _drop_first(self, group: GroupId) -> None:
        self._drop(group, next(iter(self._groups[group])))

    def _drop(self, group: GroupId, response_id: str) -> None:
        dropped = self._groups[group].pop(response_id)
        self._bytes_by_group[group] -= dropped.num_bytes
        if not self._groups[group]:
            del self._groups[group], self._bytes_by_group[group]

    def unknown(self, response_id: str) -> UnknownResponse:
        if self.max_bytes == 0:
            why = "this service stores none (`service.response_store_bytes` is 0)"
        else:
            why = (
                "responses are stored only with `store: true`, until the service stops, for "
                f"{MAX_AGE_S / 3600:g} h after their last use, up to {MAX_RESPONSES} per group of keys and "
                f"{self.max_bytes} bytes in total (`service.response_store_bytes`)"
            )
        return UnknownResponse(
            f"no stored response `{response_id:.80}`: {why}; send the whole conversation as `input`"
        )

"""Which addresses each model has: the same in every process wherever possible. Maps nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from hearth.core.types import Digest, ModelId, SamplingTable
from hearth.memory.pages import Pages
from hearth.policy.memory.space_slots import preferred_slot

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SpaceAddresses:
    """Where the parts of a model lie in its space. Pages are numbered from 0 in each part.

    begin         + 32/64 of the space   + 59/64   + 60/64     + 61/64   + 62/64
    | weights ...  | KV ...               | tables   | penalties  | bias    | workspace ...
                                                       while requests need them

    Every offset is a whole number of pages, and the same for all models and in all processes.
    """

    begin: int
    space_bytes: int
    page_bytes: int

    @property
    def kv_address(self) -> int:
        return self.begin + self.space_bytes // 2

    @property
    def tables_address(self) -> int:
        return self.begin + self.space_bytes // 64 * 59

    @property
    def workspace_address(self) -> int:
        return self.begin + self.space_bytes // 32 * 31

    def table_address(self, table: SamplingTable) -> int:
        return self.begin + self.space_bytes // 64 * (60 + list(SamplingTable).index(table))

    def has(self, place: int) -> bool:
        return self.begin <= place < self.begin + self.space_bytes

    def weights_index(self, place: int) -> int:
        return (place - self.begin) // self.page_bytes

    def weights(self, pages: Iterable[int]) -> list[int]:
        return self._places(self.begin, pages)

    def kv(self, pages: Iterable[int]) -> list[int]:
        return self._places(self.kv_address, pages)

    def tables(self, pages: Iterable[int]) -> list[int]:
        return self._places(self.tables_address, pages)

    def table(self, table: SamplingTable, pages: Iterable[int]) -> list[int]:
        return self._places(self.table_address(table), pages)

    def workspace(self, pages: Iterable[int]) -> list[int]:
        return self._places(self.workspace_address, pages)

    def _places(self, begin: int, pages: Iterable[int]) -> list[int]:
        page_bytes = self.page_bytes
        return [begin + page * page_bytes for page in pages]


class Spaces:
    """Mutable; written only by the pool."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        #: Addresses of all reserved spaces. Disjoint.
        self._owned: set[int] = set()
        self._idle: set[int] = set()
        #: Addresses that are in use by something else in this process.
        self._refused: set[int] = set()
        self.num_fallbacks = 0  #: spaces that are not at the wanted address

    @property
    def is_full(self) -> bool:
        addresses = map(self._address, range(self._pages.num_spaces))
        return not self._idle and all(at in self._owned or at in self._refused for at in addresses)

    def give(self, model: ModelId, digest: Digest, slot: int | None) -> int:
        """Return the address of a space: by slot, or as the digest prefers, or else another."""
        num_spaces = self._pages.num_spaces
        index = slot if slot is not None and slot < num_spaces else preferred_slot(digest, num_spaces)
        wanted = self._address(index)
        address = self._take(wanted) if wanted not in self._owned else self._take_other(index)
        if address != wanted:
            self.num_fallbacks += 1
            log.warning(
                "fallback address=%#x wanted=%#x model=%s reason=%s",
                address,
                wanted,
                model,
                "taken" if wanted in self._owned else "refused",
            )
        self._owned.add(address)
        return address

    def give_common(self) -> int:
        """Return the address of a space that belongs to no model and is never taken back."""
        address = self._pages.reserve(None)
        self._owned.add(address)
        return address

    def take_back(self, address: int) -> None:
        self._owned.remove(address)
        self._idle.add(address)

    def close(self) -> None:
        for address in sorted(self._owned | self._idle):
            self._pages.free(address)
        self._owned.clear()
        self._idle.clear()

    def _address(self, index: int) -> int:
        return self._pages.base_address + index * self._pages.space_bytes

    def _take(self, wanted: int) -> int:
        if wanted in self._idle:
            self._idle.remove(wanted)
            return wanted
        if wanted in self._refused:
            return self._take_beyond()
        address = self._pages.reserve(wanted)
        if address != wanted:
            self._refused.add(wanted)
        return address

    def _take_other(self, index: int) -> int:
        num_spaces = self._pages.num_spaces
        for step in range(1, num_spaces):
            wanted = self._address((index + step) % num_spaces)
            if wanted not in self._owned and wanted not in self._refused:
                return self._take(wanted)
        return self._take_beyond()

    def _take_beyond(self) -> int:
        """Take a space without an index, wherever the driver puts or has put it."""
        indexed = set(map(self._address, range(self._pages.num_spaces)))
        address = min(self._idle - indexed, default=None)
        if address is None:
            return self._pages.reserve(None)
        self._idle.remove(address)
        return address

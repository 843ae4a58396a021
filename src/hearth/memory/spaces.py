"""Which addresses each model has: the same in every process, wherever that can be. Maps nothing.

A space is reserved whole and kept when its model goes, for the next one that wants it: what is still mapped
in it then is the business of whoever maps over it.
"""

from __future__ import annotations

import logging

from hearth.memory.pages import Pages
from hearth.types import Digest, ModelId

log = logging.getLogger(__name__)


class Spaces:
    """Mutable; written only by the pool."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        #: All that are reserved are in one of these two, and in no other.
        self._owned: set[int] = set()
        self._idle: set[int] = set()
        #: Slots that were not to be had, for they are somebody else's in this process.
        self._refused: set[int] = set()
        self.num_fallbacks = 0  #: spaces that are elsewhere than wanted

    @property
    def is_full(self) -> bool:
        """Whether another space would be a further one, of which a process cannot have many."""
        slots = map(self._address, range(self._pages.num_spaces))
        return not self._idle and all(slot in self._owned or slot in self._refused for slot in slots)

    def give(self, model: ModelId, digest: Digest) -> int:
        """The address of a space: the digest's own slot, or else another that is free."""
        slot = int(digest, 16) % self._pages.num_spaces
        wanted = self._address(slot)
        address = self._take_slot(wanted) if wanted not in self._owned else self._take_other(slot)
        if address != wanted:
            self.num_fallbacks += 1
            log.warning(
                "fallback address=%#x wanted=%#x model=%s reason=%s",
                *(address, wanted, model, "taken" if wanted in self._owned else "refused"),
            )
        self._owned.add(address)
        return address

    def take_back(self, address: int) -> None:
        self._owned.remove(address)
        self._idle.add(address)

    def close(self) -> None:
        """Nothing may be mapped in any of them."""
        for address in sorted(self._owned | self._idle):
            self._pages.free(address)
        self._owned.clear()
        self._idle.clear()

    def _address(self, slot: int) -> int:
        return self._pages.base_address + slot * self._pages.space_bytes

    def _take_slot(self, wanted: int) -> int:
        if wanted in self._idle:
            self._idle.remove(wanted)
            return wanted
        if wanted in self._refused:
            return self._take_beyond()
        address = self._pages.reserve(wanted)
        if address != wanted:
            self._refused.add(wanted)
        return address

    def _take_other(self, slot: int) -> int:
        num_slots = self._pages.num_spaces
        for step in range(1, num_slots):
            wanted = self._address((slot + step) % num_slots)
            if wanted not in self._owned and wanted not in self._refused:
                return self._take_slot(wanted)
        return self._take_beyond()

    def _take_beyond(self) -> int:
        """Beyond the slots: where the driver once put a space, or wherever it puts one now."""
        slots = set(map(self._address, range(self._pages.num_spaces)))
        address = min(self._idle - slots, default=None)
        if address is None:
            return self._pages.reserve(None)
        self._idle.remove(address)
        return address

"""Which addresses each model has: the same in every process, wherever that can be. Maps nothing.

A space is reserved whole and kept when its model goes, for the next one that wants it: what is still mapped
in it then is the business of whoever maps over it.
"""

from __future__ import annotations

import logging

from hearth.core.types import Digest, ModelId
from hearth.memory.pages import Pages
from hearth.policy.memory.space_slots import preferred_slot

log = logging.getLogger(__name__)


class Spaces:
    """Mutable; written only by the pool."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        #: Addresses of all spaces that are reserved: each is in one of these two, and in no other.
        self._owned: set[int] = set()
        self._idle: set[int] = set()
        #: Addresses that were not to be had, for they are somebody else's in this process.
        self._refused: set[int] = set()
        self.num_fallbacks = 0  #: spaces that are elsewhere than wanted

    @property
    def is_full(self) -> bool:
        """True if another space would be one beyond those with an index, of which a process has few."""
        addresses = map(self._address, range(self._pages.num_spaces))
        return not self._idle and all(at in self._owned or at in self._refused for at in addresses)

    def give(self, model: ModelId, digest: Digest, slot: int | None) -> int:
        """Return the address of a space: that of the slot, or what the digest prefers, or else another."""
        num_spaces = self._pages.num_spaces
        index = slot if slot is not None and slot < num_spaces else preferred_slot(digest, num_spaces)
        wanted = self._address(index)
        address = self._take(wanted) if wanted not in self._owned else self._take_other(index)
        if address != wanted:
            self.num_fallbacks += 1
            log.warning(
                "fallback address=%#x wanted=%#x model=%s reason=%s",
                *(address, wanted, model, "taken" if wanted in self._owned else "refused"),
            )
        self._owned.add(address)
        return address

    def give_common(self) -> int:
        """Return the address of a space that is no model's, and is kept for good."""
        address = self._pages.reserve(None)
        self._owned.add(address)
        return address

    def take_back(self, address: int) -> None:
        """Keep a space that its model does not need any more, for the next one."""
        self._owned.remove(address)
        self._idle.add(address)

    def close(self) -> None:
        """Give all addresses back. Nothing may be mapped in any of them."""
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
        """Take the next space by its index that is free."""
        num_spaces = self._pages.num_spaces
        for step in range(1, num_spaces):
            wanted = self._address((index + step) % num_spaces)
            if wanted not in self._owned and wanted not in self._refused:
                return self._take(wanted)
        return self._take_beyond()

    def _take_beyond(self) -> int:
        """Take a space without an index: where the driver once put one, or wherever it puts one now."""
        indexed = set(map(self._address, range(self._pages.num_spaces)))
        address = min(self._idle - indexed, default=None)
        if address is None:
            return self._pages.reserve(None)
        self._idle.remove(address)
        return address

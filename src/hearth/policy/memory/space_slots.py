"""Which slot of addresses a deployed model has: the same on all workers, and so is its space.

What was built for a space, such as captured steps, holds in every process that gives the model the same slot.
By the digest alone two of twenty models want one slot with a probability of one half.
"""

from __future__ import annotations

from collections.abc import Collection

#: Slots of models on a CUDA device: as many as fit where nobody else has addresses.
NUM_SLOTS = 166
#: The driver honours wanted addresses from 0x18000000000 up, and the kernel puts nothing by itself below
#: 0x555555554000: from there up lie executables and their heaps, from the end down libraries and all other
#: memory, both moved by as much as 16 TiB from process to process. The space of libraries and those of models
#: lie between, so that each is free in every process.
BASE_ADDRESS = 0x20000000000
SPACE_BYTES = 512 << 30


def slot_at(address: int) -> int | None:
    """Return the slot whose space begins at an address; None: none does."""
    slot, offset = divmod(address - BASE_ADDRESS, SPACE_BYTES)
    return slot if not offset and 0 <= slot < NUM_SLOTS else None


def choose_slot(digest: str, taken: Collection[int], named: int | None = None) -> int | None:
    """Return the slot of a model that has none: the one that its digest prefers, or else the next free one.

    `named`: the one that a snapshot of it was made for, which comes first. None: all are taken. Such a model
    shares a slot, and where both are hosted one of them is elsewhere.
    """
    if named is not None and named not in taken:
        return named
    wanted = preferred_slot(digest, NUM_SLOTS)
    slots = ((wanted + step) % NUM_SLOTS for step in range(NUM_SLOTS))
    return next((slot for slot in slots if slot not in taken), None)


def preferred_slot(digest: str, num_slots: int) -> int:
    """Return the slot that a digest prefers, where nobody has given its model one. Any text has some slot."""
    try:
        number = int(digest, 16)
    except ValueError:  # a registry may be damaged
        number = int.from_bytes(digest.encode())
    return number % num_slots

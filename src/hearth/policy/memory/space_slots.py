"""The slot of addresses of a deployed model: the same on all workers."""

from __future__ import annotations

from collections.abc import Collection

#: Slots of models on a CUDA device: as many as fit into the free addresses (`memory/cuda_pages.py`).
NUM_SLOTS = 166


def choose_slot(digest: str, taken: Collection[int], named: int | None = None) -> int | None:
    """Return a slot for a model: the one that its digest prefers, or else the next free one.

    `named`: the slot of its snapshot, which comes first. None: all are taken. Such a model shares a slot, and
    if both are hosted one of them is elsewhere.
    """
    if named in range(NUM_SLOTS) and named not in taken:
        return named
    wanted = preferred_slot(digest, NUM_SLOTS)
    slots = ((wanted + step) % NUM_SLOTS for step in range(NUM_SLOTS))
    return next((slot for slot in slots if slot not in taken), None)


def preferred_slot(digest: str, num_slots: int) -> int:
    try:
        number = int(digest, 16)
    except ValueError:  # a registry may be damaged
        number = int.from_bytes(digest.encode())
    return number % num_slots

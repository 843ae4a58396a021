"""Finds the name that somebody may have meant, among thousands. Knows nothing of models.

Comparing two names well takes tens of microseconds, and while that is done for a name that does not exist,
everybody else on the event loop waits. So each name has the set of its pairs of neighbouring characters, as
bits of a number: how many of them differ is counted in a fraction of a microsecond, and only the few names
with the least are compared well.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from difflib import get_close_matches
from itertools import pairwise

#: The most names that are compared well.
MAX_COMPARED = 8
#: The most characters of a given name that are looked at.
_MAX_GIVEN = 128
#: Pairs of characters share this many places.
_NUM_PLACES = 256


class NearestName:
    """Names to be compared with. Immutable; made once for many questions."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = [(_pairs(name), name) for name in names]

    def find(self, given: str) -> str | None:
        """Return the name that is most like the given one; None: none is like it."""
        given = given[:_MAX_GIVEN]
        pairs = _pairs(given)
        likely = heapq.nsmallest(MAX_COMPARED, self._names, key=lambda entry: (entry[0] ^ pairs).bit_count())
        return next(iter(get_close_matches(given, [name for _, name in likely], n=1)), None)


def _pairs(name: str) -> int:
    """Return a number with a bit for each pair of neighbours; its ends are neighbours of a space."""
    places = bytearray(_NUM_PLACES)
    for one, other in pairwise(b" %b " % name.encode(errors="replace")):
        places[(31 * one + other) % _NUM_PLACES] = 1
    return int.from_bytes(places)

"""How long and how often to ask a remote server: limits of a request, pauses between tries. Asks nobody."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Retry:
    """A request ends within `timeout_s`, a read within `num_tries` requests and the pauses between them."""

    num_tries: int = 4
    first_delay_s: float = 0.1
    max_delay_s: float = 5.0
    stall_s: float = 10.0  #: longest silence: connecting, before the answer, between two pieces of its body
    timeout_s: float = 600.0  #: for one whole request, which a server that trickles would stretch for ever

    def delays_s(self) -> Iterator[float]:
        """The pause before each further try: twice as long each time, less a random part.

        The random part spreads readers that failed at the same moment: they do not come back at the same one.
        """
        for retry in range(self.num_tries - 1):
            longest_s = min(self.first_delay_s * 2**retry, self.max_delay_s)
            yield random.uniform(longest_s / 2, longest_s)

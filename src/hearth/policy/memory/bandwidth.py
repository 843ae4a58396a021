"""How fast a rung delivers, as a running average over its transfers. Measures no time itself."""

from __future__ import annotations

#: What was moved this many bytes ago counts half as much as what is moved now.
HALF_LIFE_BYTES = 4 << 30


class RunningRate:
    """Mutable; one caller at a time.

    Bytes over seconds, each summed over all transfers, so a transfer counts by its size. Both sums decay
    with the bytes that are moved, not with time: a rung that rests is as fast as it was.
    """

    def __init__(self) -> None:
        #: Decayed sums; both positive, or both 0 before the first transfer.
        self._num_bytes = 0.0
        self._seconds = 0.0

    @property
    def bytes_per_s(self) -> float | None:
        """None before the first transfer, otherwise positive: `rate.bytes_per_s or PRIOR` is safe."""
        return self._num_bytes / self._seconds if self._seconds else None

    def add(self, num_bytes: int, seconds: float) -> None:
        """One transfer. Nothing moved, or moved faster than the clock could tell, says nothing."""
        if num_bytes <= 0 or seconds <= 0:
            return
        decay = 0.5 ** (num_bytes / HALF_LIFE_BYTES)
        self._num_bytes = self._num_bytes * decay + num_bytes
        self._seconds = self._seconds * decay + seconds

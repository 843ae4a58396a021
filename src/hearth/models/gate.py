"""Weights that are still arriving, as whoever computes on them sees it. Loads nothing."""

from __future__ import annotations

from typing import Protocol


class Gate(Protocol):
    """Each call has the current stream wait for those weights, and raises if they will never come."""

    def is_open(self) -> bool:
        """All weights are in place: nobody has to ask any more."""

    def embed(self) -> None: ...

    def layer(self, layer: int) -> None: ...

    def head(self) -> None: ...

"""Whether torch keeps the memory of cuBLAS for as long as captured steps use it. Allocates none.

cuBLAS computes with scratch memory that torch keeps for each stream, and a captured step remembers where it
lay. All captures share a stream, so one model's steps rely on it for as long as any model is there.
"""

from __future__ import annotations

#: From this version on torch frees it with any graph that was captured on the stream.
_FIRST_THAT_FREES = (2, 12)


def capture_obstacle(torch_version: str) -> str | None:
    """Say why steps cannot be captured as graphs; None: they can."""
    numbers = tuple(int(part) for part in torch_version.split(".")[:2])
    if numbers < _FIRST_THAT_FREES:
        return None
    return f"torch {torch_version} frees memory that captured steps use, when another model leaves the device"

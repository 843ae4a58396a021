"""Whether torch keeps cuBLAS workspaces for as long as captured steps use them.

Torch allocates a workspace per stream, and captured steps keep its address. All captures share a stream, so
it must live as long as any model.
"""

from __future__ import annotations

#: From this version on torch frees it with any graph captured on the stream.
_FIRST_THAT_FREES = (2, 12)


def capture_obstacle(torch_version: str) -> str | None:
    numbers = tuple(int(part) for part in torch_version.split(".")[:2])
    if numbers < _FIRST_THAT_FREES:
        return None
    return f"torch {torch_version} frees memory that captured steps use, when another model leaves the device"

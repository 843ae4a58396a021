"""The memory that a worker was seen to take besides the books of its pool. Measures nothing."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import Struct

from hearth.core.errors import SnapshotCorrupt

SECTION = "memory"


class MemoryProfile(Struct, frozen=True, forbid_unknown_fields=True):
    """Memory besides the pool, at its peak: when every size of the model's steps had been run."""

    torch_bytes: int  #: of the device, that torch had taken from it; 0 on a CPU
    library_bytes: int  #: of the device, that graphs and libraries took beside torch; 0 on a CPU
    resident_bytes: int  #: of the host, in the worker's process, without the pool where that lies there

    @property
    def unbooked_bytes(self) -> int:
        """Memory of the models' device besides the pool."""
        return self.torch_bytes + self.library_bytes or self.resident_bytes

    def pack(self) -> bytes:
        return msgspec.json.encode(self)

    @staticmethod
    def of(sections: Mapping[str, memoryview]) -> MemoryProfile:
        """Return the profile in a snapshot. Raises SnapshotCorrupt: there is none."""
        try:
            with sections[SECTION] as raw:
                return msgspec.json.decode(raw, type=MemoryProfile)
        except (KeyError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise SnapshotCorrupt(f"the snapshot has no memory profile: {error!r}") from error

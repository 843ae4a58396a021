"""The memory that a worker used besides its pool, as measured. Measures nothing itself."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import Struct

from hearth.core.errors import SnapshotCorrupt

SECTION = "memory"


class MemoryProfile(Struct, frozen=True, forbid_unknown_fields=True):
    """Peak memory besides the pool, after every size of the model's steps was run."""

    torch_bytes: int  #: device memory reserved by torch; 0 on a CPU
    library_bytes: int  #: device memory of graphs and libraries; 0 on a CPU
    resident_bytes: int  #: host memory of the worker's process, without a pool in it

    @property
    def unbooked_bytes(self) -> int:
        return self.torch_bytes + self.library_bytes or self.resident_bytes

    def pack(self) -> bytes:
        return msgspec.json.encode(self)

    @staticmethod
    def of(sections: Mapping[str, memoryview]) -> MemoryProfile:
        try:
            with sections[SECTION] as raw:
                return msgspec.json.decode(raw, type=MemoryProfile)
        except (KeyError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise SnapshotCorrupt(f"the snapshot has no memory profile: {error!r}") from error

"""Profiles in snapshots: what is none is refused, also if it was written with the key."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from hearth.core.errors import SnapshotCorrupt
from hearth.snapshot.cost_profile import cost_profile_of
from hearth.snapshot.memory_profile import MemoryProfile

Read = Callable[[Mapping[str, memoryview]], object]


@pytest.mark.parametrize("read", [MemoryProfile.of, cost_profile_of], ids=["memory", "cost"])
@pytest.mark.parametrize(
    "raw",
    [None, b"", b"{}", b"[]", b"null", b'"\xff"', b'{"\xff": 1}', b'{"torch_bytes": "\xff"}', b"[" * 100_000],
    ids=lambda raw: str(raw)[-24:],
)
def test_what_is_no_profile_is_refused(read: Read, raw: bytes | None) -> None:
    sections = {} if raw is None else {"memory": memoryview(raw), "cost": memoryview(raw)}
    with pytest.raises(SnapshotCorrupt, match=r"the snapshot has no (memory|cost) profile"):
        read(sections)


def test_a_memory_profile_is_the_same_again() -> None:
    profile = MemoryProfile(torch_bytes=1, library_bytes=2, resident_bytes=3)
    assert MemoryProfile.of({"memory": memoryview(profile.pack())}) == profile
    assert profile.unbooked_bytes == 3
    assert MemoryProfile(0, 0, 7).unbooked_bytes == 7, "on a CPU"

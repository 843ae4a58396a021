from __future__ import annotations

from hearth.core.types import ModelId
from hearth.snapshot.memory_profile import MemoryProfile
from hearth.worker.torch_limit import SPARE_BYTES, TorchLimit

GUESS_BYTES = 10 << 30
A, B = ModelId("a"), ModelId("b")
SMALL, LARGE = MemoryProfile(1 << 30, 0, 0), MemoryProfile(16 << 30, 1 << 30, 0)


def test_a_guess_stands_in_until_all_engines_are_measured() -> None:
    limits: list[int] = []
    limit = TorchLimit(GUESS_BYTES, limits.append)
    limit.follow({A: SMALL})
    limit.follow({A: SMALL, B: None})
    limit.follow({A: SMALL, B: LARGE})
    limit.follow({B: LARGE, A: SMALL})
    limit.follow({})
    both_bytes = (1 << 30) + (16 << 30) + SPARE_BYTES
    assert limits == [GUESS_BYTES, (1 << 30) + SPARE_BYTES, GUESS_BYTES, both_bytes, GUESS_BYTES]
    assert (limit.num_bytes, limit.is_measured) == (GUESS_BYTES, False)

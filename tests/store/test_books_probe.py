from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path

from hearth.core.config import StoreConfig
from hearth.store.keeper import BooksProbe
from hearth.store.tiers.tiers import Tiers
from tests.store.stored import PATIENCE_S


def held_once_told(probe: BooksProbe) -> float:
    """How long the books have been held, once a look is over or has begun to wait."""
    waited = threading.Event()
    while (held_s := probe.held_s()) == 0.0:
        waited.wait(0.01)
    return held_s


def test_books_that_a_thread_keeps_are_told_of_at_once_and_free_ones_are_free(tmp_path: Path) -> None:
    looked = threading.Event()

    def look() -> None:
        tiers.pass_books()
        looked.set()

    with closing(Tiers(StoreConfig(path=str(tmp_path), host_bytes=16 << 20), is_pinned=False)) as tiers:
        probe = BooksProbe(look)
        assert probe.held_s() == 0.0
        assert looked.wait(PATIENCE_S), "nobody holds them"
        for lock in (tiers.fetcher._lock, tiers.disk._lock, tiers.prices._lock):
            with lock:  # as two threads that wait for each other would
                first_s = held_once_told(probe)
                assert 0.0 < first_s < held_once_told(probe)
                looked.clear()
            assert looked.wait(PATIENCE_S)

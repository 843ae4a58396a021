"""Random damage and random order: whatever is loaded is right, or it is not loaded."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hearth.core.errors import ChunkCorrupt, ChunkMissing
from hearth.store.format.manifest import WEIGHTS
from hearth.store.transfer.destination import whole
from hearth.store.transfer.transfer import Loader, Transfer
from tests.store.stored import CHUNK_BYTES, WEIGHTS_BYTES, flip, tiers_at, write_model

NUM_CHUNKS = -(-WEIGHTS_BYTES // CHUNK_BYTES)


@settings(max_examples=25)
@given(
    flips=st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, NUM_CHUNKS - 1)), max_size=4),
    order=st.lists(st.sampled_from("abc"), min_size=1, max_size=5),
    num_cells=st.integers(1, NUM_CHUNKS + 2),
)
def test_a_load_is_right_or_fails_by_the_name_of_a_damaged_chunk(
    flips: list[tuple[str, int]], order: list[str], num_cells: int
) -> None:
    """`c` is a copy of `a` that nobody damages: what `a` lacks is taken from there once `c` is open."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        data = {name: write_model(root / "models" / name, seed) for seed, name in enumerate("ab")}
        shutil.copytree(root / "models" / "a", root / "models" / "c")
        data["c"] = data["a"]
        damaged = {name: {chunk for which, chunk in flips if which == name} for name in "abc"}
        for name in "ab":
            for chunk in damaged[name]:
                flip(root / "models" / name / WEIGHTS, chunk * CHUNK_BYTES + 7)
        opened: set[str] = set()
        with tiers_at(root / "cache", num_cells=num_cells) as tiers:
            for name in order:
                model = tiers.open(root / "models" / name)
                opened.add(name)
                base = torch.zeros(model.manifest.num_bytes, dtype=torch.uint8)
                load = Loader(base.device).load(
                    name,
                    model.manifest,
                    whole(model.manifest, base),
                    lambda c, m=model: tiers.fetch(m, c),  # type: ignore[misc] # a default cannot be inferred
                )
                failure = _failure_of(load)
                if failure is None:
                    assert base.numpy().tobytes() == data[name]
                else:
                    assert damaged[name], failure
                    assert not (name == "a" and "c" in opened), failure
                with tiers.fetcher._lock:  # other readers of a load that failed may still be reading
                    tiers.fetcher.book.check()
                assert tiers.fetcher.book.num_resident <= num_cells
            tiers.fetcher.close()
            assert (tiers.fetcher.book.num_leased, tiers.fetcher.book.num_filling) == (0, 0)


def _failure_of(load: Transfer) -> str | None:
    try:
        load.wait()
    except (ChunkCorrupt, ChunkMissing) as error:
        return str(error)
    return None

"""Settings that the parts of `bench.load` share: how large everything is, and where the models are.

Measures nothing but the rate to the device, against which the rest is held.
"""

from __future__ import annotations

import gc
import shutil
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from bench.llama7b import CONFIG
from bench.load.models import Shelf
from bench.load.peers import Started
from bench.load.raw_readers import to_device_bytes_per_s
from bench.report import HERE, Row, arguments
from hearth.core.config import StoreConfig
from hearth.core.types import Rung
from hearth.store.format.manifest import CHUNK_BYTES
from hearth.store.format.verify import verify
from hearth.store.tiers.model import StoredModel
from hearth.store.tiers.tiers import Tiers
from hearth.store.transfer.destination import whole
from hearth.store.transfer.record import LoadRecord
from hearth.store.transfer.transfer import Loader

MIB, GIB = 1 << 20, 1 << 30
SHM = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of everything; the defaults are those of the real benchmark."""

    config: Mapping[str, object] = field(default_factory=lambda: CONFIG)
    chunk_bytes: int = CHUNK_BYTES
    chunk_sizes: tuple[int, ...] = (4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB, 64 * MIB)
    host_bytes: int = 16 * GIB  #: holds the model
    small_host_bytes: int = 8 * GIB  #: holds a quantised model
    ring_bytes: int = GIB  #: what a model runs through that must not be found; the default of StoreConfig
    pinned_bytes: int = 8 * GIB
    survey_bytes: int = 2 * GIB  #: of the file, for every raw reader
    kv_bytes: int = 2 * GIB
    prompt_tokens: int = 512
    decode_tokens: int = 128
    num_runs: int = 3
    num_fast_runs: int = 7  #: of what takes less than a second, and so varies more
    num_engine_runs: int = 5
    is_machine_ours: bool = True  #: others may be disturbed


#: Runs through everything within seconds; its numbers mean nothing.
QUICK = Scale(
    config={
        **CONFIG,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 512,
    },
    chunk_bytes=MIB // 4,
    chunk_sizes=(MIB // 8, MIB // 4),
    host_bytes=32 * MIB,
    small_host_bytes=32 * MIB,
    ring_bytes=16 * MIB,
    pinned_bytes=8 * MIB,
    survey_bytes=8 * MIB,
    kv_bytes=8 * MIB,
    prompt_tokens=32,
    decode_tokens=4,
    num_runs=2,
    num_fast_runs=2,
    num_engine_runs=2,
    is_machine_ours=False,
)


@dataclass(frozen=True, slots=True)
class Part:
    """The findings of one part of the benchmark."""

    rows: list[Row]
    details: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Timed:
    seconds: float  #: by the caller's clock
    record: LoadRecord


@dataclass(frozen=True)  # no slots: what is measured once is kept
class Setting:
    scale: Scale
    shelf: Shelf
    device: torch.device
    peers: Started
    #: Of peers that do not run here, by label and then by medium.
    earlier: Mapping[str, Mapping[str, float]]

    @cached_property
    def bytes_per_s(self) -> float:
        """Return the rate from pinned memory to the device, in one copy."""
        return to_device_bytes_per_s(self.scale.pinned_bytes, self.device)

    def bound_s(self, num_bytes: int) -> float:
        return num_bytes / self.bytes_per_s

    @property
    def store(self) -> Path:
        """Return the root of the disk tier."""
        return self.shelf.disk / "store"

    def register(self, directory: Path) -> float:
        """Check a model as deploying it does, and return the seconds; loads then check decay alone."""
        began_s = time.perf_counter()
        bad = verify(directory, store=self.store)
        assert not bad, f"a model that was just made is damaged: {bad[0]}"
        return time.perf_counter() - began_s

    @contextmanager
    def tiers(
        self, host_bytes: int, cell_bytes: int | None = None, *, is_pinned: bool = True
    ) -> Iterator[Tiers]:
        """Open new tiers, which hold nothing yet. Unless `is_pinned`, pinning has only begun."""
        gc.collect()  # the memory of those before goes with the last reference to it
        config = StoreConfig(path=str(self.store), host_bytes=host_bytes)
        tiers = Tiers(config, cell_bytes or self.scale.chunk_bytes)
        try:
            if is_pinned:
                tiers.segment.wait_pinned()
            yield tiers
        finally:
            tiers.close()

    def load(self, tiers: Tiers, model: StoredModel, base: torch.Tensor) -> Timed:
        """Load all of a model to the device."""
        began_s = time.perf_counter()
        load = Loader(self.device).load(
            model.name, model.manifest, whole(model.manifest, base), lambda chunks: tiers.fetch(model, chunks)
        )
        record = load.wait()
        self.synchronize()
        return Timed(time.perf_counter() - began_s, record)

    def open_and_load(self, tiers: Tiers, directory: Path) -> Timed:
        """Load as the peers do: from a path to tensors in new memory on the device."""
        began_s = time.perf_counter()
        model = tiers.open(directory)
        base = self.room_for(model)
        record = self.load(tiers, model, base).record
        seconds = time.perf_counter() - began_s
        del base
        self.forget()
        return Timed(seconds, record)

    def reload_s(self, tiers: Tiers, directory: Path) -> list[float]:
        """Return the seconds of loads that find everything in the tiers, after one that brought it there."""
        model = tiers.open(directory)
        base = self.room_for(model)
        self.load(tiers, model, base)
        runs = [self.load(tiers, model, base) for _ in range(self.scale.num_runs)]
        assert all(set(run.record.rungs) == {Rung.HOST} for run in runs), "the host tier is too small"
        del base
        self.forget()
        return [run.seconds for run in runs]

    def room_for(self, model: StoredModel) -> torch.Tensor:
        return torch.empty(model.manifest.num_bytes, dtype=torch.uint8, device=self.device)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def forget(self) -> None:
        """Give unused device memory back, so that the next run starts as this one did."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


@contextmanager
def shelved(scale: Scale, options: Namespace) -> Iterator[Shelf]:
    """Make room for the models. What is kept is found again by the next run."""
    disk, memory = HERE.parent / "build" / "bench-load", SHM / "hearth-bench-load"
    if options.quick:
        disk, memory = (Path(tempfile.mkdtemp(dir=place)) for place in (None, SHM))
    shelf = Shelf(disk, memory, scale.config, scale.chunk_bytes)
    try:
        if not options.quick:
            _check_room(shelf)
        yield shelf
    finally:
        if not options.keep:
            shelf.clear()


def _check_room(shelf: Shelf) -> None:
    for directory, need_bytes in ((shelf.disk, 28e9), (shelf.tmpfs, 42e9)):
        directory.mkdir(parents=True, exist_ok=True)
        used_bytes = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
        free_bytes = shutil.disk_usage(directory).free + used_bytes
        if free_bytes < need_bytes:
            sys.exit(
                f"bench.load needs {need_bytes / 1e9:.0f} GB in {directory}, free: {free_bytes / 1e9:.1f}"
            )


def flags(description: str | None) -> ArgumentParser:
    """Return a parser with the flags of `bench.load` and `bench.load.chunks`."""
    parser = arguments(description)
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that everything runs")
    parser.add_argument("--keep", action="store_true", help="leave the models for the next run")
    return parser

"""Settings that the parts of `bench.reuse` share: how large everything is, the pools, an aim of the result.

Measures nothing but the rate to the device, against which the rest is held.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from bench.llama7b import CONFIG
from bench.report import Row
from bench.reuse.models import MIX, TINY_MIX, Kind, Library, cell_tensor, drawn, library
from bench.reuse.replay import ReplayTerms, synchronize
from bench.reuse.workload import LEVELS
from hearth.core.config import EngineConfig
from hearth.memory.arena import ArenaPool
from hearth.memory.pages import Pages
from hearth.memory.pool import EvictionTermsOf, Pool
from hearth.memory.vmm import MappedPool
from hearth.models.arch import Arch
from hearth.models.families import arch_from_config
from hearth.models.layout import layout_of
from hearth.policy.memory.packing import merge_all, pack
from hearth.store.format.manifest import CHUNK_BYTES
from hearth.store.tiers.segment import Segment
from hearth.store.transfer.transfer import Loader

MIB, GIB = 1 << 20, 1 << 30
#: How many times the budget all models are: Tangram's pools of 120 and 200 GB over an L40's 45 GB.
PRESSURES = (2.7, 4.4)
#: Ways to hold models in memory, by name.
ARMS = ("mapped", "arena", "merge_all", "no_reuse")

NewPages = Callable[[int, int], Pages]  #: of so many bytes in all, and in each page


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of everything; the defaults are those of the real benchmark."""

    mix: Sequence[tuple[Sequence[Kind], int]] = MIX
    depth: float = 1 / 3  #: share of the layers that models keep, so that all of them fit into host memory
    chunk_bytes: int = CHUNK_BYTES  #: also of a page
    workspace_bytes: int = 128 * MIB
    min_kv_bytes: int = 128 * MIB  #: of a running request; how much more is random
    max_kv_bytes: int = 384 * MIB
    levels: tuple[str, ...] = tuple(LEVELS)
    num_warm_runs: int = 12  #: runs of requests until memory is full
    num_runs: int = 24  #: that count
    verify_every: int = 16  #: loads, of which all bytes are then compared
    num_repeats: int = 7
    copied_bytes: int = 4 * GIB
    #: Where one model is enough, all of its layers are there.
    whole_config: Mapping[str, object] = field(default_factory=lambda: CONFIG)
    max_changed_chunks: int = 96  #: of a fine-tune of it
    # Where it is computed with:
    dtype: str = "bfloat16"
    engine: EngineConfig = field(default_factory=EngineConfig)
    max_context: int = 1024
    prompt_tokens: int = 512
    filler_layers: tuple[int, ...] = (8, 7, 7, 7)  #: of models that together are as large as the whole one
    host_bytes: int = 28 * GIB  #: holds all of them
    place: str | None = "/dev/shm"  #: of their files

    @property
    def whole_arch(self) -> Arch:
        return arch_from_config(self.whole_config)

    @property
    def page_bytes(self) -> int:
        return self.chunk_bytes


#: Runs through everything on a device within a minute or two: real models, few requests, all bytes compared.
SHORT = Scale(levels=("L2",), num_warm_runs=2, num_runs=4, verify_every=1, num_repeats=2)

#: Runs through everything on a CPU within seconds; its numbers mean nothing.
TINY = Scale(
    mix=TINY_MIX,
    depth=1.0,
    chunk_bytes=32 << 10,
    workspace_bytes=16 << 10,
    min_kv_bytes=16 << 10,
    max_kv_bytes=96 << 10,
    levels=("L1", "L4"),
    num_warm_runs=3,
    num_runs=4,
    verify_every=2,
    num_repeats=2,
    copied_bytes=MIB,
    whole_config={
        **CONFIG,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "max_position_embeddings": 128,
    },
    max_changed_chunks=16,
    dtype="float32",
    engine=EngineConfig(max_batch_tokens=64, max_seqs=4, block_tokens=4),
    max_context=64,
    prompt_tokens=32,
    filler_layers=(2, 2, 2, 2),
    host_bytes=96 * MIB,
    place=None,
)


@dataclass(frozen=True, slots=True)
class Aim:
    what: str
    measured: float
    aim: str
    met: bool

    @staticmethod
    def most(what: str, measured: float, limit: float) -> Aim:
        return Aim(what, measured, f"at most {limit:g}", measured <= limit)


@dataclass(frozen=True, slots=True)
class Part:
    """The findings of one part of the benchmark."""

    rows: list[Row]
    aims: list[Aim]
    details: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Setting:
    scale: Scale
    device: torch.device
    loader: Loader
    new_pages: NewPages
    peers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def kinds(self) -> list[Kind]:
        """Return the eight models. The largest has to fit into the smallest budget, with a request's KV."""
        return drawn(self.scale.mix, self.scale.depth, self._is_fitting, seed=1)

    def _is_fitting(self, sizes: list[int]) -> bool:
        room = self.scale.workspace_bytes + self.scale.max_kv_bytes + 4 * self.scale.chunk_bytes
        return max(sizes) + room <= self.budget_bytes(sum(sizes), max(PRESSURES))

    def budget_bytes(self, total_bytes: int, pressure: float) -> int:
        """Return a budget in whole pages, so that all pools have the same."""
        return int(total_bytes / pressure) // self.scale.chunk_bytes * self.scale.chunk_bytes

    @contextmanager
    def library(self, archs: Mapping[str, Arch], spare_chunks: int = 0) -> Iterator[Library]:
        """Open host memory with these models, and room for so many chunks more."""
        scale = self.scale
        sizes = [layout_of(arch, "bfloat16").num_bytes for arch in archs.values()]
        sizes.append(spare_chunks * scale.chunk_bytes)
        with library(
            sizes, scale.chunk_bytes, self.device, scale.workspace_bytes, scale.max_kv_bytes
        ) as shelf:
            for name, arch in archs.items():
                shelf.add(name, arch)
            yield shelf
            shelf.models.clear()
        self._collect()

    @contextmanager
    def pool(self, arm: str, budget_bytes: int, terms: ReplayTerms) -> Iterator[Pool]:
        """Open a new pool, which is empty."""
        if arm in ("arena", "merge_all"):
            packer = pack if arm == "arena" else merge_all
            yield ArenaPool(self.device, budget_bytes, terms.of, packer=packer)
        else:
            mapped = MappedPool(self.new_pages(budget_bytes, self.scale.page_bytes), terms.of)
            try:
                yield mapped
            finally:
                mapped.close()
        self._collect()

    @contextmanager
    def worker_pool(
        self, budget_bytes: int, *, is_mapped: bool = False
    ) -> Iterator[Callable[[EvictionTermsOf], Pool]]:
        """Open what makes a pool as a worker on such a device does; `is_mapped`: of pages on any device."""
        if self.device.type != "cuda" and not is_mapped:
            yield partial(ArenaPool, self.device, budget_bytes)
            return
        mapped: list[MappedPool] = []

        def new_pool(terms_of: EvictionTermsOf) -> Pool:
            mapped.append(MappedPool(self.new_pages(budget_bytes, self.scale.page_bytes), terms_of))
            return mapped[-1]

        try:
            yield new_pool
        finally:
            for pool in mapped:
                pool.close()

    def _collect(self) -> None:
        """Let go of memory that nobody uses: tens of GB of it on a device, or pinned."""
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def bytes_per_s(self, segment: Segment) -> float:
        """Return the rate to the device: the best of a few plain loops over chunks, as fast as they go."""
        chunk_bytes = min(self.scale.chunk_bytes, segment.cell_bytes)
        num_cells = min(segment.num_cells, -(-self.scale.copied_bytes // chunk_bytes))
        target = torch.empty(num_cells * chunk_bytes, dtype=torch.uint8, device=self.device)
        best_s = float("inf")
        for _ in range(4):  # the first one warms up
            synchronize(self.device)
            began_s = time.perf_counter()
            for cell in range(num_cells):
                data = cell_tensor(segment, cell, chunk_bytes)
                target[cell * chunk_bytes : (cell + 1) * chunk_bytes].copy_(data, non_blocking=True)
            synchronize(self.device)
            best_s = min(best_s, time.perf_counter() - began_s)
        return len(target) / best_s

"""A random base and many adapters of it in files, and the memory that a worker needs for them.

Measures nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from bench.llama7b import CONFIG
from bench.lora.random_adapters import query_value_layout, write_adapter
from bench.random_model import TINY as TINY_CONFIG
from bench.random_model import write_random
from hearth.core.config import EngineConfig
from hearth.core.messages import AdapterOrder, HostModel
from hearth.core.sizes import StepLimits
from hearth.core.types import AdapterId, ModelId
from hearth.engine.assemble import ModelSpec, block_bytes, tables_bytes, workspace_bytes
from hearth.memory.arena import ArenaPool
from hearth.memory.cuda_pages import CudaPages
from hearth.memory.pool import EvictionTermsOf, Pool
from hearth.memory.vmm import MappedPool
from hearth.models.dtypes import DTYPES
from hearth.store.format.adapter_manifest import stored_bytes
from hearth.store.format.manifest import CHUNK_BYTES, read_manifest

BASE = ModelId("base")
#: Adapters are cut out of one row of random numbers, so far from each other: no two have a chunk in common.
STRIDE_BYTES = 4096
NUM_WRITERS = 8


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of everything; the defaults are those of the real benchmark."""

    config: Mapping[str, object]
    device: torch.device
    dtype: str = "bfloat16"
    rank: int = 8
    num_adapters: int = 1000
    num_room: int = 100  #: of these the device has room for
    batch: int = 64
    prompt_tokens: int = 32
    new_tokens: int = 48  #: of a request
    num_requests: int = 1000
    num_cold: int = 24  #: adapters whose first token is timed
    num_swaps: int = 40  #: beside a batch that runs
    max_context: int = 1024
    place: str | None = "/dev/shm"

    @property
    def engine(self) -> EngineConfig:
        return EngineConfig(max_batch_tokens=2048, max_seqs=self.batch * 3 // 2)


def full(num_layers: int, num_adapters: int) -> Scale:
    config = {**CONFIG, "num_hidden_layers": num_layers}
    return Scale(config, torch.device("cuda", 0), num_adapters=num_adapters)


#: Runs through everything on a CPU within seconds; its numbers mean nothing.
TINY = Scale(
    config=TINY_CONFIG,
    device=torch.device("cpu"),
    dtype="float32",
    rank=4,
    num_adapters=40,
    num_room=12,
    batch=4,
    prompt_tokens=8,
    new_tokens=6,
    num_requests=60,
    num_cold=4,
    num_swaps=6,
    max_context=256,
    place=None,
)


@dataclass(frozen=True, slots=True)
class Library:
    """A base and its adapters, as a worker is told of them."""

    scale: Scale
    host: HostModel
    adapters: Sequence[AdapterOrder]
    adapter_bytes: int  #: of each, rounded up as files and arenas have them
    base_bytes: int  #: that the base has on the device, with all its KV
    page_bytes: int

    @staticmethod
    def write(scale: Scale, place: Path) -> Library:
        where = write_random(place / "base", scale.config, scale.dtype, seed=1, device=scale.device)
        manifest = read_manifest(where)
        arch, page_bytes = manifest.arch, CHUNK_BYTES if scale.device.type == "cuda" else 4096
        limits = StepLimits(2048, scale.engine.max_seqs or 0, scale.engine.block_tokens)
        spec = ModelSpec(arch, DTYPES[scale.dtype], scale.max_context, limits, frozenset())
        kv_bytes = (scale.batch * 5 // 4 * scale.max_context // 2 // limits.block_tokens) * block_bytes(spec)
        parts = [manifest.num_bytes, kv_bytes, tables_bytes(spec), workspace_bytes(spec, scale.device)]
        parts += [16 * block_bytes(spec)] if scale.device.type == "cpu" else []  # seams of an arena
        host = HostModel(
            *(BASE, 0, str(where), manifest.digest, 1.0, scale.max_context, limits, kv_bytes, kv_bytes, ()),
        )
        layout = query_value_layout(arch.dimensions, scale.rank, scale.dtype)
        num_bytes = stored_bytes(layout)
        bank = _random_bytes(num_bytes + scale.num_adapters * STRIDE_BYTES, scale)

        def write_one(number: int) -> AdapterOrder:
            name = f"adapter-{number}"
            content = bank[number * STRIDE_BYTES :][:num_bytes]
            written = write_adapter(arch, layout, content, place / name)
            return AdapterOrder(AdapterId(written.digest), name, str(place / name))

        with ThreadPoolExecutor(NUM_WRITERS) as writers:
            adapters = list(writers.map(write_one, range(scale.num_adapters)))
        base_bytes = sum(-(-part // page_bytes) * page_bytes for part in parts)
        return Library(scale, host, adapters, num_bytes, base_bytes, page_bytes)

    @property
    def host_bytes(self) -> int:
        """Host memory for all of it: a chunk has a cell to itself, however short it is."""
        chunks = len(read_manifest(Path(self.host.where)).chunks)
        return (chunks + len(self.adapters) + 16) * CHUNK_BYTES

    def budget_bytes(self, num_adapters: int) -> int:
        """Return the memory of a device that has room for the base and so many of its adapters."""
        room_bytes = num_adapters * self.adapter_bytes
        return self.base_bytes + -(-room_bytes // self.page_bytes) * self.page_bytes

    @contextmanager
    def pool(self, num_adapters: int) -> Iterator[Callable[[EvictionTermsOf], Pool]]:
        """Open what makes a pool with room for so many adapters."""
        device, budget_bytes = self.scale.device, self.budget_bytes(num_adapters)
        if device.type != "cuda":
            yield partial(ArenaPool, device, budget_bytes)
            return
        pools: list[MappedPool] = []

        def new_pool(terms_of: EvictionTermsOf) -> Pool:
            pools.append(MappedPool(CudaPages(device, budget_bytes), terms_of))
            return pools[-1]

        try:
            yield new_pool
        finally:
            for pool in pools:
                pool.close()


def _random_bytes(num_bytes: int, scale: Scale) -> memoryview:
    dtype = DTYPES[scale.dtype]
    drawn = torch.empty(num_bytes // dtype.itemsize, dtype=dtype, device=scale.device).normal_(std=0.01)
    return memoryview(drawn.cpu().view(torch.uint8).numpy())

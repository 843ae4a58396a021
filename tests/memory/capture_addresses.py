"""Captures all steps of models over mapped pages and prints where all that they use lies. Has no tests.

python -m tests.memory.capture_addresses MODEL ...
"""

from __future__ import annotations

import os
import sys

import torch

from hearth.core.config import EngineConfig
from hearth.core.types import Digest, ModelId
from hearth.engine.assemble import (
    Memory,
    ModelSpec,
    assemble,
    block_bytes,
    own_limits,
    tables_bytes,
    workspace_bytes,
)
from hearth.engine.graph_capture import use_library_memory
from hearth.memory.cuda_pages import CudaPages
from hearth.memory.library_memory import LibraryMemory
from hearth.memory.pool import Shape
from hearth.memory.vmm import MappedPool
from hearth.models.families import read_arch
from hearth.models.layout import layout_of
from hearth.models.weights import bind
from hearth.worker.runtime import LIBRARY_BYTES
from tests.core.test_sizes import memory_of
from tests.memory.pool_caller import Holds
from tests.models.zoo import build, pack_directory

DEVICE = torch.device("cuda", 0)
CONFIG = EngineConfig(max_batch_tokens=256, max_seqs=8, block_tokens=16)
DTYPE = "bfloat16"


def main(names: list[str]) -> None:
    torch.cuda.set_device(DEVICE)
    library = LibraryMemory(CudaPages(DEVICE, LIBRARY_BYTES))
    pool = library.torch_pool()
    use_library_memory(pool)
    assert library.num_fallbacks == 0
    for segment in pool.snapshot():
        print("library", hex(segment["address"]), segment["total_size"])
    used_bytes = library.used_bytes
    models = MappedPool(CudaPages(DEVICE, 512 << 20), Holds().eviction_terms)
    for name in names:
        capture(name, models)
    assert library.used_bytes == used_bytes, f"captures took {library.used_bytes - used_bytes} bytes more"


def capture(name: str, models: MappedPool) -> None:
    directory = build(name).directory
    arch = read_arch(directory)
    layout = layout_of(arch, DTYPE)
    limits = own_limits(CONFIG, arch, torch.bfloat16, DEVICE)
    spec = ModelSpec(arch, torch.bfloat16, arch.max_positions, limits, frozenset())
    slot = sum(name.encode()) % 100
    shape = Shape(
        digest=Digest(f"{slot:064x}"),
        stored=layout,
        served=layout,
        chunk_bytes=1 << 20,
        chunks=(),
        workspace_bytes=workspace_bytes(spec, DEVICE),
        tables_bytes=tables_bytes(spec),
        block_bytes=block_bytes(spec),
        max_blocks=64,
        slot=slot,
    )
    space = models.place(ModelId(name), shape)
    models.prepare_rest(ModelId(name))
    for gap in space.gaps:
        models.prepare(ModelId(name), gap.part)
    base = next(iter(space.places.values())).base
    pack_directory(directory, arch, layout, base)
    models.load_ended(ModelId(name), is_whole=True)
    memory = Memory(space.workspace, space.tables, space.kv, space.sink, floor_blocks=32)
    engine = assemble(spec, bind(arch, layout, space.places), CONFIG, DEVICE, memory)
    engine.runner.fill_tables()
    num_allocations = watch_captures()
    engine.runner.capture_all()
    print(name, "allocations", sum(num_allocations), "captures", len(num_allocations))
    begin = base.data_ptr()
    for address in sorted(memory_of(engine)):
        assert begin <= address < begin + (512 << 30), f"{name} computes with {address:#x} at {begin:#x}"
        print(name, hex(address))


def watch_captures() -> list[int]:
    """Return a list that each capture adds its number of allocations to."""
    begin, end, found = torch.cuda.CUDAGraph.capture_begin, torch.cuda.CUDAGraph.capture_end, list[int]()

    def num_so_far() -> int:
        return int(torch.cuda.memory_stats()["allocation.all.allocated"])

    def begun(graph: torch.cuda.CUDAGraph, **options: object) -> None:
        begin(graph, **options)
        found.append(-num_so_far())

    def ended(graph: torch.cuda.CUDAGraph) -> None:
        found[-1] += num_so_far()
        end(graph)

    torch.cuda.CUDAGraph.capture_begin, torch.cuda.CUDAGraph.capture_end = begun, ended
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # as a worker ends: torch may call back for as long as it is there

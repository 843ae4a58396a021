"""Captures a small graph over memory at fixed addresses, or restores one that another process has captured.

    python tests/snapshot/moved_graph.py save|load DIRECTORY

It has kernels of ours, of cuBLAS and of torch, a copy and a fill. Prints `equal` if all is as it should be.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from hearth.engine.graph_capture import GraphCapture, use_library_memory
from hearth.kernels.norm import add_norm
from hearth.kernels.variants import loaded_functions
from hearth.memory.cuda_pages import FIXED_ADDRESSES, CudaPages
from hearth.memory.library_memory import LibraryMemory
from hearth.snapshot.kernel_handles import KernelHandles
from hearth.snapshot.native_rebuild import NativeRebuild
from hearth.snapshot.restored_graphs import RestoredGraphs, pack_graphs
from hearth.snapshot.trial_mark import TrialMark
from hearth.system.cuda.driver import CudaDriver
from hearth.system.cuda.graphs import CudaGraphs

DEVICE = torch.device("cuda", 0)
ROWS, WIDTH = 64, 512
NAME = f"toy-{ROWS}"


@dataclass(slots=True)
class Toy:
    """Buffers at fixed addresses, and work on them."""

    driver: CudaDriver
    x: torch.Tensor
    delta: torch.Tensor
    weight: torch.Tensor
    normed: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    wide: torch.Tensor
    copied: torch.Tensor
    filled: torch.Tensor

    @staticmethod
    def at(address: int, pages: CudaPages, driver: CudaDriver) -> Toy:
        offset = 0

        def take(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            nonlocal offset
            num_bytes = torch.Size(shape).numel() * dtype.itemsize
            begin, offset = offset, offset + -(-num_bytes // 512) * 512
            return pages.bytes_at(address + begin, num_bytes).view(dtype).view(shape)

        return Toy(
            driver,
            take(ROWS, WIDTH),
            take(ROWS, WIDTH),
            take(WIDTH),
            take(ROWS, WIDTH),
            take(2 * WIDTH, WIDTH),
            take(ROWS, 2 * WIDTH),
            *(take(ROWS, WIDTH, dtype=torch.float32) for _ in range(2)),
            take(WIDTH, dtype=torch.float32),
        )

    def fill(self, seed: int) -> None:
        generator = torch.Generator(DEVICE).manual_seed(seed)
        for tensor in (self.x, self.delta, self.weight, self.up):
            tensor.copy_(torch.randn(tensor.shape, device=DEVICE, generator=generator) * 0.1)
        for tensor in (self.normed, self.down, self.wide, self.copied, self.filled):
            tensor.fill_(torch.nan)

    def work(self) -> None:
        add_norm(self.delta, self.x, self.weight, None, 1e-5, is_rms=True, out=self.normed)
        torch.mm(self.normed, self.up.t(), out=self.down)
        torch.addmm(self.weight, self.down, self.up, out=self.delta)
        add_norm(self.delta, self.x, self.weight, None, 1e-5, is_rms=True, out=self.normed)
        self.wide.copy_(self.normed)
        self.copied.copy_(self.wide)
        stream = torch.cuda.current_stream().cuda_stream
        self.driver.call("cuMemsetD32Async", self.filled.data_ptr(), 0x3F800000, WIDTH, stream)

    def result(self) -> list[float]:
        torch.cuda.synchronize()
        tensors = (self.x, self.normed, self.copied, self.filled)
        return [float(value) for tensor in tensors for value in tensor.double().flatten().tolist()]


def main(action: str, directory: Path) -> None:
    torch.cuda.set_device(DEVICE)
    library = LibraryMemory(CudaPages(DEVICE, 64 << 20))
    use_library_memory(library.torch_pool())
    pages, driver = CudaPages(DEVICE, 32 << 20), CudaDriver(0)
    address = pages.reserve(pages.base_address)  # behind that of libraries
    assert address in FIXED_ADDRESSES, hex(address)
    pages.map(address, *range(pages.num_pages))
    driver.declare(
        {"cuMemsetD32Async": (ctypes.c_ulonglong, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p)}
    )
    toy, graphs = Toy.at(address, pages, driver), CudaGraphs(driver)
    toy.fill(0)
    toy.work()  # eagerly, so that kernels are compiled
    if action == "save":
        save(toy, graphs, directory)
    else:
        load(toy, graphs, directory)


def save(toy: Toy, graphs: CudaGraphs, directory: Path) -> None:
    captured = GraphCapture().capture(toy.work)
    toy.fill(1)
    captured.replay()
    (directory / "result").write_text(json.dumps(toy.result()))
    binaries = {function: binary for binary, function in loaded_functions().items()}
    sections = pack_graphs(graphs, {NAME: captured.raw_cuda_graph()}, binaries, FIXED_ADDRESSES)
    (directory / "packed").write_bytes(sections[f"graph/{NAME}"])


def load(toy: Toy, graphs: CudaGraphs, directory: Path) -> None:
    rebuild = NativeRebuild.load(graphs, None)
    assert rebuild is not None, "there is no C compiler"
    handles = KernelHandles(graphs, loaded_functions)
    sections = {f"graph/{NAME}": memoryview((directory / "packed").read_bytes())}
    mark = TrialMark(directory / "packed")
    restored = RestoredGraphs(handles, sections, mark, lambda reason: print("discarded", reason))

    def rehearse(name: str) -> None:
        captured = GraphCapture().capture(toy.work)  # kept while it is read
        handles.learn(captured.raw_cuda_graph())

    restored.restore(rebuild, rehearse, give_way=lambda: None)
    graph = restored.find(NAME)
    assert graph is not None
    toy.fill(1)
    graph.replay()
    assert toy.result() == json.loads((directory / "result").read_text()), "not as it was captured"
    for seed in (2, 3):
        toy.fill(seed)
        graph.replay()
        found = toy.result()
        toy.fill(seed)
        toy.work()
        assert found == toy.result(), f"not as without a graph: {seed=}"
    print("equal")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # as a worker ends: torch may call back for as long as it is there

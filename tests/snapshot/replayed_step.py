"""Makes a snapshot of a tiny model's graphs, or restores and replays those that another process has made.

    python tests/snapshot/replayed_step.py save|load|stray DIRECTORY

    save     a step of one prompt is captured, without an adapter and with one, and kept with what it computed
    load     the graphs are restored and tried beside a step, serve the next, and compute the same
    stray    as load, and once more while the pages of the weights are gone: a wrong graph, made on purpose

Prints `equal` if all is as it should be. Meant to be watched while it replays:

    compute-sanitizer --tool memcheck --error-exitcode 1 --report-api-errors no \
        python tests/snapshot/replayed_step.py load DIRECTORY
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from hearth.core.sizes import StepLimits
from hearth.core.types import AdapterId, RequestId, SamplingParams
from hearth.engine.dry_run import DryMemory, KernelNeeds, dry_runner
from hearth.engine.graph_capture import GraphCapture, use_library_memory
from hearth.engine.runner import Runner
from hearth.kernels.variants import loaded_functions
from hearth.memory.cuda_pages import FIXED_ADDRESSES, CudaPages
from hearth.memory.library_memory import LibraryMemory
from hearth.models.adapter import AdapterLayout, AdapterSlice, AdapterTarget, Projection, projection_shape
from hearth.models.families import arch_from_config
from hearth.policy.batch.blocks import SINK_BLOCK
from hearth.policy.batch.plan import Admission, DecodeRows, Row, StepPlan, TableWrite, TableWrites
from hearth.snapshot.directory import SnapshotDirectory
from hearth.snapshot.graph_names import is_for_adapters
from hearth.snapshot.kernel_handles import KernelHandles
from hearth.snapshot.native_rebuild import NativeRebuild
from hearth.snapshot.restored_graphs import RestoredGraphs, pack_graphs
from hearth.snapshot.trial_mark import TrialMark
from hearth.system.cuda.driver import CudaDriver
from hearth.system.cuda.graphs import CudaGraphs
from tests.snapshot.fingerprints import FINGERPRINT

DEVICE = torch.device("cuda", 0)
ARCH = arch_from_config(
    {
        **{"model_type": "llama", "num_hidden_layers": 2, "vocab_size": 128, "hidden_size": 64},
        **{"num_attention_heads": 2, "intermediate_size": 96, "max_position_embeddings": 64},
    }
)
LIMITS = StepLimits(max_batch_tokens=64, max_seqs=4, block_tokens=16)
PROMPT = (3, 14, 15, 92, 65, 35)
ADAPTER, RANK = AdapterId("some adapter"), 5
#: Names of the graphs of such a step: its body and its tail, of the bare model and with adapters.
NUM_GRAPHS = 4


class Tiny:
    """A model of random weights, which lie with all else at addresses that are the same in every process."""

    def __init__(self) -> None:
        self.pages = CudaPages(DEVICE, 5 * (16 << 20))
        self.address = self.pages.reserve(self.pages.base_address)
        assert self.address in FIXED_ADDRESSES, hex(self.address)
        self._parts: list[torch.Tensor] = []  #: whole pages each, the weights first
        needs = KernelNeeds.on(DEVICE, ARCH, "bfloat16", "none", LIMITS)
        self.runner: Runner = dry_runner(needs, DryMemory(self._take, self._take))
        generator = torch.Generator(DEVICE).manual_seed(0)
        weights = self._parts[0].view(torch.bfloat16)
        weights.copy_(torch.randn(weights.shape, device=DEVICE, generator=generator) * 0.1)
        self.runner.fill_tables()
        self._add_adapter(generator)
        graphs, self.runner.layers.graphs = self.runner.layers.graphs, None
        for adapter in (None, ADAPTER):
            self.step(adapter)  # eagerly, so that kernels are compiled
        self.runner.layers.graphs = graphs

    def lose_weights(self) -> None:
        """Unmap the pages of the weights."""
        self.pages.unmap(self.address, len(self._parts[0]) // self.pages.page_bytes)

    def step(self, adapter: AdapterId | None) -> list[float]:
        """Run a step of one prompt, and return its token and its logits."""
        request = RequestId("a request")
        admission = Admission(request, 0, PROMPT, len(PROMPT), 0, SamplingParams(temperature=0.0))
        row = Row(request, 0, 0, len(PROMPT), PROMPT, samples=True, adapter=adapter)
        writes = TableWrites.of(TableWrite(0, 0, (SINK_BLOCK + 1,)))
        result = self.runner.launch(StepPlan(0, (admission,), writes, DecodeRows(), (row,))).wait()
        logits = self.runner.layers.decoder.logits[0].tolist()
        self.runner.settle()
        return [*result.tokens, *logits]

    def _take(self, num_bytes: int) -> torch.Tensor:
        """Map whole pages for each part of the memory, all of which are zeros."""
        page_bytes = self.pages.page_bytes
        first, num_pages = sum(map(len, self._parts)) // page_bytes, -(-num_bytes // page_bytes)
        begin = self.address + first * page_bytes
        self.pages.map(begin, *range(first, first + num_pages))
        self._parts.append(self.pages.bytes_at(begin, num_pages * page_bytes).zero_())
        return self._parts[-1][:num_bytes]

    def _add_adapter(self, generator: torch.Generator) -> None:
        """Have an adapter of all projections lie where torch finds memory: no two processes agree on it."""
        targets = []
        for layer in range(ARCH.num_layers):
            for projection in Projection:
                outputs, inputs = projection_shape(ARCH.dimensions, projection)
                targets.append(AdapterTarget(layer, projection, inputs, (AdapterSlice(0, outputs, RANK),)))
        layout = AdapterLayout.of(targets, "bfloat16")
        numbers = torch.randn(layout.num_bytes // 2, device=DEVICE, generator=generator) * 0.1
        stored = numbers.bfloat16().view(torch.uint8)
        self.runner.add_adapter(ADAPTER, layout, [stored[part.begin : part.end] for _, part in layout.layers])


def save(tiny: Tiny, driver: CudaGraphs, directory: SnapshotDirectory) -> None:
    computed = [tiny.step(adapter) for adapter in (None, ADAPTER)]
    assert computed[0] != computed[1], "the adapter changes nothing"
    graphs = tiny.runner.layers.graphs
    assert graphs is not None
    handles = {key.name: graph.raw_cuda_graph() for key, graph in graphs.captured.items()}
    assert len(handles) == NUM_GRAPHS, sorted(handles)
    binaries = {function: binary for binary, function in loaded_functions().items()}
    sections = pack_graphs(driver, handles, binaries, FIXED_ADDRESSES)
    numbers = torch.tensor(computed, dtype=torch.float64).numpy().tobytes()
    directory.save(FINGERPRINT, {**sections, "computed": numbers})


def load(tiny: Tiny, driver: CudaGraphs, directory: SnapshotDirectory) -> None:
    opened, graphs = directory.load(FINGERPRINT), tiny.runner.layers.graphs
    assert opened is not None
    assert graphs is not None
    with opened["computed"] as raw:
        computed = torch.frombuffer(bytearray(raw), dtype=torch.float64).view(2, -1).tolist()
    handles, rebuild = KernelHandles(driver, loaded_functions), NativeRebuild.load(driver, None)
    assert rebuild is not None, "there is no C compiler"

    def rehearse(name: str) -> None:
        captured = tiny.runner.layers.rehearse(name, GraphCapture())
        assert captured is not None, name
        handles.learn(captured.raw_cuda_graph())

    def go_on(restored: RestoredGraphs) -> None:
        restored.restore(rebuild, rehearse, give_way=lambda: None)

    mark = TrialMark(opened.path)
    restored = RestoredGraphs(
        handles, opened, mark, lambda reason: print("discarded", reason), is_for_adapters, go_on
    )
    graphs.restore_from(restored)
    go_on(restored)
    graphs.want_adapters()
    for time in ("eagerly, with the graphs behind it", "by the graphs"):
        assert [tiny.step(adapter) for adapter in (None, ADAPTER)] == computed, f"not as captured: {time}"
    assert (graphs.num_restored, len(graphs.captured)) == (NUM_GRAPHS, 0), "not all graphs serve"


def main(action: str, directory: Path) -> None:
    torch.cuda.set_device(DEVICE)
    use_library_memory(LibraryMemory(CudaPages(DEVICE, 64 << 20)).torch_pool())
    tiny, driver = Tiny(), CudaGraphs(CudaDriver(0))
    snapshots = SnapshotDirectory.open(directory, quota_bytes=64 << 20)
    if action == "save":
        save(tiny, driver, snapshots)
        return
    load(tiny, driver, snapshots)
    if action == "stray":
        torch.cuda.synchronize()
        tiny.lose_weights()
        tiny.step(None)
    print("equal")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # as a worker ends: torch may call back for as long as it is there

"""Captures the first steps of models that may be hosted later, so that their kernels are loaded. Runs none.

The first step of a process launches dozens of kernels that torch or cuBLAS has to load, which took 0.1 s of a
first token. A captured kernel never runs, so one page is mapped at all addresses: a rehearsal takes 16 MiB.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from hearth.core.types import RequestId, SamplingParams
from hearth.engine.dry_run import DryMemory, KernelNeeds, dry_runner
from hearth.engine.graph_capture import GraphCapture
from hearth.engine.graph_trial import rehearse_trial
from hearth.engine.graphs import CapturedGraph
from hearth.engine.runner import Runner
from hearth.engine.step_shape import GraphKey, StepPart
from hearth.memory.pages import Pages
from hearth.policy.batch.blocks import SINK_BLOCK
from hearth.policy.batch.plan import Admission, DecodeRows, Row, StepPlan, TableWrite, TableWrites

log = logging.getLogger(__name__)


def rehearse(
    needs: KernelNeeds,
    pages: Pages,
    device: torch.device,
    give_way: Callable[[], None],
    learn: Callable[[CapturedGraph], None],
    keys_of: Callable[[Runner], Sequence[GraphKey]],
) -> None:
    """Load all library kernels of some steps. Their Triton kernels must be on the device.

    `keys_of` returns the parts of these steps. Any one thread may call this while steps run. `learn` is given
    each graph, which is dropped then. The first of `pages` is used meanwhile.
    """
    began_s = time.perf_counter()
    with aliased_memory(pages, device) as memory:
        runner = dry_runner(needs, memory)
        runner.rehearse_inputs(_plan())
        keys = keys_of(runner)
        for key in keys:
            give_way()
            if (graph := runner.layers.rehearse(key.name, GraphCapture())) is not None:
                learn(graph)
        if keys:
            give_way()
            rehearse_trial(runner.layers, runner.sampler, GraphCapture())
        runner.synchronize()
        del runner  # before its memory
    log.info("steps_rehearsed sizes=%d seconds=%.3f", len(keys), time.perf_counter() - began_s)


def first_step_keys(runner: Runner) -> list[GraphKey]:
    """Return the parts of the first steps of a single request, smallest first."""
    sizes = runner.layers.sizes
    if not sizes.decode:
        return []
    return [
        GraphKey(StepPart.TAIL, sizes.samples[0]),
        GraphKey(StepPart.DECODE, sizes.decode[0]),
        *(GraphKey(StepPart.MIXED, size) for size in sizes.mixed),
    ]


def other_keys(runner: Runner) -> list[GraphKey]:
    first = set(first_step_keys(runner))
    keys = {key for shape in runner.layers.sizes.all_shapes() for key in shape.keys} - first
    return sorted(keys, key=lambda key: (key.size, key.name))


@contextmanager
def aliased_memory(pages: Pages, device: torch.device) -> Iterator[DryMemory]:
    """Yield memory that is one page throughout, except for tables, which are written."""
    address, num_mapped = pages.reserve(None), 0

    def take(num_bytes: int) -> torch.Tensor:
        nonlocal num_mapped
        num_more, begin = -(-num_bytes // pages.page_bytes), address + num_mapped * pages.page_bytes
        pages.map(begin, *[0] * num_more)
        num_mapped += num_more
        return pages.bytes_at(begin, num_bytes)

    try:
        yield DryMemory(take, lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8, device=device))
    finally:
        if num_mapped:
            pages.unmap(address, num_mapped)
        pages.free(address)


def _plan() -> StepPlan:
    request, tokens = RequestId("rehearsal"), (0,)
    admission = Admission(request, 0, tokens, len(tokens), 0, SamplingParams(temperature=0.0))
    row = Row(request, 0, 0, len(tokens), tokens, samples=True)
    writes = TableWrites.of(TableWrite(0, 0, (SINK_BLOCK,)))
    return StepPlan(0, (admission,), writes, DecodeRows(), (row,))

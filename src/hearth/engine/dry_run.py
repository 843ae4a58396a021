"""Runs steps over tensors without memory, to find every kernel variant that a model can need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from hearth.core.config import EngineConfig
from hearth.core.sizes import StepLimits, StepSize
from hearth.engine.assemble import Memory, ModelSpec, assemble_runner, block_bytes, tables_bytes
from hearth.engine.runner import Runner
from hearth.models.arch import Arch
from hearth.models.dtypes import DTYPES
from hearth.models.formats import QUANTS, QuantPlan
from hearth.models.layout import layout_of
from hearth.models.weights import bind, contiguous_places
from hearth.models.workspace import Workspace
from hearth.policy.batch.blocks import SINK_BLOCK


@dataclass(frozen=True, slots=True)
class KernelNeeds:
    arch: Arch  #: with few layers, as most are alike
    dtype: str
    quant: str  #: a plan of models/formats.py
    limits: StepLimits
    num_processors: int  #: of the device
    capability: int  #: of the device, as in 90 for 9.0

    @staticmethod
    def on(device: torch.device, arch: Arch, dtype: str, quant: str, limits: StepLimits) -> KernelNeeds:
        found = torch.cuda.get_device_properties(device)
        capability = 10 * found.major + found.minor
        return KernelNeeds.of(arch, dtype, quant, limits, found.multi_processor_count, capability)

    @staticmethod
    def of(
        arch: Arch, dtype: str, quant: str, limits: StepLimits, num_processors: int, capability: int
    ) -> KernelNeeds:
        layers = _differing(arch, quant)
        few = quant if quant in QUANTS else QuantPlan.parse(quant).only(layers)
        return KernelNeeds(_only(arch, layers), dtype, few, limits, num_processors, capability)


@torch.inference_mode()
def dry_run(needs: KernelNeeds) -> None:
    """Run a step of every shape that the model can have, with sampling."""
    runner = dry_runner(needs)
    layers = runner.layers
    for shape in layers.sizes.all_shapes():
        runner.run_padding(shape)
        # Draws, and before them the best tokens again, as after rules that change logits.
        logits, rows = layers.decoder.wide_logits[: shape.num_logits], layers.inputs.fill_padding(shape)
        runner.sampler.take_best(logits, rows.device_slots)
        runner.sampler.draw(logits, rows)
    # Adapters add the same kernels in all sizes, but others with prompts than without.
    for has_prompts in (False, True):
        shapes = layers.sizes.all_shapes(has_adapters=True)
        runner.run_padding(next(shape for shape in shapes if shape.has_prompts is has_prompts))


@dataclass(frozen=True, slots=True)
class DryMemory:
    large: Callable[[int], torch.Tensor]  #: weights, workspace and KV: never touched
    tables: Callable[[int], torch.Tensor]


def dry_runner(needs: KernelNeeds, memory: DryMemory | None = None) -> Runner:
    """Return a runner over uninitialised memory; None: over tensors without memory."""
    memory = memory or DryMemory(_without_memory, _without_memory)
    arch, limits = needs.arch, needs.limits
    # No variant depends on the context (`do_not_specialize` in kernels).
    spec = ModelSpec(arch, DTYPES[needs.dtype], arch.max_positions, limits, frozenset())
    layout = layout_of(arch, needs.dtype, needs.quant)
    weights = bind(arch, layout, contiguous_places(layout, memory.large(layout.num_bytes)))
    size = StepSize.of(limits, "cuda", needs.num_processors)
    parts = Memory(
        memory.large(Workspace.num_bytes(arch, spec.dtype, size)),
        memory.tables(tables_bytes(spec)),
        memory.large(2 * block_bytes(spec)),
        sink=SINK_BLOCK,
        floor_blocks=1,
    )
    return assemble_runner(spec, weights, EngineConfig(), parts, size)


def _without_memory(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="meta")


def _differing(arch: Arch, quant: str) -> list[int]:
    """Return the layers that differ: first, second, last, one of each attention and of each quantisation."""
    last, plan = arch.num_layers - 1, QuantPlan.parse(quant)
    kinds = [
        (*attention, plan.forms_of_layer(layer))
        for layer, attention in enumerate(zip(arch.windows, arch.layer_ropes, strict=True))
    ]
    return sorted({0, min(1, last), last, *map(kinds.index, set(kinds))})


def _only(arch: Arch, layers: list[int]) -> Arch:
    windows = tuple(arch.windows[layer] for layer in layers)
    ropes = tuple(arch.layer_ropes[layer] for layer in layers)
    return replace(arch, num_layers=len(layers), windows=windows, layer_ropes=ropes)

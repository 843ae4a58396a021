"""Builds an engine from a model and a configuration: sizes its memory, wires its parts. Loads nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch

from hearth.core.config import EngineConfig
from hearth.core.errors import DeviceError
from hearth.core.sizes import Buffer, StepLimits, StepSize, block_buffer, run_bytes, table_buffers
from hearth.core.types import Stage
from hearth.engine.engine import Engine, StepMarks
from hearth.engine.engine_tables import EngineTables
from hearth.engine.graph_capture import GraphCapture
from hearth.engine.graphs import StepGraphs
from hearth.engine.guide import Guides
from hearth.engine.inputs import InputBuffers
from hearth.engine.layer_runner import LayerRunner
from hearth.engine.pipeline import LaterStages, PipelineRunner
from hearth.engine.runner import Runner
from hearth.engine.sampler import Sampler
from hearth.engine.step_shape import PaddedSizes
from hearth.engine.upload import Uploads
from hearth.kernels import packed_products
from hearth.kernels.cublas_workspace import capture_obstacle
from hearth.kernels.jit import HAS_TRITON
from hearth.kernels.prefill_attention import PromptKernel, prompt_kernel, prompt_tile_tokens
from hearth.models.arch import Arch
from hearth.models.buffers import name_of
from hearth.models.decoder import Decoder, heads_of
from hearth.models.weights import Weights
from hearth.models.workspace import Workspace
from hearth.policy.batch.batch_limits import BatchLimits
from hearth.policy.batch.batcher import Batcher
from hearth.policy.batch.blocks import SINK_BLOCK, BlockBook
from hearth.policy.batch.prompt_allowance import PromptAllowance
from hearth.policy.batch.step_limits import step_limits
from hearth.system.host_memory import machine_bytes

#: Share of the machine's memory for the KV of a CPU engine. Unwritten memory costs nothing.
_CPU_SHARE = 0.25

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    arch: Arch
    dtype: torch.dtype
    max_context: int
    limits: StepLimits
    eos_ids: frozenset[int]
    tokenizer_json: Path | None = None  #: for guided decoding; None: not supported
    stage: Stage | None = None  #: None: the whole model
    #: The layers that KV blocks have room for, if more than the stage's: of a member that will become whole.
    wider_kv: range | None = None

    @property
    def layers(self) -> range:
        return self.arch.dimensions.layers if self.stage is None else self.stage.layers

    @property
    def kv_layers(self) -> range:
        return self.layers if self.wider_kv is None else self.wider_kv


@dataclass(frozen=True, slots=True)
class Memory:
    """Device memory for all but the weights, owned by the caller."""

    workspace: torch.Tensor  #: of `workspace_bytes`
    tables: torch.Tensor  #: of `tables_bytes`
    #: Every block that the engine may ever get, at its number times `block_bytes`. Most are unmapped: none
    #: but the sink is touched before it is added.
    kv: torch.Tensor
    sink: int  #: receives the writes of padded rows; always mapped
    floor_blocks: int  #: promised to the engine: no request needs more


def own_limits(config: EngineConfig, arch: Arch, dtype: torch.dtype, device: torch.device) -> StepLimits:
    budget_bytes = _spare_bytes(config, device)
    return step_limits(config.wanted_limits, arch.dimensions, name_of(dtype), device.type, budget_bytes)


def workspace_bytes(spec: ModelSpec, device: torch.device) -> int:
    return Workspace.num_bytes(spec.arch, spec.dtype, step_size(spec.limits, device), spec.layers)


def tables_bytes(spec: ModelSpec) -> int:
    return run_bytes(table_buffers(spec.arch.dimensions, spec.limits, spec.max_context))


def block_bytes(spec: ModelSpec) -> int:
    return _block(spec).num_bytes


def prompt_kernel_of(spec: ModelSpec) -> PromptKernel:
    return prompt_kernel(heads_of(spec.arch), spec.dtype, spec.limits.block_tokens)


@cache
def _tell_if_slow(kernel: PromptKernel) -> None:
    if kernel.slow_reason is not None:
        log.warning("fallback prompt_attention=%s reason=`%s`", kernel.name, kernel.slow_reason)


@cache
def _tell_of_little_scratch(obstacle: str | None) -> None:
    if obstacle is not None:
        remedy = "raise `engine.max_batch_tokens` and `engine.max_seqs`"
        log.warning("fallback eight_bit_products=shared_by_fewer reason=`%s` remedy=`%s`", obstacle, remedy)


def assemble(
    spec: ModelSpec,
    weights: Weights,
    config: EngineConfig,
    device: torch.device,
    memory: Memory | None = None,
    marks: StepMarks | None = None,
    later: LaterStages | None = None,
) -> Engine:
    """Return an engine over weights that have their place on the device; `later`: the stages behind it.

    Given `memory` is not touched: call `Engine.add_blocks` and `Runner.fill_tables`. Without it the engine
    allocates its own, and KV takes what is left on the device.
    """
    limits = spec.limits
    log.info(
        "engine_assembled max_batch_tokens=%d max_seqs=%d max_context=%d",
        limits.max_batch_tokens,
        limits.max_seqs,
        spec.max_context,
    )
    is_elastic = memory is not None
    memory = memory or _own_memory(spec, config, device)
    if device.type == "cuda":
        _tell_if_slow(prompt_kernel_of(spec))
    elif any(layer.qkv.scale is not None for layer in weights.layers):
        packed_products.prepare()  # beside the load
    on_layer = None if marks is None else marks.layer_passed
    runner = assemble_runner(spec, weights, config, memory, step_size(limits, device), on_layer, later)
    _tell_of_little_scratch(runner.layers.decoder.sharing_obstacle())
    if is_elastic:
        # No captures: weights may be missing (`worker/hosted_model.py`).
        book = BlockBook(limits.block_tokens, memory.floor_blocks)
    else:
        book = BlockBook.fixed(len(runner.layers.kv), limits.block_tokens)
        runner.add_blocks(range(SINK_BLOCK + 1, len(runner.layers.kv)))
        runner.fill_tables()
        if config.graphs == "start":
            runner.capture_all()
    batch_limits = BatchLimits(
        limits.max_batch_tokens, limits.max_seqs, spec.max_context, runner.layers.sizes.mixed
    )
    batcher = Batcher(batch_limits, book, None if later is None else later.num_flights)
    vocab_size = spec.arch.vocab_size
    guides = Guides(spec.tokenizer_json, vocab_size, spec.eos_ids)
    allowance = PromptAllowance(config.max_step, is_slow=device.type == "cpu")
    return Engine(batcher, runner, guides, vocab_size, spec.eos_ids, allowance, marks)


def assemble_runner(
    spec: ModelSpec,
    weights: Weights,
    config: EngineConfig,
    memory: Memory,
    size: StepSize,
    on_layer: Callable[[], None] | None = None,
    later: LaterStages | None = None,
) -> Runner:
    arch, dtype, device, limits = spec.arch, spec.dtype, memory.workspace.device, spec.limits
    tables = EngineTables(arch, limits, spec.max_context, memory.sink, memory.tables)
    bind_workspace = partial(Workspace.bind, arch, dtype, size, counters=tables.counters, layers=spec.layers)
    workspace = bind_workspace(memory.workspace)
    uploads = Uploads(device)
    sampler = Sampler(tables.sampler, arch.vocab_size, uploads)
    heads = heads_of(arch)
    inputs = InputBuffers(
        limits.max_seqs,
        tables.inputs,
        sampler.tokens,
        uploads,
        memory.sink,
        lambda num_rows: prompt_tile_tokens(heads, dtype, num_rows, limits.block_tokens),
    )
    kv = _bind_kv(spec, memory.kv)
    decoder = Decoder(arch, weights, workspace, tables.cos_sin, spec.layers, on_layer)
    sizes = _padded_sizes(limits, device, has_tail=decoder.is_last)
    is_captured = device.type == "cuda" and sizes.decode and config.graphs != "off"
    if is_captured and (obstacle := capture_obstacle(torch.__version__)) is not None:
        log.warning("fallback graphs=off reason=`%s` remedy=`pip install hearth-inference[gpu]`", obstacle)
        is_captured = False
    graphs = StepGraphs(GraphCapture()) if is_captured else None
    layers = LayerRunner(
        decoder, kv, spec.kv_layers, inputs, sizes, graphs, sampler.take_best, bind_workspace
    )
    if later is not None:
        return PipelineRunner(layers, sampler, uploads, tables, later)
    return Runner(layers, sampler, uploads, tables)


def allocate(num_bytes: int, device: torch.device, what: str, remedy: str) -> torch.Tensor:
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:  # torch.OutOfMemoryError on CUDA, the bare class on a CPU
        raise DeviceError(
            f"cannot allocate {num_bytes} bytes on {device} for {what}: {error}; free some, or {remedy}"
        ) from error


def _padded_sizes(limits: StepLimits, device: torch.device, *, has_tail: bool) -> PaddedSizes:
    """Return the sizes that steps are padded to, captured or not, so that both compute the same bits."""
    if device.type == "cpu":
        return PaddedSizes(has_tail=has_tail)
    if not HAS_TRITON:
        log.warning(
            "fallback kernels=torch graphs=off reason=triton_missing "
            "remedy=`pip install hearth-inference[gpu]`"
        )
        return PaddedSizes(has_tail=has_tail)
    return PaddedSizes.of(limits, has_tail=has_tail)


def step_size(limits: StepLimits, device: torch.device) -> StepSize:
    if device.type != "cuda":
        return StepSize.of(limits, device.type)
    num_processors: int = torch.cuda.get_device_properties(device).multi_processor_count
    return StepSize.of(limits, device.type, num_processors)


def _own_memory(spec: ModelSpec, config: EngineConfig, device: torch.device) -> Memory:
    num_bytes = workspace_bytes(spec, device)
    remedy = "lower `engine.max_batch_tokens` or `engine.max_seqs`"
    workspace = allocate(num_bytes, device, "the workspace", remedy)
    tables = allocate(tables_bytes(spec), device, "tables", "lower `engine.max_seqs` or the context")
    num_blocks = _num_blocks(spec, config.kv_bytes or _spare_bytes(config, device))
    kv_bytes = num_blocks * block_bytes(spec)
    kv = allocate(kv_bytes, device, "KV", "lower `engine.kv_bytes`")
    return Memory(workspace, tables, kv, SINK_BLOCK, floor_blocks=num_blocks - 1)


def _num_blocks(spec: ModelSpec, limit_bytes: int) -> int:
    size_bytes = block_bytes(spec)
    blocks_per_seq = spec.limits.num_blocks(spec.max_context)
    num_blocks = min(limit_bytes // size_bytes, 1 + spec.limits.max_seqs * blocks_per_seq)
    if num_blocks < 2:
        raise DeviceError(
            f"KV memory of {limit_bytes} bytes holds {num_blocks} blocks of {size_bytes} bytes, at least 2 "
            "are needed; raise `engine.kv_bytes` or `engine.memory_fraction`, or use a smaller model"
        )
    return num_blocks


def _bind_kv(spec: ModelSpec, base: torch.Tensor) -> torch.Tensor:
    block = _block(spec)
    num_bytes = len(base) // block.num_bytes * block.num_bytes
    return base[:num_bytes].view(spec.dtype).view(-1, *block.shape)


def _block(spec: ModelSpec) -> Buffer:
    return block_buffer(spec.arch.dimensions, spec.kv_layers, name_of(spec.dtype), spec.limits.block_tokens)


def _spare_bytes(config: EngineConfig, device: torch.device) -> int:
    if device.type != "cuda":
        return int(machine_bytes() * _CPU_SHARE)
    free, total = torch.cuda.mem_get_info(device)
    # torch's cache is free as well.
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(0, int(free - (1.0 - config.memory_fraction) * total))

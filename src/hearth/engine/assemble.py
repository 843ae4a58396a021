"""Puts an engine together from a model and a configuration: sizes memory, wires the parts. Loads nothing."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from hearth.config import EngineConfig
from hearth.engine.engine import Engine
from hearth.engine.graphs import GRAPH_SIZES
from hearth.engine.inputs import InputBuffers
from hearth.engine.runner import Runner
from hearth.engine.sampler import Sampler
from hearth.errors import DeviceError
from hearth.kernels.jit import HAS_TRITON
from hearth.models.angles import cos_sin_table
from hearth.models.arch import Arch
from hearth.models.decoder import Decoder
from hearth.models.weights import Weights
from hearth.models.workspace import StepSize, Workspace
from hearth.policy.batch import Batcher, BatchLimits
from hearth.policy.blocks import BlockBook

#: Programs per multiprocessor that a decode attention may be split into.
_PROGRAMS_PER_PROCESSOR = 4
#: The KV of a CPU engine takes at most this share of the machine's memory; what is not written costs nothing.
_CPU_SHARE = 0.25

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What an engine needs to know of a model besides its weights."""

    arch: Arch
    dtype: torch.dtype
    max_context: int
    eos_ids: frozenset[int]


def assemble(spec: ModelSpec, weights: Weights, config: EngineConfig, device: torch.device) -> Engine:
    """An engine over weights that have their place on the device. What memory is left goes to KV."""
    arch, dtype = spec.arch, spec.dtype
    size = StepSize(config.max_batch_tokens, config.max_seqs, _num_programs(device))
    workspace_bytes = Workspace.num_bytes(arch, dtype, size)
    base = allocate(workspace_bytes, device, "the workspace", "lower `engine.max_batch_tokens`")
    workspace = Workspace.bind(arch, dtype, size, base)
    cos_sin = None if arch.rope is None else cos_sin_table(arch.rope, spec.max_context, device)
    sampler = Sampler(config.max_seqs, arch.vocab_size, device)
    max_blocks = -(-spec.max_context // config.block_tokens)
    inputs = InputBuffers(config.max_batch_tokens, config.max_seqs, max_blocks, sampler.tokens, device)
    kv = _new_kv(spec, config, device)
    decoder = Decoder(arch, weights, workspace, cos_sin)
    runner = Runner(decoder, kv, inputs, sampler, _max_graph_size(config, device))
    if config.graphs == "start":
        runner.capture_all()
    limits = BatchLimits(config.max_batch_tokens, config.max_seqs, spec.max_context)
    return Engine(
        Batcher(limits, BlockBook(len(kv), config.block_tokens)), runner, arch.vocab_size, spec.eos_ids
    )


def allocate(num_bytes: int, device: torch.device, what: str, remedy: str) -> torch.Tensor:
    """Plain bytes, not initialised.

    Raises:
        DeviceError: the device has no such room.
    """
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:  # torch.OutOfMemoryError on CUDA, the bare class on a CPU
        raise DeviceError(
            f"{num_bytes} bytes for {what} cannot be had on {device}: {error}; free memory there, or {remedy}"
        ) from error


def _max_graph_size(config: EngineConfig, device: torch.device) -> int:
    if device.type != "cuda" or config.graphs == "off":
        return 0
    if not HAS_TRITON:
        log.warning(
            "fallback kernels=torch graphs=off reason=triton_missing remedy=`pip install hearth[gpu]`"
        )
        return 0
    return min(config.max_seqs, config.max_batch_tokens, GRAPH_SIZES[-1])


def _num_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    num_processors: int = torch.cuda.get_device_properties(device).multi_processor_count
    return _PROGRAMS_PER_PROCESSOR * num_processors


def _new_kv(spec: ModelSpec, config: EngineConfig, device: torch.device) -> torch.Tensor:
    """As many blocks as the memory allows and running sequences can fill; block 0 is the sink."""
    arch = spec.arch
    shape = (arch.num_layers, 2, config.block_tokens, arch.num_kv_heads, arch.head_dim)
    block_bytes = torch.Size(shape).numel() * spec.dtype.itemsize
    kv_bytes = config.kv_bytes or _spare_bytes(config, device)
    blocks_per_seq = -(-spec.max_context // config.block_tokens)
    num_blocks = min(kv_bytes // block_bytes, 1 + config.max_seqs * blocks_per_seq)
    if num_blocks < 2:
        raise DeviceError(
            f"KV memory of {kv_bytes} bytes holds {num_blocks} blocks of {block_bytes} bytes, at least 2 are "
            "needed; raise `engine.kv_bytes` or `engine.memory_fraction`, or use a smaller model"
        )
    base = allocate(num_blocks * block_bytes, device, "KV", "lower `engine.kv_bytes`")
    return base.view(spec.dtype).view(num_blocks, *shape)


def _spare_bytes(config: EngineConfig, device: torch.device) -> int:
    """Read once: from here on the engine's own books count."""
    if device.type != "cuda":
        return int(_machine_bytes() * _CPU_SHARE)
    free, total = torch.cuda.mem_get_info(device)
    # What an engine before this one has left in torch's hands is free as well.
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(0, int(free - (1.0 - config.memory_fraction) * total))


def _machine_bytes() -> int:
    """The machine's memory, or the container's limit where that is lower."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return physical if text == "max" else min(physical, int(text))

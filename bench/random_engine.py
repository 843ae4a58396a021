"""Engines over random weights that are made on the device, in a moment. Their answers mean nothing."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from bench.random_model import tokenizer_json
from bench.shape import Shape
from hearth.core.config import EngineConfig, StoreConfig
from hearth.engine.assemble import ModelSpec, assemble, own_limits
from hearth.engine.dry_run import KernelNeeds
from hearth.engine.engine import Engine
from hearth.engine.kernel_warmup import KernelWarmup
from hearth.kernels.compilations import COMPILATIONS
from hearth.kernels.kernel_cache import KernelCache
from hearth.models.dtypes import DTYPES, STORED_DTYPES
from hearth.models.layout import Layout, TensorSpec
from hearth.models.weights import TensorPlace, Weights, bind, contiguous_places
from hearth.text.tokenizer import Tokenizer

#: The spread of weights, and that of what a quantised one is stored as.
_SPREAD, _STORED_SPREAD = 0.02, 32.0


def new_engine(
    shape: Shape,
    config: EngineConfig,
    device: torch.device,
    *,
    seed: int | None,
    max_context: int | None = None,
) -> Engine:
    """Return an engine over random weights; without a seed they are whatever the memory holds."""
    arch, dtype = shape.arch, DTYPES[shape.dtype]
    limits = own_limits(config, arch, dtype, device)  # before anything is taken of the memory
    spec = ModelSpec(arch, dtype, max_context or arch.max_positions, limits, eos_ids=frozenset())
    if device.type == "cuda":
        make_kernels_ready(KernelNeeds.on(device, arch, shape.dtype, shape.quant, limits))
    return assemble(spec, random_weights(shape, device, seed), config, device)


def make_kernels_ready(needs: KernelNeeds) -> None:
    """Have all kernels on the device before the first step, as whoever opens a model does."""
    COMPILATIONS.watch()
    KernelWarmup(_kernel_cache()).compile(needs)


def _kernel_cache() -> KernelCache:
    return KernelCache.open(Path(StoreConfig().path).expanduser() / "kernels")


def random_weights(shape: Shape, device: torch.device, seed: int | None) -> Weights:
    layout = shape.layout
    places = contiguous_places(layout, torch.empty(layout.num_bytes, dtype=torch.uint8, device=device))
    if seed is not None:
        fill_random(layout, places, seed)
    return bind(shape.arch, layout, places)


def fill_random(layout: Layout, places: Mapping[str, TensorPlace], seed: int) -> None:
    """Fill weights that have their places with random numbers."""
    generator: torch.Generator | None = None
    for spec in layout.tensors:
        place = places[spec.name]
        generator = generator or torch.Generator(place.base.device).manual_seed(seed)
        _fill(place.base[place.offset : place.offset + spec.nbytes], spec, generator)


def new_tokenizer(vocab_size: int) -> Tokenizer:
    """Return a tokenizer of so many entries: detokenising costs what it costs with a real one."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "tokenizer.json").write_text(tokenizer_json(vocab_size))
        return Tokenizer.load(Path(directory))


def _fill(stored: torch.Tensor, spec: TensorSpec, generator: torch.Generator) -> None:
    tensor = stored.view(STORED_DTYPES[spec.dtype])
    if "norm" in spec.name:
        tensor.fill_(1.0)
    elif spec.name.endswith(".scale"):
        tensor.fill_(_SPREAD / _STORED_SPREAD)
    elif spec.name.endswith(".min"):
        tensor.fill_(-8 * _SPREAD / _STORED_SPREAD)
    elif spec.dtype == "int32":  # words of codes
        tensor.random_(-(2**31), 2**31 - 1, generator=generator)
    elif tensor.itemsize == 1:  # torch draws no such numbers
        wide = torch.empty(tensor.shape, dtype=torch.bfloat16, device=tensor.device)
        tensor.copy_(wide.normal_(std=_STORED_SPREAD, generator=generator).clamp_(-127, 127))
    else:
        tensor.normal_(std=_SPREAD, generator=generator)

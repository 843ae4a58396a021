"""Packs LoRA factors into an adapter's bytes: fused, scaled, in the order of the base's rows.

The name map of the base's family says which module of a checkpoint is which part of a projection, as for
weights. Where a checkpoint interleaves heads, `b` is sorted into q, k and v.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from hearth.core.errors import BadCheckpoint
from hearth.models.adapter import (
    MAX_RANK,
    AdapterLayout,
    AdapterSlice,
    AdapterTarget,
    FactorPlaces,
    Projection,
    projection_shape,
)
from hearth.models.arch import Arch
from hearth.models.dtypes import DTYPES
from hearth.models.pack import Checkpoint, in_order, read_tensor
from hearth.models.tensor_names import NAMES


@dataclass(frozen=True, slots=True)
class LoraModule:
    """The factors of one module of the base: `b @ a`, times the scale, is added to its weight."""

    a: str  #: this and the next name tensors of a checkpoint: [rank, inputs]
    b: str  #: [outputs, rank]
    scale: float


#: Factors by the name of the module, as transformers has it.
LoraModules = Mapping[str, LoraModule]


@dataclass(frozen=True, slots=True)
class _ModulePlace:
    layer: int
    projection: Projection
    begin: int
    size: int


@dataclass(frozen=True, slots=True)
class AdapterSource:
    arch: Arch
    layout: AdapterLayout
    checkpoint: Checkpoint
    modules: Mapping[tuple[int, Projection, int], LoraModule]  #: by layer, projection and begin of the slice

    @staticmethod
    def of(arch: Arch, checkpoint: Checkpoint, modules: LoraModules, dtype: str) -> AdapterSource:
        """Lay out an adapter in its base's dtype. Raises BadCheckpoint if it does not fit the base."""
        found: dict[tuple[int, Projection, int], LoraModule] = {}
        slices: dict[tuple[int, Projection], list[AdapterSlice]] = defaultdict(list)
        for name, module in modules.items():
            part = _part_of(arch, name)
            key = (part.layer, part.projection, part.begin)
            if key in found:
                raise BadCheckpoint(f"the adapter has factors twice for `{name:.120}`; save it again")
            found[key] = module
            slices[key[:2]].append(AdapterSlice(part.begin, part.size, _rank(arch, part, module, checkpoint)))
        order = list(Projection)
        targets = [
            AdapterTarget(
                layer,
                projection,
                projection_shape(arch.dimensions, projection)[1],
                tuple(sorted(slices[layer, projection], key=lambda one: one.begin)),
            )
            for layer, projection in sorted(slices, key=lambda key: (key[0], order.index(key[1])))
        ]
        return AdapterSource(arch, AdapterLayout.of(targets, dtype), checkpoint, found)

    def pieces(self) -> Iterator[memoryview]:
        """Yield the adapter's bytes without gaps, made on demand. Raises BadCheckpoint for bad values."""
        done = 0
        for place in self.layout.places:
            for offset, factor in self._factors(place):
                yield memoryview(bytes(offset - done))
                data = factor.contiguous().view(torch.uint8).flatten().numpy().data
                yield data
                done = offset + len(data)
        yield memoryview(bytes(self.layout.num_bytes - done))

    def _factors(self, place: FactorPlaces) -> Iterator[tuple[int, torch.Tensor]]:
        target = place.target
        modules = [self.modules[target.layer, target.projection, part.begin] for part in target.slices]
        sizes = self.arch.dimensions
        qkv_begins = (0, sizes.q_size, sizes.q_size + sizes.kv_size)
        yield place.a, torch.cat([self._stored(module.a, 1.0) for module in modules])
        for offset, part, module in zip(place.b, target.slices, modules, strict=True):
            b = self._stored(module.b, module.scale)
            index = qkv_begins.index(part.begin) if target.projection is Projection.QKV else 0
            b = torch.cat(list(in_order(self.arch, target.projection, index, b)))
            yield offset, pad(b.t(), (0, part.row_size - part.size))

    def _stored(self, name: str, scale: float) -> torch.Tensor:
        factor = read_tensor(name, self.checkpoint).float() * scale
        stored = factor.to(DTYPES[self.layout.dtype])
        if not factor.isfinite().all():
            raise BadCheckpoint(
                f"`{name:.120}` holds NaN or infinity; its training went wrong, so train again"
            )
        if not stored.isfinite().all():
            raise BadCheckpoint(
                f"`{name:.120}`: {self.layout.dtype}, in which the base is computed, holds values up to "
                f"{torch.finfo(stored.dtype).max:g}, found: {factor.abs().max():g} with the adapter's scale"
            )
        return stored


def target_names(family: str) -> list[str]:
    modules = NAMES[family].modules
    return [template.rpartition(".")[2] for one in Projection for template in modules[one]]


def _part_of(arch: Arch, module: str) -> _ModulePlace:
    names, dimensions = NAMES[arch.family], arch.dimensions
    prefixes = "|".join(map(re.escape, names.prefixes))
    for projection in Projection:
        templates = names.modules[projection]
        num_outputs = projection_shape(dimensions, projection)[0]
        sizes = [num_outputs // len(templates)] * len(templates)
        if projection is Projection.QKV and len(templates) == 3:
            sizes = [dimensions.q_size, dimensions.kv_size, dimensions.kv_size]
        for index, template in enumerate(templates):
            pattern = re.escape(template).replace(r"\{i\}", r"(0|[1-9][0-9]{0,5})")
            match = re.fullmatch(f"(?:{prefixes}){pattern}", module, re.ASCII)
            if match is not None and int(match[1]) < arch.num_layers:
                return _ModulePlace(int(match[1]), projection, sum(sizes[:index]), sizes[index])
    raise BadCheckpoint(
        f"the adapter changes `{module:.120}`, which is not an attention or MLP projection of the base: "
        f"family {arch.family}, {arch.num_layers} layers; choose another base, or train with "
        f"`target_modules` among {', '.join(target_names(arch.family))}"
    )


def _rank(arch: Arch, part: _ModulePlace, module: LoraModule, checkpoint: Checkpoint) -> int:
    a, b = checkpoint[module.a].shape, checkpoint[module.b].shape
    num_inputs = projection_shape(arch.dimensions, part.projection)[1]
    for name, shape, size, at in ((module.a, a, num_inputs, 1), (module.b, b, part.size, 0)):
        if len(shape) != 2 or shape[at] != size:
            wanted = f"[rank, {size}]" if at else f"[{size}, rank]"
            raise BadCheckpoint(
                f"`{name:.120}` has shape {list(shape[:4])}, the base needs {wanted}; choose the base that "
                "the adapter was trained on"
            )
    if a[0] != b[1]:
        raise BadCheckpoint(f"`{module.a:.120}` has rank {a[0]}, `{module.b:.120}` {b[1]}; save it again")
    if not 1 <= a[0] <= MAX_RANK:
        raise BadCheckpoint(
            f"`{module.a:.120}` must have a rank from 1 to {MAX_RANK}, given: {a[0]}; merge the adapter into "
            "its base with PEFT's `merge_and_unload`, and deploy that"
        )
    return a[0]

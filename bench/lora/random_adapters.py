"""Random LoRA adapters, on the device and in files. Their answers mean nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hearth.core.sizes import Dimensions
from hearth.core.types import AdapterId
from hearth.engine.engine import Engine
from hearth.models.adapter import AdapterLayout, AdapterSlice, AdapterTarget, Projection, projection_shape
from hearth.models.arch import Arch
from hearth.store.format.adapter_manifest import AdapterManifest, stored_bytes
from hearth.store.format.manifest import CHUNK_BYTES, MANIFEST
from hearth.store.format.writer import staged

CUDA = torch.device("cuda", 0)
#: The ranks of the adapters of a set, in turn.
RANKS: Mapping[str, Sequence[int]] = {"mixed": (8, 16, 32, 64), "8": (8,), "16": (16,), "64": (64,)}
#: The name of a set of odd ranks, most of which change some projections alone.
ODD = "odd"


def slice_sizes(dimensions: Dimensions) -> Mapping[Projection, Sequence[int]]:
    """Return the outputs of each of the projections that are one in the model."""
    return {
        Projection.QKV: (dimensions.q_size, dimensions.kv_size, dimensions.kv_size),
        Projection.O: (dimensions.hidden_size,),
        Projection.UP: (dimensions.intermediate_size,) * 2,
        Projection.DOWN: (dimensions.hidden_size,),
    }


def layouts_of(dimensions: Dimensions, name: str) -> list[AdapterLayout]:
    """Return the layouts of the adapters of a set, in turn: those of `RANKS`, or ones of ODD."""
    if name != ODD:
        return [layout_of_rank(dimensions, rank) for rank in RANKS[name]]
    return [
        query_value_layout(dimensions, 3, "bfloat16"),
        layout_of_rank(dimensions, 12, (Projection.UP, Projection.DOWN)),
        layout_of_rank(dimensions, 33),
        layout_of_rank(dimensions, 100, (Projection.O,)),
    ]


def layout_of_rank(
    dimensions: Dimensions, rank: int, projections: Collection[Projection] = tuple(Projection)
) -> AdapterLayout:
    targets = []
    for layer in dimensions.layers:
        for projection, sizes in slice_sizes(dimensions).items():
            if projection not in projections:
                continue
            slices = tuple(AdapterSlice(sum(sizes[:at]), size, rank) for at, size in enumerate(sizes))
            inputs = projection_shape(dimensions, projection)[1]
            targets.append(AdapterTarget(layer, projection, inputs, slices))
    return AdapterLayout.of(targets, "bfloat16")


def query_value_layout(dimensions: Dimensions, rank: int, dtype: str) -> AdapterLayout:
    """Return the layout of an adapter of q and v alone, as LoRA's authors have them."""
    begins = {0: dimensions.q_size, dimensions.q_size + dimensions.kv_size: dimensions.kv_size}
    slices = tuple(AdapterSlice(begin, size, rank) for begin, size in begins.items())
    targets = [
        AdapterTarget(layer, Projection.QKV, dimensions.hidden_size, slices) for layer in dimensions.layers
    ]
    return AdapterLayout.of(targets, dtype)


def write_adapter(arch: Arch, layout: AdapterLayout, content: memoryview, dest: Path) -> AdapterManifest:
    """Write an adapter of these factors in Hearth's format."""
    assert len(content) == stored_bytes(layout), f"{len(content)=} {stored_bytes(layout)=}"
    with staged(dest, len(content)) as staging:
        written = staging.write_pieces(iter([content]), len(content), CHUNK_BYTES, None)
        manifest = AdapterManifest.of(arch.family, arch.dimensions, layout, written.chunks, CHUNK_BYTES)
        staging.write_file(MANIFEST, manifest.to_json().encode())
    return manifest


def random_pieces(layout: AdapterLayout) -> list[torch.Tensor]:
    memory = torch.empty(layout.num_bytes, dtype=torch.uint8, device=CUDA)
    memory.view(torch.bfloat16).normal_(std=0.01)
    return [memory[stored.begin : stored.end] for _, stored in layout.layers]


@dataclass(frozen=True, slots=True)
class AdapterSet:
    """Adapters that an engine has."""

    ids: Sequence[AdapterId]
    num_bytes: Sequence[int]  #: of each

    @staticmethod
    def add_to(engine: Engine, name: str, count: int) -> AdapterSet:
        """Add so many adapters of a set (`layouts_of`)."""
        layouts = layouts_of(engine.runner.layers.decoder.arch.dimensions, name)
        ids, num_bytes = [], []
        for number in range(count):
            layout = layouts[number % len(layouts)]
            ids.append(AdapterId(f"{number} of {name}"))
            num_bytes.append(layout.num_bytes)
            engine.add_adapter(ids[-1], layout, random_pieces(layout))
        return AdapterSet(ids, num_bytes)

    def remove_from(self, engine: Engine) -> None:
        for one in self.ids:
            engine.remove_adapter(one)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

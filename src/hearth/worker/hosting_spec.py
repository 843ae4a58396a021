"""How a worker will host a model: its dtype and its memory. Allocates nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from hearth.core.errors import ModelError
from hearth.core.messages import HostModel
from hearth.core.sizes import computed_dtype
from hearth.core.types import Stage
from hearth.engine.assemble import ModelSpec, block_bytes, tables_bytes, workspace_bytes
from hearth.memory.pool import Shape
from hearth.models.dtypes import DTYPES
from hearth.models.layout import Layout
from hearth.store.format.manifest import Manifest
from hearth.store.format.widen_dtype import served_layout


@dataclass(frozen=True, slots=True)
class HostingSpec:
    manifest: Manifest
    model: ModelSpec
    layout: Layout  #: as served
    shape: Shape
    floor_blocks: int  #: of KV, promised to the model, without the sink

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the tensors as stored, without padding."""
        return sum(spec.nbytes for spec in self.shape.stored.tensors)


def hosting_spec(
    order: HostModel, manifest: Manifest, tokenizer_json: Path | None, device: torch.device
) -> HostingSpec:
    """Return how a model is hosted by an order. Raises ModelError if the order exceeds what it supports."""
    dtype, stage = computed_dtype(manifest.dtype, device.type), _stage(order, manifest)
    arch, layers = manifest.arch, manifest.arch.dimensions.layers if stage is None else stage.layers
    layout = served_layout(manifest, dtype).only(arch, layers)
    spec = ModelSpec(
        arch=arch,
        dtype=DTYPES[dtype],
        max_context=_context(order, manifest),
        limits=order.limits,
        eos_ids=frozenset(order.eos_ids),
        tokenizer_json=tokenizer_json,
        stage=stage,
    )
    num_bytes = block_bytes(spec)
    floor_blocks, max_blocks = order.kv_floor_bytes // num_bytes - 1, order.max_kv_bytes // num_bytes
    if order.pipeline is not None:
        floor_blocks = _shared_blocks(order, floor_blocks)
    shape = Shape(
        digest=manifest.digest,
        stored=manifest.layout.only(arch, layers),
        served=layout,
        chunk_bytes=manifest.chunk_bytes,
        chunks=manifest.chunk_ids,
        workspace_bytes=workspace_bytes(spec, device),
        tables_bytes=tables_bytes(spec),
        block_bytes=num_bytes,
        max_blocks=max(2, max_blocks),
        slot=order.slot,
    )
    return HostingSpec(manifest, spec, layout, shape, max(1, floor_blocks))


def _shared_blocks(order: HostModel, own_blocks: int) -> int:
    """Return how many blocks each member of a pipeline is promised."""
    assert order.pipeline is not None, f"no pipeline: {order}"
    if own_blocks < order.pipeline.num_blocks:
        raise ModelError(
            f"a stage of `{order.model}` needs {order.pipeline.num_blocks} blocks of KV; "
            f"{order.kv_floor_bytes} bytes hold {own_blocks}"
        )
    return order.pipeline.num_blocks


def _stage(order: HostModel, manifest: Manifest) -> Stage | None:
    if order.layers is None:
        return None
    layers, num_layers = order.layers, manifest.arch.num_layers
    if not 0 <= layers.start < layers.stop <= num_layers:
        raise ModelError(
            f"a stage of `{order.model}` must be some of its {num_layers} layers; given: {layers}"
        )
    return Stage(layers)


def _context(order: HostModel, manifest: Manifest) -> int:
    most = manifest.arch.max_positions
    if not 1 < order.max_context <= most:
        raise ModelError(
            f"the context of `{order.model}` must be from 2 to {most}, which the model supports; "
            f"given: {order.max_context}"
        )
    return order.max_context

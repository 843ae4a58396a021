"""How a worker will host a model: its dtype and its memory. Allocates nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from hearth.core.errors import ModelError
from hearth.core.messages import HostModel
from hearth.core.sizes import computed_dtype
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
        return sum(spec.nbytes for spec in self.manifest.tensors)


def hosting_spec(
    order: HostModel, manifest: Manifest, tokenizer_json: Path | None, device: torch.device
) -> HostingSpec:
    """Return how a model is hosted by an order. Raises ModelError if the order exceeds what it supports."""
    dtype = computed_dtype(manifest.dtype, device.type)
    layout = served_layout(manifest, dtype)
    spec = ModelSpec(
        arch=manifest.arch,
        dtype=DTYPES[dtype],
        max_context=_context(order, manifest),
        limits=order.limits,
        eos_ids=frozenset(order.eos_ids),
        tokenizer_json=tokenizer_json,
    )
    num_bytes = block_bytes(spec)
    shape = Shape(
        digest=manifest.digest,
        stored=manifest.layout,
        served=layout,
        chunk_bytes=manifest.chunk_bytes,
        chunks=manifest.chunk_ids,
        workspace_bytes=workspace_bytes(spec, device),
        tables_bytes=tables_bytes(spec),
        block_bytes=num_bytes,
        max_blocks=max(2, order.max_kv_bytes // num_bytes),
        slot=order.slot,
    )
    return HostingSpec(manifest, spec, layout, shape, max(1, order.kv_floor_bytes // num_bytes - 1))


def _context(order: HostModel, manifest: Manifest) -> int:
    most = manifest.arch.max_positions
    if not 1 < order.max_context <= most:
        raise ModelError(
            f"the context of `{order.model}` must be from 2 to {most}, which the model supports; "
            f"given: {order.max_context}"
        )
    return order.max_context

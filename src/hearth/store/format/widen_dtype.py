"""Widens stored weights to the dtype that a device computes in, where the stored one would be slow there.

A CPU is slow in anything narrower than float32, so there the weights are widened, in the place that they are
loaded into:

    | wide bytes, from the front, tensor by tensor ->                                |
    |                         | narrow bytes, as they lie in the file, at the end    |

No tensor becomes smaller, so the front never runs into a tensor that has not been read. Where each tensor has
a place of its own, it lands at the end of that. Loads nothing.
"""

from __future__ import annotations

import logging

import torch

from hearth.models.dtypes import DTYPES
from hearth.models.layout import Layout, TensorSpec, layout_of
from hearth.store.format.manifest import Manifest

log = logging.getLogger(__name__)


def served_layout(manifest: Manifest, dtype: str) -> Layout:
    """Return the layout of a model whose tensors are in `dtype`. Quantised weights stay quantised."""
    return manifest.layout if dtype == manifest.dtype else layout_of(manifest.arch, dtype, manifest.quant)


def stored_part(base: torch.Tensor, manifest: Manifest) -> torch.Tensor:
    return base[len(base) - manifest.num_bytes :]


def widen(base: torch.Tensor, manifest: Manifest, layout: Layout) -> None:
    if layout == manifest.layout:
        return
    tell_widening(manifest)
    narrow = stored_part(base, manifest)
    for stored, spec in zip(manifest.tensors, layout.tensors, strict=True):
        # A copy: the tensor's own wide bytes may begin in front of its narrow ones and end behind.
        source = narrow[stored.offset : stored.offset + stored.nbytes].clone()
        _widen(source, base[spec.offset : spec.offset + spec.nbytes], stored, spec)


def tell_widening(manifest: Manifest) -> None:
    log.warning(
        "fallback dtype=float32 reason=`%s is slow on a CPU` remedy=`hearth convert --dtype float32`",
        manifest.dtype,
    )


def widen_in_place(base: torch.Tensor, stored: TensorSpec, served: TensorSpec) -> None:
    if stored.dtype != served.dtype:
        _widen(base[len(base) - stored.nbytes :].clone(), base, stored, served)


def _widen(source: torch.Tensor, target: torch.Tensor, stored: TensorSpec, served: TensorSpec) -> None:
    if stored.dtype == served.dtype:
        target.copy_(source)
    else:
        target.view(DTYPES[served.dtype]).copy_(source.view(DTYPES[stored.dtype]))

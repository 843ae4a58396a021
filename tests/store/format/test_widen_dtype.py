"""A narrow model becomes wide in the memory that it is loaded into, bit for bit what a copy would give."""

from __future__ import annotations

import pytest
import torch

from hearth.models.dtypes import STORED_DTYPES
from hearth.store.format.manifest import WEIGHTS, read_manifest
from hearth.store.format.widen_dtype import served_layout, stored_part, widen
from tests.models.zoo import VARIANTS
from tests.store.stored import converted


@pytest.mark.parametrize("name", ["llama-gqa", "opt-350m", "falcon-rw-like", "qwen3"])
@pytest.mark.parametrize(
    ("dtype", "quant"), [("bfloat16", "none"), ("float16", "none"), ("bfloat16", "int8")]
)
def test_every_tensor_is_what_it_was(name: str, dtype: str, quant: str) -> None:
    assert name in VARIANTS
    where = converted(name, dtype=dtype, quant=quant)
    manifest = read_manifest(where)
    stored = torch.frombuffer(bytearray((where / WEIGHTS).read_bytes()), dtype=torch.uint8)
    layout = served_layout(manifest, "float32")
    base = torch.randint(0, 256, (layout.num_bytes,), dtype=torch.uint8)
    stored_part(base, manifest).copy_(stored)

    widen(base, manifest, layout)

    for narrow, wide in zip(manifest.tensors, layout.tensors, strict=True):
        before = stored[narrow.offset : narrow.offset + narrow.nbytes].view(STORED_DTYPES[narrow.dtype])
        after = base[wide.offset : wide.offset + wide.nbytes].view(STORED_DTYPES[wide.dtype])
        assert torch.equal(before.to(after.dtype), after), wide.name


def test_what_is_served_as_it_is_stored_is_left_alone() -> None:
    where = converted("llama-gqa")
    manifest = read_manifest(where)
    base = torch.arange(manifest.num_bytes, dtype=torch.int64).to(torch.uint8)
    before = base.clone()

    widen(base, manifest, served_layout(manifest, "float32"))

    assert torch.equal(base, before)
    assert stored_part(base, manifest).data_ptr() == base.data_ptr()

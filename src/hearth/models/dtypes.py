"""Torch's dtypes by the names that layouts and manifests use."""

from __future__ import annotations

import torch

#: Of computation.
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

#: Of stored tensors.
STORED_DTYPES = {
    **DTYPES,
    "int8": torch.int8,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int32": torch.int32,
}

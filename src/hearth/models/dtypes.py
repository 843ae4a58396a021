"""Torch's dtypes by the names that layouts and manifests give them. Knows no sizes."""

from __future__ import annotations

import torch

#: The dtypes that a model may be computed in.
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

#: The dtypes that a tensor may be stored as.
STORED_DTYPES = {**DTYPES, "int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}

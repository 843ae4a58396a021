"""Products of float32 activations and weights of 4 or 8 bits on a CPU, where the weights stay packed.

They are C (`packed_products.c`). A few rows are multiplied by weights that are widened in the first-level
cache; for more rows, some outputs at a time are widened for the library's product. Without a C compiler the
references of `four_bits.py` and `quantized.py` do the same, many times slower.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from hearth.core.sizes import CODE_CHUNK
from hearth.kernels.linear import linear
from hearth.system.native_code import native_library, remedy_for

#: Up to so many rows the weight is not widened into memory.
MAX_ROWS = 32
#: Widened weights that stay in the second-level caches until they are used.
WIDE_BYTES = 1 << 20
_FLAGS = ("-O3", "-march=native")
_NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
#: The value of each code of an 8-bit float.
_FP8_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()

log = logging.getLogger(__name__)


class _Weight(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("kind", "scale_dtype", "minimum_dtype", "n", "k", "groups")),
        *((name, ctypes.c_void_p) for name in ("values", "scale", "minimum", "codebook")),
    )


class _Product(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("begin", "end", "num_rows")),
        *((name, ctypes.c_void_p) for name in ("x", "bias", "out")),
    )


def packed_linear(
    x: torch.Tensor,
    values: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    out: torch.Tensor,
    minimum: torch.Tensor | None = None,
    codebook: torch.Tensor | None = None,
) -> bool:
    """Compute `out = x @ weight.T + bias`. False: not done, for want of float32 or of a compiler.

    The weight is as in `quantized.py`, or if `values` are int32 as in `four_bits.py`.
    """
    if not x.is_cpu or x.dtype != torch.float32 or (run := _native()) is None:
        return False
    rows, k = x.shape
    if not rows:
        return True
    assert values.is_contiguous(), f"{values.stride()=}"
    assert scale.is_contiguous(), f"{scale.stride()=}"
    is_four_bit = values.dtype == torch.int32
    if values.dtype == torch.float8_e4m3fn:
        codebook = _FP8_VALUES
    n, groups = (values.shape[1], scale.shape[0]) if is_four_bit else (values.shape[0], 1)
    weight = _Weight(
        0 if is_four_bit else 1,
        _NUMBERS[scale.dtype],
        0 if minimum is None else _NUMBERS[minimum.dtype],
        n,
        k,
        groups,
        *(None if part is None else part.data_ptr() for part in (values, scale, minimum, codebook)),
    )
    threads = torch.get_num_threads()
    if rows <= MAX_ROWS and out.is_contiguous() and (bias is None or bias.dtype == torch.float32):
        whole = torch.nn.functional.pad(x, (0, -k % CODE_CHUNK)).contiguous()
        address = None if bias is None else bias.data_ptr()
        run(weight, _Product(0, n, rows, whole.data_ptr(), address, out.data_ptr()), threads)
        return True
    wide = torch.empty(min(n, max(1, WIDE_BYTES // (4 * k))), k)
    for begin in range(0, n, len(wide)):
        end = min(begin + len(wide), n)
        run(weight, _Product(begin, end, 0, None, None, wide.data_ptr()), threads)
        linear(x, wide[: end - begin], None if bias is None else bias[begin:end], out=out[:, begin:end])
    return True


@cache
def _native() -> Callable[[_Weight, _Product, int], None] | None:
    """Return the function in C; None, logged once, where it cannot be had."""
    try:
        run = native_library(Path(__file__).with_suffix(".c"), flags=_FLAGS).hearth_packed_product
    except (OSError, AttributeError) as error:
        log.warning("fallback products=torch reason=`%s` remedy=`%s`", error, remedy_for(error))
        return None
    run.restype = None
    run.argtypes = (ctypes.POINTER(_Weight), ctypes.POINTER(_Product), ctypes.c_uint)
    return run

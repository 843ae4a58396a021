"""Products of float32 activations and weights of 4 or 8 bits on a CPU, where the weights stay packed.

They are C (`packed_products.c`). A few rows are multiplied by weights that are widened in the first-level
cache; for more rows, some outputs at a time are widened for the library's product. Without a C compiler the
references of `four_bits.py` and `quantized.py` do the same, many times slower.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from hearth.core.sizes import CODE_WORDS
from hearth.kernels.linear import linear
from hearth.system.native_code import native_library, remedy_for

#: Up to so many rows the weight is not widened into memory.
MAX_ROWS = 64
#: Weights that are widened at a time: the library is slow for few outputs, and threads meet after each piece.
WIDE_BYTES = 8 << 20
#: Outputs that the C code takes at a time.
_BLOCK = 16
_FLAGS = ("-O3", "-march=native")
_NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_KINDS = {torch.int32: 0, torch.int8: 1, torch.float8_e4m3fn: 2}

log = logging.getLogger(__name__)


class _Scratch(threading.local):
    """Memory for widened weights, kept because new pages take as long as the widening."""

    def __init__(self) -> None:
        self.wide = torch.empty(WIDE_BYTES // 4)


_scratch = _Scratch()
_compiling = threading.Lock()


class _Weight(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in ("kind", "scale_dtype", "minimum_dtype", "n", "k", "group_size")
        ),
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
    n = values.shape[1] if is_four_bit else values.shape[0]
    weight = _Weight(
        _KINDS[values.dtype],
        _NUMBERS[scale.dtype],
        0 if minimum is None else _NUMBERS[minimum.dtype],
        n,
        k,
        k // len(scale) if is_four_bit else 0,
        *(None if part is None else part.data_ptr() for part in (values, scale, minimum, codebook)),
    )
    threads = torch.get_num_threads()
    if rows <= MAX_ROWS and out.is_contiguous() and (bias is None or bias.dtype == torch.float32):
        padded = torch.nn.functional.pad(x, (0, -k % CODE_WORDS)) if k % CODE_WORDS else x
        whole = padded.contiguous()
        address = None if bias is None else bias.data_ptr()
        run(weight, _Product(0, n, rows, whole.data_ptr(), address, out.data_ptr()), threads)
        return True
    wide = _scratch.wide
    if len(wide) < _BLOCK * k:
        wide = torch.empty(_BLOCK * k)
    wide = wide[: len(wide) // (_BLOCK * k) * _BLOCK * k].view(-1, k)
    for begin in range(0, n, len(wide)):
        end = min(begin + len(wide), n)
        run(weight, _Product(begin, end, 0, None, None, wide.data_ptr()), threads)
        linear(x, wide[: end - begin], None if bias is None else bias[begin:end], out=out[:, begin:end])
    return True


def prepare() -> None:
    """Start to compile, so that the first product need not wait for it."""
    threading.Thread(target=_native, name="hearth-products", daemon=True).start()


def is_missing() -> bool:
    """Whether products are known to take the references, for want of a compiler."""
    return _compiled.cache_info().currsize > 0 and _compiled() is None


Run = Callable[[_Weight, _Product, int], None]


def _native() -> Run | None:
    with _compiling:
        return _compiled()


@cache
def _compiled() -> Run | None:
    """Return the function in C; None, logged once, where it cannot be had."""
    try:
        run = native_library(Path(__file__).with_suffix(".c"), flags=_FLAGS).hearth_packed_product
    except (OSError, AttributeError) as error:
        log.warning("fallback products=torch reason=`%s` remedy=`%s`", error, remedy_for(error))
        return None
    run.restype = None
    run.argtypes = (ctypes.POINTER(_Weight), ctypes.POINTER(_Product), ctypes.c_uint)
    return run

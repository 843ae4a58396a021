"""Products by cuBLASLt itself, by any kernel that it has. Chooses none.

Its numbers are those of cublasLt.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.engine.kernels import BF16

WORKSPACE_BYTES = 32 << 20
_COMPUTE_32F, _REAL_32F, _REAL_16BF = 68, 0, 14
_TRANS_A, _MAX_WORKSPACE, _TRANSPOSED = 3, 1, 1
#: What tells kernels apart, by its number.
_CONFIG = {"id": 0, "tile": 1, "split": 2, "swizzle": 4, "option": 5, "stages": 6, "inner": 7, "cluster": 8}


class _Heuristic(ctypes.Structure):
    """A kernel that cuBLASLt proposes, and what it says about it."""

    _fields_ = (
        ("algo", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A kernel for products, as cuBLASLt writes it down."""

    words: tuple[int, ...]


class LtLibrary:
    """cuBLASLt as torch has loaded it, with a handle and scratch memory of its own."""

    def __init__(self) -> None:
        torch.mm(torch.ones(16, 16, **BF16), torch.ones(16, 16, **BF16))
        maps = Path("/proc/self/maps").read_text()
        paths = {line.split()[-1] for line in maps.splitlines() if "libcublasLt.so" in line}
        self._library = ctypes.CDLL(paths.pop())
        self.handle = ctypes.c_void_p()
        self.call("cublasLtCreate", ctypes.byref(self.handle))
        self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        self.matmul = self._library.cublasLtMatmul
        pointer = ctypes.c_void_p
        self.matmul.argtypes = [*[pointer] * 14, ctypes.c_size_t, pointer]

    def call(self, name: str, *arguments: object) -> None:
        if status := getattr(self._library, name)(*arguments):
            raise RuntimeError(f"{name} returned {status}")

    def described(self, algorithm: Algorithm) -> dict[str, int]:
        """Return what tells a kernel from others."""
        words, value, size = (ctypes.c_uint64 * 8)(*algorithm.words), ctypes.c_uint64(), ctypes.c_size_t()
        found = {}
        for name, number in _CONFIG.items():
            for num_bytes in (4, 2, 8):
                value.value = 0
                status = self._library.cublasLtMatmulAlgoConfigGetAttribute(
                    words, number, ctypes.byref(value), ctypes.c_size_t(num_bytes), ctypes.byref(size)
                )
                if not status:
                    found[name] = value.value
                    break
        return found


class LtProduct:
    """One size of `out = x @ weight.T`, to which `out` itself may be added; x is [rows, k], weight [n, k]."""

    def __init__(self, library: LtLibrary, n: int, k: int, rows: int, *, adds: bool) -> None:
        self._library = library
        self._alpha, self._beta = ctypes.c_float(1.0), ctypes.c_float(1.0 if adds else 0.0)
        self._product, self._layouts = ctypes.c_void_p(), [ctypes.c_void_p() for _ in range(3)]
        library.call("cublasLtMatmulDescCreate", ctypes.byref(self._product), _COMPUTE_32F, _REAL_32F)
        transposed = ctypes.c_int32(_TRANSPOSED)
        library.call(
            "cublasLtMatmulDescSetAttribute", self._product, _TRANS_A, ctypes.byref(transposed),
            ctypes.c_size_t(4),
        )  # fmt: skip
        # As cuBLASLt sees it, columns first: so the weight is transposed.
        for layout, (first, second) in zip(self._layouts, [(k, n), (k, rows), (n, rows)], strict=True):
            library.call(
                "cublasLtMatrixLayoutCreate", ctypes.byref(layout), _REAL_16BF,
                ctypes.c_uint64(first), ctypes.c_uint64(second), ctypes.c_int64(first),
            )  # fmt: skip

    def proposed(self, most: int, workspace_bytes: int = WORKSPACE_BYTES) -> list[Algorithm]:
        """Return up to `most` kernels, the one that is thought to be the fastest first."""
        preference, found, count = ctypes.c_void_p(), (_Heuristic * most)(), ctypes.c_int()
        library, (weight, x, out) = self._library, self._layouts
        library.call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        limit = ctypes.c_uint64(workspace_bytes)
        library.call(
            "cublasLtMatmulPreferenceSetAttribute", preference, _MAX_WORKSPACE, ctypes.byref(limit),
            ctypes.c_size_t(8),
        )  # fmt: skip
        try:
            library.call(
                "cublasLtMatmulAlgoGetHeuristic", library.handle, self._product, weight, x, out, out,
                preference, most, found, ctypes.byref(count),
            )  # fmt: skip
        except RuntimeError:
            return []  # there is none
        finally:
            library.call("cublasLtMatmulPreferenceDestroy", preference)
        return [Algorithm(tuple(one.algo)) for one in found[: count.value] if not one.state]

    def can_run(self, algorithm: Algorithm) -> bool:
        """True if a kernel, be it proposed for another size, computes this one."""
        library, (weight, x, out), result = self._library, self._layouts, _Heuristic()
        words = (ctypes.c_uint64 * 8)(*algorithm.words)
        try:
            library.call(
                "cublasLtMatmulAlgoCheck", library.handle, self._product, weight, x, out, out, words,
                ctypes.byref(result),
            )  # fmt: skip
        except RuntimeError:
            return False
        return not result.state and result.workspace_bytes <= WORKSPACE_BYTES

    def launcher(
        self, algorithm: Algorithm, weight: torch.Tensor, x: torch.Tensor, out: torch.Tensor
    ) -> Callable[[], None]:
        """Return what queues the product by this kernel, and keeps all that it takes alive."""
        library, words, to = self._library, (ctypes.c_uint64 * 8)(*algorithm.words), ctypes.byref
        weight_at, x_at, out_at = self._layouts

        def launch() -> None:
            status = library.matmul(
                library.handle, self._product, to(self._alpha), weight.data_ptr(), weight_at,
                x.data_ptr(), x_at, to(self._beta), out.data_ptr(), out_at, out.data_ptr(), out_at,
                to(words), library.workspace.data_ptr(), WORKSPACE_BYTES,
                torch.cuda.current_stream().cuda_stream,
            )  # fmt: skip
            if status:
                raise RuntimeError(f"cublasLtMatmul returned {status}")

        return launch

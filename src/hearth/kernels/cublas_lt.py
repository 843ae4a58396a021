"""Products by kernels of cuBLASLt that somebody has chosen, through ctypes. Chooses none, allocates nothing.

torch takes the kernel that the library proposes first, and has no call for another one. Kernels that compute
in scratch memory are left out: so nothing has to be kept for them, and products may run side by side.
Numbers and structures are those of cublasLt.h, which need not be there.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import torch

from hearth.errors import DeviceError
from hearth.kernels.product_table import ALGORITHM_BYTES, ProductSize, ProductTable

_COMPUTE_32F, _REAL_32F = 68, 0
_TYPES = {"bfloat16": 14, "float16": 2}
_DESCRIPTION_TRANSPOSES_A, _TRANSPOSED, _PREFERENCE_MAX_WORKSPACE = 3, 1, 1
#: Of all pointers: kernels are proposed for memory that is aligned so.
_ALIGNMENT_BYTES = 256
_MAPS = Path("/proc/self/maps")

log = logging.getLogger(__name__)


#: Queues a product of x, weight and out by one kernel; returns the library's status, 0 if it is queued.
Launch = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], int]


class ProductKernels(Protocol):
    """Kernels for products, beside those that torch takes."""

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, adds: bool) -> bool:
        """Queue `out = x @ weight.T`, or `out +=`, if there is a kernel for it; False: nothing was done."""


class _Heuristic(ctypes.Structure):
    """A kernel that the library proposes, and what it says about it."""

    _fields_ = (
        ("algorithm", ctypes.c_char * ALGORITHM_BYTES),
        ("workspace_bytes", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True, slots=True)
class _LtDescription:
    """A size as the library has it described, with columns first: so the weight is transposed."""

    product: ctypes.c_void_p
    weight: ctypes.c_void_p
    x: ctypes.c_void_p
    out: ctypes.c_void_p
    alpha: ctypes.c_float
    beta: ctypes.c_float


class CublasLt:
    """The library as torch has loaded it. Any thread calls it; what it describes once stays for all."""

    def __init__(self, library: ctypes.CDLL, stream: Callable[[], int]) -> None:
        """`stream` returns the one to queue products on. Raises DeviceError."""
        self._library, self._stream = library, stream
        library.cublasLtGetVersion.restype = ctypes.c_size_t
        self.version = str(library.cublasLtGetVersion())
        pointer = ctypes.c_void_p
        library.cublasLtMatmul.argtypes = [*[pointer] * 14, ctypes.c_size_t, pointer]
        self._handle = pointer()
        self._call("cublasLtCreate", ctypes.byref(self._handle))
        self._describe = cache(self._new_description)

    def proposed(self, size: ProductSize, most: int) -> list[bytes]:
        """Return up to so many kernels for a size, the one that is thought to be the fastest first."""
        if size.dtype not in _TYPES:
            return []
        about, preference = self._describe(size), ctypes.c_void_p()
        found, count, limit = (_Heuristic * most)(), ctypes.c_int(), ctypes.c_uint64(0)
        self._call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        try:
            self._call(
                "cublasLtMatmulPreferenceSetAttribute",
                *(preference, _PREFERENCE_MAX_WORKSPACE, ctypes.byref(limit)),
                ctypes.c_size_t(ctypes.sizeof(limit)),
            )
            status = self._library.cublasLtMatmulAlgoGetHeuristic(
                *(self._handle, about.product, about.weight, about.x, about.out, about.out, preference),
                *(most, found, ctypes.byref(count)),
            )
        finally:
            self._call("cublasLtMatmulPreferenceDestroy", preference)
        if status:  # it has none
            return []
        usable = [one for one in found[: count.value] if not one.status and not one.workspace_bytes]
        return [ctypes.string_at(ctypes.addressof(one), ALGORITHM_BYTES) for one in usable]

    def can_run(self, size: ProductSize, algorithm: bytes) -> bool:
        """True if a kernel, be it proposed for another size, computes this one without scratch memory."""
        about, found, words = self._describe(size), _Heuristic(), _words(algorithm)
        status = self._library.cublasLtMatmulAlgoCheck(
            *(self._handle, about.product, about.weight, about.x, about.out, about.out),
            *(words, ctypes.byref(found)),
        )
        return not status and not found.status and not found.workspace_bytes

    def launcher(self, size: ProductSize, algorithm: bytes) -> Launch:
        """Return what queues products of a size by one kernel."""
        about, matmul, handle = self._describe(size), self._library.cublasLtMatmul, self._handle
        words = _words(algorithm)
        alpha, beta = ctypes.byref(about.alpha), ctypes.byref(about.beta)

        def launch(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> int:
            to = out.data_ptr()
            status: int = matmul(
                *(handle, about.product, alpha, weight.data_ptr(), about.weight, x.data_ptr(), about.x),
                *(beta, to, about.out, to, about.out, words, None, 0, self._stream()),
            )
            return status

        return launch

    def _new_description(self, size: ProductSize) -> _LtDescription:
        product, (weight, x, out) = ctypes.c_void_p(), [ctypes.c_void_p() for _ in range(3)]
        self._call("cublasLtMatmulDescCreate", ctypes.byref(product), _COMPUTE_32F, _REAL_32F)
        transposed = ctypes.c_int32(_TRANSPOSED)
        self._call(
            "cublasLtMatmulDescSetAttribute",
            *(product, _DESCRIPTION_TRANSPOSES_A, ctypes.byref(transposed)),
            ctypes.c_size_t(ctypes.sizeof(transposed)),
        )
        shapes = (
            (weight, size.inputs, size.outputs),
            (x, size.inputs, size.rows),
            (out, size.outputs, size.rows),
        )
        for layout, num_rows, num_columns in shapes:
            self._call(
                "cublasLtMatrixLayoutCreate",
                *(ctypes.byref(layout), _TYPES[size.dtype]),
                *(ctypes.c_uint64(num_rows), ctypes.c_uint64(num_columns), ctypes.c_int64(num_rows)),
            )
        return _LtDescription(product, weight, x, out, ctypes.c_float(1.0), ctypes.c_float(float(size.adds)))

    def _call(self, name: str, *arguments: object) -> None:
        if status := getattr(self._library, name)(*arguments):
            raise DeviceError(f"cuBLASLt refused {name}: status {status}; see `nvidia-smi`")


def _words(algorithm: bytes) -> ctypes.Array[ctypes.c_uint64]:
    """Return an algorithm as the library reads it."""
    return (ctypes.c_uint64 * (ALGORITHM_BYTES // 8)).from_buffer_copy(algorithm)


class ChosenProducts:
    """Products by the kernels of a table. Any thread calls it. Mutable in what the library refuses."""

    def __init__(self, library: CublasLt, table: ProductTable) -> None:
        self.digest = table.digest
        self._library, self._algorithms = library, dict(table.algorithms)
        self._launches: dict[ProductSize, Launch] = {}  #: of those that were asked for
        self.num_refused = 0  #: sizes whose kernel the library did not take

    def __len__(self) -> int:
        return len(self._algorithms)

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, adds: bool) -> bool:
        size = size_of(x, weight, adds=adds)
        algorithm = self._algorithms.get(size)
        if algorithm is None or not is_plain(x, weight, out):
            return False
        if (launch := self._launches.get(size)) is None:
            launch = self._launches[size] = self._library.launcher(size, algorithm)
        status = launch(x, weight, out)
        if status:  # nothing is queued, now and ever
            self._algorithms.pop(size, None)
            self.num_refused += 1
            log.warning("fallback product=torch size=`%s` reason=`cuBLASLt returned %d`", size, status)
        return not status


def size_of(x: torch.Tensor, weight: torch.Tensor, *, adds: bool) -> ProductSize:
    """Return the size of the product of x [rows, k] and weight [n, k]."""
    outputs, inputs = weight.shape
    return ProductSize(x.shape[0], outputs, inputs, str(x.dtype).removeprefix("torch."), adds)


def is_plain(*tensors: torch.Tensor) -> bool:
    """True if a kernel that was proposed for a size can work with these tensors of it."""
    return all(one.is_contiguous() and one.data_ptr() % _ALIGNMENT_BYTES == 0 for one in tensors)


@cache
def loaded_library() -> CublasLt:
    """Return the library that torch computes with in this process.

    Raises:
        DeviceError: none is loaded, or it cannot be used.
    """
    return CublasLt(ctypes.CDLL(str(_library_path())), lambda: torch.cuda.current_stream().cuda_stream)


@cache
def lt_obstacle() -> str | None:
    """Say why products cannot be computed by chosen kernels; None: they can."""
    try:
        loaded_library()
    except (DeviceError, OSError, AttributeError) as error:
        return str(error)
    return None


def _library_path() -> Path:
    paths = _mapped_paths()
    if not paths and torch.cuda.is_available():
        try:
            torch.cuda.current_blas_handle()  # it comes with the first product at the latest
        except (RuntimeError, AssertionError) as error:  # torch was built without CUDA, or finds it broken
            raise DeviceError(f"torch cannot multiply on the device: {error}") from error
        paths = _mapped_paths()
    if len(paths) != 1:
        found = ", ".join(sorted(paths)) or "none"
        raise DeviceError(f"torch should have loaded one cuBLASLt, found: {found}")
    return Path(paths.pop())


def _mapped_paths() -> set[str]:
    return {line.split()[-1] for line in _MAPS.read_text().splitlines() if "/libcublasLt.so" in line}

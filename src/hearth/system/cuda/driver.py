"""Calls of CUDA's driver that map and fill memory, by ctypes: torch has no such calls. Each is checked.

A long call releases the interpreter. A call of a few microseconds does not: beside a thread that computes,
getting the interpreter back takes up to a hundred times longer. `system/cuda/batches.py` makes many calls at
once.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn

from hearth.core.errors import DeviceError, OutOfDeviceMemory

# From cuda.h, where these names have `CU_` in front.
DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102
DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103
DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED = 110
MEM_ALLOCATION_TYPE_PINNED = 1
MEM_LOCATION_TYPE_DEVICE = 1
MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1
MEM_ACCESS_FLAGS_PROT_READWRITE = 3
MEM_ALLOC_GRANULARITY_MINIMUM = 0
MEMORYTYPE_HOST, MEMORYTYPE_DEVICE = 1, 2
MEMHOSTREGISTER_PORTABLE = 1
POINTER_ATTRIBUTE_MEMORY_TYPE = 2
ERROR_OUT_OF_MEMORY = 2


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _AllocationFlags(ctypes.Structure):
    _fields_ = (
        ("compression_type", ctypes.c_ubyte),
        ("is_rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _AllocationProperties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows_metadata", ctypes.c_void_p),
        ("flags", _AllocationFlags),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class CudaDriver:
    """The driver of one device. Keeps the primary context alive. Any thread may call it."""

    def __init__(self, device_index: int, library: ctypes.CDLL | None = None) -> None:
        """Open the system's driver, or a `library` with its calls. Raises DeviceError if there is none."""
        try:
            self._library = library or ctypes.CDLL("libcuda.so.1")
            #: The same library; its calls keep the interpreter.
            self._brief = ctypes.PyDLL(self._library._name, handle=self._library._handle)
        except OSError as error:
            raise DeviceError(f"CUDA's driver cannot be loaded: {error}; use `--device cpu`") from error
        self._context = ctypes.c_void_p()
        self._thread = threading.local()  #: `is_current`: the context is set on this thread
        self._thread.is_current = True  # calls before the context exists need none
        self.call("cuInit", ctypes.c_uint(0))
        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(device_index))
        self._device = device.value
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self._thread.is_current = False
        self._location = _Location(MEM_LOCATION_TYPE_DEVICE, self._device)

    def has(self, attribute: int) -> bool:
        value = ctypes.c_int()
        self.call(
            "cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(attribute), ctypes.c_int(self._device)
        )
        return value.value != 0

    def granularity_bytes(self, *, is_exportable: bool, is_rdma_capable: bool) -> int:
        properties, value = self._properties(is_exportable, is_rdma_capable), ctypes.c_size_t()
        minimum = ctypes.c_int(MEM_ALLOC_GRANULARITY_MINIMUM)
        self.call("cuMemGetAllocationGranularity", ctypes.byref(value), ctypes.byref(properties), minimum)
        return value.value

    def creator(self, num_bytes: int, *, is_exportable: bool, is_rdma_capable: bool) -> Callable[[], int]:
        """Return a function that allocates memory, for one thread. Its arguments are built once."""
        properties, handle = self._properties(is_exportable, is_rdma_capable), ctypes.c_ulonglong()
        size, flags = ctypes.c_size_t(num_bytes), ctypes.c_ulonglong(0)
        arguments = (ctypes.byref(handle), size, ctypes.byref(properties), flags)

        def create() -> int:
            self.call("cuMemCreate", *arguments)
            return handle.value

        return create

    def release(self, handle: int) -> None:
        self.call("cuMemRelease", ctypes.c_ulonglong(handle))

    def reserve(self, num_bytes: int, wanted: int | None) -> int:
        address = ctypes.c_ulonglong()
        self.call(
            "cuMemAddressReserve",
            ctypes.byref(address),
            ctypes.c_size_t(num_bytes),
            ctypes.c_size_t(0),
            ctypes.c_ulonglong(wanted or 0),
            ctypes.c_ulonglong(0),
        )
        return address.value

    def free_address(self, address: int, num_bytes: int) -> None:
        self.call("cuMemAddressFree", ctypes.c_ulonglong(address), ctypes.c_size_t(num_bytes))

    def map(self, address: int, num_bytes: int, handles: Sequence[int]) -> None:
        zero, size = ctypes.c_ulonglong(0), ctypes.c_size_t(num_bytes)
        mapped_bytes = 0
        try:
            for handle in handles:
                where = ctypes.c_ulonglong(address + mapped_bytes)
                self.call_briefly(
                    "cuMemMap", where, size, ctypes.c_size_t(0), ctypes.c_ulonglong(handle), zero
                )
                mapped_bytes += num_bytes
            where, size = ctypes.c_ulonglong(address), ctypes.c_size_t(mapped_bytes)
            self.call("cuMemSetAccess", where, size, ctypes.byref(self.access()), ctypes.c_size_t(1))
        except DeviceError:
            if mapped_bytes:
                self.unmap(address, mapped_bytes)  # all or none of them
            raise

    def access(self) -> ctypes.Structure:
        return _Access(self._location, MEM_ACCESS_FLAGS_PROT_READWRITE)

    def unmap(self, address: int, num_bytes: int) -> None:
        self.call("cuMemUnmap", ctypes.c_ulonglong(address), ctypes.c_size_t(num_bytes))

    def copy_from_host(self, destination: int, source: int, num_bytes: int, stream: int) -> None:
        """Queue a copy. From memory that is not pinned, this call blocks for part of it."""
        call = self.call_briefly if self._is_pinned(source) else self.call
        where, what = ctypes.c_ulonglong(destination), ctypes.c_void_p(source)
        call("cuMemcpyHtoDAsync_v2", where, what, ctypes.c_size_t(num_bytes), ctypes.c_void_p(stream))

    def register_host(self, address: int, num_bytes: int) -> int:
        """Pin host memory for all devices; return the driver's code, 0 on success."""
        self.enter_context()
        where, size = ctypes.c_void_p(address), ctypes.c_size_t(num_bytes)
        flags = ctypes.c_uint(MEMHOSTREGISTER_PORTABLE)
        return int(self._library.cuMemHostRegister_v2(where, size, flags))

    def unregister_host(self, address: int) -> int:
        self.enter_context()
        return int(self._library.cuMemHostUnregister(ctypes.c_void_p(address)))

    def _is_pinned(self, address: int) -> bool:
        kind, which = ctypes.c_uint(), ctypes.c_int(POINTER_ATTRIBUTE_MEMORY_TYPE)
        code = self._brief.cuPointerGetAttribute(ctypes.byref(kind), which, ctypes.c_ulonglong(address))
        return bool(code == 0 and kind.value == MEMORYTYPE_HOST)

    def export(self, handle: int) -> int:
        """Return a file descriptor by which another process can map the memory. The caller closes it."""
        fd = ctypes.c_int()
        self.call(
            "cuMemExportToShareableHandle",
            ctypes.byref(fd),
            ctypes.c_ulonglong(handle),
            ctypes.c_int(MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
            ctypes.c_ulonglong(0),
        )
        return fd.value

    def open(self, fd: int) -> int:
        """Return a handle of memory that another process has exported. The caller closes the descriptor."""
        handle = ctypes.c_ulonglong()
        self.call(
            "cuMemImportFromShareableHandle",
            ctypes.byref(handle),
            ctypes.c_void_p(fd),
            ctypes.c_int(MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
        )
        return handle.value

    def close(self) -> None:
        self.call("cuDevicePrimaryCtxRelease_v2", ctypes.c_int(self._device))

    def _properties(self, is_exportable: bool, is_rdma_capable: bool) -> _AllocationProperties:
        properties = _AllocationProperties(type=MEM_ALLOCATION_TYPE_PINNED, location=self._location)
        properties.handle_types = MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR if is_exportable else 0
        properties.flags.is_rdma_capable = is_rdma_capable
        return properties

    def declare(self, types_by_call: Mapping[str, Sequence[type]]) -> None:
        """Declare argument types, so that calls take plain numbers. Raises DeviceError: a call is missing."""
        for name, types in types_by_call.items():
            try:
                getattr(self._library, name).argtypes = types
            except AttributeError as error:
                raise DeviceError(
                    f"CUDA's driver has no {name}, it is older than CUDA 12.4: use a newer driver"
                ) from error

    def call(self, name: str, *arguments: object) -> None:
        self.enter_context()
        self._check(getattr(self._library, name)(*arguments), name, arguments)

    def call_each(self, name: str, calls: Iterable[tuple[object, ...]]) -> None:
        self.enter_context()
        function = getattr(self._library, name)
        for arguments in calls:
            if code := function(*arguments):
                self._check(code, name, arguments)

    def address(self, name: str) -> int:
        return ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value or 0

    def refused(self, name: str, num_arguments: int, code: int) -> NoReturn:
        assert code != 0, f"{name} has not failed"
        self._check(code, name, (None,) * num_arguments)
        raise AssertionError("unreachable")

    def succeeds(self, name: str, *arguments: object) -> bool:
        self.enter_context()
        return bool(getattr(self._library, name)(*arguments) == 0)

    def call_briefly(self, name: str, *arguments: object) -> None:
        """Make a call of a few microseconds without releasing the interpreter. Raises DeviceError."""
        self._check(self.code_of(name, *arguments), name, arguments)

    def code_of(self, name: str, *arguments: object) -> int:
        self.enter_context()
        return int(getattr(self._brief, name)(*arguments))

    def enter_context(self) -> int:
        """Set the context on this thread, which has none if torch was not used on it, and return it."""
        if not getattr(self._thread, "is_current", False):
            self._check(self._library.cuCtxSetCurrent(self._context), "cuCtxSetCurrent", ())
            self._thread.is_current = True
        return self._context.value or 0

    def _check(self, code: int, name: str, arguments: tuple[object, ...]) -> None:
        if code != 0:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            what = text.value.decode() if text.value else "unknown"
            values = ", ".join(str(getattr(argument, "value", "&")) for argument in arguments)
            kind = OutOfDeviceMemory if code == ERROR_OUT_OF_MEMORY else DeviceError
            raise kind(f"CUDA's driver refused {name}({values}): {what} ({code}); see `nvidia-smi`")

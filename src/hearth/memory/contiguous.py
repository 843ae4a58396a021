"""One contiguous piece of device memory: moves bytes within it and returns free pages to the system.

CPU memory is mapped here and not by torch, because its pages are returned and come back as zeros.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable

import torch

from hearth.core.errors import DeviceError
from hearth.models.layout import ALIGNMENT_BYTES

#: Bytes of a move that overlaps itself are read this many at a time before they are written.
STAGED_BYTES = 16 << 20


class ContiguousMemory:
    """Mutable; one thread moves its bytes."""

    def __init__(
        self, device: torch.device, num_bytes: int, wipe: Callable[[torch.Tensor], None] | None
    ) -> None:
        """`wipe`: called with all bytes that come free, for tests.

        Raises:
            DeviceError: the device has fewer bytes.
        """
        #: None: the memory is a device's, which has no pages that could be given back.
        self._map: mmap.mmap | None = None
        try:
            if device.type == "cpu":
                self._map = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                memory = torch.frombuffer(self._map, dtype=torch.uint8)
            else:
                memory = torch.empty(num_bytes + ALIGNMENT_BYTES, dtype=torch.uint8, device=device)
        except (OSError, RuntimeError) as error:  # the system's, or torch.OutOfMemoryError on CUDA
            raise DeviceError(
                f"a pool of {num_bytes} bytes was asked for, but {device} does not have them: {error}; end "
                "what else uses it, or lower `service.memory_bytes`"
            ) from error
        begin = -memory.data_ptr() % ALIGNMENT_BYTES
        #: Begins at a multiple of the alignment, so that offsets in it are aligned as addresses are.
        self.bytes = memory[begin : begin + num_bytes]
        self._wipe = wipe

    def give_back(self, begin: int, end: int) -> None:
        """Return the pages within these bytes to the system; they then hold arbitrary bits. Does nothing on
        CUDA."""
        begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if self._map is not None and begin < end:
            self._map.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def freed(self, begin: int, end: int) -> None:
        if self._wipe is not None and begin < end:
            self._wipe(self.bytes[begin:end])

    def move(self, source: int, target: int, num_bytes: int) -> None:
        """Copy bytes; source and target may overlap. On CUDA in the order of the current stream."""
        if self.bytes.is_cuda:
            self._copy_in_pieces(source, target, num_bytes)
        else:
            base = self.bytes.data_ptr()
            ctypes.memmove(base + target, base + source, num_bytes)
        # What the target does not cover of the source.
        if target < source:
            self.freed(max(source, target + num_bytes), source + num_bytes)
        else:
            self.freed(source, min(source + num_bytes, target))

    def _copy_in_pieces(self, source: int, target: int, num_bytes: int) -> None:
        distance = abs(target - source)
        piece_bytes = max(distance, STAGED_BYTES)
        begins = range(0, num_bytes, piece_bytes)
        for begin in begins if target < source else reversed(begins):
            end = min(begin + piece_bytes, num_bytes)
            piece = self.bytes[source + begin : source + end]
            overlaps = end - begin > distance
            self.bytes[target + begin : target + end].copy_(piece.clone() if overlaps else piece)

"""Pages of a CUDA device's memory, all created at start and kept. Does not know their owners.

They can be exported to other processes and reached by RDMA where the device supports it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import torch

from hearth.core.errors import DeviceError, OutOfDeviceMemory
from hearth.memory.pages import Mark, PageRun, remap_each
from hearth.policy.memory.space_slots import NUM_SLOTS
from hearth.system.cuda.batches import HandleRun, batches_of
from hearth.system.cuda.driver import (
    DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
    DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
    DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
    CudaDriver,
)

#: A chunk of the store: mapping one takes far less time than copying it, and linear layers run as fast.
PAGE_BYTES = 16 << 20
#: The driver honours wanted addresses from 0x18000000000 up, and the kernel places nothing by itself below
#: 0x555555554000: executables and heaps lie from there up, libraries and other memory from the end down, both
#: moved by as much as 16 TiB from process to process. The space of libraries and those of models lie between,
#: so that on x86-64 each is free in every process; one that is not is logged and not used.
BASE_ADDRESS = 0x20000000000
SPACE_BYTES = 512 << 30
#: Addresses that are the same in every process: the space of libraries, and those of models behind it.
FIXED_ADDRESSES = range(BASE_ADDRESS - SPACE_BYTES, BASE_ADDRESS + NUM_SLOTS * SPACE_BYTES)
#: The memory of a killed process may come free a moment later: wait until none has for this long, check this
#: often, log this often.
MEMORY_PATIENCE_S, MEMORY_LOOK_S, MEMORY_TELL_S = 2.0, 0.005, 1.0

log = logging.getLogger(__name__)


def can_map(device: torch.device) -> bool:
    with closing(CudaDriver(device.index or 0)) as driver:
        return driver.has(DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)


class CudaPages:
    base_address = BASE_ADDRESS
    space_bytes = SPACE_BYTES
    num_spaces = NUM_SLOTS

    def __init__(self, device: torch.device, budget_bytes: int, page_bytes: int = PAGE_BYTES) -> None:
        """Create the pages of the budget, waiting for memory that is about to come free.

        Raises:
            DeviceError: the device cannot map memory, or not in pages of this size, or has less of it.
        """
        self._device = torch.device("cuda", device.index if device.index is not None else 0)
        self.page_bytes, self.num_pages = page_bytes, budget_bytes // page_bytes
        self.fallbacks: Counter[str] = Counter()
        self._handles: list[int] = []
        self._driver = CudaDriver(self._device.index)
        self._batches = batches_of(self._driver)
        if self._batches is None:  # as was logged
            self.fallbacks["driver_batches"] += 1
        if not self._driver.has(DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED):
            raise DeviceError(f"{self._device} cannot map memory by pages")
        self.is_exportable = self._can("export", DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)
        self._is_rdma_capable = self._can("rdma", DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)
        self._check_size(budget_bytes)
        self._probe()
        self._create()

    def reserve(self, wanted: int | None) -> int:
        return self._driver.reserve(SPACE_BYTES, wanted)

    def free(self, address: int) -> None:
        self._driver.free_address(address, SPACE_BYTES)

    def map(self, address: int, *pages: int) -> None:
        self._driver.map(address, self.page_bytes, [self._handles[page] for page in pages])

    def unmap(self, address: int, num_pages: int = 1) -> None:
        self._driver.unmap(address, num_pages * self.page_bytes)

    def remap(self, runs: Sequence[PageRun]) -> Iterator[PageRun]:
        """Makes all calls of the driver without holding the interpreter lock."""
        if self._batches is None:
            return remap_each(self, runs)
        handle_runs = [
            HandleRun(run.address, run.num_pages, [self._handles[page] for page in run.pages]) for run in runs
        ]
        return (runs[at] for at in self._batches.remap(self.page_bytes, handle_runs))

    def mark(self) -> Mark:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch leaves it untyped
        event.record(torch.cuda.current_stream(self._device))
        return _EventMark(event)

    def bytes_at(self, address: int, num_bytes: int) -> torch.Tensor:
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        # Other ways to a tensor ask the driver about the address, which fails where nothing is mapped.
        storage = torch._C._construct_storage_from_data_pointer(address, self._device, num_bytes)
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage, 0, (num_bytes,), (1,))

    def export(self, page: int) -> int:
        """Return a file descriptor, for the caller to close, with which another process can map the page."""
        return self._driver.export(self._handles[page])

    def close(self) -> None:
        while self._handles:
            self._driver.release(self._handles.pop())
        self._driver.close()

    def _can(self, name: str, attribute: int) -> bool:
        if self._driver.has(attribute):
            return True
        self._go_without(name, "the device cannot")
        return False

    def _go_without(self, name: str, reason: str) -> None:
        self.fallbacks[name] += 1
        log.warning("fallback pages=without_%s device=%s reason=%s", name, self._device, reason)

    def _probe(self) -> None:
        while self._is_rdma_capable or self.is_exportable:
            try:
                handles = list[int]()
                create_patiently(self._creator(), handles, 1)  # memory that is not free yet says nothing
                self._driver.release(handles[0])
                return
            except DeviceError as error:
                self._go_without("rdma" if self._is_rdma_capable else "export", str(error))
                if self._is_rdma_capable:
                    self._is_rdma_capable = False
                else:
                    self.is_exportable = False

    def _check_size(self, budget_bytes: int) -> None:
        granularity_bytes = self._driver.granularity_bytes(
            is_exportable=self.is_exportable, is_rdma_capable=self._is_rdma_capable
        )
        if self.page_bytes % granularity_bytes:
            raise DeviceError(
                f"pages on {self._device} have to be multiples of {granularity_bytes} bytes, "
                f"given: {self.page_bytes}; choose another chunk size"
            )
        if not self.num_pages:
            raise DeviceError(
                f"a pool needs at least one page of {self.page_bytes} bytes, given: {budget_bytes}; "
                "raise `service.memory_bytes`"
            )
        total_bytes = torch.cuda.get_device_properties(self._device).total_memory
        if budget_bytes > total_bytes:  # before taking any, which other processes may need
            raise DeviceError(
                f"{self._device} has only {total_bytes} of the {budget_bytes} bytes of the budget; "
                "lower `service.memory_bytes`"
            )

    def _create(self) -> None:
        try:
            create_patiently(self._creator(), self._handles, self.num_pages)
        except DeviceError as error:
            had_bytes, wanted_bytes = (num * self.page_bytes for num in (len(self._handles), self.num_pages))
            self.close()
            raise DeviceError(
                f"{self._device} has only {had_bytes} of the {wanted_bytes} bytes of the budget: {error}; "
                "end what else uses it, or lower `service.memory_bytes`"
            ) from error

    def _creator(self) -> Callable[[], int]:
        return self._driver.creator(
            self.page_bytes, is_exportable=self.is_exportable, is_rdma_capable=self._is_rdma_capable
        )


class _EventMark:
    """Skips waiting if the mark has passed, which would release the interpreter lock."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def synchronize(self) -> None:
        if not self.has_passed():
            self._event.synchronize()

    def has_passed(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call] # torch leaves it untyped


def create_patiently(
    create: Callable[[], int],
    handles: list[int],
    num_wanted: int,
    *,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Append handles until there are `num_wanted`, waiting for memory that is coming free.

    Raises:
        OutOfDeviceMemory: there is too little, and none came free for `MEMORY_PATIENCE_S`.
    """
    waiting_s: float | None = None  #: since when none has come free; None: the last one was there at once
    tell_s = clock()
    while len(handles) < num_wanted:
        try:
            handles.append(create())
            waiting_s = None
        except OutOfDeviceMemory:
            now_s = clock()
            waiting_s = now_s if waiting_s is None else waiting_s
            if now_s - waiting_s >= MEMORY_PATIENCE_S:
                raise
            if now_s >= tell_s:
                log.info("pool_waits pages=%d of=%d reason=`no memory is free yet`", len(handles), num_wanted)
                tell_s = now_s + MEMORY_TELL_S
            pause(MEMORY_LOOK_S)

"""Device memory that processes of one GPU share by a descriptor, outside of their pools."""

from __future__ import annotations

from contextlib import closing

import torch

from hearth.core.errors import DeviceError
from hearth.system.cuda.driver import CudaDriver


def create(device: torch.device, num_bytes: int) -> int:
    """Return a descriptor of new memory, which exists until this is closed and no process maps it.

    Raises DeviceError.
    """
    with closing(CudaDriver(device.index or 0)) as driver:
        size = _mapped_bytes(driver, num_bytes)
        handle = driver.creator(size, is_exportable=True, is_rdma_capable=False)()
        try:
            return driver.export(handle)
        finally:
            driver.release(handle)


class DeviceMapping:
    """Such memory, mapped by this process. Mutable; one thread calls it."""

    def __init__(self, device: torch.device, num_bytes: int, descriptor: int) -> None:
        """The caller closes the descriptor. Raises DeviceError."""
        self._driver = driver = CudaDriver(device.index or 0)
        try:
            self._mapped_bytes = _mapped_bytes(driver, num_bytes)
            self._address = _map(driver, descriptor, self._mapped_bytes)
        except DeviceError:
            driver.close()
            raise
        storage = torch._C._construct_storage_from_data_pointer(self._address, device, num_bytes)
        self.content = torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (num_bytes,), (1,))

    def free(self) -> None:
        """Unmap it. Nothing on the device may use it any more."""
        self._driver.unmap(self._address, self._mapped_bytes)
        self._driver.free_address(self._address, self._mapped_bytes)
        self._driver.close()


def _map(driver: CudaDriver, descriptor: int, num_bytes: int) -> int:
    handle = driver.open(descriptor)
    try:
        address = driver.reserve(num_bytes, None)
        try:
            driver.map(address, num_bytes, [handle])
        except DeviceError:
            driver.free_address(address, num_bytes)
            raise
        return address
    finally:
        driver.release(handle)  # what is mapped stays


def _mapped_bytes(driver: CudaDriver, num_bytes: int) -> int:
    unit_bytes = driver.granularity_bytes(is_exportable=True, is_rdma_capable=False)
    return -(-num_bytes // unit_bytes) * unit_bytes

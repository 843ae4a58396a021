"""The tables of products of all models on one CUDA device: found where kernels are kept, or measured.

A table is found when an engine is put together, and stays for the engine's life. If there is none, torch
takes the kernels, until one was measured while nobody asks for anything (`worker/snapshot_maker.py`).
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Generator

import msgspec
import torch

from hearth.engine.dry_run import KernelNeeds
from hearth.engine.graph_capture import GraphCapture
from hearth.engine.product_choice import MAX_COLD_ROWS, ProductChooser, cuda_times_us
from hearth.engine.runner import Runner
from hearth.engine.step_shape import PaddedSizes
from hearth.errors import DeviceError
from hearth.kernels.cublas_lt import ChosenProducts, CublasLt, loaded_library
from hearth.kernels.kernel_cache import KernelCache
from hearth.kernels.product_table import ProductSize, ProductTable

#: Of choosing: kernels that were chosen in another way are not found.
_METHOD = 4

log = logging.getLogger(__name__)

#: Measures a piece each time it is asked for the next; returns all products once they are kept.
Tuning = Generator[ProductSize, None, ChosenProducts | None]


class ProductTables:
    """Tables for one device and one version of the library. Any thread calls it."""

    def __init__(self, cache: KernelCache, device: str, library: CublasLt) -> None:
        """`device` is the name of it."""
        self._cache, self._device, self._library = cache, device, library

    @staticmethod
    def on(device: torch.device, cache: KernelCache) -> ProductTables | None:
        """Return the tables of a CUDA device; None: torch takes all kernels there, which is told."""
        try:
            return ProductTables(cache, torch.cuda.get_device_name(device), loaded_library())
        except (DeviceError, OSError, AttributeError) as error:
            log.warning(
                "fallback products=torch reason=`%s` remedy=`pip install hearth-inference[gpu]`", error
            )
            return None

    def find(self, needs: KernelNeeds) -> ChosenProducts | None:
        """Return the kernels that were chosen for a model; None: nobody has measured them yet."""
        path = self._cache.products_path(self._key(needs))
        table = ProductTable.find(path, self._device, self._library.version)
        if table is None:
            return None
        log.info("products_chosen sizes=%d table=%s", len(table.algorithms), table.digest)
        return ChosenProducts(self._library, table)

    def tune(self, needs: KernelNeeds, runner: Runner) -> Tuning:
        """Find or measure the kernels for a model whose weights are there, between requests.

        Returns None where they cannot be kept.
        """
        if (found := self.find(needs)) is not None:  # another process was quicker
            return found
        began_s = time.perf_counter()
        capturer = None if runner.graphs is None else GraphCapture()
        chooser = ProductChooser(runner, self._library, cuda_times_us, capturer)
        chosen = yield from chooser.choose_all()
        if capturer is None:  # those of few rows were not proved, and who finds the table may capture steps
            chosen = {size: word for size, word in chosen.items() if size.rows > MAX_COLD_ROWS}
        table = ProductTable(self._device, self._library.version, chosen)
        try:
            table.save(self._cache.products_path(self._key(needs)))
        except OSError as error:
            log.warning("product_table_not_kept reason=%s", error)
            return None
        seconds = time.perf_counter() - began_s
        log.info("products_measured sizes=%d seconds=%.1f", len(table.algorithms), seconds)
        return self.find(needs)  # if another process was quicker, all go by that one's

    def _key(self, needs: KernelNeeds) -> str:
        """Return the name of a table, a new one for other sizes of steps, devices and libraries."""
        sizes = PaddedSizes.of(needs.limits)
        told = msgspec.json.encode((_METHOD, needs, sizes, self._device, self._library.version))
        return hashlib.sha256(told).hexdigest()[:32]

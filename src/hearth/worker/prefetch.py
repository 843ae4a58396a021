"""Prefetches what has no turn or no room yet: to host memory, and a model's first bytes to the device.

Failures are only logged; the load that follows meets them again. Takes no memory and decides nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial

from hearth.core.errors import HearthError, LoadCancelled
from hearth.core.messages import HostModel
from hearth.core.types import ModelId
from hearth.memory.pool import Pool, Space
from hearth.models.layout import ByteRange, Layout
from hearth.store.transfer.destination import PageMapping
from hearth.store.transfer.lease import Lease
from hearth.store.transfer.lease_client import HostPrefetch, OpenedAdapter, OpenedModel
from hearth.store.transfer.record import LoadRecord
from hearth.worker.failure import start_thread
from hearth.worker.model_load import (
    FrontLoaded,
    HostingNews,
    HostPrefetched,
    open_model,
)
from hearth.worker.runtime import HostingResources
from hearth.worker.weights_transfer import (
    LoadNews,
    ModelBroken,
    WeightsLoaded,
    WeightsTransfer,
    missing_chunks,
)

log = logging.getLogger(__name__)


class ModelPrefetch:
    """One wait of a model for its turn. The step thread calls it and takes its news; threads `post` them."""

    def __init__(
        self,
        order: HostModel,
        opened: OpenedModel,
        resources: HostingResources,
        post: Callable[[HostingNews], None],
    ) -> None:
        self._order, self._opened, self._resources, self._post = order, opened, resources, post
        #: News that the step thread has taken so far.
        self.is_in_host = False
        self.copying_bytes = 0  #: that have a place and are being transferred to it
        self._transfer: WeightsTransfer | None = None  #: of the last bytes that were given a place
        #: Keeps beginning and cancelling apart; guards the fields below.
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._prefetch: HostPrefetch | None = None
        self._start(self._run)

    def copy(self, space: Space, layout: Layout, prepare: Callable[[ByteRange], None]) -> None:
        """Fill all gaps of a space; `prepare` maps a part of it."""
        self.copying_bytes = sum(gap.part.end - gap.part.begin for gap in space.gaps)
        manifest, loader = self._opened.manifest, self._resources.loader
        chunks = missing_chunks(manifest, space.gaps)
        lease = Lease(self._resources.lease_client, self._opened, chunks, is_prefetch=True)
        map_pages = partial(PageMapping, prepare, space.parts, loader.threads)
        transfer = WeightsTransfer(lease, manifest, space, layout, map_pages, loader, self._tell)
        self._transfer = transfer
        self._start(lambda: self._copy(lease, transfer))

    def cancel(self) -> None:
        """Cancel all of it, and wait until no thread touches the memory."""
        with self._lock:
            self._is_cancelled = True
            if self._prefetch is not None:
                self._prefetch.cancel()
        if self._transfer is not None:
            self._transfer.cancel()

    def _start(self, act: Callable[[], None]) -> None:
        threads, post = self._resources.loader.threads, self._post
        start_thread(threads, act, lambda failure: post(ModelBroken(failure)))

    def _run(self) -> None:
        try:
            self._post(HostPrefetched(self._bring_to_host()))
        except LoadCancelled:
            pass
        except HearthError as error:
            self._log_failure(str(error))
            self._post(HostPrefetched(is_in_host=False))

    def _bring_to_host(self) -> bool:
        lease_client = self._resources.lease_client
        opened = open_model(lease_client, self._order, lambda: self._is_cancelled)
        if opened.is_in_host:
            return True
        prefetch = lease_client.prefetch(opened)
        with self._lock:
            self._prefetch = prefetch
            if self._is_cancelled:
                prefetch.cancel()
        return prefetch.wait()

    def _copy(self, lease: Lease, transfer: WeightsTransfer) -> None:
        try:
            lease.begin()
            if lease.is_in_host:
                transfer.start()
            else:
                lease.cancel()
                self._post(FrontLoaded(None))
        except HearthError as error:
            self._log_failure(str(error))
            self._post(FrontLoaded(None))

    def _tell(self, news: LoadNews) -> None:
        match news:
            case WeightsLoaded(record):
                self._post(FrontLoaded(record))
            case ModelBroken(failure) if failure.is_fatal:
                self._post(news)
            case ModelBroken(failure):
                self._log_failure(failure.reason)
                self._post(FrontLoaded(None))

    def _log_failure(self, reason: str) -> None:
        if not self._is_cancelled:
            log.warning("prefetch_failed model=%s reason=%s", self._order.model, reason)


class TurnPrefetch:
    """The prefetch of a model while it waits for its turn. Mutable; the step thread alone calls it."""

    def __init__(self, model: ModelId, resources: HostingResources, pool: Pool) -> None:
        self._model, self._resources, self._pool = model, resources, pool
        self._current: ModelPrefetch | None = None  #: while the model is one of the next
        self._records: list[LoadRecord] = []  #: of bytes copied to the device since all of it was there

    @property
    def copying_bytes(self) -> int:
        return 0 if self._current is None else self._current.copying_bytes

    @property
    def is_in_host(self) -> bool:
        return self._current is not None and self._current.is_in_host

    def begin(self, order: HostModel, opened: OpenedModel, post: Callable[[HostingNews], None]) -> None:
        if self._current is None:
            self._current = ModelPrefetch(order, opened, self._resources, post)

    def reached_host(self, news: HostPrefetched) -> None:
        if self._current is not None:
            self._current.is_in_host = news.is_in_host

    def copy(self, space: Space, layout: Layout) -> None:
        assert self._current is not None, f"`{self._model}` is not being prefetched"
        self._current.copy(space, layout, lambda part: self._pool.prepare(self._model, part))

    def copied(self, news: FrontLoaded) -> None:
        assert self._current is not None, f"`{self._model}` is not being prefetched"
        if news.record is None:
            self._current.cancel()  # of which some may be going on
        else:
            self._records.append(news.record)
        self._current.copying_bytes, self._current.is_in_host = 0, news.record is not None
        self._pool.load_ended(self._model, is_whole=news.record is not None)

    def stop(self) -> None:
        """Prefetch no more, unless bytes are being copied to the device."""
        if self._current is not None and not self._current.copying_bytes:
            self.cancel()

    def cancel(self) -> None:
        """Prefetch no more, wait until no thread touches the memory, and give back what was to be filled."""
        if self._current is not None:
            self._current.cancel()
            if self._current.copying_bytes:
                self._pool.load_ended(self._model, is_whole=False)
            self._current = None

    def take_records(self) -> list[LoadRecord]:
        records, self._records = self._records, []
        return records


class AdapterPrefetch:
    def __init__(self, opened: OpenedAdapter, resources: HostingResources) -> None:
        self._opened, self._resources = opened, resources
        self._lock = threading.Lock()  #: keeps beginning and cancelling apart; guards the fields below
        self._is_cancelled = False
        self._prefetch: HostPrefetch | None = None
        self.is_over = False  #: written by the thread that waits
        resources.loader.threads.start(self._run)

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
            if self._prefetch is not None:
                self._prefetch.cancel()

    def _run(self) -> None:
        try:
            with self._lock:
                if self._is_cancelled:
                    return
                self._prefetch = self._resources.lease_client.prefetch(self._opened)
            self._prefetch.wait()
        except HearthError:
            pass  # the load meets it again, and reports it
        finally:
            self.is_over = True

"""Brings a model nearer that waits for its turn: it comes to host memory, and its first bytes cross.

Nobody waits for either, and what fails here is left to its turn. Takes no memory and decides nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from hearth.core.errors import HearthError, LoadCancelled
from hearth.core.messages import HostModel
from hearth.memory.pool import Space
from hearth.models.layout import ByteRange, Layout
from hearth.store.transfer.lease_client import HostPrefetch, OpenedModel
from hearth.store.transfer.patient_loan import await_keeper
from hearth.worker.map_ahead import PageMapping
from hearth.worker.model_load import (
    FrontLoaded,
    HostingNews,
    HostPrefetched,
    borrow,
    start_thread,
)
from hearth.worker.runtime import HostingResources
from hearth.worker.weights_transfer import (
    Destination,
    LoadNews,
    ModelBroken,
    WeightsLoaded,
    WeightsTransfer,
    missing_chunks,
)

log = logging.getLogger(__name__)


class ModelPrefetch:
    """One wait of a model. The step thread makes, calls and cancels it and notes its news; others `post`."""

    def __init__(
        self,
        order: HostModel,
        opened: OpenedModel,
        resources: HostingResources,
        post: Callable[[HostingNews], None],
    ) -> None:
        """Have the keeper bring the model to host memory. `opened`: the model as it was found."""
        self._order, self._opened, self._resources, self._post = order, opened, resources, post
        #: News that the step thread has taken so far.
        self.is_in_host = False
        self.crossing_bytes = 0  #: that have a place and are on their way to it
        #: Keeps beginning and cancelling apart; guards the fields below.
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._prefetch: HostPrefetch | None = None
        self._mapping: PageMapping | None = None
        self._transfer: WeightsTransfer | None = None
        start_thread(self._run, resources, post)

    def cross(self, space: Space, layout: Layout, prepare: Callable[[ByteRange], None]) -> None:
        """Have all gaps of a space filled; `prepare` makes a part of it ready to be written."""
        self.crossing_bytes = sum(gap.part.end - gap.part.begin for gap in space.gaps)
        mapping = PageMapping(prepare, space.parts, self._resources.loader.threads)
        with self._lock:
            self._mapping, self._transfer = mapping, None
        to = Destination(space.gaps, mapping, space.places, layout)
        start_thread(lambda: self._cross(to), self._resources, self._post)

    def cancel(self) -> None:
        """Call all of it off, and wait until nobody touches the memory any more."""
        with self._lock:
            self._is_cancelled = True
            if self._prefetch is not None:
                self._prefetch.cancel()
            if self._mapping is not None:
                self._mapping.stop()
            if self._transfer is not None:
                self._transfer.cancel()

    def _run(self) -> None:
        try:
            self._post(HostPrefetched(self._bring_to_host()))
        except LoadCancelled:
            pass
        except HearthError as error:  # whoever needs the model meets it again, and says so
            self._log_failure(str(error))
            self._post(HostPrefetched(is_in_host=False))

    def _bring_to_host(self) -> bool:
        """Return whether all of the model is in host memory, when no more of it is on its way."""
        lease_client = self._resources.lease_client
        opened = borrow(lease_client, self._order, lambda: self._is_cancelled)
        if opened.is_in_host:
            return True
        prefetch = lease_client.prefetch(opened)
        with self._lock:
            self._prefetch = prefetch
            if self._is_cancelled:
                prefetch.cancel()
        return prefetch.wait()

    def _cross(self, to: Destination) -> None:
        opened, lease_client = self._opened, self._resources.lease_client
        chunks = missing_chunks(opened.manifest, to.gaps)
        try:
            # A lease that ends with its lender: others may wait for the memory, and nobody for these bytes.
            lease = await_keeper(lambda: lease_client.fetch(opened, chunks), lambda: self._is_cancelled)
            if not lease.is_in_host:
                lease.cancel()
                self._post(FrontLoaded(None))
                return
            with self._lock:
                if self._is_cancelled:
                    lease.cancel()
                else:
                    self._transfer = WeightsTransfer(opened, lease, to, self._resources.loader, self._tell)
        except HearthError as error:  # as above
            self._log_failure(str(error))
            self._post(FrontLoaded(None))

    def _tell(self, news: LoadNews) -> None:
        """Post how it ends; how far it is matters to nobody."""
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
            log.warning("load_ahead_failed model=%s reason=%s", self._order.model, reason)

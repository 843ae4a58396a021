"""The adapters of a worker: looked up, loaded, kept and evicted. Steps nothing and sends no messages.

`AdapterResidency` decides which is placed next and which take requests, `ReclaimPolicy` what is evicted.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

import msgspec

from hearth.core.errors import DeviceError
from hearth.core.messages import AdapterLoaded, AdapterOrder, AdapterUsage
from hearth.core.types import LOCAL, AdapterId, ModelId, node_of, where_on_nodes
from hearth.engine.engine import Engine
from hearth.policy.memory.adapter_residency import AdapterState
from hearth.store.transfer.lease_client import OpenedAdapter
from hearth.store.transfer.record import rung_bytes
from hearth.worker.adapter_load import (
    AdapterArriving,
    AdapterBroken,
    AdapterFilled,
    AdapterFound,
    AdapterMissing,
    AdapterNews,
    PostAdapterNews,
    adapter_lease,
    find_adapter,
    load_adapter,
)
from hearth.worker.failure import Failure, failure_of
from hearth.worker.hosted_model import HostedModel
from hearth.worker.prefetch import AdapterPrefetch
from hearth.worker.reclaimer import Reclaimer
from hearth.worker.runtime import HostingResources

log = logging.getLogger(__name__)

#: Adapters that stay looked up without requests, so that the next request asks the keeper nothing.
MAX_FOUND = 1024
#: Adapters looked up at once, and prefetched to host memory at once: each takes a thread.
MAX_FINDING, MAX_PREFETCHING = 16, 8


def foreign_run(run: int) -> int:
    """Return the number here of another worker's request, whose model has a later stage on this one.

    The numbers of this worker's own requests are positive.
    """
    return -run


def is_own(run: int) -> bool:
    return run > 0


@dataclass(slots=True)
class _WantedAdapter:
    """An adapter that has memory or requests here. Mutable; written by `WorkerAdapters`."""

    order: AdapterOrder
    base: ModelId  #: of the last request
    asked_s: float  #: since when requests wait for it, by `time.perf_counter`
    is_finding: bool = False  #: the keeper is being asked, or will be
    prefetch: AdapterPrefetch | None = None
    wait_s: float = 0.0  #: until it had its memory
    was_asked_in_vain: bool = False  #: its lease was requested ahead, and then there was no place


@dataclass(frozen=True, slots=True)
class FailedRuns:
    runs: Sequence[int]
    failure: Failure


class WorkerAdapters:
    """Mutable; the step thread alone calls it. `post` is called by other threads."""

    def __init__(
        self,
        resources: HostingResources,
        reclaimer: Reclaimer,
        hosted: Mapping[ModelId, HostedModel],
        post: PostAdapterNews,
    ) -> None:
        self._resources, self._reclaimer, self._hosted, self._post = resources, reclaimer, hosted, post
        self.residency, self._pieces = reclaimer.adapters, reclaimer.pieces
        self._wanted: dict[AdapterId, _WantedAdapter] = {}
        self._unwanted: set[AdapterId] = set()  #: to be forgotten when they are looked up
        #: Looked-up adapters, the least recently used first.
        self._found: dict[AdapterId, OpenedAdapter] = {}
        #: Adapters that were removed and still have memory or requests.
        self._forgotten: set[AdapterId] = set()
        self._is_due = False  #: an adapter may be placed, or a request start, that could not before
        self._node = LOCAL if resources.connections is None else node_of(resources.connections.own)
        #: When room was looked for last: the generation of memory, and whether a promise was short.
        self._seen: tuple[int, bool] | None = None
        self._to_find: deque[AdapterOrder] = deque()  #: adapters that the keeper will be asked for
        self._num_finding = 0

    # Events.

    def asked(
        self, order: AdapterOrder, run: int, model: ModelId, arrived_s: float, *, is_ahead: bool = False
    ) -> None:
        """`is_ahead`: as in `AdapterResidency`."""
        adapter, now_s = order.adapter, time.perf_counter()
        if self._node != LOCAL:
            order = msgspec.structs.replace(order, where=where_on_nodes(adapter))
        self._forgotten.discard(adapter)  # it was deployed again
        wanted = self._wanted.get(adapter)
        if wanted is None:
            wanted = self._wanted[adapter] = _WantedAdapter(order, model, now_s)
        elif adapter not in self.residency.known:
            wanted.asked_s = now_s
        wanted.order, wanted.base = order, model
        if order.is_pinned:
            self._unpin_others(order)
        self.residency.asked(adapter, run, model, arrived_s, is_pinned=order.is_pinned, is_ahead=is_ahead)
        self._reclaimer.reload_costs.hosted(adapter, order.weight)
        self._reclaimer.reload_costs.asked(adapter, time.monotonic())
        found = self._found.get(adapter)
        if found is not None and found.where == order.where:  # else it was removed, and deployed again
            self._found[adapter] = self._found.pop(adapter)
            self.residency.found(adapter)
        elif not wanted.is_finding:
            wanted.is_finding = True
            self._to_find.append(order)
            self._find_more()
        self.recheck()

    def ended(self, run: int) -> None:
        """Note the end of any request, with an adapter or without."""
        if (adapter := self.residency.ended(run)) is not None:
            self._pieces.rest(adapter)
            self._reclaimer.policy.note_freed()  # it may be evicted
        self.recheck()

    def forget(self, adapter: AdapterId) -> None:
        """Note that an adapter was removed: its memory is freed with its last request."""
        self._forgotten.add(adapter)
        self.recheck()

    def recheck(self) -> None:
        self._is_due = True

    def take_news(self, adapter: AdapterId, news: AdapterNews) -> AdapterLoaded | FailedRuns | None:
        """Take a thread's news of an adapter. Returns what the gateway has to be told.

        Raises ModelBroke if a model breaks by it: drop that one and take the same news again.
        """
        self.recheck()
        match news:
            case AdapterFound(opened):
                self._looked_up()
                self._note_found(adapter, opened)
                return None
            case AdapterMissing(failure):
                self._looked_up()
                return self._note_missing(adapter, failure)
            case AdapterArriving(transfer):
                transfer.have_stream_wait()  # before a step computes with it, or its memory is taken
                self._note_there(adapter)
                return None
            case AdapterFilled():
                return self._filled(adapter, news)
            case AdapterBroken(failure):
                return self._fail(adapter, failure)
            case _:
                assert_never(news)

    # Consequences.

    @property
    def is_due(self) -> bool:
        return self._is_due or self._seen != self._seen_now()

    def advance(self) -> Iterator[FailedRuns]:
        """Place adapters while there is room; yield failed requests, which the caller ends at once."""
        self._is_due = is_blocked = False
        self._drop_forgotten()
        while (adapter := self.residency.next()) is not None:
            if self._may_have_room(adapter) and self._place(adapter, may_take=True):
                continue
            if self._waits_for_room(adapter):
                self._prefetch(adapter)
                is_blocked = True
                break
            yield self._fail(adapter, failure_of(self._shortage(adapter)))
        for adapter in self.residency.early():
            if is_blocked or not self._place(adapter, may_take=False):
                self._prefetch(adapter)
        self._seen = self._seen_now()
        self._forget_unwanted()

    def give_up(self, short: ModelId) -> FailedRuns | None:
        """Evict an adapter in use, if any: adapters are promised no memory, so their requests fail first.

        Not those of later stages: steps that use them may be on their way.
        """
        adapter = self.residency.last_in_use(lambda one: all(map(is_own, self.residency.runs_of(one))))
        if adapter is None:
            return None
        name = self._wanted[adapter].order.name
        error = DeviceError(
            f"the adapter `{name}` was evicted while it was in use: `{short}` needs its promised KV, of "
            f"{self._reclaimer.pool.budget_bytes} bytes in all; ask again, stop another model, or raise "
            "`service.memory_bytes`"
        )
        return self._fail(adapter, failure_of(error))

    def start(self, run: int, adapter: AdapterId, model: ModelId, engine: Engine) -> None:
        self._pieces.bind(adapter, model, engine)
        self.residency.started(run)

    def running_bytes(self, base: ModelId) -> int:
        """Return the bytes that adapters of a model's running requests need, loaded or not.

        Includes what pages lose because pieces do not fill them.
        """
        page_bytes, num_bytes = self._reclaimer.pool.pieces.page_bytes, 0
        for adapter in self.residency.run_by(base):
            if (found := self._found.get(adapter)) is not None:
                layout = found.manifest.layout
                filled_bytes = page_bytes - page_bytes % max(layout.layer_sizes)
                num_bytes += (
                    layout.num_bytes * page_bytes // filled_bytes if filled_bytes else layout.num_bytes
                )
        return -(-num_bytes // page_bytes) * page_bytes

    def usages(self) -> list[AdapterUsage]:
        return [
            AdapterUsage(
                self._wanted[adapter].order.name,
                self._wanted[adapter].base,
                known.num_bytes,
                len(known.running),
                sum(map(is_own, known.waiting)),  # requests are counted where they run
                known.is_pinned,
            )
            for adapter, known in self.residency.known.items()
        ]

    def _seen_now(self) -> tuple[int, bool]:
        policy = self._reclaimer.policy
        return policy.generation, policy.is_short

    def _unpin_others(self, order: AdapterOrder) -> None:
        for adapter, wanted in self._wanted.items():
            if wanted.order.name == order.name and adapter != order.adapter:
                self.residency.unpin(adapter)

    def _find_more(self) -> None:
        while self._to_find and self._num_finding < MAX_FINDING:
            order = self._to_find.popleft()
            if self.residency.runs_of(order.adapter):
                self._num_finding += 1
                find_adapter(order, self._resources, self._post)
            elif (wanted := self._wanted.get(order.adapter)) is not None:
                wanted.is_finding = False  # no request waits for it any more

    def _looked_up(self) -> None:
        self._num_finding -= 1
        self._find_more()

    def _note_missing(self, adapter: AdapterId, failure: Failure) -> FailedRuns | None:
        """Fail requests whose adapter is nowhere. If it was found before, the same bytes serve."""
        if adapter not in self._found:
            return self._fail(adapter, failure)
        if (wanted := self._wanted.get(adapter)) is not None:
            wanted.is_finding = False
            self.residency.found(adapter)
        return None

    def _note_found(self, adapter: AdapterId, opened: OpenedAdapter) -> None:
        if len(self._found) >= MAX_FOUND:
            self._forget_oldest()
        self._found[adapter] = opened
        if (wanted := self._wanted.get(adapter)) is not None:
            wanted.is_finding = False
            self.residency.found(adapter)

    def _forget_oldest(self) -> None:
        oldest = next((one for one in self._found if one not in self._wanted), None)
        if oldest is not None:
            del self._found[oldest]
            self._reclaimer.reload_costs.forget(oldest)

    def _may_have_room(self, adapter: AdapterId) -> bool:
        """True unless adapters that drain for it still run: another attempt would preempt in vain."""
        is_first = not self.residency.is_any_draining
        return is_first or self._seems_to_have_room(self._found[adapter].manifest.layout.num_bytes)

    def _seems_to_have_room(self, num_bytes: int) -> bool:
        """True if so much is free or something can be evicted, promised to models or not."""
        return bool(self.residency.idle()) or self._reclaimer.pool.free_bytes >= num_bytes

    def _place(self, adapter: AdapterId, *, may_take: bool) -> bool:
        wanted, opened = self._wanted[adapter], self._found[adapter]
        layout = opened.manifest.layout
        lease, is_asked = adapter_lease(opened, self._resources), False
        if may_take and not wanted.was_asked_in_vain and self._seems_to_have_room(layout.num_bytes):
            is_asked = lease.request()  # the keeper answers while the place is found
        is_placed = False
        try:
            is_placed = self._reclaimer.place_adapter(adapter, layout.layer_sizes, may_take=may_take)
        finally:
            if is_asked and not is_placed:  # also if a model broke that was evicted for it
                lease.cancel()
                wanted.was_asked_in_vain = True
        if not is_placed:
            return False
        wanted.was_asked_in_vain = False
        self.residency.placed(adapter, layout.num_bytes)
        if wanted.prefetch is not None:
            wanted.prefetch.cancel()
            wanted.prefetch = None
        wanted.wait_s = time.perf_counter() - wanted.asked_s
        pool = self._reclaimer.pool
        load_adapter(
            wanted.order,
            opened,
            lease,
            runs=self._pieces[adapter],
            prepare=lambda: pool.pieces.prepare(adapter),
            resources=self._resources,
            post=self._post,
        )
        self._pieces.split(adapter)
        return True

    def _prefetch(self, adapter: AdapterId) -> None:
        wanted, opened = self._wanted[adapter], self._found[adapter]
        if wanted.prefetch is not None or opened.is_in_host:
            return
        prefetches = [one.prefetch for one in self._wanted.values() if one.prefetch is not None]
        if sum(not prefetch.is_over for prefetch in prefetches) < MAX_PREFETCHING:
            wanted.prefetch = AdapterPrefetch(opened, self._resources)

    def _waits_for_room(self, adapter: AdapterId) -> bool:
        """Have adapters drain to make room; False: neither they nor a load can."""
        num_bytes = self._found[adapter].manifest.layout.num_bytes
        return (
            self.residency.drain(num_bytes)
            or self.residency.is_any_coming
            or any(one.is_loading for one in self._hosted.values())
            or self._reclaimer.is_any_returning
        )

    def _note_there(self, adapter: AdapterId) -> None:
        self._pieces.filled(adapter, self._found[adapter].manifest.layout)
        self.residency.loaded(adapter)
        self._reclaimer.policy.note_freed()  # it may be evicted again

    def _filled(self, adapter: AdapterId, news: AdapterFilled) -> AdapterLoaded | None:
        if not news.was_arriving:
            self._note_there(adapter)
        wanted, record = self._wanted.get(adapter), news.record
        if wanted is None:
            return None
        self._reclaimer.reload_costs.learn_load(
            adapter,
            {rung: use.num_bytes for rung, use in record.rungs.items()},
            {rung: use.seconds for rung, use in record.rungs.items()},
            None if record.shared_bytes else record.total_s,
        )
        runs = tuple(filter(is_own, self.residency.runs_of(adapter)))
        log.debug("adapter_loaded adapter=%s load_s=%.3f", wanted.order.name, record.total_s)
        return AdapterLoaded(
            adapter, runs, record.num_bytes, rung_bytes(record), wanted.wait_s, record.total_s
        )

    def _fail(self, adapter: AdapterId, failure: Failure) -> FailedRuns:
        runs = self.residency.runs_of(adapter)
        if adapter in self._wanted:
            self._wanted[adapter].is_finding = False
            name = self._wanted[adapter].order.name
            log.error("adapter_failed adapter=%s label=%s reason=%s", name, failure.label, failure.reason)
        if (known := self.residency.known.get(adapter)) is not None and known.num_bytes:
            self._pieces.drop(adapter)
            self._reclaimer.policy.note_freed()
        self._found.pop(adapter, None)  # it may be another one when it is asked for again
        self._reclaimer.reload_costs.forget(adapter)
        for run in runs:
            self.residency.ended(run)
        return FailedRuns(runs, failure)

    def _shortage(self, adapter: AdapterId) -> DeviceError:
        order, pool = self._wanted[adapter].order, self._reclaimer.pool
        num_bytes = self._found[adapter].manifest.layout.num_bytes
        return DeviceError(
            f"the adapter `{order.name}` needs {num_bytes} bytes of device memory, but the hosted models "
            f"are promised almost all of {pool.budget_bytes}; stop another model, unpin adapters, or "
            "raise `service.memory_bytes`"
        )

    def _drop_forgotten(self) -> None:
        for adapter in [one for one in self._forgotten if not self.residency.runs_of(one)]:
            match self.residency.state(adapter):
                case AdapterState.LOADING:
                    continue  # until it is loaded
                case AdapterState.LOADED:
                    self._pieces.drop(adapter)
                    self._reclaimer.policy.note_freed()
            self._forgotten.remove(adapter)
            if self._found.pop(adapter, None) is not None:
                self._reclaimer.reload_costs.forget(adapter)

    def _forget_unwanted(self) -> None:
        for adapter in (*self._unwanted, *self.residency.take_unused()):
            self._unwanted.discard(adapter)
            wanted = self._wanted.get(adapter)
            if wanted is None or adapter in self.residency.known:
                continue
            if wanted.prefetch is not None:
                wanted.prefetch.cancel()
                wanted.prefetch = None
            if wanted.is_finding:
                self._unwanted.add(adapter)
            else:
                del self._wanted[adapter]

"""The adapters of a worker as they are asked for, come, stay and go. Steps nothing and talks to nobody.

`AdapterResidency` decides which comes next and who takes requests, `ReclaimPolicy` who gives way for it. An
adapter is looked up as soon as a request for it is here, and comes while its model is loaded or waits for its
turn, as far as memory is free.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

from hearth.core.errors import DeviceError
from hearth.core.messages import AdapterLoaded, AdapterOrder, AdapterUsage, RungBytes, StartRequest
from hearth.core.types import AdapterId, ModelId
from hearth.engine.engine import Engine
from hearth.policy.memory.adapter_residency import AdapterState
from hearth.store.transfer.lease_client import OpenedAdapter
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

#: How many adapters stay looked up that nobody asks for, so that the next request costs no question.
MAX_FOUND = 1024
#: How many adapters are looked up at once, and how many come to host memory: each takes a thread.
MAX_FINDING, MAX_PREFETCHING = 16, 8


@dataclass(slots=True)
class _WantedAdapter:
    """An adapter that has memory or requests here. Mutable; written by `WorkerAdapters`."""

    order: AdapterOrder
    base: ModelId  #: of the last request
    asked_s: float  #: since when it is waited for, on the clock of `time.perf_counter`
    is_finding: bool = False  #: the keeper is being asked, or will be
    prefetch: AdapterPrefetch | None = None
    wait_s: float = 0.0  #: until it had its memory
    was_asked_in_vain: bool = False  #: the keeper was asked for it ahead, and then there was no place


@dataclass(frozen=True, slots=True)
class FailedRuns:
    """Requests whose adapter cannot be had."""

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
        """`hosted` are the hosted models, kept by whoever calls."""
        self._resources, self._reclaimer, self._hosted, self._post = resources, reclaimer, hosted, post
        self.residency, self._pieces = reclaimer.adapters, reclaimer.pieces
        self._wanted: dict[AdapterId, _WantedAdapter] = {}
        self._unwanted: set[AdapterId] = set()  #: those of them to be forgotten when they are looked up
        #: Adapters as they were found, the one that was used longest ago first.
        self._found: dict[AdapterId, OpenedAdapter] = {}
        #: Adapters that were removed and still have memory or requests.
        self._forgotten: set[AdapterId] = set()
        self._is_due = False  #: something has happened that may let an adapter come or a request start
        #: When room was looked for last: the generation of memory, and whether a promise was short.
        self._seen: tuple[int, bool] | None = None
        self._to_find: deque[AdapterOrder] = deque()  #: adapters that the keeper will be asked for
        self._num_finding = 0

    # What happens.

    def asked(self, request: StartRequest, order: AdapterOrder, arrived_s: float) -> None:
        """Note a request that wants an adapter."""
        adapter, now_s = order.adapter, time.perf_counter()
        self._forgotten.discard(adapter)  # it was deployed again
        wanted = self._wanted.get(adapter)
        if wanted is None:
            wanted = self._wanted[adapter] = _WantedAdapter(order, request.model, now_s)
        elif not self.residency.has_memory(adapter) and not self.residency.runs_of(adapter):
            wanted.asked_s = now_s
        wanted.order, wanted.base = order, request.model
        if order.is_pinned:
            self._unpin_others(order)
        self.residency.asked(adapter, request.run, request.model, arrived_s, is_pinned=order.is_pinned)
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
        self.look_again()

    def ended(self, run: int) -> None:
        """Note that a request has ended, wherever it was. One that wants no adapter is unknown."""
        if (adapter := self.residency.ended(run)) is not None:
            self._pieces.rest(adapter)
        self.look_again()

    def forget(self, adapter: AdapterId) -> None:
        """Note that an adapter was removed: its memory goes with its last request."""
        self._forgotten.add(adapter)
        self.look_again()

    def look_again(self) -> None:
        """Note that something has happened: an adapter may come, or a request start."""
        self._is_due = True

    def take_news(self, adapter: AdapterId, news: AdapterNews) -> AdapterLoaded | FailedRuns | None:
        """Note what a thread has to tell of an adapter. Returns what others have to be told then.

        Raises ModelBroke if a model breaks by it: once that one has gone, the same news are to be told again.
        """
        self.look_again()
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

    # What follows.

    @property
    def is_due(self) -> bool:
        """True if an adapter may come, or a request start, that could not before."""
        return self._is_due or self._seen != self._seen_now()

    def advance(self) -> Iterator[FailedRuns]:
        """Have adapters come that requests wait for, as far as there is room; yield those that never can.

        Whoever calls ends their requests before it goes on.
        """
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
        """Give up an adapter in use, if there is one, for a model that cannot go on otherwise.

        Adapters are promised nothing, so their requests end before a model does.
        """
        adapter = self.residency.last_in_use()
        if adapter is None:
            return None
        name = self._wanted[adapter].order.name
        error = DeviceError(
            f"the adapter `{name}` had to give way while it was in use: `{short}` is promised more KV than "
            f"adapters leave of {self._reclaimer.pool.budget_bytes} bytes; ask again, stop another model, or "
            "raise `service.memory_bytes`"
        )
        return self._fail(adapter, failure_of(error))

    def start(self, run: int, adapter: AdapterId, model: ModelId, engine: Engine) -> None:
        """Have the engine of a model know the adapter of a request that starts now."""
        self._pieces.bind(adapter, model, engine)
        self.residency.started(run)

    def running_bytes(self, base: ModelId) -> int:
        """Return the memory that adapters of a model's running requests take, also those that are not there.

        With what pages lose on which not all of another piece fits.
        """
        page_bytes, num_bytes = self._reclaimer.pool.page_bytes, 0
        for adapter in self.residency.run_by(base):
            if (found := self._found.get(adapter)) is not None:
                layout = found.manifest.layout
                filled_bytes = page_bytes - page_bytes % max(layout.layer_sizes)
                num_bytes += (
                    layout.num_bytes * page_bytes // filled_bytes if filled_bytes else layout.num_bytes
                )
        return -(-num_bytes // page_bytes) * page_bytes

    def usages(self) -> list[AdapterUsage]:
        """Return all adapters that have memory or requests here."""
        return [
            AdapterUsage(
                *(self._wanted[use.adapter].order.name, self._wanted[use.adapter].base, use.num_bytes),
                *(use.num_running, use.num_waiting, use.is_pinned),
            )
            for use in self.residency.uses()
        ]

    def _seen_now(self) -> tuple[int, bool]:
        policy = self._reclaimer.policy
        return policy.generation, policy.is_short

    def _unpin_others(self, order: AdapterOrder) -> None:
        """Have what was deployed under the same name before give way: nobody will ask for it again."""
        for adapter, wanted in self._wanted.items():
            if wanted.order.name == order.name and adapter != order.adapter:
                self.residency.unpin(adapter)

    def _find_more(self) -> None:
        """Have the keeper look adapters up, not too many at once, the one that was asked for first before."""
        while self._to_find and self._num_finding < MAX_FINDING:
            order = self._to_find.popleft()
            if self.residency.runs_of(order.adapter):
                self._num_finding += 1
                find_adapter(order, self._resources, self._post)
            elif (wanted := self._wanted.get(order.adapter)) is not None:
                wanted.is_finding = False  # nobody waits for it any more

    def _looked_up(self) -> None:
        self._num_finding -= 1
        self._find_more()

    def _note_missing(self, adapter: AdapterId, failure: Failure) -> FailedRuns | None:
        """Have requests end whose adapter is nowhere. Where it was found before, the same bytes serve."""
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
        """Forget the adapter that was asked for longest ago, of those that nobody wants."""
        oldest = next((one for one in self._found if one not in self._wanted), None)
        if oldest is not None:
            del self._found[oldest]
            self._reclaimer.reload_costs.forget(oldest)

    def _may_have_room(self, adapter: AdapterId) -> bool:
        """True unless those that drain for an adapter still run: to look again would preempt in vain."""
        is_first = not self.residency.is_any_draining
        return is_first or self._seems_to_have_room(self._found[adapter].manifest.layout.num_bytes)

    def _seems_to_have_room(self, num_bytes: int) -> bool:
        """True if so much is free, or something can be given up, whoever else is promised that."""
        return bool(self.residency.idle()) or self._reclaimer.pool.free_bytes >= num_bytes

    def _place(self, adapter: AdapterId, *, may_take: bool) -> bool:
        """Give an adapter its memory, and have it filled; False: there is no room."""
        wanted, opened = self._wanted[adapter], self._found[adapter]
        layout = opened.manifest.layout
        lease, is_asked = adapter_lease(opened, self._resources), False
        if may_take and not wanted.was_asked_in_vain and self._seems_to_have_room(layout.num_bytes):
            is_asked = lease.request()  # the keeper answers while the place is found
        is_placed = False
        try:
            is_placed = self._reclaimer.place_adapter(adapter, layout.layer_sizes, may_take=may_take)
        finally:
            if is_asked and not is_placed:  # also where a model broke that was to give way
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
            prepare=lambda: pool.prepare_pieces(adapter),
            resources=self._resources,
            post=self._post,
        )
        self._pieces.split(adapter)
        return True

    def _prefetch(self, adapter: AdapterId) -> None:
        """Have an adapter that has no room yet come to host memory meanwhile."""
        wanted, opened = self._wanted[adapter], self._found[adapter]
        if wanted.prefetch is not None or opened.is_in_host:
            return
        prefetches = [one.prefetch for one in self._wanted.values() if one.prefetch is not None]
        if sum(not prefetch.is_over for prefetch in prefetches) < MAX_PREFETCHING:
            wanted.prefetch = AdapterPrefetch(opened, self._resources)

    def _waits_for_room(self, adapter: AdapterId) -> bool:
        """Have others make room when their requests end; False: nobody can."""
        num_bytes = self._found[adapter].manifest.layout.num_bytes
        return (
            self.residency.drain(num_bytes)
            or self.residency.is_any_coming
            or any(one.is_loading for one in self._hosted.values())
        )

    def _note_there(self, adapter: AdapterId) -> None:
        """Have requests start that wait for an adapter, once all engines that compute with it know of it."""
        self._pieces.filled(adapter, self._found[adapter].manifest.layout)
        self.residency.loaded(adapter)
        self._reclaimer.policy.room_may_have_come()  # what is there may be taken again

    def _filled(self, adapter: AdapterId, news: AdapterFilled) -> AdapterLoaded | None:
        """Learn from a load; None: nobody knows the adapter any more."""
        if not news.was_arriving:
            self._note_there(adapter)
        wanted, record = self._wanted.get(adapter), news.record
        if wanted is None:
            return None
        rungs = tuple(RungBytes(rung, use.num_bytes, use.seconds) for rung, use in record.rungs.items())
        self._reclaimer.reload_costs.learn_load(
            adapter,
            {use.rung: use.num_bytes for use in rungs},
            {use.rung: use.seconds for use in rungs},
            None if record.shared_bytes else record.total_s,
        )
        runs = tuple(self.residency.runs_of(adapter))
        log.debug("adapter_loaded adapter=%s load_s=%.3f", wanted.order.name, record.total_s)
        return AdapterLoaded(adapter, runs, record.num_bytes, rungs, wanted.wait_s, record.total_s)

    def _fail(self, adapter: AdapterId, failure: Failure) -> FailedRuns:
        """Give up an adapter that cannot be had, and whoever waits for it; the next request tries again."""
        runs = self.residency.runs_of(adapter)
        if adapter in self._wanted:
            self._wanted[adapter].is_finding = False
            name = self._wanted[adapter].order.name
            log.error("adapter_failed adapter=%s label=%s reason=%s", name, failure.label, failure.reason)
        if self.residency.has_memory(adapter):
            self._pieces.drop(adapter)
            self._reclaimer.policy.room_may_have_come()
        self._found.pop(adapter, None)  # it may be another one when it is asked for again
        self._reclaimer.reload_costs.forget(adapter)
        for run in runs:
            self.residency.ended(run)
        return FailedRuns(runs, failure)

    def _shortage(self, adapter: AdapterId) -> DeviceError:
        order, pool = self._wanted[adapter].order, self._reclaimer.pool
        num_bytes = self._found[adapter].manifest.layout.num_bytes
        return DeviceError(
            f"the adapter `{order.name}` needs {num_bytes} bytes of device memory, and what models that are "
            f"there are promised leaves less of {pool.budget_bytes}; stop another model, unpin adapters, or "
            "raise `service.memory_bytes`"
        )

    def _drop_forgotten(self) -> None:
        for adapter in [one for one in self._forgotten if not self.residency.runs_of(one)]:
            match self.residency.state(adapter):
                case AdapterState.LOADING:
                    continue  # until it is there
                case AdapterState.LOADED:
                    self._pieces.drop(adapter)
                    self._reclaimer.policy.room_may_have_come()
            self._forgotten.remove(adapter)
            if self._found.pop(adapter, None) is not None:
                self._reclaimer.reload_costs.forget(adapter)

    def _forget_unwanted(self) -> None:
        """Forget adapters that have neither memory nor requests, once the keeper has been asked for them."""
        for adapter in (*self._unwanted, *self.residency.take_unused()):
            self._unwanted.discard(adapter)
            wanted = self._wanted.get(adapter)
            if wanted is None or self.residency.state(adapter) is not None:
                continue
            if wanted.prefetch is not None:
                wanted.prefetch.cancel()
                wanted.prefetch = None
            if wanted.is_finding:
                self._unwanted.add(adapter)
            else:
                del self._wanted[adapter]

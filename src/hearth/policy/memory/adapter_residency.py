"""Decides which adapters a worker's device holds, which are evicted, and which requests wait for which. Pure.

An adapter is placed when its oldest waiting request is the oldest of all that wait. Of adapters without
running requests, the cheapest to reload is evicted first. When all others are in use, some of them drain:
they take no new requests until that room is there. So while a request waits for room, every other adapter is
loaded at most once, however popular the others are.

Adapters of a base without its turn may be evicted as if they were idle. They are loaded again, before all
others, ahead of the base's next step (`lacking`).

A request to a model in stages is ahead on a worker while the workers before it in the pipeline have no room
for its adapter: until then it cannot start, and nothing is evicted for it.

While a model waits for room that it is promised, no adapter is placed and none takes new requests. Then
pinned adapters are evicted as well, and those of a base that makes no step because it lacks another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from hearth.core.types import AdapterId, ModelId


class AdapterState(StrEnum):
    """How far an adapter is, on the ladder of models (`worker/hosting_state.py`)."""

    FINDING = "finding"  #: the keeper is asked for it
    FOUND = "found"  #: its size is known, and it has no memory
    LOADING = "loading"  #: its memory is being filled
    LOADED = "loaded"


_ABSENT = (AdapterState.FINDING, AdapterState.FOUND)


@dataclass(frozen=True, slots=True)
class _AdapterRun:
    adapter: AdapterId
    base: ModelId
    arrived_s: float
    is_ahead: bool


@dataclass(slots=True)
class KnownAdapter:
    """An adapter with memory or requests. Mutable; written by `AdapterResidency`."""

    is_pinned: bool
    num_bytes: int = 0  #: that it has on the device
    state: AdapterState = AdapterState.FINDING
    waiting: set[int] = field(default_factory=set)  #: requests
    running: set[int] = field(default_factory=set)


class AdapterResidency:
    """Mutable; written by the one thread that calls it and carries out what it decides."""

    def __init__(
        self,
        cost_per_byte: Callable[[AdapterId], float],
        is_active: Callable[[ModelId], bool],
        is_promise_short: Callable[[], bool],
        is_whole: Callable[[ModelId], bool] = lambda base: True,
    ) -> None:
        """`cost_per_byte` of reloading an adapter. `is_active`: a base has its turn.

        `is_promise_short`: a model waits for room that it is promised. `is_whole`: all of a base's weights
        are loaded or loading.
        """
        self._cost_per_byte, self._is_active = cost_per_byte, is_active
        self._is_promise_short, self._is_whole = is_promise_short, is_whole
        self.known: dict[AdapterId, KnownAdapter] = {}
        self._runs: dict[int, _AdapterRun] = {}  #: waiting or running
        # There may be a thousand, so what every step asks for has an index, in the order of arrival.
        self._absent: dict[AdapterId, None] = {}
        self._loading: set[AdapterId] = set()
        self._waited: dict[AdapterId, None] = {}  #: adapters with waiting requests
        self._draining: set[AdapterId] = set()  #: loaded, and take no new requests
        self._unused: list[AdapterId] = []  #: forgotten since `take_unused`
        #: Adapters of running requests that are not loaded: they were evicted while their base had no turn.
        self._lacking: set[AdapterId] = set()

    # Events.

    def asked(
        self,
        adapter: AdapterId,
        run: int,
        base: ModelId,
        arrived_s: float,
        *,
        is_pinned: bool,
        is_ahead: bool = False,
    ) -> None:
        """`is_ahead`: the request may start after `confirmed`."""
        known = self.known.get(adapter)
        if known is None:
            known = self.known[adapter] = KnownAdapter(is_pinned)
            self._absent[adapter] = None
        known.is_pinned = is_pinned
        known.waiting.add(run)
        self._waited[adapter] = None
        self._runs[run] = _AdapterRun(adapter, base, arrived_s, is_ahead)

    def confirmed(self, run: int) -> None:
        """Note that a request that was ahead may start. One that has ended is ignored."""
        if (ahead := self._runs.get(run)) is not None:
            self._runs[run] = replace(ahead, is_ahead=False)

    def found(self, adapter: AdapterId) -> None:
        known = self.known.get(adapter)
        if known is not None and known.state is AdapterState.FINDING:
            known.state = AdapterState.FOUND

    def unpin(self, adapter: AdapterId) -> None:
        if (known := self.known.get(adapter)) is not None:
            known.is_pinned = False

    def started(self, run: int) -> None:
        adapter = self._runs[run].adapter
        known = self.known[adapter]
        known.waiting.remove(run)
        known.running.add(run)
        if not known.waiting:
            del self._waited[adapter]

    def ended(self, run: int) -> AdapterId | None:
        """Note that a request has ended; one that is unknown wanted no adapter.

        Returns its adapter if it was the last running request of that.
        """
        if (ended := self._runs.pop(run, None)) is None:
            return None
        known = self.known[ended.adapter]
        was_last = known.running == {run}
        known.waiting.discard(run)
        known.running.discard(run)
        if not known.waiting:
            self._waited.pop(ended.adapter, None)
        if not known.running:
            self._lacking.discard(ended.adapter)
        self._forget_unused(ended.adapter)
        if self._draining and not self._is_room_wanted():
            self._draining.clear()
        return ended.adapter if was_last else None

    def placed(self, adapter: AdapterId, num_bytes: int) -> None:
        """Note that an adapter has its memory; those that drained for it take requests again."""
        known = self.known[adapter]
        assert known.state in _ABSENT, f"adapter {adapter} is placed twice: {known}"
        known.state, known.num_bytes = AdapterState.LOADING, num_bytes
        del self._absent[adapter]
        self._loading.add(adapter)
        self._draining.clear()

    def loaded(self, adapter: AdapterId) -> None:
        known = self.known[adapter]
        assert known.state is AdapterState.LOADING, f"adapter {adapter} was not being loaded: {known}"
        known.state = AdapterState.LOADED
        self._loading.remove(adapter)
        self._lacking.discard(adapter)

    def left(self, adapter: AdapterId) -> None:
        known = self.known[adapter]
        known.state, known.num_bytes = AdapterState.FOUND, 0
        self._absent[adapter] = None
        self._loading.discard(adapter)
        self._draining.discard(adapter)
        if known.running:
            self._lacking.add(adapter)
        self._forget_unused(adapter)

    # Which adapters take requests.

    def state(self, adapter: AdapterId) -> AdapterState | None:
        known = self.known.get(adapter)
        return None if known is None else known.state

    def startable(self) -> list[int]:
        """Return the waiting requests that may start, the oldest first."""
        wanted = [adapter for adapter in self._waited if adapter not in self._draining]
        takers = [adapter for adapter in wanted if self.known[adapter].state is AdapterState.LOADED]
        if not takers or self._is_promise_short():
            return []
        waiting = (run for adapter in takers for run in self.known[adapter].waiting)
        return sorted((run for run in waiting if not self._runs[run].is_ahead), key=self._age)

    def runs_of(self, adapter: AdapterId) -> list[int]:
        known = self.known.get(adapter)
        return [] if known is None else sorted(known.waiting | known.running, key=self._age)

    def lacking(self, base: ModelId) -> bool:
        """True if a running request of a model has an adapter that is not loaded: the model must not step."""
        return any(self.is_run_by(adapter, base) for adapter in self._lacking)

    def run_by(self, base: ModelId) -> set[AdapterId]:
        own = {run.adapter for run in self._runs.values() if run.base == base}
        return {adapter for adapter in own if self.is_run_by(adapter, base)}

    def is_run_by(self, adapter: AdapterId, base: ModelId) -> bool:
        known = self.known.get(adapter)
        return known is not None and any(self._runs[run].base == base for run in known.running)

    # Which adapters are placed and evicted.

    def next(self) -> AdapterId | None:
        """Return the adapter to be placed next, for which others are evicted; None: none waits for room.

        Those that running requests lack come first: their base makes no step before.
        """
        if self._is_promise_short():
            return None
        wanted = (
            (adapter not in self._lacking, self._age(run), adapter)
            for adapter in self._absent
            if (known := self.known[adapter]).state is AdapterState.FOUND
            for run in known.waiting | known.running
            if self._may_evict(run)
        )
        first = min(wanted, default=None)
        return None if first is None else first[-1]

    def early(self) -> list[AdapterId]:
        """Return absent adapters whose requests are ahead, or whose models have no turn or engine.

        Nothing is evicted for them: they are placed where memory is free.
        """
        if self._is_promise_short():
            return []
        return [
            adapter
            for adapter in self._absent
            if (known := self.known[adapter]).state is AdapterState.FOUND
            if not any(map(self._may_evict, known.waiting | known.running))
        ]

    def idle(self, *, is_promised: bool = False) -> list[AdapterId]:
        """Return the adapters that may be evicted, in this order: none that is pinned, or that steps use.

        Those with waiting requests go last, and before them those of models that wait for their turn.
        `is_promised`: also all others that no step uses, behind these.
        """

        def price(item: tuple[AdapterId, KnownAdapter]) -> tuple[bool, bool, bool, float, AdapterId]:
            adapter, known = item
            is_wanted = bool(known.waiting) and adapter not in self._draining
            is_running = bool(known.running)
            return known.is_pinned, is_wanted, is_running, self._cost_per_byte(adapter), adapter

        is_used = self._is_stepped if is_promised else self._is_in_use
        loaded = [
            (adapter, known)
            for adapter, known in self.known.items()
            if known.state is AdapterState.LOADED and (is_promised or not known.is_pinned)
            if not known.running or not is_used(known)
        ]
        return [adapter for adapter, _ in sorted(loaded, key=price)]

    def drain(self, need_bytes: int) -> bool:
        """Drain adapters that steps use, the cheapest to reload first, until so many bytes will come free.

        Those that drain already count. False: none is in use.
        """
        in_use = {
            adapter: known
            for adapter, known in self.known.items()
            if known.state is AdapterState.LOADED and not known.is_pinned and self._is_stepped(known)
        }
        left_bytes = need_bytes
        order = sorted(in_use, key=lambda one: (one not in self._draining, self._cost_per_byte(one), one))
        for adapter in order:
            if left_bytes > 0:
                self._draining.add(adapter)
                left_bytes -= in_use[adapter].num_bytes
        return bool(in_use)

    def last_in_use(
        self, is_eligible: Callable[[AdapterId], bool] = lambda adapter: True
    ) -> AdapterId | None:
        """Return the eligible adapter in use whose oldest request is the youngest; None: no step uses any."""
        in_use = [
            adapter
            for adapter, known in self.known.items()
            if known.state is AdapterState.LOADED and self._is_stepped(known) and is_eligible(adapter)
        ]
        return max(in_use, key=lambda adapter: self._age(self.runs_of(adapter)[0]), default=None)

    @property
    def is_any_draining(self) -> bool:
        return bool(self._draining)

    @property
    def is_any_coming(self) -> bool:
        return bool(self._loading)

    def take_unused(self) -> list[AdapterId]:
        """Return adapters that lost their last memory or request since the last call."""
        unused, self._unused = self._unused, []
        return [adapter for adapter in unused if adapter not in self.known]

    def check(self) -> None:
        for adapter, known in self.known.items():
            assert not known.waiting & known.running, f"{adapter} {known}"
            assert adapter not in self._draining or known.state is AdapterState.LOADED, f"{adapter} {known}"
            assert bool(known.num_bytes) == (known.state not in _ABSENT), f"{adapter} {known}"
            assert known.waiting or known.running or known.num_bytes, f"{adapter} is of no use: {known}"
            for run in known.waiting | known.running:
                assert self._runs[run].adapter == adapter, f"{run=} {adapter} {known}"
            is_lacking = bool(known.running) and known.state is not AdapterState.LOADED
            assert is_lacking == (adapter in self._lacking), f"{adapter} {known} {self._lacking=}"
        absent = {adapter for adapter, known in self.known.items() if known.state in _ABSENT}
        assert self._absent.keys() == absent, f"{self._absent=}"
        loading = {one for one, known in self.known.items() if known.state is AdapterState.LOADING}
        assert self._loading == loading, f"{self._loading=}"
        assert self._draining <= self.known.keys(), f"{self._draining=}"
        waited = {adapter for adapter, known in self.known.items() if known.waiting}
        assert self._waited.keys() == waited, f"{self._waited=} {waited=}"
        num_runs = sum(len(known.waiting) + len(known.running) for known in self.known.values())
        assert num_runs == len(self._runs), f"{num_runs=} {len(self._runs)=}"

    def _is_room_wanted(self) -> bool:
        """True if a request that is not ahead waits for an absent adapter."""
        waiting = (run for adapter in self._absent for run in self.known[adapter].waiting)
        return any(not self._runs[run].is_ahead for run in waiting)

    def _may_evict(self, run: int) -> bool:
        return not self._runs[run].is_ahead and self._is_active(self._runs[run].base)

    def _is_in_use(self, known: KnownAdapter) -> bool:
        return any(self._is_active(self._runs[run].base) for run in known.running)

    def _is_stepped(self, known: KnownAdapter) -> bool:
        """True if an adapter is in use by a base that lacks nothing else, so that its requests will end."""
        bases = {self._runs[run].base for run in known.running}
        return any(
            self._is_active(base) and self._is_whole(base) and not self.lacking(base) for base in bases
        )

    def _age(self, run: int) -> tuple[float, int]:
        return self._runs[run].arrived_s, run

    def _forget_unused(self, adapter: AdapterId) -> None:
        known = self.known[adapter]
        if not known.waiting and not known.running and known.state in _ABSENT:
            del self.known[adapter], self._absent[adapter]
            self._unused.append(adapter)

"""Which adapters come to a worker's device, which give way, and which requests wait for which. Pure.

An adapter that is there takes its requests at once, so as long as all that are asked for fit together nobody
waits but for a load. One that is not there comes when its oldest waiting request is the oldest of all that
wait, and nobody is placed before it: age decides, as it does in the batcher. Its room comes from whoever
`ReclaimPolicy` names, and of adapters from those without running requests, cheapest to have back first.

When all others are in use, some of them drain: they take no new request until that room is there. Whoever
comes takes all requests that wait for it then, and may be the next to drain. So while a request waits for
room, every other adapter comes at most once: for a request that is older, and the next that it could come for
is younger. A request hence waits for at most as many adapters as have older requests when it arrives, each
until those running on the ones that drain have ended, however popular the others are. An adapter is in line
once it is known what it takes: one that a slow store has still to look up holds up nobody.

Models may take turns. Requests of a base that has not its turn wait for no room, and its adapters give way
as if they were idle: before its next step they come back, before all others, which `lacking` tells.

Adapters are promised nothing, and models are. While a model waits for room that it is promised, no adapter
comes and none takes new requests, so that the room comes when the running ones have ended. Then pinned ones
give way as well, and those of a base that makes no step because it lacks another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from hearth.core.types import AdapterId, ModelId


class Residence(StrEnum):
    """Where an adapter's bytes are, as far as the device is concerned."""

    AWAY = "away"
    COMING = "coming"  #: it has its memory, which is being filled
    THERE = "there"


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """How an adapter is used at one moment."""

    adapter: AdapterId
    residence: Residence
    num_bytes: int  #: that it has on the device
    num_running: int
    num_waiting: int  #: requests that wait for it
    is_pinned: bool


@dataclass(frozen=True, slots=True)
class _AdapterRun:
    """A request for an adapter."""

    adapter: AdapterId
    base: ModelId
    arrived_s: float


@dataclass(slots=True)
class _KnownAdapter:
    """An adapter that has bytes or requests here. Mutable; written by `AdapterResidency`."""

    is_pinned: bool
    num_bytes: int = 0  #: that it takes of the device unless it is away
    residence: Residence = Residence.AWAY
    is_found: bool = False  #: it is known what it takes
    waiting: set[int] = field(default_factory=set)
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
        """`cost_per_byte`: how dear an adapter is to have back. `is_active`: a base has its turn.

        `is_promise_short`: a model waits for room that it is promised. `is_whole`: all of a base's weights
        are there or on their way.
        """
        self._cost_per_byte, self._is_active = cost_per_byte, is_active
        self._is_promise_short, self._is_whole = is_promise_short, is_whole
        self._known: dict[AdapterId, _KnownAdapter] = {}
        self._runs: dict[int, _AdapterRun] = {}  #: all that wait or run
        # A thousand may be there, so what every step asks for has an index; the order is that of coming.
        self._away: dict[AdapterId, None] = {}
        self._coming: set[AdapterId] = set()
        self._waited: dict[AdapterId, None] = {}  #: adapters with waiting requests
        self._draining: set[AdapterId] = set()  #: they are there, and take no new requests
        self._unused: list[AdapterId] = []  #: those that are known no more, until somebody takes notice
        #: Adapters of running requests that are not there: they gave way while their base had no turn.
        self._lacking: set[AdapterId] = set()

    # What happens.

    def asked(
        self, adapter: AdapterId, run: int, base: ModelId, arrived_s: float, *, is_pinned: bool
    ) -> None:
        """Note a request that waits for an adapter from now on."""
        known = self._known.get(adapter)
        if known is None:
            known = self._known[adapter] = _KnownAdapter(is_pinned)
            self._away[adapter] = None
        known.is_pinned = is_pinned
        known.waiting.add(run)
        self._waited[adapter] = None
        self._runs[run] = _AdapterRun(adapter, base, arrived_s)

    def found(self, adapter: AdapterId) -> None:
        """Note that it is known what an adapter takes, if anybody still asks for it."""
        if (known := self._known.get(adapter)) is not None:
            known.is_found = True

    def unpin(self, adapter: AdapterId) -> None:
        """Note that an adapter may give way from now on: it was replaced. One that is unknown has nothing."""
        if (known := self._known.get(adapter)) is not None:
            known.is_pinned = False

    def started(self, run: int) -> None:
        """Note that a request runs which `may_start`."""
        adapter = self._runs[run].adapter
        known = self._known[adapter]
        known.waiting.remove(run)
        known.running.add(run)
        if not known.waiting:
            del self._waited[adapter]

    def ended(self, run: int) -> AdapterId | None:
        """Note that a request has ended, wherever it was. One that is unknown wanted no adapter.

        Returns the adapter if it was the last running one that had it.
        """
        if (ended := self._runs.pop(run, None)) is None:
            return None
        known = self._known[ended.adapter]
        was_last = known.running == {run}
        known.waiting.discard(run)
        known.running.discard(run)
        if not known.waiting:
            self._waited.pop(ended.adapter, None)
        if not known.running:
            self._lacking.discard(ended.adapter)
        self._forget_unused(ended.adapter)
        if self._draining and not any(self._known[adapter].waiting for adapter in self._away):
            self._stop_draining()  # nobody needs the room any more
        return ended.adapter if was_last else None

    def placed(self, adapter: AdapterId, num_bytes: int) -> None:
        """Note that an adapter has its memory; those that drained for it take requests again."""
        known = self._known[adapter]
        assert known.residence is Residence.AWAY, f"adapter {adapter} is placed twice: {known}"
        known.residence, known.num_bytes = Residence.COMING, num_bytes
        del self._away[adapter]
        self._coming.add(adapter)
        self._stop_draining()

    def loaded(self, adapter: AdapterId) -> None:
        """Note that all bytes of an adapter are there."""
        known = self._known[adapter]
        assert known.residence is Residence.COMING, f"adapter {adapter} was not being loaded: {known}"
        known.residence = Residence.THERE
        self._coming.remove(adapter)
        self._lacking.discard(adapter)

    def left(self, adapter: AdapterId) -> None:
        """Note that an adapter has given up its memory."""
        known = self._known[adapter]
        known.residence, known.num_bytes = Residence.AWAY, 0
        self._away[adapter] = None
        self._coming.discard(adapter)
        self._draining.discard(adapter)
        if known.running:
            self._lacking.add(adapter)
        self._forget_unused(adapter)

    # Who takes requests.

    def residence(self, adapter: AdapterId) -> Residence:
        """Return where an adapter is; one that is unknown is away."""
        known = self._known.get(adapter)
        return Residence.AWAY if known is None else known.residence

    def is_known(self, adapter: AdapterId) -> bool:
        """True if an adapter has bytes or requests here."""
        return adapter in self._known

    def may_start(self, run: int) -> bool:
        """True if the adapter of a request is there and takes new ones."""
        return not self._is_promise_short() and self._takes_requests(self._runs[run].adapter)

    def startable(self) -> list[int]:
        """Return the waiting requests that may start, the oldest first."""
        takers = [adapter for adapter in self._waited if self._takes_requests(adapter)]
        if not takers or self._is_promise_short():
            return []
        return sorted((run for adapter in takers for run in self._known[adapter].waiting), key=self._age)

    def runs_of(self, adapter: AdapterId) -> list[int]:
        """Return all requests for an adapter, the oldest first."""
        known = self._known.get(adapter)
        return [] if known is None else sorted(known.waiting | known.running, key=self._age)

    def lacking(self, base: ModelId) -> bool:
        """True if a running request of a model has an adapter that is not there: the model must not step."""
        return any(self.is_run_by(adapter, base) for adapter in self._lacking)

    def run_by(self, base: ModelId) -> set[AdapterId]:
        """Return the adapters that running requests of a model have, also those that are not there."""
        own = {run.adapter for run in self._runs.values() if run.base == base}
        return {adapter for adapter in own if self.is_run_by(adapter, base)}

    def is_run_by(self, adapter: AdapterId, base: ModelId) -> bool:
        """True if a running request of a model has an adapter."""
        known = self._known.get(adapter)
        return known is not None and any(self._runs[run].base == base for run in known.running)

    # Who comes, and who gives way.

    def next(self) -> AdapterId | None:
        """Return the adapter to be placed next, for which others give way; None: nobody waits for room.

        Those that running requests lack come first: nobody of their base makes a step before.
        """
        if self._is_promise_short():
            return None
        wanted = (
            (adapter not in self._lacking, self._age(run), adapter)
            for adapter in self._away
            if (known := self._known[adapter]).is_found
            for run in known.waiting | known.running
            if self._is_active(self._runs[run].base)
        )
        first = min(wanted, default=None)
        return None if first is None else first[-1]

    def early(self) -> list[AdapterId]:
        """Return adapters that are away and wanted by models that wait for their turn or are not there yet.

        Nobody gives way for them: they come early where memory is free.
        """
        if self._is_promise_short():
            return []
        return [
            adapter
            for adapter in self._away
            if (known := self._known[adapter]).is_found
            if not any(self._is_active(self._runs[run].base) for run in known.waiting | known.running)
        ]

    def idle(self, *, is_promised: bool = False) -> list[AdapterId]:
        """Return the adapters that may give way, in this order: none that is pinned, or that steps use.

        Those that somebody waits for go last, and before them those of models that wait for their turn.
        `is_promised`: also all others that no step uses, behind these.
        """

        def price(item: tuple[AdapterId, _KnownAdapter]) -> tuple[bool, bool, bool, float, AdapterId]:
            adapter, known = item
            is_wanted = bool(known.waiting) and adapter not in self._draining
            is_running = bool(known.running)
            return known.is_pinned, is_wanted, is_running, self._cost_per_byte(adapter), adapter

        is_used = self._is_stepped if is_promised else self._is_in_use
        there = [
            (adapter, known)
            for adapter, known in self._known.items()
            if known.residence is Residence.THERE and (is_promised or not known.is_pinned)
            if not known.running or not is_used(known)
        ]
        return [adapter for adapter, _ in sorted(there, key=price)]

    def drain(self, need_bytes: int) -> bool:
        """Have adapters that steps use take no new requests, until so many bytes of them will come free.

        The cheapest to have back go first; those that drain already count. False: none is in use that could.
        """
        in_use = {
            adapter: known
            for adapter, known in self._known.items()
            if known.residence is Residence.THERE and not known.is_pinned and self._is_stepped(known)
        }
        left_bytes = need_bytes
        order = sorted(in_use, key=lambda one: (one not in self._draining, self._cost_per_byte(one), one))
        for adapter in order:
            if left_bytes > 0:
                self._draining.add(adapter)
                left_bytes -= in_use[adapter].num_bytes
        return bool(in_use)

    def last_in_use(self) -> AdapterId | None:
        """Return the adapter in use whose oldest request is the youngest; None: no step uses any."""
        in_use = [
            adapter
            for adapter, known in self._known.items()
            if known.residence is Residence.THERE and self._is_stepped(known)
        ]
        return max(in_use, key=lambda adapter: self._age(self.runs_of(adapter)[0]), default=None)

    @property
    def is_any_draining(self) -> bool:
        return bool(self._draining)

    @property
    def is_any_coming(self) -> bool:
        return bool(self._coming)

    def take_unused(self) -> list[AdapterId]:
        """Return those that have neither bytes nor requests any more, since this was asked last."""
        unused, self._unused = self._unused, []
        return [adapter for adapter in unused if adapter not in self._known]

    def uses(self) -> list[AdapterUse]:
        """Return the adapters that have memory or requests here, with how they are used."""
        return [
            AdapterUse(
                *(adapter, known.residence, known.num_bytes, len(known.running), len(known.waiting)),
                known.is_pinned,
            )
            for adapter, known in self._known.items()
        ]

    def check(self) -> None:
        """Raise if the books contradict each other. For tests."""
        for adapter, known in self._known.items():
            assert not known.waiting & known.running, f"{adapter} {known}"
            assert adapter not in self._draining or known.residence is Residence.THERE, f"{adapter} {known}"
            assert bool(known.num_bytes) == (known.residence is not Residence.AWAY), f"{adapter} {known}"
            assert known.waiting or known.running or known.num_bytes, f"{adapter} is of no use: {known}"
            for run in known.waiting | known.running:
                assert self._runs[run].adapter == adapter, f"{run=} {adapter} {known}"
            is_lacking = bool(known.running) and known.residence is not Residence.THERE
            assert is_lacking == (adapter in self._lacking), f"{adapter} {known} {self._lacking=}"
        by_residence = {
            one: {adapter for adapter, known in self._known.items() if known.residence is one}
            for one in Residence
        }
        assert self._away.keys() == by_residence[Residence.AWAY], f"{self._away=}"
        assert self._coming == by_residence[Residence.COMING], f"{self._coming=}"
        assert self._draining <= self._known.keys(), f"{self._draining=}"
        waited = {adapter for adapter, known in self._known.items() if known.waiting}
        assert self._waited.keys() == waited, f"{self._waited=} {waited=}"
        num_runs = sum(len(known.waiting) + len(known.running) for known in self._known.values())
        assert num_runs == len(self._runs), f"{num_runs=} {len(self._runs)=}"

    def _is_in_use(self, known: _KnownAdapter) -> bool:
        return any(self._is_active(self._runs[run].base) for run in known.running)

    def _is_stepped(self, known: _KnownAdapter) -> bool:
        """True if an adapter is in use by a base that lacks nothing else: its requests end some day.

        A base without all of its weights may be waiting for the very room that its adapters have.
        """
        bases = {self._runs[run].base for run in known.running}
        return any(
            self._is_active(base) and self._is_whole(base) and not self.lacking(base) for base in bases
        )

    def _takes_requests(self, adapter: AdapterId) -> bool:
        return self._known[adapter].residence is Residence.THERE and adapter not in self._draining

    def _age(self, run: int) -> tuple[float, int]:
        return self._runs[run].arrived_s, run

    def _stop_draining(self) -> None:
        self._draining.clear()

    def _forget_unused(self, adapter: AdapterId) -> None:
        known = self._known[adapter]
        if not known.waiting and not known.running and known.residence is Residence.AWAY:
            del self._known[adapter], self._away[adapter]
            self._unused.append(adapter)

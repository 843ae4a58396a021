"""Orders snapshots from workers, and notes why models start without one. Reads no snapshot itself.

A worker says whether it used a snapshot when it assembled an engine. If not, one is ordered when the model is
loaded, and made when the worker is idle. If the model leaves first, it is ordered again at the next load. A
snapshot made before the model had adapters is used, and remade with the graphs of adapter steps. Of a model
in stages each worker makes that of its own layers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Collection
from dataclasses import dataclass, field

from hearth.control.observe.metrics import Metrics
from hearth.core.errors import SnapshotError
from hearth.core.messages import MakeSnapshot, SnapshotLooked, SnapshotMade, SnapshotProgress
from hearth.core.types import ModelId, SnapshotOutcome, WorkerId, node_of
from hearth.node.link import FrameLink

log = logging.getLogger(__name__)

_Follower = asyncio.Queue[SnapshotProgress | SnapshotMade]
#: Outcomes of a snapshot that exists but was not used.
_UNUSED = (SnapshotOutcome.OUTDATED, SnapshotOutcome.REFUSED, SnapshotOutcome.DISCARDED)


@dataclass(slots=True)
class _OrderedSnapshot:
    has_adapters: bool  #: also of steps with adapters
    followers: list[_Follower] = field(default_factory=list)


class Snapshots:
    """Mutable; used on the event loop alone."""

    def __init__(
        self,
        metrics: Metrics,
        obstacle: str | None = None,
        bases: Callable[[], Collection[ModelId]] = tuple,
        collect: Callable[[], None] = lambda: None,
        *,
        is_off: bool = False,
    ) -> None:
        """`obstacle`: why this service cannot keep snapshots; None: it can, or should not.

        `bases` returns the models that have adapters. `collect` deletes snapshots of models that are not
        deployed; called on another thread. `is_off`: snapshots are disabled.
        """
        self._bases, self._obstacle, self._is_off = bases, obstacle, is_off
        self._count, self._collect = metrics.snapshots, collect
        self._links: dict[WorkerId, FrameLink] = {}
        self._makings: dict[tuple[WorkerId, ModelId], _OrderedSnapshot] = {}
        #: Models on workers without a snapshot, for which making one has not failed.
        self._wanted: set[tuple[WorkerId, ModelId]] = set()
        #: Models on workers whose snapshot has no graphs of adapter steps.
        self._lacking: set[tuple[WorkerId, ModelId]] = set()
        #: The stays of models that are loaded completely.
        self._stays: dict[tuple[WorkerId, ModelId], int] = {}
        self._stages: set[tuple[WorkerId, ModelId]] = set()  #: of these, those of some layers
        self._notes: dict[ModelId, str] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        obstacles = () if self._obstacle is None else (f"no snapshots are kept: {self._obstacle}",)
        return (*obstacles, *self._notes.values())

    # Workers.

    def joined(self, worker: WorkerId, link: FrameLink) -> None:
        self._links[worker] = link

    def lost(self, worker: WorkerId) -> None:
        self._links.pop(worker, None)
        for key in [key for key in self._makings if key[0] == worker]:
            self._end(key, "its worker is gone")
        self._wanted = {key for key in self._wanted if key[0] != worker}
        self._lacking = {key for key in self._lacking if key[0] != worker}
        self._stays = {key: hosting for key, hosting in self._stays.items() if key[0] != worker}
        self._stages.intersection_update(self._stays)

    def left(self, worker: WorkerId, model: ModelId) -> None:
        self._stays.pop((worker, model), None)
        self._stages.discard((worker, model))
        self._end((worker, model), "the model left device memory")

    def loaded(self, worker: WorkerId, model: ModelId, hosting: int, *, is_stage: bool = False) -> None:
        self._stays[worker, model] = hosting
        if is_stage:
            self._stages.add((worker, model))
        self._order_if_wanted(worker, model, hosting)

    def _order_if_wanted(self, worker: WorkerId, model: ModelId, hosting: int) -> None:
        key = worker, model
        if key in self._wanted and not any(self._is_same(key, other) for other in self._makings):
            self._order(worker, model, hosting)

    def adapters_deployed(self) -> None:
        for worker, model in self._lacking:
            self._want_adapters(worker, model)

    def removed(self, model: ModelId) -> None:
        self._notes.pop(model, None)
        self._wanted = {key for key in self._wanted if key[1] != model}
        self._lacking = {key for key in self._lacking if key[1] != model}

    # Facts of workers.

    def receive(
        self, worker: WorkerId, fact: SnapshotLooked | SnapshotProgress | SnapshotMade, *, is_current: bool
    ) -> None:
        """Take a fact about a model's stay on a worker; not `is_current`: the stay has ended."""
        match fact:
            case SnapshotLooked():  # also if not current: a later stay may keep its engine
                self._looked(worker, fact)
            case SnapshotProgress() if is_current:
                self._progressed(worker, fact)
            case SnapshotMade() if is_current:
                self._made(worker, fact)
            case SnapshotMade():
                self._made_late(worker, fact)

    def _looked(self, worker: WorkerId, fact: SnapshotLooked) -> None:
        self._count.labels(fact.outcome).inc()
        self._notes.pop(fact.model, None)
        self._wanted.discard((worker, fact.model))
        self._note_lack(worker, fact.model, lacks_adapters=fact.lacks_adapters)
        if fact.outcome is SnapshotOutcome.USED:
            return
        self._wanted.add((worker, fact.model))
        if fact.outcome in _UNUSED:
            log.warning(
                "snapshot_unused model=%s worker=%s outcome=%s reason=`%s`",
                fact.model,
                worker,
                fact.outcome,
                (fact.reason or "").replace("`", ""),
            )
            self._notes[fact.model] = (
                f"the snapshot of `{fact.model}` is not used ({fact.outcome}): {fact.reason}; a new one is "
                "made when the worker is idle"
            )
        if self._stays.get((worker, fact.model)) == fact.hosting:  # discarded by a model that is loaded
            self._order_if_wanted(worker, fact.model, fact.hosting)

    def _progressed(self, worker: WorkerId, fact: SnapshotProgress) -> None:
        if (making := self._makings.get((worker, fact.model))) is not None:
            for follower in making.followers:
                follower.put_nowait(fact)

    def _made(self, worker: WorkerId, fact: SnapshotMade) -> None:
        self._tell_made(worker, fact)
        if fact.failure is None:
            self._notes.pop(fact.model, None)
        else:
            self._notes[fact.model] = f"no snapshot of `{fact.model}` could be made: {fact.failure}"
        made = worker, fact.model
        self._wanted = {key for key in self._wanted if not self._is_same(key, made)}
        making = self._makings.pop(made, None)
        for follower in () if making is None else making.followers:
            follower.put_nowait(fact)
        if fact.failure is None and making is not None:
            # An adapter may have come meanwhile. A snapshot ordered with adapter graphs is not made again.
            lacks_adapters = fact.lacks_adapters and not making.has_adapters
            if not lacks_adapters:  # other workers of the node find the new one
                self._lacking = {key for key in self._lacking if not self._is_same(key, made)}
            self._note_lack(worker, fact.model, lacks_adapters=lacks_adapters)

    def _made_late(self, worker: WorkerId, fact: SnapshotMade) -> None:
        self._tell_made(worker, fact)
        collected = asyncio.get_running_loop().run_in_executor(None, self._collect)
        collected.add_done_callback(_log_files_left)

    def _tell_made(self, worker: WorkerId, fact: SnapshotMade) -> None:
        self._count.labels(SnapshotOutcome.MADE if fact.failure is None else SnapshotOutcome.FAILED).inc()
        if fact.failure is None:
            log.info(
                "snapshot_made model=%s worker=%s num_bytes=%d unbooked_bytes=%d seconds=%.1f",
                fact.model,
                worker,
                fact.num_bytes,
                fact.unbooked_bytes,
                fact.seconds,
            )
        else:
            why = fact.failure.replace("`", "")
            log.warning("snapshot_not_made model=%s worker=%s reason=`%s`", fact.model, worker, why)

    # By hand.

    def check_kept(self) -> None:
        if self._is_off:
            raise SnapshotError(
                "no snapshots are kept: `store.snapshot_bytes` is 0; raise it and restart the service"
            )
        if self._obstacle is not None:
            raise SnapshotError(f"no snapshots are kept: {self._obstacle}")

    async def make(
        self, worker: WorkerId, model: ModelId, hosting: int
    ) -> AsyncGenerator[SnapshotProgress | SnapshotMade, None]:
        """Order a snapshot, or follow the one being made; yield progress and result. Raises SnapshotError."""
        follower: _Follower = asyncio.Queue()
        key = (worker, model)
        if key not in self._makings:
            self._order(worker, model, hosting)
        self._makings[key].followers.append(follower)
        try:
            while True:
                fact = await follower.get()
                if isinstance(fact, SnapshotMade) and fact.failure is not None:
                    raise SnapshotError(f"no snapshot of `{model}` could be made: {fact.failure}")
                yield fact
                if isinstance(fact, SnapshotMade):
                    return
        finally:
            if (making := self._makings.get(key)) is not None and follower in making.followers:
                making.followers.remove(follower)

    def _note_lack(self, worker: WorkerId, model: ModelId, *, lacks_adapters: bool) -> None:
        if lacks_adapters:
            self._lacking.add((worker, model))
            self._want_adapters(worker, model)
        else:
            self._lacking.discard((worker, model))

    def _want_adapters(self, worker: WorkerId, model: ModelId) -> None:
        if model not in self._bases() or (worker, model) in self._wanted:
            return
        self._count.labels(SnapshotOutcome.PARTIAL).inc()
        log.info("snapshot_partial model=%s worker=%s reason=`made before it had adapters`", model, worker)
        self._notes[model] = (
            f"the snapshot of `{model}` was made before it had adapters: steps with adapters are captured "
            "when they are first needed; a new one is made when the worker is idle"
        )
        self._wanted.add((worker, model))
        if (hosting := self._stays.get((worker, model))) is not None:
            self._order_if_wanted(worker, model, hosting)

    def _order(self, worker: WorkerId, model: ModelId, hosting: int) -> None:
        has_adapters = model in self._bases()
        self._makings[worker, model] = _OrderedSnapshot(has_adapters)
        self._links[worker].send(MakeSnapshot(model, hosting, has_adapters))

    def _is_same(self, key: tuple[WorkerId, ModelId], other: tuple[WorkerId, ModelId]) -> bool:
        """True if one snapshot is for both: of one model on one node, and not of different stages."""
        if key == other:
            return True
        is_any_stage = key in self._stages or other in self._stages
        return (node_of(key[0]), key[1]) == (node_of(other[0]), other[1]) and not is_any_stage

    def _end(self, key: tuple[WorkerId, ModelId], why: str) -> None:
        if (making := self._makings.pop(key, None)) is not None:
            for follower in making.followers:
                follower.put_nowait(SnapshotMade(key[1], 0, failure=why))


def _log_files_left(collected: asyncio.Future[None]) -> None:
    if not collected.cancelled() and (error := collected.exception()) is not None:
        log.warning("snapshots_left reason=%s", error)

"""Parts of steps as CUDA graphs, by part and padded size: captured here, or restored from a snapshot.

A restored graph serves nobody before it was tried: the first step that could use it runs eagerly, and behind
that the graph is replayed on its inputs (`engine/graph_trial.py`). If both computed the same it serves from
then on, else all of the snapshot's graphs are dropped, and steps are captured as without a snapshot.

    key:    coming -> untried -> on trial -> ready        restored
            nothing                       -> ready        captured when first needed

Fills no inputs and samples nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from hearth.engine.step_shape import GraphKey

#: Queues a part of a step on the current stream. All that it reads and writes lies at fixed addresses.
Work = Callable[[], None]

log = logging.getLogger(__name__)


class StepGraph(Protocol):
    """A part of a step that can be queued again by one call."""

    def replay(self) -> None:
        """Queue the graph on the current stream, on the inputs that are in place."""


class CapturedGraph(StepGraph, Protocol):
    """A graph that was captured in this process, as torch has it."""

    def instantiate(self) -> None:
        """Make it ready to be queued, as the first replay would do."""

    def raw_cuda_graph(self) -> int:
        """Return the driver's handle of its nodes, which lasts as long as this object."""


class GraphSource(Protocol):
    """The graphs of a snapshot. Another thread restores them one by one, the steps' thread asks."""

    num_failed: int  #: graphs that could not be restored

    def find(self, key: str) -> StepGraph | None:
        """Return a graph that is restored."""

    def is_coming(self, key: str) -> bool:
        """True if a graph will be restored. Becomes false in any case, restored or not."""

    def want(self, key: str) -> None:
        """Have a graph that is coming restored before all that no step has needed so far."""

    def want_adapters(self) -> None:
        """Have the graphs of steps with adapters restored as well, behind the others."""

    def begin_trial(self) -> None:
        """Note for whoever starts next that graphs are tried: should this process die now, it was of them."""

    def end_trial(self) -> None:
        """Note that the process lives. Of a trial that never began nothing is noted."""

    def stop(self) -> None:
        """Restore no more graphs: nobody wants them."""

    def let_go(self, others: list[object]) -> None:
        """Have all graphs go that were restored: nobody runs one of them any more, or asks for it.

        The list of `others` is emptied likewise: who has a graph last waits for the driver.
        """

    def discard(self, reason: str) -> None:
        """Have the snapshot used no more, by anybody: a graph of it does not compute what the step does."""


class Capturer(Protocol):
    """Makes graphs of work (`engine/graph_capture.py`)."""

    def capture(self, work: Work) -> CapturedGraph: ...

    def forget(self) -> None: ...


class StepGraphs:
    """Parts of steps as graphs. Mutable; written only by the runner; any thread captures ahead.

    Work is given with each call and not kept: it belongs to the runner, which owns the graphs, and the two
    would keep each other and all their memory alive.
    """

    def __init__(self, capturer: Capturer) -> None:
        self._capturer = capturer
        self._captured: dict[GraphKey, CapturedGraph] = {}
        self._source: GraphSource | None = None
        #: Restored ones that compute what the step does, and those that stand in for some.
        self._tried: dict[GraphKey, StepGraph] = {}
        self._on_trial: dict[GraphKey, StepGraph] = {}

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._captured or key in self._tried

    def __len__(self) -> int:
        return len(self._captured) + len(self._tried)

    @property
    def captured(self) -> Mapping[GraphKey, CapturedGraph]:
        """The graphs that were captured here, of which a snapshot can be made."""
        return self._captured

    @property
    def num_restored(self) -> int:
        """How many graphs of the snapshot serve, because they were tried, or are stood in for."""
        return len(self._tried)

    @property
    def num_unrestored(self) -> int:
        """How many graphs of the snapshot could not be restored, and are captured instead."""
        return 0 if self._source is None else self._source.num_failed

    def restore_from(self, source: GraphSource) -> None:
        """Use the graphs of a snapshot where nothing is captured yet."""
        self._source = source

    def want_adapters(self) -> None:
        """Note that steps with adapters will come. Any number of times."""
        if self._source is not None:
            self._source.want_adapters()

    def needs_capture(self, key: GraphKey) -> bool:
        """True if there is no graph, and none will come of a snapshot."""
        return key not in self and not self._is_restored(key)

    def run(self, key: GraphKey, work: Work) -> None:
        """Queue a part of a step on the inputs that are in place.

        By its graph, captured from the work where there is none; eagerly while that is not yet tried.
        """
        if (tried := self._tried.get(key)) is not None:
            tried.replay()
        elif key not in self._captured and self._source is not None and self._is_restored(key):
            self._source.want(key.name)
            work()
        else:
            if key not in self._captured:
                self._captured[key] = self._capturer.capture(work)
            self._captured[key].replay()

    def capture_ahead(self, key: GraphKey, work: Work) -> None:
        """Have a graph of a part of a step ready, if it has none and gets none. Runs nothing."""
        if self.needs_capture(key):
            graph = self._capturer.capture(work)
            graph.instantiate()
            # If a step has captured one meanwhile, that may be running.
            self._captured.setdefault(key, graph)

    def stand_in(
        self, key: GraphKey, work: Work, capturer: Capturer, get_behind: Callable[[], None] = lambda: None
    ) -> None:
        """Have a graph that is captured now serve in place of one that is restored, and would be tried first.

        Runs nothing. It goes with those of the snapshot, and no snapshot is made of it: what libraries need
        for it belongs to the thread that calls this. `capturer` is used for nothing else: those that are
        captured later must not want the memory of one that is gone. `get_behind` waits for a moment at which
        the driver may be busy for long.
        """
        tried = self._tried  # which is another one once all are dropped: this must go with the others
        if key not in self and self._is_restored(key):
            get_behind()
            graph = capturer.capture(work)
            get_behind()
            graph.instantiate()
            tried.setdefault(key, graph)

    def begin_trial(self, keys: Collection[GraphKey]) -> Sequence[StepGraph] | None:
        """Return the graphs of all parts of a step, in order; None: there is nothing to try, or not yet.

        Until `accept` or `reject` no other step is tried.
        """
        if self._source is None or self._on_trial:
            return None
        untried = {key: found for key in keys if key not in self and (found := self._source.find(key.name))}
        known: dict[GraphKey, StepGraph] = {**self._captured, **self._tried, **untried}
        if not untried or any(key not in known for key in keys):
            return None
        self._on_trial = untried
        self._source.begin_trial()
        return [known[key] for key in keys]

    def accept(self) -> None:
        """Have the graphs on trial serve from now on."""
        for key, graph in self._on_trial.items():
            self._tried.setdefault(key, graph)  # one that stands in since the trial began may be running
        log.debug("graphs_accepted graphs=%s", ",".join(key.name for key in self._on_trial))
        self._end_trial()

    def reject(self, reason: str) -> None:
        """Drop all graphs of the snapshot, because those on trial did not do what the step does."""
        keys = ",".join(key.name for key in self._on_trial)
        log.error("snapshot_discarded graphs=%s reason=`%s`", keys, reason)
        if self._source is not None:  # else all graphs were forgotten meanwhile
            self._source.discard(reason)
        self.drop_restored()

    def forget(self) -> None:
        """Drop every graph, because what they point at has moved."""
        self._captured.clear()
        self._capturer.forget()
        self.drop_restored()

    def drop_restored(self) -> None:
        """Drop the graphs of the snapshot: those that were not captured are when they are next needed."""
        self.stop_restoring()
        self._end_trial()
        source, self._source = self._source, None
        others, self._tried = list[object](self._tried.values()), {}
        if source is not None:
            source.let_go(others)  # with those that stood in

    def stop_restoring(self) -> None:
        """Have no more graphs restored. Those that are there stay, be they on trial or not."""
        if self._source is not None:
            self._source.stop()

    def _end_trial(self) -> None:
        self._on_trial = {}
        if self._source is not None:
            self._source.end_trial()

    def _is_restored(self, key: GraphKey) -> bool:
        """True if the snapshot has a graph that does not serve yet."""
        source = self._source
        # In this order: one that is restored between the two questions is seen by the second.
        return source is not None and (source.is_coming(key.name) or source.find(key.name) is not None)

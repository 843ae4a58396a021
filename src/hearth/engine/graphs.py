"""CUDA graphs of step parts, by part and padded size: captured here, or restored from a snapshot.

A restored graph is used only after a trial: the first step that could use it runs eagerly, and then the graph
is replayed on the same inputs (`engine/graph_trial.py`). If both computed the same bits, later steps use it.
Otherwise all graphs of the snapshot are dropped, and steps are captured.

    key:    coming -> untried -> on trial -> ready        restored
            none                          -> ready        captured when first needed
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from hearth.engine.step_shape import GraphKey

#: Queues a part of a step on the current stream. It reads and writes fixed addresses only.
Work = Callable[[], None]

log = logging.getLogger(__name__)


class StepGraph(Protocol):
    def replay(self) -> None: ...


class CapturedGraph(StepGraph, Protocol):
    def instantiate(self) -> None: ...

    def raw_cuda_graph(self) -> int:
        """Return the driver's handle of the graph, valid as long as this object."""


class GraphSource(Protocol):
    """The graphs of a snapshot. Another thread restores them one by one; the step thread asks for them."""

    num_failed: int  #: graphs that could not be restored

    def find(self, key: str) -> StepGraph | None: ...

    def is_coming(self, key: str) -> bool:
        """True if a graph will be restored. Turns false in the end, restored or not."""

    def want(self, key: str) -> None:
        """Restore this graph before all that no step has needed."""

    def want_adapters(self) -> None: ...

    def begin_trial(self) -> None:
        """Leave a mark on disk: if this process dies now, the next start blames the graphs."""

    def end_trial(self) -> None:
        """Remove the mark, if there is one."""

    def stop(self) -> None: ...

    def let_go(self, others: list[object]) -> None:
        """Release all restored graphs, and empty `others`, on a thread that may wait for the driver."""

    def discard(self, reason: str) -> None:
        """Invalidate the snapshot for all processes: a graph computes something else than its step."""


class Capturer(Protocol):
    def capture(self, work: Work) -> CapturedGraph: ...

    def forget(self) -> None: ...


class StepGraphs:
    """Graphs of step parts. Mutable; written by the runner alone, but any thread captures ahead.

    Work is passed with each call and not kept: it refers to the runner, which owns the graphs, and a cycle
    would keep all of their memory alive.
    """

    def __init__(self, capturer: Capturer) -> None:
        self._capturer = capturer
        self._captured: dict[GraphKey, CapturedGraph] = {}
        self._source: GraphSource | None = None
        #: Restored graphs that passed their trial, and substitutes.
        self._tried: dict[GraphKey, StepGraph] = {}
        self._on_trial: dict[GraphKey, StepGraph] = {}

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._captured or key in self._tried

    def __len__(self) -> int:
        return len(self._captured) + len(self._tried)

    @property
    def captured(self) -> Mapping[GraphKey, CapturedGraph]:
        return self._captured

    @property
    def num_restored(self) -> int:
        return len(self._tried)

    @property
    def num_unrestored(self) -> int:
        return 0 if self._source is None else self._source.num_failed

    def restore_from(self, source: GraphSource) -> None:
        self._source = source

    def want_adapters(self) -> None:
        if self._source is not None:
            self._source.want_adapters()

    def needs_capture(self, key: GraphKey) -> bool:
        return key not in self and not self._is_restored(key)

    def run(self, key: GraphKey, work: Work) -> None:
        """Queue a part of a step on the inputs in place, by its graph; eagerly while that is untried.

        If there is no graph, one is captured from `work` first.
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
        """Capture a graph if there is none and none is coming. Runs nothing."""
        if self.needs_capture(key):
            graph = self._capturer.capture(work)
            graph.instantiate()
            # A step may have captured one meanwhile, and be running it.
            self._captured.setdefault(key, graph)

    def capture_substitute(
        self, key: GraphKey, work: Work, capturer: Capturer, get_behind: Callable[[], None] = lambda: None
    ) -> None:
        """Capture a graph that is used instead of a restored one, which would need a trial. Runs nothing.

        It is dropped with the snapshot's graphs, and never saved: library memory of it belongs to the calling
        thread. `capturer` must not be used again: later captures must not depend on memory of a dropped
        graph. `get_behind` waits until the driver may be busy for long.
        """
        tried = self._tried  # replaced when all are dropped: this graph must go with them
        if key not in self and self._is_restored(key):
            get_behind()
            graph = capturer.capture(work)
            get_behind()
            graph.instantiate()
            tried.setdefault(key, graph)

    def begin_trial(self, keys: Collection[GraphKey]) -> Sequence[StepGraph] | None:
        """Return the graphs of all parts of a step, in order; None: nothing to try now.

        No other trial begins until `end_trial`.
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

    def end_trial(self, reason: str | None) -> None:
        """Use the graphs on trial; with a `reason` why they are wrong, drop the whole snapshot instead."""
        keys = ",".join(key.name for key in self._on_trial)
        if reason is None:
            for key, graph in self._on_trial.items():
                self._tried.setdefault(key, graph)  # a substitute may be running since then
            log.debug("graphs_accepted graphs=%s", keys)
            self._clear_trial()
            return
        log.error("snapshot_discarded graphs=%s reason=`%s`", keys, reason)
        if self._source is not None:  # else all graphs were forgotten meanwhile
            self._source.discard(reason)
        self.drop_restored()

    def forget(self) -> None:
        self._captured.clear()
        self._capturer.forget()
        self.drop_restored()

    def drop_restored(self) -> None:
        self.stop_restoring()
        self._clear_trial()
        source, self._source = self._source, None
        others, self._tried = list[object](self._tried.values()), {}
        if source is not None:
            source.let_go(others)  # with the substitutes

    def stop_restoring(self) -> None:
        if self._source is not None:
            self._source.stop()

    def _clear_trial(self) -> None:
        self._on_trial = {}
        if self._source is not None:
            self._source.end_trial()

    def _is_restored(self, key: GraphKey) -> bool:
        source = self._source
        # In this order: a graph restored between the two calls is seen by the second.
        return source is not None and (source.is_coming(key.name) or source.find(key.name) is not None)

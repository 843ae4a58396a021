"""Adapters of requests to models in stages: every member loads them, and a request starts when all have them.

    first    asks    ->  each member passes it on and loads the adapter, all at the same time
    first    keeps   ->  each member keeps the adapter when the one before does, and confirms
    last     answers the first, which starts the request
    first    ends    ->  each member releases the adapter behind the last step that uses it

Before the members ahead of it keep an adapter, a member loads it only to free memory. So members evict in the
order of the pipeline, and all pipelines are in the order of their workers' names: requests never wait for
each other in a circle. A member that cannot load an adapter fails the request alone.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import assert_never

from hearth.core.messages import AdapterOrder
from hearth.core.types import AdapterId, ModelId, Pipeline
from hearth.engine.stage_messages import (
    AdapterMessage,
    StageAdapter,
    StageAdapterEnded,
    StageAdapterFailed,
    StageAdapterReady,
)
from hearth.worker.adapters import foreign_run
from hearth.worker.failure import Failure, blaming
from hearth.worker.hosted_model import HostedModel
from hearth.worker.hosted_models import HostedModels


@dataclass(frozen=True, slots=True)
class _AdapterUse:
    """An adapter that a request of the first member needs here."""

    hosted: HostedModel
    run: int  #: of the first member
    adapter: AdapterId


class StageAdapters:
    """Mutable; the step thread alone calls it."""

    def __init__(self, models: HostedModels) -> None:
        self._hosted, self._adapters = models.hosted, models.adapters
        self._uses: dict[int, _AdapterUse] = {}  #: of a later member, by `foreign_run`
        self._unsent: deque[tuple[HostedModel, AdapterMessage]] = deque()

    # On the first member.

    def ask(self, hosted: HostedModel, run: int, order: AdapterOrder, age_s: float) -> None:
        pipeline = _pipeline(hosted)
        self._send(hosted, StageAdapter(pipeline.name, run, order, age_s))

    def confirm(self, hosted: HostedModel, run: int) -> None:
        """Tell that this member keeps the adapter of a request. The last member answers when all do."""
        pipeline = _pipeline(hosted)
        self._send(hosted, StageAdapterReady(pipeline.name, run))

    def end(self, hosted: HostedModel, run: int) -> None:
        pipeline = _pipeline(hosted)
        self._send(hosted, StageAdapterEnded(pipeline.name, run))

    # On later members.

    def take(self, hosted: HostedModel, message: AdapterMessage) -> None:
        """Take what the member before has told."""
        own_run = foreign_run(message.run)
        match message:
            case StageAdapter(run=run, order=order, age_s=age_s):
                self._uses[own_run] = _AdapterUse(hosted, run, order.adapter)
                arrived_s = time.perf_counter() - age_s
                self._adapters.asked(order, own_run, hosted.model, arrived_s, is_ahead=True)
            case StageAdapterReady():
                self._adapters.residency.confirmed(own_run)
                self._adapters.recheck()
                return  # until this member keeps it, too
            case StageAdapterFailed():
                pass
            case StageAdapterEnded():
                self._uses.pop(own_run, None)
                self._adapters.ended(own_run)
            case _:
                assert_never(message)
        self._send(hosted, message)

    def fail(self, own_run: int, failure: Failure) -> None:
        use = self._uses.pop(own_run)
        pipeline = _pipeline(use.hosted)
        failed = StageAdapterFailed(pipeline.name, use.run, failure.label, failure.reason)
        self._send(use.hosted, failed)

    def forget(self, model: ModelId) -> None:
        """Release all adapters of a model that leaves this worker."""
        for own_run in [one for one, use in self._uses.items() if use.hosted.model == model]:
            del self._uses[own_run]
            self._adapters.ended(own_run)

    def advance(self) -> None:
        """Keep the adapters that are loaded and wanted, and tell other members what has changed.

        Raises ModelBroke if the engine of a model cannot have an adapter, or another member is gone.
        """
        for own_run in self._adapters.residency.startable() if self._uses else ():
            use = self._uses.get(own_run)
            if use is not None and (served := use.hosted.served) is not None:
                self._adapters.start(own_run, use.adapter, use.hosted.model, served.engine)
                self.confirm(use.hosted, use.run)
        while self._unsent:
            hosted, message = self._unsent.popleft()
            if self._hosted.get(hosted.model) is hosted and hosted.member is not None:  # else it has left
                with blaming(hosted.model):
                    hosted.member.tell(message)

    def _send(self, hosted: HostedModel, message: AdapterMessage) -> None:
        self._unsent.append((hosted, message))
        self._adapters.recheck()


def _pipeline(hosted: HostedModel) -> Pipeline:
    pipeline = hosted.order.pipeline
    assert pipeline is not None, f"`{hosted.model}` is not in stages"
    return pipeline

"""The models of a worker as they come, stay, are retired and go. Knows no requests and talks to nobody.

The step thread owns all of it. A method that brings a model to the point where all of it is there returns the
news of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from hearth.engine.engine import StepOutcome
from hearth.errors import DeviceError
from hearth.messages import HostModel, ModelLoaded
from hearth.policy.batch.step_sharing import BusyModel, StepReadiness
from hearth.types import Hold, ModelId, RequestId
from hearth.worker.hosted_model import Found, HostedModel, HostingNews, Opened, Workshop
from hearth.worker.reclaimer import Reclaimer
from hearth.worker.watched_load import Loaded

#: Engines of retired models that are kept for their return. What they have besides the pool's memory, such as
#: graphs and buffers of inputs, is some tens of MB each.
MAX_DORMANT = 16

log = logging.getLogger(__name__)


class HostedModels:
    """Mutable; the step thread alone calls it. `post` is called by other threads."""

    def __init__(self, workshop: Workshop, post: Callable[[int, ModelId, HostingNews], None]) -> None:
        self.hosts: dict[ModelId, HostedModel] = {}
        self.reclaimer = Reclaimer(workshop.new_pool, self.hosts)
        self._workshop, self._post = workshop, post
        #: Retired ones whose engine waits for them, the longest retired first.
        self._dormant: dict[ModelId, HostedModel] = {}
        self._readiness = StepReadiness()

    def host(self, order: HostModel) -> ModelLoaded | None:
        model, post = order.model, self._post
        assert model not in self.hosts, f"`{model}` is hosted already"
        self.reclaimer.worth.hosted(model, order.weight)
        for displaced in self.reclaimer.pool.take_displaced():  # its engine was built at those addresses
            if (gone := self._dormant.pop(displaced, None)) is not None:
                gone.close()
        dormant = self._dormant.pop(model, None)
        if dormant is not None and dormant.is_same(order):
            dormant.come_back(order)
            self.hosts[model] = dormant
            return self.settle(dormant)
        if dormant is not None:
            dormant.close()
        self.hosts[model] = HostedModel(
            *(order, self._workshop, self.reclaimer.pool), lambda hosting, news: post(hosting, model, news)
        )
        return None

    def asked(self, host: HostedModel) -> None:
        """It has got a request."""
        self.reclaimer.worth.asked(host.model, time.monotonic())
        if host.hold is Hold.RETAINED:
            host.hold = Hold.WARM

    def regard(self, model: ModelId, hold: Hold) -> None:
        """How it is held while it has none. One that has just failed is gone already."""
        if (host := self.hosts.get(model)) is not None:
            host.hold = hold
            self.reclaimer.policy.room_may_have_come()

    def settle(self, host: HostedModel) -> ModelLoaded | None:
        """Have all of it loaded that is not there; others may have to give way."""
        try:
            return self._announced(host.settle(self.reclaimer.place))
        except DeviceError:
            is_any_loading = any(one.is_settling for one in self.hosts.values())
            if not self.reclaimer.policy.defer(host.model, is_any_loading=is_any_loading):
                raise
        log.info("model_deferred model=%s", host.model)
        return None

    def deferred(self) -> list[HostedModel]:
        """Those who may find a place now."""
        return [self.hosts[model] for model in self.reclaimer.policy.deferred()]

    def found(self, host: HostedModel, news: Found) -> ModelLoaded | None:
        host.found(news)
        return self.settle(host)

    def opened(self, host: HostedModel, news: Opened) -> ModelLoaded | None:
        return self._announced(host.opened(news))

    def loaded(self, host: HostedModel, news: Loaded) -> ModelLoaded | None:
        return self._announced(host.loaded(news))

    def can_step(self) -> list[ModelId]:
        """Return the models that may step now."""
        return self._readiness.ready(self._busy(), self.reclaimer.policy.generation)

    def _busy(self) -> list[BusyModel]:
        return [
            BusyModel(model, host.is_loaded, host.is_near)
            for model, host in self.hosts.items()
            if host.has_work
        ]

    def step(self, host: HostedModel) -> StepOutcome:
        assert host.engine is not None, f"`{host.model}` can step"
        self.reclaimer.before_step(host)
        outcome = host.engine.step()
        self.reclaimer.after_step(host, outcome)
        if not outcome.has_run and not outcome.preempted:
            self._readiness.starved(host.model, self.reclaimer.policy.generation)
        return outcome

    def stirred(self) -> None:
        """Something has come from outside: whoever was stuck may look again."""
        self._readiness.look_again()

    def stuck(self) -> HostedModel | None:
        """When no model can step: one that waits for memory that nobody is going to give back."""
        if any(host.plan is None or host.is_settling for host in self.hosts.values()):
            return None  # there will be news
        model = self._readiness.hopeless(self._busy())
        return None if model is None else self.hosts[model]

    def cancel(self, host: HostedModel, run: int) -> None:
        """One of its requests ends now, wherever it is."""
        host.waiting = [order for order in host.waiting if order.run != run]
        host.unchecked.discard(run)
        if host.engine is not None:
            host.engine.cancel(RequestId(str(run)))
        self.reclaimer.policy.room_may_have_come()

    def retire(self, model: ModelId) -> None:
        """It has no requests; its weights stay until somebody needs their room."""
        host = self.hosts[model]
        while host.engine is not None and host.engine.has_work:
            host.engine.step()  # what was under way when its requests ended
        host.call_off()
        self.reclaimer.retire(host)
        if host.engine is not None and self.reclaimer.pool.keeps_addresses:
            host.engine.rest()
            self._dormant[model] = host
            if len(self._dormant) > MAX_DORMANT:
                self._dormant.pop(next(iter(self._dormant))).close()
        else:
            host.close()
        del self.hosts[model]
        log.info("model_retired model=%s", model)

    def drop(self, model: ModelId) -> None:
        """All of it goes, also of a retired one; one that is unknown has nothing."""
        host = self.hosts.pop(model, None) or self._dormant.pop(model, None)
        if host is not None:
            host.close()
        self.reclaimer.drop(model)
        self.reclaimer.worth.forget(model)
        log.info("model_dropped model=%s", model)

    def _announced(self, loaded: ModelLoaded | None) -> ModelLoaded | None:
        if loaded is not None:
            log.info("model_loaded model=%s load_s=%.3f", loaded.model, loaded.total_s)
            num_bytes = sum(use.num_bytes for use in loaded.rungs)
            self.reclaimer.worth.loaded(loaded.model, num_bytes, loaded.total_s)
            self.reclaimer.policy.room_may_have_come()
        return loaded

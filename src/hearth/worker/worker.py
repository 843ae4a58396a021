"""The step loop of a worker: orders in, steps of busy models in turns, facts out. Opens no socket.

One thread runs it and owns all engines. Others post what they have into its inbox: orders of the gateway and
news of models that are opened and loaded. With nothing to do it sleeps there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import assert_never

from hearth.engine.engine import Intake, StepOutcome
from hearth.errors import EngineFailed, HearthError, ServiceError
from hearth.messages import (
    Admitted,
    CancelRequest,
    DropModel,
    Fact,
    HostModel,
    LoadProgressed,
    ModelFailed,
    ModelUse,
    Order,
    Ping,
    Pong,
    RunFailed,
    Shutdown,
    StartRequest,
    StepDone,
    Welcome,
)
from hearth.policy.plan import Request
from hearth.types import GuideSpec, ModelId, RequestId
from hearth.worker.arrival import Broken, Loaded, Near, Progressed
from hearth.worker.failure import Failure, failure_of
from hearth.worker.host import Host, HostNews, Opened, Workshop
from hearth.worker.turns import Turns

log = logging.getLogger(__name__)


class DeviceLost(Exception):
    """Every model in this process is lost."""


@dataclass(frozen=True, slots=True)
class Told:
    """News of a hosted model."""

    hosting: int  #: which stay of the model: one that was dropped has nothing to say any more
    model: ModelId
    news: HostNews


@dataclass(frozen=True, slots=True)
class Checked:
    """A guided request, whose grammar was compiled apart."""

    hosting: int
    order: StartRequest
    outcome: Request | HearthError


Inbox = SimpleQueue[Order | Told | Checked]


@dataclass(slots=True)
class _Run:
    """Mutable; written by the step thread."""

    model: ModelId
    since_s: float  #: when it came, or was preempted


class Worker:
    """Mutable; `run` is called by one thread, which owns all of it."""

    def __init__(self, workshop: Workshop, inbox: Inbox, send: Callable[[Fact], None]) -> None:
        """`send` may block: then no step is made."""
        self._workshop, self._inbox, self._send = workshop, inbox, send
        self._turns = Turns()
        self._hosts: dict[ModelId, Host] = {}
        self._runs: dict[int, _Run] = {}  #: all that have not ended, each of a hosted model
        self._compilers = ThreadPoolExecutor(1, thread_name_prefix="hearth-guide")

    def run(self) -> None:
        """Until it is told to shut down. Raises DeviceLost, and OSError when nobody listens any more."""
        while self._take_orders():
            self._step()

    def _take_orders(self) -> bool:
        """Carry out what has come, sleeping while no model is busy; False at the end."""
        while not self._inbox.empty() or not self._can_step():
            message = self._inbox.get()
            if isinstance(message, Shutdown):
                return False
            self._handle(message)
        return True

    def _can_step(self) -> list[ModelId]:
        """One that is still arriving would hold up others, so it steps only alone."""
        busy = [name for name, host in self._hosts.items() if host.has_work]
        loaded = [name for name in busy if self._hosts[name].is_loaded]
        return loaded or [name for name in busy if self._hosts[name].is_near]

    def _step(self) -> None:
        """One step of the model whose turn it is. If that breaks, the model leaves and the others go on."""
        model = self._turns.next(self._can_step())
        engine = self._hosts[model].engine
        assert engine is not None, f"`{model}` can step"
        began_s = time.perf_counter()
        try:
            outcome = engine.step()
        except Exception as error:  # whatever it is, it is this model's alone, or `_fail` says otherwise
            failure = failure_of(error)
        else:
            step_s = time.perf_counter() - began_s
            self._turns.ran(model, step_s)
            self._tell_step(model, outcome, step_s)
            return
        del engine  # the last of it besides the host's own
        self._fail(model, failure)

    # Orders.

    def _handle(self, message: Order | Told | Checked) -> None:
        match message:
            case HostModel():
                self._host(message)
            case DropModel(model):
                self._drop(model)
            case StartRequest():
                self._start(message)
            case CancelRequest(run):
                self._cancel(run)
            case Ping(number):
                self._send(Pong(number, self._workshop.pool.used_bytes, tuple(self._uses())))
            case Told(hosting, model, news):
                if self._is_current(model, hosting):
                    self._hear(self._hosts[model], news)
            case Checked(hosting, order, outcome):
                if self._is_current(order.model, hosting) and order.run in self._runs:
                    self._add(order, outcome)
            case Welcome() | Shutdown():
                raise ServiceError(f"a worker at work is not told {type(message).__name__}")
            case _:
                assert_never(message)

    def _host(self, order: HostModel) -> None:
        assert order.model not in self._hosts, f"`{order.model}` is hosted already"
        hosting, inbox = order.hosting, self._inbox
        self._hosts[order.model] = Host(
            order, self._workshop, lambda news: inbox.put(Told(hosting, order.model, news))
        )

    def _is_current(self, model: ModelId, hosting: int) -> bool:
        host = self._hosts.get(model)
        return host is not None and host.order.hosting == hosting

    def _drop(self, model: ModelId) -> None:
        """One that has just failed is gone already."""
        host = self._hosts.pop(model, None)
        if host is None:
            return
        self._turns.forget(model)
        self._runs = {run: entry for run, entry in self._runs.items() if entry.model != model}
        host.drop()
        log.info("model_dropped model=%s used_bytes=%d", model, self._workshop.pool.used_bytes)

    def _start(self, order: StartRequest) -> None:
        host = self._hosts.get(order.model)
        if host is None:
            reason = f"`{order.model}` is not on this worker; it was dropped or has failed"
            self._send(RunFailed(order.run, ServiceError.label, reason))
            return
        self._runs[order.run] = _Run(order.model, time.perf_counter())
        if host.engine is None:
            host.waiting.append(order)
        elif order.guide is None:
            self._add(order, _checked(host.engine.intake, order))
        else:
            # Not the engine: its memory must be free as soon as it is dropped.
            hosting, inbox, intake = host.order.hosting, self._inbox, host.engine.intake
            self._compilers.submit(lambda: inbox.put(Checked(hosting, order, _checked(intake, order))))

    def _add(self, order: StartRequest, outcome: Request | HearthError) -> None:
        engine = self._hosts[order.model].engine
        assert engine is not None, f"`{order.model}` has checked a request"
        if isinstance(outcome, HearthError):
            del self._runs[order.run]
            self._send(RunFailed(order.run, outcome.label, str(outcome)))
        else:
            engine.add(outcome)

    def _cancel(self, run: int) -> None:
        """One that has ended meanwhile has its last word on the way."""
        entry = self._runs.pop(run, None)
        if entry is None:
            return
        host = self._hosts[entry.model]
        host.waiting = [order for order in host.waiting if order.run != run]
        if host.engine is not None:
            host.engine.cancel(RequestId(str(run)))

    # News of models.

    def _hear(self, host: Host, news: HostNews) -> None:
        model = host.order.model
        match news:
            case Opened():
                for order in host.opened():
                    self._start(order)
            case Progressed(num_bytes, num_layers):
                self._send(LoadProgressed(model, host.order.hosting, num_bytes, num_layers))
            case Near():
                host.is_near = True
            case Loaded():
                loaded = host.loaded(news)
                log.info("model_loaded model=%s load_s=%.3f", model, loaded.total_s)
                self._send(loaded)
            case Broken(failure):
                self._fail(model, failure)
            case _:
                assert_never(news)

    def _fail(self, model: ModelId, failure: Failure) -> None:
        """The model leaves, and the others go on. Raises DeviceLost where they cannot."""
        log.error(
            "model_failed model=%s label=%s reason=%s%s",
            *(model, failure.label, failure.reason, failure.trace and "\n" + failure.trace),
        )
        if failure.is_fatal:
            raise DeviceLost(f"the device is lost, under `{model}`: {failure.reason}")
        hosting = self._hosts[model].order.hosting
        self._drop(model)
        self._send(ModelFailed(model, hosting, failure.label, failure.reason))

    # Facts.

    def _tell_step(self, model: ModelId, outcome: StepOutcome, step_s: float) -> None:
        now_s = time.perf_counter()
        outputs = outcome.outputs
        admitted = [
            Admitted(run := int(one.request_id), one.num_cached_tokens, now_s - self._runs[run].since_s)
            for one in outcome.admitted
        ]
        preempted = [int(request_id) for request_id in outcome.preempted]
        for run in preempted:
            self._runs[run].since_s = now_s
        finished = {
            int(one.request_id): one.finish_reason for one in outputs if one.finish_reason is not None
        }
        for run in finished:
            del self._runs[run]
        if not outputs and not admitted and not preempted:
            return
        has_logprobs = any(one.logprobs is not None for one in outputs)
        self._send(
            StepDone(
                model=model,
                runs=[int(one.request_id) for one in outputs],
                tokens=[one.token for one in outputs],
                finished=finished,
                logprobs=[one.logprobs for one in outputs] if has_logprobs else None,
                admitted=admitted,
                preempted=preempted,
                step_s=step_s,
            )
        )

    def _uses(self) -> list[ModelUse]:
        uses = []
        for model, host in self._hosts.items():
            if host.engine is None:
                uses.append(ModelUse(model, 0, len(host.waiting), 0, 0))
            else:
                use = host.engine.usage
                uses.append(
                    ModelUse(model, use.num_running, use.num_waiting, use.kv_used_blocks, use.kv_blocks)
                )
        return uses


def _checked(intake: Intake, order: StartRequest) -> Request | HearthError:
    guide = None if order.guide is None else GuideSpec(order.guide.kind, order.guide.text)
    try:
        return intake.request(
            RequestId(str(order.run)),
            order.prompt,
            order.sampling.params(),
            output=order.output,
            guide=guide,
        )
    except HearthError as error:
        return error
    except Exception as error:  # nobody waits for the thread that this may be on, but somebody for the answer
        log.exception("request_broke run=%d model=%s", order.run, order.model)
        return EngineFailed(f"the request broke: {error!r}")

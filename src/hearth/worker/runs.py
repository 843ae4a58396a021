"""The requests of a worker, each from the order that starts it to the one end that is told of it.

A request waits here for an engine of its model, for its grammar and for its adapter; then the engine has it.
Steps no engine and brings no model: both is the loop's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from hearth.core.errors import EngineFailed, HearthError
from hearth.core.messages import Admitted, Fact, RunFailed, StartRequest, StepDone
from hearth.core.types import ModelId, RequestId
from hearth.engine.engine import Intake, StepOutcome
from hearth.policy.batch.plan import EngineRequest
from hearth.worker.first_tokens import FirstTokens
from hearth.worker.hosted_model import HostedModel
from hearth.worker.hosted_models import HostedModels
from hearth.worker.hosting_state import Incomplete

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A guided request, whose grammar was compiled apart."""

    hosting: int
    order: StartRequest
    outcome: EngineRequest | HearthError


@dataclass(slots=True)
class _Run:
    """A request on this worker. Mutable; written by the step thread."""

    model: ModelId
    since_s: float  #: when it came, or was preempted


class Runs:
    """All requests that have not ended, each of a hosted model. Mutable; the step thread alone calls it."""

    def __init__(
        self,
        models: HostedModels,
        first_tokens: FirstTokens,
        load: Callable[[HostedModel], None],
        post: Callable[[CheckedRequest], None],
        send: Callable[[Fact], None],
    ) -> None:
        """`load` brings what a model lacks, in its turn. `post` is called by another thread."""
        self._models, self._hosted = models, models.hosted
        self._turns, self._adapters = models.turns, models.adapters
        self._load, self._post, self._send = load, post, send
        self._runs: dict[int, _Run] = {}
        self._first_tokens = first_tokens  #: that some of them wait for
        self._untold_s: dict[ModelId, float] = {}  #: of steps since the last one that the gateway heard of
        self._compilers = ThreadPoolExecutor(1, thread_name_prefix="hearth-guide")

    def __len__(self) -> int:
        return len(self._runs)

    def of(self, model: ModelId) -> list[int]:
        return [run for run, entry in self._runs.items() if entry.model == model]

    # The way to the engine.

    def start(self, order: StartRequest, hosted: HostedModel) -> None:
        """Take in a request of a hosted model."""
        now_s = time.perf_counter()
        self._runs[order.run] = _Run(order.model, now_s)
        self._first_tokens.awaited(order.run)
        self._models.request_came(hosted)
        self.want_turn(order)
        if order.adapter is not None:
            self._adapters.asked(order, order.adapter, now_s - order.age_s)
        if not hosted.queue_until_ready(order):
            self._begin(order, hosted)

    def want_turn(self, order: StartRequest) -> None:
        """Have a request that has not begun want a turn of its model."""
        self._turns.arrived(order, time.perf_counter() - self._runs[order.run].since_s)

    def begin_waiting(self, hosted: HostedModel) -> None:
        """Have the requests begin that waited for an engine, if it is there."""
        if hosted.takes_requests:
            for order in hosted.take_waiting():
                self._begin(order, hosted)

    def _begin(self, order: StartRequest, hosted: HostedModel) -> None:
        """Check a request of a model that has its engine, if not all of its bytes."""
        served = hosted.served
        if served is None:  # it has failed meanwhile
            return
        intake = served.engine.intake
        if order.guide is None:
            self._add(order, _checked(intake, order))
        else:
            # Not the engine: its memory must be free as soon as it is dropped.
            hosting, post = hosted.order.hosting, self._post
            served.unchecked.add(order.run)
            self.set_unchecked_aside(hosted)
            self._compilers.submit(lambda: post(CheckedRequest(hosting, order, _checked(intake, order))))

    def set_unchecked_aside(self, hosted: HostedModel) -> None:
        """Have requests whose grammar is being compiled want no turn until it is; a load goes on meanwhile.

        The others that wait would wait for a compiler, which may take long.
        """
        if hosted.is_loaded and (served := hosted.served) is not None:
            for run in served.unchecked:
                self._turns.ended(hosted.model, run)

    def take_checked(self, checked: CheckedRequest) -> None:
        """Go on with a request whose grammar is compiled, unless it or its model has gone meanwhile."""
        order = checked.order
        if order.run in self._runs and self._hosted[order.model].order.hosting == checked.hosting:
            self.want_turn(order)
            self._add(order, checked.outcome)

    def _add(self, order: StartRequest, outcome: EngineRequest | HearthError) -> None:
        """Have the engine compute a request that was checked, as soon as its adapter is there."""
        hosted = self._hosted[order.model]
        if isinstance(outcome, HearthError):
            self.fail(order.run, outcome.label, str(outcome))
            return
        now_s = time.perf_counter()
        arrived_s = self._runs[order.run].since_s - order.age_s
        request = outcome.in_line(order.pace, arrived_s, now_s)
        if request.adapter is None:
            hosted.add(order.run, request)
        else:  # it stands in line from now on, also while it waits for its adapter
            hosted.hold_back(order.run, request)
            self._adapters.look_again()
        if isinstance(hosted.state, Incomplete):  # others took from it while it was idle
            self._load(hosted)

    def start_adapted(self) -> None:
        """Have the requests start that waited for nothing but their adapter, which is there."""
        for run in self._adapters.residency.startable():
            hosted = self._hosted[self._runs[run].model]
            if (served := hosted.served) is None or (request := served.held.get(run)) is None:
                continue  # it waits for more than its adapter
            assert request.adapter is not None, f"{run=} is held and has no adapter"
            self._adapters.start(run, request.adapter, hosted.model, served.engine)
            del served.held[run]
            hosted.add(run, request)

    # Tokens, and the end.

    def tell_step(self, model: ModelId, outcome: StepOutcome, step_s: float) -> None:
        """Tell what came of a step that ends now, and forget the requests that ended by it."""
        outputs = outcome.outputs
        if (done := self._step_done(model, outcome, step_s)) is not None:
            self._send(done)
        self._turns.sent(model, outputs.request_ids)
        for run in map(int, outputs.request_ids):
            self._first_tokens.served(run)
        for run in map(int, outputs.finished):
            del self._runs[run]
            self._ended(model, run)
        for failure in outcome.failures:  # behind the tokens that it has still got
            run, error = int(failure.request_id), failure.error
            del self._runs[run]
            self._ended(model, run)
            log.warning("run_failed run=%d model=%s label=%s reason=%s", run, model, error.label, error)
            self._send(RunFailed(run, error.label, str(error)))

    def _step_done(self, model: ModelId, outcome: StepOutcome, step_s: float) -> StepDone | None:
        """Return what the gateway has to hear of a step; None: nothing, but for the time that it took."""
        began_s = time.perf_counter() - step_s
        outputs = outcome.outputs
        preempted = [run for one in outcome.preempted if (run := int(one)) in self._runs]
        for run in preempted:  # it may be admitted again by this step
            self._runs[run].since_s = began_s
        admitted = [
            Admitted(run := int(one.request_id), one.num_cached_tokens, began_s - self._runs[run].since_s)
            for one in outcome.admitted
        ]
        busy_s = self._untold_s.pop(model, 0.0) + step_s
        if not (outputs or admitted or preempted):
            self._untold_s[model] = busy_s
            return None
        return StepDone(
            model=model,
            runs=list(map(int, outputs.request_ids)),
            tokens=list(outputs.tokens),
            finished={int(request_id): reason for request_id, reason in outputs.finished.items()},
            logprobs=None if outputs.logprobs is None else list(outputs.logprobs),
            readings={int(request_id): one for request_id, one in outputs.readings.items()},
            admitted=admitted,
            preempted=preempted,
            step_s=step_s,
            busy_s=busy_s,
        )

    def cancel(self, run: int) -> None:
        """End a request now; one that has ended meanwhile has its last word on the way."""
        if (entry := self._runs.pop(run, None)) is not None:
            self._models.cancel(self._hosted[entry.model], run)
            self._ended(entry.model, run)

    def cancel_all(self, model: ModelId) -> None:
        for run in self.of(model):
            self.cancel(run)

    def fail(self, run: int, label: str, reason: str) -> None:
        """End a request that its engine cannot have, and say why."""
        self.cancel(run)
        self._send(RunFailed(run, label, reason))

    def _ended(self, model: ModelId, run: int) -> None:
        """Have nobody else count on a request that is over."""
        self._first_tokens.served(run)
        self._turns.ended(model, run)
        self._adapters.ended(run)


def _checked(intake: Intake, order: StartRequest) -> EngineRequest | HearthError:
    try:
        return intake.request(
            RequestId(str(order.run)),
            order.prompt,
            order.sampling,
            salt=order.salt,
            output=order.output,
            guide=order.guide,
            pooling=order.pooling,
            adapter=None if order.adapter is None else order.adapter.adapter,
        )
    except HearthError as error:
        return error
    # Nobody waits for the thread that this may be on, but somebody for the answer. A panic of llguidance is
    # no Exception.
    except BaseException as error:
        log.exception("request_broke run=%d model=%s", order.run, order.model)
        return EngineFailed(f"the request broke: {error!r}")

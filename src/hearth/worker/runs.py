"""The requests of a worker, from the order that starts each to its one end. Steps and loads nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from hearth.core.errors import EngineFailed, HearthError
from hearth.core.messages import Admitted, Fact, RunFailed, StartRequest, StepDone
from hearth.core.types import Hold, ModelId, RequestId
from hearth.engine.engine import StepOutcome
from hearth.engine.intake import Intake
from hearth.policy.batch.plan import EngineRequest
from hearth.worker.adapters import is_own
from hearth.worker.background import FirstTokens
from hearth.worker.hosted_model import HostedModel
from hearth.worker.hosted_models import HostedModels
from hearth.worker.hosting_state import Incomplete
from hearth.worker.kv_moves import KvArrived, KvMoves
from hearth.worker.stage_adapters import StageAdapters

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request whose grammar was compiled on another thread."""

    hosting: int
    order: StartRequest
    outcome: EngineRequest | HearthError


@dataclass(slots=True)
class _Run:
    model: ModelId
    since_s: float  #: when it arrived or was preempted
    has_stage_adapter: bool = False  #: later members of its pipeline were asked for its adapter


class Runs:
    """Every request that has not ended. Mutable; the step thread alone calls it.

    Owns the end of each request: it is sent to the gateway here, exactly once.
    """

    def __init__(
        self,
        models: HostedModels,
        stage_adapters: StageAdapters,
        kv_moves: KvMoves,
        first_tokens: FirstTokens,
        load: Callable[[HostedModel], None],
        post: Callable[[CheckedRequest], None],
        send: Callable[[Fact], None],
    ) -> None:
        """`load` loads what a model lacks, in its turn. `post` is called by another thread."""
        self._models, self._hosted = models, models.hosted
        self._turns, self._adapters, self._stage_adapters = models.turns, models.adapters, stage_adapters
        self._kv_moves = kv_moves
        self._load, self._post, self._send = load, post, send
        self._runs: dict[int, _Run] = {}
        self._first_tokens = first_tokens
        self._unsent_s: dict[ModelId, float] = {}  #: of steps since the last fact of one
        self._compilers = ThreadPoolExecutor(1, thread_name_prefix="hearth-guide")

    def __len__(self) -> int:
        return len(self._runs)

    def of(self, model: ModelId) -> list[int]:
        return [run for run, entry in self._runs.items() if entry.model == model]

    # The way to the engine.

    def start(self, order: StartRequest, hosted: HostedModel) -> None:
        now_s = time.perf_counter()
        self._runs[order.run] = _Run(order.model, now_s)
        self._first_tokens.awaited(order.run)
        self._models.reclaimer.reload_costs.asked(hosted.model, time.monotonic())
        if hosted.hold is Hold.RETAINED:
            hosted.hold = Hold.WARM
        self.want_turn(order)
        if order.adapter is not None:
            self._adapters.asked(order.adapter, order.run, order.model, now_s - order.age_s)
        if (load := hosted.load_under_way) is not None:
            load.expect(order)
        if not hosted.takes_requests:
            hosted.pending.queued.append(order)
        elif self._kv_moves.expect(order, hosted):
            hosted.pending.arriving[order.run] = order
        else:
            self._begin(order, hosted)

    def take_kv(self, arrived: KvArrived, hosted: HostedModel) -> None:
        """Start a request that has waited for its KV, unless it has ended.

        Raises ModelBroke if a model breaks by it: drop that one and take the same KV again.
        """
        order = hosted.pending.arriving.get(arrived.run)
        if order is None:
            return
        if hosted.takes_requests:
            self._send(self._kv_moves.take(hosted, order, arrived))
        del hosted.pending.arriving[arrived.run]
        hosted.pending.queued.append(order)
        self.begin_queued(hosted)

    def want_turn(self, order: StartRequest) -> None:
        self._turns.arrived(order, time.perf_counter() - self._runs[order.run].since_s)

    def begin_queued(self, hosted: HostedModel) -> None:
        if hosted.takes_requests:
            for order in hosted.pending.take_queued():
                self._begin(order, hosted)

    def _begin(self, order: StartRequest, hosted: HostedModel) -> None:
        served = hosted.served
        if served is None:  # failed meanwhile
            return
        if order.adapter is not None and hosted.member is not None:
            entry = self._runs[order.run]
            entry.has_stage_adapter = True
            age_s = time.perf_counter() - entry.since_s + order.age_s
            self._stage_adapters.ask(hosted, order.run, order.adapter, age_s)
        intake = served.engine.intake
        if order.guide is None:
            self._add(order, _checked(intake, order))
        else:
            # The intake alone: holding the engine would keep its memory after a drop.
            hosting, post = hosted.order.hosting, self._post
            hosted.pending.unchecked.add(order.run)
            self.set_unchecked_aside(hosted)
            self._compilers.submit(lambda: post(CheckedRequest(hosting, order, _checked(intake, order))))

    def set_unchecked_aside(self, hosted: HostedModel) -> None:
        """Count no request towards a turn while its grammar is compiled: other models would wait for that."""
        if hosted.is_loaded:
            for run in hosted.pending.unchecked:
                self._turns.ended(hosted.model, run)

    def take_checked(self, checked: CheckedRequest) -> None:
        order = checked.order
        if order.run in self._runs and self._hosted[order.model].order.hosting == checked.hosting:
            self.want_turn(order)
            self._add(order, checked.outcome)

    def _add(self, order: StartRequest, outcome: EngineRequest | HearthError) -> None:
        hosted = self._hosted[order.model]
        if isinstance(outcome, HearthError):
            self.fail(order.run, outcome.label, str(outcome))
            return
        now_s = time.perf_counter()
        arrived_s = self._runs[order.run].since_s - order.age_s
        request = outcome.in_line(order.pace, arrived_s, now_s)
        if request.adapter is None:
            self._compute(hosted, order.run, request)
        else:  # it is in line from now on, also while it waits for its adapter
            hosted.pending.unchecked.discard(order.run)
            hosted.pending.held[order.run] = request
            self._adapters.recheck()
        if isinstance(hosted.state, Incomplete):  # other models took weights while it was idle
            self._load(hosted)

    def start_adapted(self) -> None:
        for run in filter(is_own, self._adapters.residency.startable()):
            hosted = self._hosted[self._runs[run].model]
            if (served := hosted.served) is None or (request := hosted.pending.held.get(run)) is None:
                continue  # it waits for more than its adapter
            assert request.adapter is not None, f"{run=} is held and has no adapter"
            self._adapters.start(run, request.adapter, hosted.model, served.engine)
            if hosted.member is None:
                self._compute(hosted, run, request)
            else:
                self._stage_adapters.confirm(hosted, run)

    def adapter_confirmed(self, run: int) -> None:
        """Start a request, unless it has ended: all members of its pipeline have its adapter."""
        if (entry := self._runs.get(run)) is not None:
            hosted = self._hosted[entry.model]
            self._compute(hosted, run, hosted.pending.held[run])

    def _compute(self, hosted: HostedModel, run: int, request: EngineRequest) -> None:
        served, pending = hosted.served, hosted.pending
        assert served is not None, f"`{hosted.model}` has no engine: {run=}"
        pending.unchecked.discard(run)
        pending.held.pop(run, None)
        served.engine.add(request)

    # Tokens, and the end.

    def send_step(self, model: ModelId, outcome: StepOutcome, step_s: float) -> None:
        outputs = outcome.outputs
        if (done := self._step_done(model, outcome, step_s)) is not None:
            self._send(done)
        self._turns.sent(model, outputs.request_ids)
        for run in map(int, outputs.request_ids):
            self._first_tokens.served(run)
        for run in map(int, outputs.finished):
            self._ended(run, self._runs.pop(run))
        for failure in outcome.failures:  # after its last tokens
            run, error = int(failure.request_id), failure.error
            self._ended(run, self._runs.pop(run))
            log.warning("run_failed run=%d model=%s label=%s reason=%s", run, model, error.label, error)
            self._send(RunFailed(run, error.label, str(error)))

    def _step_done(self, model: ModelId, outcome: StepOutcome, step_s: float) -> StepDone | None:
        """Return the fact of a step; None: the gateway needs only its time, with the next one."""
        began_s = time.perf_counter() - step_s
        outputs = outcome.outputs
        preempted = [run for one in outcome.preempted if (run := int(one)) in self._runs]
        for run in preempted:  # this step may admit it again
            self._runs[run].since_s = began_s
        admitted = [
            Admitted(run := int(one.request_id), one.num_cached_tokens, began_s - self._runs[run].since_s)
            for one in outcome.admitted
        ]
        busy_s = self._unsent_s.pop(model, 0.0) + step_s
        if not (outputs or admitted or preempted):
            self._unsent_s[model] = busy_s
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
        if (entry := self._runs.pop(run, None)) is not None:
            hosted = self._hosted[entry.model]
            hosted.pending.discard(run)
            if (load := hosted.load_under_way) is not None:
                load.forget(run)
            if (served := hosted.served) is not None:
                served.engine.cancel(RequestId(str(run)))
            self._models.reclaimer.request_cancelled(hosted)
            self._ended(run, entry)

    def cancel_all(self, model: ModelId) -> None:
        for run in self.of(model):
            self.cancel(run)

    def fail(self, run: int, label: str, reason: str) -> None:
        self.cancel(run)
        self._send(RunFailed(run, label, reason))

    def adapter_failed(self, run: int, label: str, reason: str) -> None:
        """Fail a request, unless it has ended: another member of its pipeline cannot have its adapter."""
        if run in self._runs:
            self.fail(run, label, reason)

    def _ended(self, run: int, entry: _Run) -> None:
        self._first_tokens.served(run)
        self._turns.ended(entry.model, run)
        self._adapters.ended(run)
        if entry.has_stage_adapter:
            self._stage_adapters.end(self._hosted[entry.model], run)


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
    # The thread's top: the client waits for an answer. A panic of llguidance is no Exception.
    except BaseException as error:
        log.exception("request_broke run=%d model=%s", order.run, order.model)
        return EngineFailed(f"the request failed: {error!r}")

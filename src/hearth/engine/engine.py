"""One model being served: plan, run, commit, one step ahead of the device. Knows no text and no threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from hearth.core.types import (
    AdapterId,
    FinishReason,
    PromptReading,
    RequestId,
    TokenLogprobs,
)
from hearth.engine.guide import Guides
from hearth.engine.intake import Intake
from hearth.engine.pending_step import StepInFlight, StepResult
from hearth.engine.prompt_reader import ReadingPieces
from hearth.engine.runner import Runner
from hearth.engine.step_times import StepSamples, StepTimer
from hearth.models.adapter import AdapterLayout
from hearth.policy.batch.batcher import Batcher
from hearth.policy.batch.digest_chain import DigestChain
from hearth.policy.batch.elastic import Elastic
from hearth.policy.batch.plan import Admission, CommittedStep, EngineRequest, RequestFailed, StepPlan
from hearth.policy.batch.prompt_allowance import PromptAllowance


@dataclass(frozen=True, slots=True)
class Output:
    request_id: RequestId
    token: int
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None
    reading: PromptReading | None = None  #: of its prompt, with the first token


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """Tokens of one step, in columns of equal length: a step may have a thousand of them."""

    request_ids: Sequence[RequestId] = ()
    tokens: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs | None] | None = None  #: None: not requested
    finished: Mapping[RequestId, FinishReason] = field(default_factory=dict)  #: requests that this step ended
    #: Prompt readings of requests whose first token is here.
    readings: Mapping[RequestId, PromptReading] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    def __iter__(self) -> Iterator[Output]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, row: int) -> Output:
        request_id = self.request_ids[row]
        logprobs = None if self.logprobs is None else self.logprobs[row]
        reason, reading = self.finished.get(request_id), self.readings.get(request_id)
        return Output(request_id, self.tokens[row], logprobs, reason, reading)

    def only(self, rows: Sequence[int]) -> StepOutputs:
        request_ids = [self.request_ids[row] for row in rows]
        return StepOutputs(
            request_ids,
            [self.tokens[row] for row in rows],
            None if self.logprobs is None else [self.logprobs[row] for row in rows],
            {one: self.finished[one] for one in request_ids if one in self.finished},
            {one: self.readings[one] for one in request_ids if one in self.readings},
        )


@dataclass(frozen=True, slots=True)
class StepOutcome:
    outputs: StepOutputs  #: of the step that was committed
    admitted: Sequence[Admission]  #: that the launched step admits, for the first time or again
    preempted: Sequence[RequestId]  #: that made room for that step; admitted again later
    has_run: bool = True  #: a step was launched or committed; False: KV is short
    failures: Sequence[RequestFailed] = ()  #: that failed in that step, after its outputs


@dataclass(frozen=True, slots=True)
class Usage:
    num_running: int
    num_waiting: int
    kv_used_blocks: int  #: held by running requests
    kv_cached_blocks: int  #: cached prefixes without a reader, free to be overwritten
    kv_blocks: int


@dataclass(frozen=True, slots=True)
class _LaunchedStep:
    plan: StepPlan
    pending: StepInFlight
    timer: StepTimer | None  #: None: its time is not typical


class StepMarks(Protocol):
    """Told how the steps of an engine advance, by the thread that steps it.

    On a CPU a layer is passed when it is computed. On other devices a layer passed only shows that the host
    is alive, and the device advances when it completes a step.
    """

    def begun(self, request_ids: Sequence[RequestId]) -> None: ...

    def launched(self) -> None:
        """The step is queued (on a CPU: computed), or failed."""

    def layer_passed(self) -> None: ...

    def done(self) -> None:
        """The device has completed the oldest step of this engine, and all launched before it."""

    def closed(self) -> None: ...


class NoMarks:
    def begun(self, request_ids: Sequence[RequestId]) -> None:
        pass

    def launched(self) -> None:
        pass

    def layer_passed(self) -> None:
        pass

    def done(self) -> None:
        pass

    def closed(self) -> None:
        pass


class Engine:
    """One model's batcher and runner, stepped together. Mutable; one thread calls it.

    Knows the requests that it computes, up to the step that ends each; the caller owns and tells that end.
    """

    def __init__(
        self,
        batcher: Batcher,
        runner: Runner,
        guides: Guides,
        vocab_size: int,
        eos_ids: frozenset[int],
        allowance: PromptAllowance,
        marks: StepMarks | None = None,
    ) -> None:
        self.batcher = batcher
        self.runner = runner
        self.elastic = Elastic(batcher.blocks.block_tokens)
        self.intake = Intake(batcher.request_limits, guides, vocab_size, eos_ids)
        self.request = self.intake.request
        self._flights: deque[_LaunchedStep] = deque()  #: oldest first
        #: To be launched when the oldest step returns from other stages, before its tokens are committed.
        self._ahead: StepPlan | None = None
        self._unmeasured: _LaunchedStep | None = None  #: committed, but its time is not recorded yet
        self.allowance = allowance
        #: If set, the caller sends tokens first and then calls `settle`.
        self.settles_later = False
        self.samples = StepSamples()  #: of measured steps
        self._marks: StepMarks = NoMarks() if marks is None else marks
        #: Of steps that are not marked as done, oldest first: recorded behind their parts on this device.
        self._ends: deque[torch.cuda.Event] = deque()
        self.tables = runner.sampler.tables
        self.reading = ReadingPieces()
        #: Live requests with a table, reading or adapter: most have none.
        self._remembered: set[RequestId] = set()
        self._adapter_by_user: dict[RequestId, AdapterId] = {}

    @property
    def has_work(self) -> bool:
        return self.batcher.has_work

    @property
    def is_computing(self) -> bool:
        return bool(self._flights)

    @property
    def is_step_prepared(self) -> bool:
        """True if the next step was planned ahead, and the tokens that it waited for are known."""
        return self._ahead is not None and self._flights[0].pending.is_done

    @property
    def computes_first_tokens(self) -> bool:
        """True if every prompt of a newcomer is launched, and the device is still computing."""
        flights = self._flights
        return bool(flights) and not flights[-1].pending.is_done and self.batcher.newcomers_are_planned

    @property
    def usage(self) -> Usage:
        batcher, blocks = self.batcher, self.batcher.blocks
        return Usage(
            batcher.num_running, batcher.num_waiting, blocks.num_live, len(blocks.cached), blocks.num_blocks
        )

    @property
    def adapters(self) -> Collection[AdapterId]:
        return self.runner.adapters.ids

    def add_adapter(self, adapter: AdapterId, layout: AdapterLayout, layers: Sequence[torch.Tensor]) -> None:
        """Let requests have an adapter, whose bytes stay in place until it is removed.

        `layers` (uint8) are the pieces of `layout.layers`, in the dtype that the model is computed in.
        """
        self.runner.add_adapter(adapter, layout, layers)

    def move_adapter(self, adapter: AdapterId, layout: AdapterLayout, layers: Sequence[torch.Tensor]) -> None:
        self.runner.remove_adapter(adapter)
        self.runner.add_adapter(adapter, layout, layers)

    def remove_adapter(self, adapter: AdapterId) -> None:
        """Forget an adapter that no request has. Steps in flight may still read its bytes."""
        users = [user for user, used in self._adapter_by_user.items() if used == adapter]
        assert not users, f"`{adapter}` is in use by {sorted(users)}"
        self.runner.remove_adapter(adapter)

    def add(self, request: EngineRequest) -> None:
        adapter = request.adapter
        assert adapter is None or adapter in self.adapters, (
            f"`{adapter}` of {request.request_id} is not there"
        )
        self._undo_ahead()  # this request may start in the next step
        self.batcher.add(request)
        is_read = request.pooling is not None or request.sampling.prompt_logprobs is not None
        has_tables = self.tables.expect(request.request_id, request.sampling)
        if adapter is not None or is_read or has_tables:
            self._remembered.add(request.request_id)
        if adapter is not None:
            self._adapter_by_user[request.request_id] = adapter
        if is_read:
            flights = self._flights
            self.reading.expect(request.request_id, flights[-1].plan.step_id + 1 if flights else 0)

    def cancel(self, request_id: RequestId) -> bool:
        self._forget(request_id)
        self._undo_ahead()
        return self.batcher.cancel(request_id)

    def add_blocks(self, extent: range) -> None:
        num_blocks = len(self.runner.layers.kv)
        assert 0 <= extent.start < extent.stop <= num_blocks, f"{extent=} of {num_blocks=}"
        assert self.runner.layers.inputs.sink not in extent, f"the sink among blocks: {extent=}"
        self.batcher.kv.add(extent)
        self.runner.add_blocks(extent)

    def clear(self, extent: range, *, may_move: bool, may_preempt: bool, keeps_floor: bool = True) -> bool:
        """Stop using blocks in later steps; False: that is impossible, and nothing changed.

        Steps in flight may still touch them, and so may copies queued behind those on the current stream.
        """
        self.runner.settle()
        self._undo_ahead()
        moves = self.batcher.kv.clear(
            extent, may_move=may_move, may_preempt=may_preempt, keeps_floor=keeps_floor
        )
        if moves is None:
            return False
        self.runner.copy_blocks(moves)
        self.runner.remove_blocks(extent)
        return True

    def cache_prefix(self, chain: DigestChain, num_blocks: int, parts: Mapping[range, torch.Tensor]) -> int:
        """Take KV that other workers have computed into the prefix cache; return how many tokens it has then.

        `parts` (uint8) has a row for each of `num_blocks`, by layers, which are all of the model.
        """
        self.runner.settle()
        self._undo_ahead()
        num_known, added = self.batcher.cache_prefix(chain, num_blocks)
        for layers, content in parts.items():
            self.runner.write_blocks(added, layers, content[num_known:])
        return (num_known + len(added)) * chain.block_tokens

    def step(self) -> StepOutcome:
        """Launch the next step, then wait for the oldest one and commit its tokens, if that is another.

        If every sequence sits out until that commit, the next step is launched behind it. Launches nothing if
        there is work but an elastic KV has fewer blocks than it was promised. Does not wait for other
        devices: if they compute all steps that there can be, nothing happens.
        """
        self._measure()
        flights, is_ahead = self._flights, self._ahead is not None
        if not is_ahead:
            self.batcher.num_flights = self.runner.num_flights
        launched = self._launch_next()
        is_full = launched is None or is_ahead or len(flights) == self.batcher.max_in_flight
        # The tokens of the oldest step may have come since `_launch_next`: a step that was planned ahead of
        # their commit has to be launched first.
        is_due = is_full and self._ahead is None
        previous = flights.popleft() if flights and is_due and flights[0].pending.may_wait else None
        blocks = self.batcher.blocks
        assert (
            launched or previous or flights or not self.has_work or blocks.num_blocks < blocks.floor_blocks
        ), f"there is work, but nothing to compute and to wait for: {self.usage}"
        outputs, failures = self._take_in(previous)
        if launched is None and previous is not None and self.has_work:
            launched = self._launch_next()
        if launched is None and previous is None and flights:
            self._plan_ahead()
        if launched is None or not self.has_work:
            self.runner.settle()  # no step may follow, and a trial uses the model's memory
        return StepOutcome(
            outputs,
            () if launched is None else launched.plan.admissions,
            self.batcher.take_preempted(),
            has_run=launched is not None or previous is not None,
            failures=failures,
        )

    def _launch_next(self) -> _LaunchedStep | None:
        if self._ahead is not None:
            if not self.is_step_prepared:
                return None
            launched = self._launch(self._ahead)
            self._ahead = None
            self._flights.append(launched)
            return launched
        if len(self._flights) >= self.batcher.max_in_flight:
            return None
        num_waiting_tokens = self.batcher.waiting_prompt_tokens()
        plan = self.batcher.plan(
            self.allowance.num_tokens(num_waiting_tokens), self.allowance.num_lone_tokens
        )
        if plan is None:
            return None
        launched = self._launch(plan)
        self._flights.append(launched)
        return launched

    def _plan_ahead(self) -> None:
        if self._ahead is None and self.runner.num_flights is not None:
            self._ahead = self.batcher.plan_ahead()
            if self._ahead is not None:
                self.runner.prepare(self._ahead)

    def _undo_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead = None
            self.batcher.undo_ahead()
            self.runner.forget_prepared()

    def flush(self) -> StepOutcome:
        """Commit the oldest step in flight, if there is one, and launch none.

        When none is left, the device reads nothing of the model. Requests stay: the next `step` goes on with
        them.
        """
        self._measure()
        self._undo_ahead()
        previous = self._flights.popleft() if self._flights else None
        outputs, failures = self._take_in(previous)
        self.settle()
        self.runner.settle()
        preempted = self.batcher.take_preempted()
        return StepOutcome(outputs, (), preempted, has_run=previous is not None, failures=failures)

    @contextmanager
    def marked(self, request_ids: Sequence[RequestId]) -> Iterator[None]:
        """Mark a step that comes from another stage."""
        self.note_done()
        self._marks.begun(request_ids)
        try:
            yield
        finally:
            self._marks.launched()
        self._launched(self.runner.last_end)

    def note_done(self, *, waits: bool = False) -> None:
        """Mark steps as done that this device has completed; `waits`: it has to complete all of them."""
        while self._ends and (waits or self._ends[0].query()):  # type: ignore[no-untyped-call] # untyped
            self._ends[0].synchronize()
            self._ends.popleft()
            self._marks.done()

    def _launched(self, end: torch.cuda.Event | None) -> None:
        if end is None:
            self._marks.done()
        else:
            self._ends.append(end)

    def settle(self) -> None:
        """Finish the books of KV: the caller's duty after each step if `settles_later`."""
        self.batcher.settle()

    def _take_in(self, previous: _LaunchedStep | None) -> tuple[StepOutputs, Sequence[RequestFailed]]:
        outputs, committed = StepOutputs(), CommittedStep()
        if previous is not None:
            result = previous.pending.wait()
            self._unmeasured = previous
            if previous.pending.is_computed:
                self._measure()
            self.note_done()
            committed = self.batcher.take_tokens(previous.plan, result.tokens, result.broken_rows)
            outputs = self._outputs(previous.plan, committed, result)
        if not self.settles_later:
            self.batcher.settle()
        return outputs, committed.failures

    def _measure(self) -> None:
        """Record the time of the last committed step, after its tokens are sent: the driver may be slow."""
        taken_in, self._unmeasured = self._unmeasured, None
        if taken_in is not None and taken_in.timer is not None:
            plan, seconds = taken_in.plan, taken_in.timer.seconds()
            self.allowance.measured(plan.num_decode_rows, plan.num_prompt_tokens, seconds)
            self.samples.add(plan, seconds)
            self.runner.measured(plan, seconds)

    def close(self) -> None:
        """Wait for the device, so that memory can be freed. No other call may follow."""
        self._flights.clear()
        self._ahead = None
        self._ends.clear()
        self._unmeasured = None
        self.runner.close()  # also for a step that failed half-way: its inputs are still being read
        self._marks.closed()
        self.settle()  # last: wrong books must not skip the wait for the device

    def _launch(self, plan: StepPlan) -> _LaunchedStep:
        # Touching unmapped memory would kill the context, and with it every model in the worker.
        written = plan.table_writes.blocks
        assert self.batcher.blocks.has_all(written), f"blocks that are not there: {plan.table_writes}"
        timer = StepTimer(self.runner.layers.kv.device) if self.runner.is_warm(plan) else None
        self._marks.begun(plan.request_ids)
        try:
            pending = self.runner.launch(plan)
        finally:
            self._marks.launched()
        self._launched(pending.end)
        if timer is not None:
            timer.stop(pending.end)
        return _LaunchedStep(plan, pending, timer)

    def _outputs(self, plan: StepPlan, committed: CommittedStep, result: StepResult) -> StepOutputs:
        for failure in committed.failures:
            self._forget(failure.request_id)
        readings = self.reading.take(plan, result.reads) if result.reads else {}
        for request_id in self._remembered.intersection(committed.finished):
            self._forget(request_id)
        logprobs = None
        if result.logprobs is not None:
            logprobs = [result.logprobs[index] for index in committed.sample_indices]
        return StepOutputs(committed.request_ids, committed.tokens, logprobs, committed.finished, readings)

    def _forget(self, request_id: RequestId) -> None:
        self._remembered.discard(request_id)
        self.reading.forget(request_id)
        self._adapter_by_user.pop(request_id, None)
        self.tables.forget(request_id)

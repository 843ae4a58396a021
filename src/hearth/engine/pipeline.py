"""A model in stages: the first stage is here, with everything that plans; the others may be anywhere.

    first    plan -> embedding, layers -> hidden states ->
    others                                  layers -> hidden states -> ... -> head, sampler -> result
    first    <- tokens of slots <---------------------------------------------------------------

Every stage runs its steps in the order of the first, so slots mean the same on all of them. Blocks are named
by their numbers in the first stage; each other stage has blocks of its own for them (`BlockMap`). A sequence
in flight sits out (`Batcher`), so the first stage knows the token of every row that it plans.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Protocol

import msgspec
import torch

from hearth.core.errors import DeviceError, StageLost
from hearth.engine.engine_tables import EngineTables
from hearth.engine.layer_runner import LayerRunner
from hearth.engine.pending_step import PendingCopy, StepInFlight, StepResult, host_like
from hearth.engine.runner import Runner
from hearth.engine.sampler import Sampler
from hearth.engine.stage_messages import (
    StageBlocks,
    StageMessage,
    StageMoves,
    StageResult,
    StageStep,
    StageWork,
    without_tokens,
)
from hearth.engine.step_times import NUM_KEPT, StageClock
from hearth.engine.upload import Uploads
from hearth.policy.batch.blocks import BlockBook, BlockMove
from hearth.policy.batch.flights import StageTimes, choose_flights
from hearth.policy.batch.plan import StepPlan, TableWrites


class NextStage(Protocol):
    """The way to the next stage."""

    def place(self, num_tokens: int) -> torch.Tensor:
        """Return memory for the hidden states of the next step, which is free again when that has ended."""

    def announce(self, step: StageStep) -> None:
        """Pass on a step before it is computed, so that the next stage prepares it. `send` has to follow."""

    def send(self, message: StageMessage, hidden: PendingCopy | None = None) -> None:
        """Pass on a message, behind all before it, once its hidden states have arrived in their place."""


class LaterStages(NextStage, Protocol):
    """All stages but the first, as the first one sees them."""

    pipeline: str
    devices: Sequence[int]  #: of all stages, by number; empty: each has its own
    num_flights: int  #: steps that are at least on their way at the same time: one for each device
    max_flights: int  #: and at most

    def result(self, *, waits: bool) -> StageResult | None:
        """Return the next result; None: it has not come. Raises StageLost if it cannot come any more."""


class PipelineRunner(Runner):
    """Runs the first stage, and hands the steps on."""

    def __init__(
        self,
        layers: LayerRunner,
        sampler: Sampler,
        uploads: Uploads,
        tables: EngineTables,
        later: LaterStages,
    ) -> None:
        super().__init__(layers, sampler, uploads, tables)
        self._later = later
        self._steps: deque[PipelineStep] = deque()  #: whose results have not come, oldest first
        self._host_tokens = host_like(sampler.tokens)
        self._last_tokens = self._host_tokens.numpy()  #: by slot
        self._own_s: deque[float] = deque(maxlen=NUM_KEPT)  #: that this stage computed for decode steps
        self._later_s: tuple[float, ...] = ()  #: of the later stages, as their clocks tell
        self._hops_s: deque[float] = deque(maxlen=NUM_KEPT)  #: of the last decode steps that were alone

    @property
    def stage_times(self) -> StageTimes | None:
        stage_s = self._stage_s
        if not stage_s or not self._hops_s:
            return None
        return StageTimes(stage_s, median_low(self._hops_s), self._later.devices)

    @property
    def _stage_s(self) -> tuple[float, ...]:
        """The time of each stage; empty: not all are known."""
        own_s = median_low(self._own_s) if self._own_s else 0.0
        stage_s = (own_s, *self._later_s)
        return stage_s if self._later_s and all(stage_s) else ()

    @property
    def num_flights(self) -> int:
        return choose_flights(self.stage_times, self._later.num_flights, self._later.max_flights)

    def measured(self, plan: StepPlan, seconds: float) -> None:
        if not plan.prompts:
            self._own_s.append(seconds)

    def prepare(self, plan: StepPlan) -> None:
        before_last = self._step_ends[0]
        if before_last is None or before_last.query():  # type: ignore[no-untyped-call] # torch leaves it untyped
            super().prepare(plan)  # else it would wait for the device

    def launch(self, plan: StepPlan, hidden: torch.Tensor | None = None) -> PipelineStep:
        later, began_s = self._later, time.perf_counter()
        message = StageStep(later.pipeline, without_tokens(plan))
        is_cpu = not self.layers.kv.is_cuda
        if is_cpu:  # which computes in `launch_stage`, and a device behind it
            later.announce(message)
        self._copy_tokens()
        copy = self.launch_stage(plan, hidden, later.place(plan.num_tokens))
        if not is_cpu:
            later.announce(message)
        later.send(message, copy)
        step = PipelineStep(self, plan, copy, began_s)
        if self._steps:
            self._steps[-1].is_alone = step.is_alone = False
        self._steps.append(step)
        return step

    @torch.inference_mode()
    def _copy_tokens(self) -> None:
        """Queue the copy of all slots' last tokens to the device.

        The host's memory may change before: only in slots whose next step waits for the result of this one.
        """
        self.sampler.tokens.copy_(self._host_tokens, non_blocking=True)

    def copy_blocks(self, moves: Sequence[BlockMove]) -> None:
        super().copy_blocks(moves)
        if moves:
            self._later.send(StageMoves(self._later.pipeline, tuple(moves)))

    def add_blocks(self, extent: range) -> None:
        self._send_blocks(extent, is_added=True)

    def remove_blocks(self, extent: range) -> None:
        self._send_blocks(extent, is_added=False)

    def _send_blocks(self, extent: range, *, is_added: bool) -> None:
        later = self._later
        later.send(StageBlocks(later.pipeline, extent.start, extent.stop, is_added))

    def take_result(self, *, waits: bool) -> bool:
        """Take in the next result; False: it has not come."""
        found = self._later.result(waits=waits)
        if found is None:
            return False
        step = self._steps.popleft()
        plan, tokens = step.plan, found.result.tokens
        if found.number != plan.step_id:
            raise DeviceError(f"the result of step {found.number} came instead of that of {plan.step_id}")
        self._last_tokens[[*plan.decode.slots, *(row.slot for row in plan.prompts if row.samples)]] = tokens
        step.result = found.result
        self._note_times(step, found.stage_s)
        return True

    def _note_times(self, step: PipelineStep, later_s: tuple[float, ...]) -> None:
        """Learn from a decode step that no other one held up: what no stage computed was on its way."""
        self._later_s = later_s
        if step.is_alone and not step.plan.prompts and (stage_s := self._stage_s):
            self._hops_s.append(max(0.0, time.perf_counter() - step.began_s - sum(stage_s)))

    def close(self) -> None:
        super().close()
        self._steps.clear()  # they refer to the runner, and so to all of its memory


class PipelineStep:
    """A step on its way through the stages."""

    def __init__(self, runner: PipelineRunner, plan: StepPlan, copy: PendingCopy, began_s: float) -> None:
        self._runner, self.plan, self.began_s = runner, plan, began_s
        self.end = copy.end  #: of the first stage
        self.is_alone = True  #: no other step was in flight since it began
        self.result: StepResult | None = None

    @property
    def is_computed(self) -> bool:
        return False

    @property
    def is_done(self) -> bool:
        with suppress(StageLost):  # `wait` raises it
            while self.result is None and self._runner.take_result(waits=False):
                pass
            return self.result is not None
        return True

    @property
    def may_wait(self) -> bool:
        return self.is_done

    def wait(self) -> StepResult:
        while self.result is None:
            self._runner.take_result(waits=True)
        return self.result


class BlockMap:
    """The blocks of a later stage, by the numbers of the first one. Mutable; one thread calls it."""

    def __init__(self, book: BlockBook) -> None:
        """`book`: of the stage. Blocks that the first stage has are live in it, all others free."""
        self._book = book
        self._own_by_first: dict[int, int] = {}

    def change(self, message: StageBlocks) -> None:
        blocks = range(message.begin, message.end)
        if message.is_added:
            own = self._book.allocate(len(blocks))
            assert own is not None, f"{blocks} added, {self._book.num_available} are free"
            self._own_by_first.update(zip(blocks, own, strict=True))
        else:
            self._book.release_all([[self._own_by_first.pop(first) for first in blocks]])

    def remove(self, extent: range) -> list[BlockMove]:
        """Remove blocks of this stage, as `BlockBook.remove` does."""
        moves = self._book.remove(extent)
        targets = {move.source: move.target for move in moves}
        self._own_by_first = {first: targets.get(own, own) for first, own in self._own_by_first.items()}
        return moves

    def clear(self) -> None:
        self._book.release_all([list(self._own_by_first.values())])
        self._own_by_first.clear()

    def plan(self, plan: StepPlan) -> StepPlan:
        writes = plan.table_writes
        mapped = TableWrites(writes.slots, writes.begins, writes.counts, self.own(writes.blocks))
        return replace(plan, table_writes=mapped)

    def own(self, blocks: Sequence[int]) -> list[int]:
        return [self._own_by_first[first] for first in blocks]

    def moves(self, moves: Sequence[BlockMove]) -> list[BlockMove]:
        own = self._own_by_first
        return [BlockMove(own[move.source], own[move.target]) for move in moves]


@dataclass(frozen=True, slots=True)
class _OwnStep:
    """A step as a later stage runs it."""

    message: StageStep  #: for the next stage
    plan: StepPlan  #: with the blocks of this one


class LaterStage:
    """Runs a stage that is not the first, message by message."""

    def __init__(self, runner: Runner, following: NextStage | None, blocks: BlockMap) -> None:
        """`following`: None for the last stage."""
        self._runner, self._following, self._blocks = runner, following, blocks
        self.own_blocks = blocks.own
        self._clock = StageClock(runner.layers.kv.device)
        self._prepared: _OwnStep | None = None

    @property
    def seconds(self) -> float:
        """How long it computes for a usual decode step; 0: not known."""
        return self._clock.seconds

    def timed(self, message: StageStep) -> StageStep:
        """Return a step with the time of this stage."""
        return msgspec.structs.replace(message, stage_s=(*message.stage_s, self.seconds))

    def prepare(self, step: StageStep) -> None:
        """Prepare the next step to be taken, while the stage before computes it."""
        self._prepared = own = self._own(step)
        if self._following is not None:
            self._following.announce(own.message)
        self._runner.prepare(own.plan)

    def take(self, message: StageWork, hidden: torch.Tensor | None) -> StepInFlight | None:
        """Run a message behind all before it; the last stage returns its step, others pass it on.

        `hidden` must stay as it is until the step has ended. The caller waits for a step before it takes the
        second one behind it, which uses the same host memory.
        """
        runner, following = self._runner, self._following
        if not isinstance(message, StageStep):
            if isinstance(message, StageBlocks):
                self._blocks.change(message)
            else:
                runner.copy_blocks(self._blocks.moves(message.moves))
            if following is not None:
                following.send(message)
            return None
        assert hidden is not None, f"a step without hidden states: {message.plan.step_id=}"
        step, self._prepared = self._prepared or self._own(message), None
        stop = self._clock.start(step.plan, is_warm=runner.is_warm(step.plan))
        if following is None:
            pending = runner.launch(step.plan, hidden)
            stop(pending.end)
            return pending
        copy = runner.launch_stage(step.plan, hidden, following.place(step.plan.num_tokens))
        stop(copy.end)
        following.send(step.message, copy)
        return None

    def remove_blocks(self, extent: range) -> None:
        """Stop using blocks of this stage in later steps; there are enough others. No step is prepared."""
        assert self._prepared is None, f"prepared with blocks that go: {extent}"
        self._runner.move_blocks(self._blocks.remove(extent))

    def close(self) -> None:
        self._blocks.clear()

    def _own(self, message: StageStep) -> _OwnStep:
        return _OwnStep(self.timed(message), self._blocks.plan(message.plan))

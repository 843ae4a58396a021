"""What the steps of an engine were like, seen from outside while others ask it. Changes no step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.report import percentiles
from hearth.engine.engine import Engine, StepOutcome
from hearth.engine.pending_step import PendingStep, StepResult
from hearth.engine.runner import Runner
from hearth.policy.batch.plan import StepPlan

try:
    from hearth.kernels.compilations import COMPILATIONS
except ImportError:  # sources that do not count compilations
    COMPILATIONS = None


@dataclass(slots=True)
class WatchedStep:
    """One step that was launched. Mutable; written by the thread that steps."""

    plan: StepPlan  #: looked at later, so that looking costs no step anything
    launch_s: float  #: of the host, to queue the step
    #: The one before had ended when this was queued, so that the device waited. None: none was in flight.
    is_late: bool | None
    host_s: float = 0.0  #: all that the host did during that call of `Engine.step`, but for waiting
    computed_s: float = 0.0  #: of that, what its thread computed: no waits for the interpreter or the driver


class StepWatch:
    """Counts and times the steps of one engine. Mutable; written by the thread that steps."""

    def __init__(self, engine: Engine) -> None:
        self._runner = engine.runner
        self._step, self._launch = engine.step, engine.runner.launch
        self._steps: list[WatchedStep] = []
        self._launched: WatchedStep | None = None
        self._in_flight: PendingStep | None = None
        self._waited_s = self._computed_wait_s = 0.0
        self._num_preempted = 0
        if COMPILATIONS is not None:
            COMPILATIONS.watch()
        self._num_compiled = kernels_compiled_while_serving()
        engine.step = self.step  # type: ignore[method-assign] # the point of watching
        engine.runner.launch = self.launch  # type: ignore[assignment,method-assign]

    def step(self) -> StepOutcome:
        self._launched, self._waited_s, self._computed_wait_s = None, 0.0, 0.0
        began_s, computed_s = time.perf_counter(), time.thread_time()
        outcome = self._step()
        if self._launched is None:
            self._in_flight = None
        else:
            self._launched.host_s = time.perf_counter() - began_s - self._waited_s
            self._launched.computed_s = time.thread_time() - computed_s - self._computed_wait_s
            self._steps.append(self._launched)
        self._num_preempted += len(outcome.preempted)
        return outcome

    def launch(self, plan: StepPlan) -> _TimedWait:
        began_s = time.perf_counter()
        pending = self._launch(plan)
        launch_s = time.perf_counter() - began_s
        before, self._in_flight = self._in_flight, pending
        is_late = None if before is None or before.is_computed else before.is_done
        self._launched = WatchedStep(plan, launch_s, is_late)
        return _TimedWait(self, pending)

    def waited(self, seconds: float, computed_s: float) -> None:
        self._waited_s += seconds
        self._computed_wait_s += computed_s

    def take(self) -> dict[str, object]:
        """Return what the steps since the last call were like. Between steps."""
        steps, self._steps = self._steps, []
        preempted, self._num_preempted = self._num_preempted, 0
        before, self._num_compiled = self._num_compiled, kernels_compiled_while_serving()
        compiled = None if before is None or self._num_compiled is None else self._num_compiled - before
        return {
            **_described(steps, self._runner),
            "preempted": preempted,
            "kernels_compiled_while_serving": compiled,
        }


class _TimedWait:
    """A step in flight, whose wait is no time of the host."""

    def __init__(self, watch: StepWatch, pending: PendingStep) -> None:
        self._watch, self._pending = watch, pending
        self.end = pending.end

    @property
    def is_computed(self) -> bool:
        return self._pending.is_computed

    @property
    def may_wait(self) -> bool:
        return self._pending.may_wait

    def wait(self) -> StepResult:
        began_s, computed_s = time.perf_counter(), time.thread_time()
        try:
            return self._pending.wait()
        finally:
            self._watch.waited(time.perf_counter() - began_s, time.thread_time() - computed_s)


def kernels_compiled_while_serving() -> int | None:
    """Return how many kernels were compiled in front of requests in this process; None if nobody counts."""
    return None if COMPILATIONS is None else COMPILATIONS.num_while_serving


def num_padded_tokens(runner: Runner, plan: StepPlan) -> int:
    """Return by how many tokens the runner pads a step."""
    return runner.layers.sizes.shape_of(plan).num_rows - plan.num_tokens


def _described(steps: Sequence[WatchedStep], runner: Runner) -> Mapping[str, object]:
    if not steps:
        return {"steps": 0}
    plans = [step.plan for step in steps]
    num_tokens, num_rows = sum(plan.num_tokens for plan in plans), [_num_rows(plan) for plan in plans]
    padded = [num_padded_tokens(runner, plan) for plan in plans]
    has_prompts = [plan.num_decode_rows < rows for plan, rows in zip(plans, num_rows, strict=True)]
    late = [step.is_late for step in steps if step.is_late is not None]
    return {
        "steps": len(steps),
        "tokens_per_step": num_tokens / len(steps),
        "rows_per_step": sum(num_rows) / len(steps),
        "share_with_prompts": sum(has_prompts) / len(steps),
        "padded_share": sum(padded) / (num_tokens + sum(padded)) if padded else None,
        "late_share": sum(late) / len(late) if late else None,
        "host_ms": _spread([1e3 * step.host_s for step in steps]),
        "computed_ms": _spread([1e3 * step.computed_s for step in steps]),
        "launch_ms": _spread([1e3 * step.launch_s for step in steps]),
    }


def _num_rows(plan: StepPlan) -> int:
    """Return the rows of a plan, which has their number at hand where it makes them only when asked."""
    count: int = plan.num_rows if hasattr(plan, "num_rows") else len(plan.rows)
    return count


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in percentiles(values).items() if name in ("p50", "p99")}

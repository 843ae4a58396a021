"""The host's time in each step of an engine, by part: by the clock, and computed by the thread that steps."""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from hearth.engine.engine import Engine, StepOutcome
from hearth.engine.pending_step import PendingStep
from hearth.policy.batch.plan import StepPlan


@dataclass(slots=True)
class Part:
    """The time of all calls of one kind in one step. Mutable."""

    wall_s: float = 0.0
    cpu_s: float = 0.0


@dataclass(slots=True)
class TracedStep:
    """One call of `Engine.step`. Mutable; written by the thread that steps."""

    number: int
    plan: StepPlan | None = None
    whole: Part = field(default_factory=Part)
    parts: defaultdict[str, Part] = field(default_factory=lambda: defaultdict(Part))

    @property
    def host_s(self) -> float:
        return self.whole.wall_s - self.parts["wait"].wall_s

    @property
    def cpu_s(self) -> float:
        return self.whole.cpu_s - self.parts["wait"].cpu_s

    def line(self) -> str:
        plan = self.plan
        shape = "-" if plan is None else f"{plan.num_decode_rows}+{plan.num_prompt_tokens}"
        admitted = 0 if plan is None else len(plan.admissions)
        parts = sorted(self.parts.items(), key=lambda named: -named[1].wall_s)
        shown = " ".join(f"{name} {1e3 * one.wall_s:.2f}/{1e3 * one.cpu_s:.2f}" for name, one in parts)
        return (
            f"step {self.number} of {shape} admits {admitted}: "
            f"{1e3 * self.host_s:.2f}/{1e3 * self.cpu_s:.2f} in which {shown}"
        )


def step_parts(engine: Engine) -> list[tuple[object, str]]:
    """Return the calls that a step is made of on the host, by their owners. Some are parts of others."""
    runner, batcher = engine.runner, engine.batcher
    return [
        (engine, "_measure"),
        (batcher, "waiting_prompt_tokens"),
        (batcher, "plan"),
        (batcher, "take_tokens"),
        (batcher, "settle"),
        (engine, "_launch"),
        (runner, "is_warm"),
        (runner, "launch"),
        (runner, "settle"),
        (runner._uploads, "next_step"),
        (runner.layers.inputs, "fill"),
        (runner.layers, "run"),
        (runner.sampler, "admit"),
        (runner.sampler, "sample"),
        (engine, "_outputs"),
    ]


class HostTrace:
    """Times the parts of each step of an engine. Mutable; written by the thread that steps."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._step = engine, engine.step
        self.steps: list[TracedStep] = []
        self._open: TracedStep | None = None
        self._wait = PendingStep.wait
        engine.step = self.step  # type: ignore[method-assign] # the point of tracing
        for owner, method in (*step_parts(engine), (PendingStep, "wait")):
            self._wrap(owner, method)
        gc.callbacks.append(self._collected)

    def close(self) -> None:
        """Look at garbage and at waits no longer. The engine stays traced."""
        gc.callbacks.remove(self._collected)
        PendingStep.wait = self._wait  # type: ignore[method-assign] # as it was

    def step(self) -> StepOutcome:
        self._open = TracedStep(len(self.steps))
        try:
            with _timed(self._open.whole):
                return self._step()
        finally:
            self.steps.append(self._open)
            self._open = None

    def _wrap(self, owner: object, method: str) -> None:
        called: Callable[..., object] = getattr(owner, method)

        def timed(*args: object, **kwargs: object) -> object:
            step = self._open
            if step is None:
                return called(*args, **kwargs)
            if method == "_launch" and isinstance(args[0], StepPlan):
                step.plan = args[0]
            with _timed(step.parts[method]):
                return called(*args, **kwargs)

        setattr(owner, method, timed)

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        """Note a collection of garbage, whichever thread it befalls: it keeps the interpreter."""
        step = self._open
        if step is not None:
            key, sign = f"garbage of generation {info['generation']}", -1 if phase == "start" else 1
            step.parts[key].wall_s += sign * time.perf_counter()
            step.parts[key].cpu_s += sign * time.thread_time()


@contextmanager
def _timed(part: Part) -> Iterator[None]:
    wall_s, cpu_s = time.perf_counter(), time.thread_time()
    try:
        yield
    finally:
        part.wall_s += time.perf_counter() - wall_s
        part.cpu_s += time.thread_time() - cpu_s

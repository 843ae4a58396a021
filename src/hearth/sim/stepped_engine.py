"""A model on a simulated device: the real batcher, steps that only take time, and tokens that are made up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hearth.core.sizes import StepLimits
from hearth.core.types import Pace, RequestId, SamplingParams
from hearth.policy.batch.batch_limits import BatchLimits
from hearth.policy.batch.batcher import Batcher
from hearth.policy.batch.blocks import BlockBook
from hearth.policy.batch.decode_run import DecodeRun
from hearth.policy.batch.elastic import Elastic
from hearth.policy.batch.plan import CommittedStep, EngineRequest, StepPlan
from hearth.policy.batch.prompt_allowance import PromptAllowance
from hearth.policy.memory.kv_range import KvRange
from hearth.sim.profile import NO_LEAST, LeastSeconds, ShapeProfile
from hearth.sim.step_graphs import SteppedGraphs

#: What every step samples: nothing depends on it.
_TOKEN = 0


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """How long a step takes."""

    step_s: float  #: until the next one can begin
    device_s: float | None  #: as an engine's timer tells it; None: it tells nothing of such a step


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was launched and not taken in."""

    plan: StepPlan
    seconds: StepSeconds
    end_s: float


@dataclass(frozen=True, slots=True)
class StepCall:
    """The two steps of one call: neither, if there is nothing to compute for want of KV."""

    awaited: Flight | None
    launched: Flight | None
    launch_s: float = 0.0  #: that the host takes for the launched step, where that has no graph


@dataclass(frozen=True, slots=True)
class _Launch:
    """The launch of a step, beyond what the times of steps tell."""

    host_s: float
    is_eager: bool  #: kernel by kernel, so that the device computes meanwhile
    is_timed: bool  #: as live: the step is neither captured nor the first one behind a load


class SteppedEngine:
    """One model's batcher and the pages of its KV. Mutable; written only by its worker."""

    def __init__(
        self,
        shape: ShapeProfile,
        limits: BatchLimits,
        kv: KvRange,
        block_tokens: int,
        floor_blocks: int,
        max_step_s: float,
    ) -> None:
        self.shape, self.kv = shape, kv
        self.batcher = Batcher(limits, BlockBook(block_tokens, floor_blocks))
        self.elastic = Elastic(block_tokens)
        self._allowance = PromptAllowance(max_step_s)
        #: As the pages of a mapped pool are: those of the sink come first and are given back last.
        self._num_kv_pages = self._num_kv_blocks = 0
        self.flight: Flight | None = None
        self._graphs = SteppedGraphs(StepLimits(limits.max_batch_tokens, limits.max_seqs, block_tokens))
        #: Weights have come since its last step, or are still coming: the next one is not captured.
        self.is_behind_load = False
        self._num_added = 0

    @property
    def has_work(self) -> bool:
        return self.batcher.has_work

    def add(
        self,
        request_id: RequestId,
        num_prompt_tokens: int,
        num_output_tokens: int,
        num_sent: int,
        pace: Pace,
        arrived_s: float,
        now_s: float,
    ) -> None:
        """Queue a request with a prompt that begins like no other, and an answer of just that length.

        `num_sent` tokens of the answer come from a worker that is gone.
        """
        self._num_added += 1
        prompt = (self._num_added,) * num_prompt_tokens
        sampling = SamplingParams(max_tokens=num_output_tokens, ignore_eos=True, seed=0)
        request = EngineRequest(request_id, prompt, sampling, output=(_TOKEN,) * num_sent)
        self.batcher.add(request.in_line(pace, arrived_s, now_s))

    def computes_first_tokens(self, now_s: float) -> bool:
        """True if the device has still to compute what newcomers wait for, and all of that was launched."""
        flight = self.flight
        return flight is not None and flight.end_s > now_s and self.batcher.newcomers_are_planned

    @property
    def is_placed(self) -> bool:
        """True if the model has its sink, as from its load until it is retired."""
        return self._num_kv_pages > 0

    @property
    def kv_bytes(self) -> int:
        """Bytes of all pages that the KV takes, with the sink."""
        return self._num_kv_pages * self.kv.page_bytes

    def place_sink(self) -> None:
        """Take the pages that a model has as long as it is placed; nothing if it has them."""
        if not self.is_placed:
            self._num_kv_pages, self._num_kv_blocks = self.kv.sink_pages, 1

    def extents(self) -> list[range]:
        """Return the blocks that could be given back next: those of the last page."""
        num_left = self.kv.one_less(self._num_kv_pages)
        return [] if num_left is None else [range(self.kv.num_blocks(num_left), self._num_kv_blocks)]

    def grow(self, num_blocks: int, free_bytes: int) -> int:
        """Take free pages until there are so many blocks more, or none is free; return how many blocks."""
        num_before, most_bytes = self._num_kv_blocks, self.kv_bytes + free_bytes
        while self._num_kv_blocks < num_before + num_blocks:
            end = self.kv.num_blocks(self._num_kv_pages)
            if end == self._num_kv_blocks:
                num_pages = self.kv.one_more(self._num_kv_pages)
                if num_pages is None or num_pages * self.kv.page_bytes > most_bytes:
                    break
                self._num_kv_pages, end = num_pages, self.kv.num_blocks(num_pages)
            self.batcher.kv.add(range(self._num_kv_blocks, end))
            self._num_kv_blocks = end
        return self._num_kv_blocks - num_before

    def clear(self, extent: range, *, may_preempt: bool, keeps_floor: bool) -> bool:
        """Give the last extent back; False, and nothing has changed, if that is not possible."""
        if (
            self.batcher.kv.clear(extent, may_move=True, may_preempt=may_preempt, keeps_floor=keeps_floor)
            is None
        ):
            return False
        self._num_kv_blocks = extent.start
        self._num_kv_pages = self.kv.num_pages(extent.start)
        return True

    def clear_all(self) -> None:
        """Give back all KV of an idle model, with the sink."""
        self.batcher.kv.remove_all()
        self._num_kv_pages = self._num_kv_blocks = 0

    # Steps, one ahead of the device.

    def launch(
        self,
        now_s: float,
        device_free_s: float,
        load_end_s: float | None = None,
        least: LeastSeconds = NO_LEAST,
    ) -> StepCall:
        """Do what a call of a real engine does: launch the next step, and wait for the one before.

        The device begins it when it is free. `load_end_s`: when the weights are there that it follows, for a
        step does not end before; it takes `least` or longer.
        """
        awaited, self.flight = self.flight, None
        plan = self.batcher.plan(self._allowance.num_tokens(self.batcher.waiting_prompt_tokens()))
        if plan is None:
            return StepCall(awaited, None)
        start_s = timed_start_s = 0.0
        if awaited is None:  # a timer begins with the launch, or when the device has done all before it
            start_s = self.shape.times.start_s
            timed_start_s = max(0.0, self.shape.device_times.start_s - max(0.0, device_free_s - now_s))
        seconds = self.step_seconds(
            *(plan.num_tokens, plan.num_rows, plan.context_tokens), least, timed_start_s
        )
        launch = self._launched(plan, is_loading=load_end_s is not None)
        if not launch.is_timed:
            seconds = replace(seconds, device_s=None)
        begin_s = max(now_s + start_s + (0.0 if launch.is_eager else launch.host_s), device_free_s)
        end_s = max(begin_s + seconds.step_s, now_s + launch.host_s, load_end_s or 0.0)
        self.flight = Flight(plan, seconds, end_s)
        return StepCall(awaited, self.flight, launch.host_s)

    def step_seconds(
        self,
        num_tokens: int,
        num_rows: int,
        context_tokens: int,
        least: LeastSeconds,
        timed_start_s: float = 0.0,
    ) -> StepSeconds:
        """Return how long a step takes that has a graph: `least` or longer.

        `timed_start_s` of its launch also count for the timer: the device rested meanwhile. So it does where
        a step waits for the host, of which a timer sees no more than the launch.
        """
        shape, sizes = self.shape, (num_tokens, num_rows, context_tokens)
        if num_tokens > num_rows and shape.with_prompts.step_s > least.step_s:
            least = shape.with_prompts
        device_s = shape.device_s(*sizes)
        waited_s = min(least.told_s, device_s + shape.device_times.start_s)
        return StepSeconds(max(least.step_s, shape.step_s(*sizes)), max(timed_start_s + device_s, waited_s))

    def _launched(self, plan: StepPlan, *, is_loading: bool) -> _Launch:
        """Return what launching a step takes; it is captured, unless it is the first one behind a load."""
        is_behind, self.is_behind_load = self.is_behind_load, is_loading
        has_graph = self._graphs.has(plan)
        if is_loading or (is_behind and not has_graph):
            return _Launch(self.shape.eager_s, is_eager=True, is_timed=False)
        if has_graph:
            return _Launch(0.0, is_eager=False, is_timed=not is_behind)
        self._graphs.capture(plan)
        capture_s = self.shape.capture_s  # 0: nothing is captured there
        return _Launch(capture_s, is_eager=False, is_timed=not capture_s)

    def flush(self) -> Flight | None:
        """Have no step in flight any more; return the one that has to be waited for."""
        awaited, self.flight = self.flight, None
        return awaited

    def take_in(self, awaited: Flight) -> CommittedStep:
        """Commit the step that was waited for."""
        plan = awaited.plan
        if (device_s := awaited.seconds.device_s) is not None:
            self._allowance.measured(plan.num_decode_rows, plan.num_prompt_tokens, device_s)
        return self.batcher.commit(awaited.plan, [_TOKEN] * awaited.plan.num_samples)

    def decode_run(self, free_bytes: int) -> DecodeRun | None:
        """Return the next steps that need nobody's decision, if the KV may take so many free bytes.

        None: the next step has no graph.
        """
        if self.is_behind_load or not self._graphs.has_decode(max(1, self.batcher.num_running)):
            return None
        most_blocks = self.kv.num_blocks(self._num_kv_pages + free_bytes // self.kv.page_bytes)
        return self.batcher.decode_run(self.elastic.num_steps_left, most_blocks - self._num_kv_blocks)

    def skip(self, steps: Sequence[StepSeconds], free_bytes: int, flight_end_s: float) -> None:
        """Have steps of `decode_run` be launched that take so long, the last one until then.

        All but the last are waited for, and so is the one that was in flight.
        """
        assert self.flight is not None, "only a step that is in flight can be followed by a jump"
        num_rows, num_steps = self.batcher.num_running, len(steps)
        for seconds in (self.flight.seconds, *steps[:-1]):
            if seconds.device_s is not None:
                self._allowance.measured(num_rows, 0, seconds.device_s)
        use = replace(self.batcher.kv.use(), num_wanted=self.batcher.blocks_wanted_by(num_steps))
        self.grow(self.elastic.growth(use).now_blocks, free_bytes)
        plan = self.batcher.skip(num_steps, _TOKEN)
        assert plan is not None, f"{self.flight=}"
        self.flight = Flight(plan, steps[-1], flight_end_s)
        self.elastic.skip(num_steps, self.batcher.kv.use())

"""A model on a simulated device: the real batcher, steps that only take time, and fake tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hearth.core.sizes import StepLimits, decode_sizes, mixed_sizes, padded_size
from hearth.core.types import Pace, RequestId, SamplingParams
from hearth.policy.batch.batch_kv import BatchKv
from hearth.policy.batch.batch_limits import BatchLimits
from hearth.policy.batch.batcher import Batcher
from hearth.policy.batch.blocks import BlockBook
from hearth.policy.batch.decode_run import DecodeRun
from hearth.policy.batch.digest_chain import DigestChain
from hearth.policy.batch.elastic import Elastic
from hearth.policy.batch.plan import CommittedStep, EngineRequest, StepPlan
from hearth.policy.batch.prompt_allowance import PromptAllowance
from hearth.policy.memory.kv_range import KvRange
from hearth.sim.profile import NO_LEAST, LeastSeconds, ShapeProfile

#: What every step samples, and what prompts consist of behind two tokens that tell them apart.
_TOKEN = 0


@dataclass(frozen=True, slots=True)
class StepSeconds:
    step_s: float  #: until the next one can begin
    device_s: float | None  #: as an engine's timer measures it; None: it does not measure such a step


@dataclass(frozen=True, slots=True)
class Flight:
    plan: StepPlan
    seconds: StepSeconds
    end_s: float


@dataclass(frozen=True, slots=True)
class StepCall:
    """The two steps of one call; neither if nothing can be computed because KV is short."""

    awaited: Flight | None
    launched: Flight | None
    launch_s: float = 0.0  #: that the host takes to launch a step without a graph


@dataclass(frozen=True, slots=True)
class _Launch:
    host_s: float
    is_eager: bool  #: kernel by kernel: the device computes meanwhile
    is_timed: bool  #: the step is neither captured nor the first one behind a load, as on a live worker


class SteppedGraphs:
    """Step sizes with captured graphs, by rows and by whether there are prompts. Mutable."""

    def __init__(self, limits: StepLimits) -> None:
        self._decode, self._mixed = decode_sizes(limits), mixed_sizes(limits)
        self._captured: set[tuple[bool, int]] = set()

    def has(self, plan: StepPlan) -> bool:
        return self._key(plan) in self._captured

    def has_decode(self, num_rows: int) -> bool:
        return (False, padded_size(self._decode, num_rows)) in self._captured

    def capture(self, plan: StepPlan) -> None:
        self._captured.add(self._key(plan))

    def _key(self, plan: StepPlan) -> tuple[bool, int]:
        if plan.num_prompt_tokens:
            return True, padded_size(self._mixed, plan.num_tokens)
        return False, padded_size(self._decode, plan.num_rows)


class SteppedKv:
    """The pages of a model's KV, as in a mapped pool. Mutable; written only by its worker."""

    def __init__(self, range_: KvRange, batch: BatchKv) -> None:
        self.range, self._batch = range_, batch
        #: The pages of the sink come first and are given back last.
        self._num_pages = self._num_blocks = 0

    @property
    def is_placed(self) -> bool:
        return self._num_pages > 0

    @property
    def num_bytes(self) -> int:
        return self._num_pages * self.range.page_bytes

    def max_growth(self, free_bytes: int) -> int:
        return self.range.num_blocks(self._num_pages + free_bytes // self.range.page_bytes) - self._num_blocks

    def place_sink(self) -> None:
        if not self.is_placed:
            self._num_pages, self._num_blocks = self.range.sink_pages, 1

    def extents(self) -> list[range]:
        num_left = self.range.one_less(self._num_pages)
        return [] if num_left is None else [range(self.range.num_blocks(num_left), self._num_blocks)]

    def grow(self, num_blocks: int, free_bytes: int) -> int:
        num_before, max_bytes = self._num_blocks, self.num_bytes + free_bytes
        while self._num_blocks < num_before + num_blocks:
            end = self.range.num_blocks(self._num_pages)
            if end == self._num_blocks:
                num_pages = self.range.one_more(self._num_pages)
                if num_pages is None or num_pages * self.range.page_bytes > max_bytes:
                    break
                self._num_pages, end = num_pages, self.range.num_blocks(num_pages)
            self._batch.add(range(self._num_blocks, end))
            self._num_blocks = end
        return self._num_blocks - num_before

    def clear(self, extent: range, *, may_preempt: bool, keeps_floor: bool) -> bool:
        """Give the last extent back; False: not possible, nothing changed."""
        moves = self._batch.clear(extent, may_move=True, may_preempt=may_preempt, keeps_floor=keeps_floor)
        if moves is None:
            return False
        self._num_blocks = extent.start
        self._num_pages = self.range.num_pages(extent.start)
        return True

    def clear_all(self) -> None:
        self._batch.remove_all()
        self._num_pages = self._num_blocks = 0


class SteppedEngine:
    """One model's batcher, KV and steps. Mutable; written only by its worker."""

    def __init__(
        self,
        shape: ShapeProfile,
        limits: BatchLimits,
        kv: KvRange,
        block_tokens: int,
        floor_blocks: int,
        max_step_s: float,
    ) -> None:
        self.shape = shape
        self.batcher = Batcher(limits, BlockBook(block_tokens, floor_blocks))
        self.kv = SteppedKv(kv, self.batcher.kv)
        self.elastic = Elastic(block_tokens)
        self._allowance = PromptAllowance(max_step_s)
        self.flight: Flight | None = None
        self._graphs = SteppedGraphs(StepLimits(limits.max_batch_tokens, limits.max_seqs, block_tokens))
        #: Weights were loaded since its last step, or still are: the next one is not captured.
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
        conversation: int | None = None,
        *,
        has_kv: bool = False,
    ) -> None:
        """Queue a request with an answer of exactly that length, and a prompt of its own or a conversation's.

        `num_sent` tokens of the answer were sent by a lost worker. `has_kv`: its KV has come from there.
        """
        self._num_added += 1
        begin = (0, self._num_added) if conversation is None else (1, conversation)
        prompt = (*begin, *(_TOKEN,) * num_prompt_tokens)[:num_prompt_tokens]
        sampling = SamplingParams(max_tokens=num_output_tokens, ignore_eos=True, seed=0)
        request = EngineRequest(request_id, prompt, sampling, output=(_TOKEN,) * num_sent)
        if has_kv:
            chain = DigestChain((*prompt, *request.output), self.batcher.blocks.block_tokens)
            self.batcher.cache_prefix(chain, (len(chain.tokens) - 1) // chain.block_tokens)
        self.batcher.add(request.in_line(pace, arrived_s, now_s))

    @property
    def only_decodes(self) -> bool:
        """Whether its step in flight has no prompts. If it has, `decode_run` has no steps."""
        return self.flight is not None and not self.flight.plan.num_prompt_tokens

    def computes_first_tokens(self, now_s: float) -> bool:
        flight = self.flight
        return flight is not None and flight.end_s > now_s and self.batcher.newcomers_are_planned

    def launch(
        self,
        now_s: float,
        device_free_s: float,
        load_end_s: float | None = None,
        least: LeastSeconds = NO_LEAST,
    ) -> StepCall:
        """Launch the next step and wait for the one before, as a call of a real engine does.

        The device begins it when it is free. `load_end_s`: when the weights are loaded that it follows; it
        ends no earlier. It takes `least` or longer.
        """
        awaited, self.flight = self.flight, None
        plan = self.batcher.plan(self._allowance.num_tokens(self.batcher.waiting_prompt_tokens()))
        if plan is None:
            return StepCall(awaited, None)
        start_s = timed_start_s = 0.0
        if awaited is None:  # a timer starts at the launch, or when the device is free
            start_s = self.shape.times.start_s
            timed_start_s = max(0.0, self.shape.device_times.start_s - max(0.0, device_free_s - now_s))
        seconds = self.step_seconds(plan.num_tokens, plan.num_rows, plan.context_tokens, least, timed_start_s)
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
        shape, sizes = self.shape, (num_tokens, num_rows, context_tokens)
        if num_tokens > num_rows and shape.with_prompts.step_s > least.step_s:
            least = shape.with_prompts
        device_s = shape.device_s(*sizes)
        waited_s = min(least.told_s, device_s + shape.device_times.start_s)
        return StepSeconds(max(least.step_s, shape.step_s(*sizes)), max(timed_start_s + device_s, waited_s))

    def _launched(self, plan: StepPlan, *, is_loading: bool) -> _Launch:
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
        awaited, self.flight = self.flight, None
        return awaited

    def take_in(self, awaited: Flight) -> CommittedStep:
        plan = awaited.plan
        if (device_s := awaited.seconds.device_s) is not None:
            self._allowance.measured(plan.num_decode_rows, plan.num_prompt_tokens, device_s)
        return self.batcher.commit(awaited.plan, [_TOKEN] * awaited.plan.num_samples)

    def decode_run(self, free_bytes: int) -> DecodeRun | None:
        """Return the next steps that only decode, if KV may take `free_bytes`; None: no graph for them."""
        if self.is_behind_load or not self._graphs.has_decode(max(1, self.batcher.num_running)):
            return None
        return self.batcher.decode_run(self.elastic.num_steps_left, self.kv.max_growth(free_bytes))

    def skip(self, steps: Sequence[StepSeconds], free_bytes: int, flight_end_s: float) -> None:
        """Launch steps of `decode_run` that take `steps`, the last one until `flight_end_s`.

        All but the last are waited for, and so is the one in flight.
        """
        assert self.flight is not None, "a jump follows a step in flight"
        num_rows, num_steps = self.batcher.num_running, len(steps)
        for seconds in (self.flight.seconds, *steps[:-1]):
            if seconds.device_s is not None:
                self._allowance.measured(num_rows, 0, seconds.device_s)
        use = replace(self.batcher.kv.use(), num_wanted=self.batcher.kv.blocks_wanted_by(num_steps))
        self.kv.grow(self.elastic.growth(use).now_blocks, free_bytes)
        plan = self.batcher.skip(num_steps, _TOKEN)
        assert plan is not None, f"{self.flight=}"
        self.flight = Flight(plan, steps[-1], flight_end_s)
        self.elastic.skip(num_steps, self.batcher.kv.use())

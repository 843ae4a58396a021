"""A pipeline whose stages are all in this process; every message and result is encoded on its way."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

import torch

from hearth.core.config import EngineConfig
from hearth.core.types import Stage
from hearth.engine.assemble import Memory, ModelSpec, assemble, assemble_runner, own_limits, step_size
from hearth.engine.engine import Engine
from hearth.engine.pending_step import PendingCopy, StepInFlight
from hearth.engine.pipeline import BlockMap, LaterStage
from hearth.engine.runner import Runner
from hearth.engine.stage_messages import (
    StageMessage,
    StageResult,
    StageStep,
    StageWork,
    decode_message,
    decode_result,
    encode_message,
    encode_result,
)
from hearth.models.dtypes import DTYPES
from hearth.models.weights import Weights, bind, contiguous_places
from hearth.policy.batch.blocks import BlockBook
from tests.engine.harness import ROOMY, packed_once
from tests.engine.test_elastic import elastic_memory

CPU = torch.device("cpu")


class LocalStages:
    """The stages behind the first. A message runs through all of them when it is sent."""

    pipeline = "p0"

    def __init__(self, runners: Sequence[Runner], num_flights: int) -> None:
        self.devices: Sequence[int] = ()
        self.num_flights = self.max_flights = num_flights
        self.runners = runners
        self._places = [_Place(runner) for runner in runners]
        following: list[_Place | None] = [*self._places[1:], None]
        self.books = [_later_book() for _ in runners]
        self._stages = [
            LaterStage(runner, place, BlockMap(book))
            for runner, place, book in zip(runners, following, self.books, strict=True)
        ]
        self._results: deque[bytes] = deque()
        self._is_late = False
        self.most_in_flight = 0  #: steps at the same time

    def place(self, num_tokens: int) -> torch.Tensor:
        return self._places[0].place(num_tokens)

    def announce(self, step: StageStep) -> None:
        """Have the second stage prepare a step; later ones get it unprepared."""
        self._stages[0].prepare(step)

    def send(self, message: StageMessage, hidden: PendingCopy | None = None) -> None:
        self._places[0].send(message, hidden)
        for stage, place in zip(self._stages, self._places, strict=True):
            frame, received = place.sent.popleft()
            decoded = decode_message(frame)
            assert isinstance(decoded, StageWork)
            pending = stage.take(decoded, received)
            if pending is not None:
                assert isinstance(decoded, StageStep)
                self._results.append(_encoded(stage.timed(decoded), pending))
                self.most_in_flight = max(self.most_in_flight, len(self._results))

    def replace_blocks(self, number: int, extent: range) -> None:
        """Have a stage do without some of its blocks, and then have others in their place."""
        self._stages[number].remove_blocks(extent)
        self.runners[number].layers.kv[list(extent)] = math.nan
        self.books[number].add(extent)

    def result(self, *, waits: bool) -> StageResult | None:
        """Return the next result; unless it is waited for, not the first time that it is asked for."""
        self._is_late = not self._is_late
        if self._results and (waits or not self._is_late or len(self._results) == self.num_flights):
            result = decode_result(self._results.popleft())
            assert isinstance(result, StageResult)
            return result
        return None


#: Of later stages, without the sink. Few are those that the first stage has.
LATER_EXTENTS = [range(first, first + 8) for first in (*range(47, 143, 8), *range(151, 199, 8))]


def _later_book() -> BlockBook:
    book = BlockBook(ROOMY.block_tokens, floor_blocks=1)
    for extent in LATER_EXTENTS:
        book.add(extent)
    return book


class _Place:
    def __init__(self, runner: Runner) -> None:
        self._like = runner.layers.decoder.hidden(1)
        self.sent: deque[tuple[bytes, torch.Tensor | None]] = deque()

    def place(self, num_tokens: int) -> torch.Tensor:
        return self._like.new_empty(num_tokens, self._like.shape[1])

    def announce(self, step: StageStep) -> None:
        pass

    def send(self, message: StageMessage, hidden: PendingCopy | None = None) -> None:
        self.sent.append((encode_message(message), None if hidden is None else hidden.wait()))


def _encoded(step: StageStep, pending: StepInFlight) -> bytes:
    return encode_result(StageResult(step.pipeline, step.plan.step_id, pending.wait(), step.stage_s))


def stages_of(num_layers: int, cuts: Sequence[int]) -> list[Stage]:
    return [Stage(range(*ends)) for ends in zip((0, *cuts), (*cuts, num_layers), strict=True)]


def parts_of(
    name: str,
    cuts: Sequence[int],
    config: EngineConfig,
    device: torch.device = CPU,
    dtype: str = "float32",
    eos_ids: frozenset[int] = frozenset(),
    *,
    is_kv_wide: bool = False,
) -> list[tuple[ModelSpec, Weights]]:
    """The stages of the variant that begin at 0 and `cuts`. Wide KV has room for all layers."""
    arch, layout, packed = packed_once(name, dtype)
    places = contiguous_places(layout, packed.to(device, copy=True))
    limits = own_limits(config, arch, DTYPES[dtype], device)
    wider = arch.dimensions.layers if is_kv_wide else None
    specs = [
        ModelSpec(arch, DTYPES[dtype], arch.max_positions, limits, eos_ids, None, stage, wider)
        for stage in stages_of(arch.num_layers, cuts)
    ]
    return [(spec, bind(arch, layout, places, spec.layers)) for spec in specs]


def pipeline_for(
    name: str,
    cuts: Sequence[int],
    num_flights: int = 1,
    config: EngineConfig = ROOMY,
    device: str = "cpu",
    dtype: str = "float32",
    eos_ids: frozenset[int] = frozenset(),
    memory: Callable[[ModelSpec], Memory] = elastic_memory,
    *,
    is_kv_wide: bool = False,
) -> tuple[Engine, Sequence[Runner]]:
    """Return an engine of the variant in stages that begin at 0 and `cuts`, and the runners of all stages.

    It has no blocks yet. Wide KV has room for all layers.
    """
    where = torch.device(device)
    parts = parts_of(name, cuts, config, where, dtype, eos_ids, is_kv_wide=is_kv_wide)
    first, *others = parts
    runners = [
        assemble_runner(spec, weights, config, memory(spec), step_size(spec.limits, where))
        for spec, weights in others
    ]
    later = LocalStages(runners, num_flights)
    engine = assemble(*first, config, where, memory(first[0]), later=later)
    runners = [engine.runner, *runners]
    for runner in runners:
        runner.fill_tables()
    return engine, runners

"""How much device memory a model takes, from the few facts that the registry keeps of it.

    | weights | workspace | tables | KV ...                    |
    |--------- fixed ------------- |- min, promised ->|- max ->|

Tables of penalties and biases are not included: they exist only while a request needs them.

All models of a worker share one workspace, as large as the largest, because they step one after the other.
Mapped pages always allow that. In an arena an immovable region may be in the way of a larger workspace: then
a model gets its own. So with an arena `Promises` charges each model in turn its own workspace.

The least KV holds one full context, so that every replica can serve every request. The context is cut to what
a worker's budget can hold, unless it is configured. A model that no worker can hold is split into stages, and
its context is cut to what the fewest of them can hold.

Workspace, tables and blocks are those of `hearth/core/sizes.py`, rounded up: memory taken by these numbers
always suffices. CUDA memory comes in pages, and weights, workspace, tables and KV have their own. An arena
has regions at multiples of 4096 bytes. KV extents are blocks at multiples of their size, so almost a block is
lost at either end of each free region that KV is taken from.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from hearth.core.errors import ConfigError
from hearth.core.sizes import (
    Dimensions,
    StepLimits,
    StepSize,
    block_buffer,
    computed_dtype,
    run_bytes,
    table_buffers,
    workspace_bytes,
)
from hearth.policy.fleet.profile import MAX_STAGES, MIN_STAGES, Footprint, PartBytes, StageSizes

_MIN_CONTEXT = 2048
_CONTEXT_STEP = 16
#: Of mapped memory, as `memory/cuda_pages.py` has it.
PAGE_BYTES = 16 << 20
#: Regions of an arena begin at multiples of it, as tensors do in `models/layout.py`.
REGION_BYTES = 4096
#: Pages that a stage shares with layers of other stages: at either end, and behind a tied embedding.
_SHARED_PAGES = 3
#: Free regions of an arena that the least KV is taken from: one for the sink, others between tensors and KV.
MAX_EXTENTS = 4


@dataclass(frozen=True, slots=True)
class Facts:
    """Sizes and properties of a deployed model, known without opening it. Becomes JSON."""

    num_bytes: int  #: as stored
    wide_bytes: int  #: in float32, for CPUs; quantised weights stay as they are
    dtype: str
    quant: str
    num_parameters: int
    largest_bytes: int  #: of the largest tensor, as stored
    dimensions: Dimensions
    max_positions: int
    eos_ids: tuple[int, ...]
    has_chat_template: bool
    family: str | None = None  #: as in `Arch`; None: deployed before it was stored
    parts: PartBytes | None = None  #: of `num_bytes`; None: one layer, or deployed before they were stored
    wide_parts: PartBytes | None = None  #: of `wide_bytes`
    is_text_part: bool = False  #: as in `Arch`

    @property
    def brief_quant(self) -> str:
        """The format of most weights, without details: "int4" of `int4-g32-float16 int8:head`."""
        return self.quant.partition(" ")[0].partition("-")[0]


def footprint(
    facts: Facts,
    kind: str,
    limits: StepLimits,
    context: int | None = None,
    floor_bytes: int | None = None,
    ceiling_bytes: int | None = None,
) -> Footprint:
    """Return the memory that a model takes on a `kind` of device, "cpu" or "cuda", within floor and ceiling.

    KV is at least one full context or the floor, and at most the ceiling or what can be filled.

    Raises:
        ConfigError: a context beyond the model's, or a ceiling that leaves no room for one context.
    """
    context = context_of(facts, context)
    fixed_bytes = fixed_bytes_of(facts, kind, limits, context)
    unit_bytes = PAGE_BYTES if kind == "cuda" else _block_bytes(facts, kind, limits)
    least_bytes = _least_kv_bytes(facts, kind, limits, context)
    most_blocks = 1 + limits.max_seqs * limits.num_blocks(context)  # with the sink
    most_bytes = _up_to(most_blocks * _block_bytes(facts, kind, limits), unit_bytes)
    if floor_bytes is not None:
        least_bytes = max(least_bytes, min(most_bytes, _up_to(floor_bytes - fixed_bytes, unit_bytes)))
    if ceiling_bytes is not None:
        room_bytes = (ceiling_bytes - fixed_bytes) // unit_bytes * unit_bytes
        if room_bytes < least_bytes:
            raise ConfigError(
                f"a memory ceiling of {ceiling_bytes} bytes is too low on a {kind} device: weights and "
                f"workspace take {fixed_bytes}, KV at least {least_bytes}; raise "
                "`memory_ceiling_bytes` or lower `context`, `engine.max_batch_tokens` or `engine.max_seqs`"
            )
        most_bytes = min(most_bytes, room_bytes)
    return Footprint(
        fixed_bytes=fixed_bytes,
        min_kv_bytes=least_bytes,
        max_kv_bytes=most_bytes,
        workspace_bytes=workspace_bytes_of(facts, kind, limits),
        tables_bytes=tables_bytes_of(facts, kind, limits, context),
        sink_bytes=_sink_bytes(facts, kind, limits),
        max_seqs=limits.max_seqs,
        kv_token_bytes=_block_bytes(facts, kind, limits) // limits.block_tokens,
    )


def context_of(facts: Facts, wanted: int | None) -> int:
    """Return the context that the model is served with.

    Raises:
        ConfigError: it supports less than `wanted`.
    """
    if wanted is not None and not 2 <= wanted <= facts.max_positions:
        raise ConfigError(
            f"`context` must be from 2 to what the model was made for, {facts.max_positions}; given: {wanted}"
        )
    return wanted or facts.max_positions


def fitted_context(facts: Facts, kind: str, limits: StepLimits, budget_bytes: int) -> int:
    """Return the longest context that fits into the budget beside the weights.

    Never below `_MIN_CONTEXT`: a model that does not fit with that does not fit.
    """

    def is_fitting(context: int) -> bool:
        kv_bytes = _least_kv_bytes(facts, kind, limits, context)
        return fixed_bytes_of(facts, kind, limits, context) + kv_bytes <= budget_bytes

    return _longest(facts, is_fitting)


def _longest(facts: Facts, is_fitting: Callable[[int], bool]) -> int:
    if facts.max_positions <= _MIN_CONTEXT or is_fitting(facts.max_positions):
        return facts.max_positions
    steps = range(_MIN_CONTEXT // _CONTEXT_STEP, -(-facts.max_positions // _CONTEXT_STEP))
    num_fitting = bisect_left(steps, True, key=lambda step: not is_fitting(step * _CONTEXT_STEP))
    return steps[max(0, num_fitting - 1)] * _CONTEXT_STEP


def stage_sizes(facts: Facts, kind: str, limits: StepLimits, context: int) -> StageSizes | None:
    """Return what stages of a model take on a `kind` of device; None: it cannot be split."""
    is_widened = facts.dtype != computed_dtype(facts.dtype, kind)
    placed = facts.wide_parts if is_widened else facts.parts
    if facts.parts is None or placed is None:
        return None
    is_mapped = kind == "cuda"
    return StageSizes(
        num_layers=facts.dimensions.num_layers,
        stored=facts.parts,
        placed=placed,
        spare_bytes=_SHARED_PAGES * PAGE_BYTES if is_mapped else is_widened * facts.largest_bytes,
        unit_bytes=PAGE_BYTES if is_mapped else REGION_BYTES,
        kv_layer_bytes=_block_bytes(facts, kind, limits) // facts.dimensions.num_layers,
        kv_unit_bytes=PAGE_BYTES if is_mapped else 1,
        num_lost_blocks=0 if is_mapped else 2 * MAX_EXTENTS,
        workspace_bytes=workspace_bytes_of(facts, kind, limits),
        tables_bytes=tables_bytes_of(facts, kind, limits, context),
        context_blocks=limits.num_blocks(context),
        max_seqs=limits.max_seqs,
    )


def split_evenly(sizes: StageSizes, budget_bytes: int) -> list[int] | None:
    """Return the layers of the fewest stages that fit workers of one budget; None: too many are needed."""
    for num_stages in range(MIN_STAGES, MAX_STAGES + 1):
        shares = sizes.split([lambda stage: stage.least_bytes <= budget_bytes] * num_stages)
        if shares is not None:
            return shares
    return None


def staged_context(facts: Facts, kind: str, limits: StepLimits, budget_bytes: int) -> int | None:
    """Return the longest context that fits into the fewest stages; None: a model fits into none."""

    def num_stages(context: int) -> int:
        sizes = stage_sizes(facts, kind, limits, context)
        shares = None if sizes is None else split_evenly(sizes, budget_bytes)
        return MAX_STAGES + 1 if shares is None else len(shares)

    fewest = num_stages(min(_MIN_CONTEXT, facts.max_positions))
    if fewest > MAX_STAGES:
        return None
    return _longest(facts, lambda context: num_stages(context) <= fewest)


def fixed_bytes_of(facts: Facts, kind: str, limits: StepLimits, context: int) -> int:
    return (
        weights_bytes_of(facts, kind, limits)
        + workspace_bytes_of(facts, kind, limits)
        + tables_bytes_of(facts, kind, limits, context)
    )


def weights_bytes_of(facts: Facts, kind: str, limits: StepLimits) -> int:
    num_bytes = facts.num_bytes
    if facts.dtype != computed_dtype(facts.dtype, kind):
        # Widened in place, one tensor at a time, with a copy of it meanwhile.
        num_bytes = facts.wide_bytes + facts.largest_bytes
    return _in_units(num_bytes, kind) + (0 if kind == "cuda" else arena_loss_bytes(facts, limits))


def arena_loss_bytes(facts: Facts, limits: StepLimits) -> int:
    return 2 * MAX_EXTENTS * _block_bytes(facts, "cpu", limits)


def workspace_bytes_of(facts: Facts, kind: str, limits: StepLimits) -> int:
    dimensions, dtype = facts.dimensions, computed_dtype(facts.dtype, kind)
    num_bytes = workspace_bytes(dimensions, dimensions.layers, dtype, StepSize.of(limits, kind))
    return _in_units(num_bytes, kind)


def tables_bytes_of(facts: Facts, kind: str, limits: StepLimits, context: int) -> int:
    return _in_units(run_bytes(table_buffers(facts.dimensions, limits, context)), kind)


def _least_kv_bytes(facts: Facts, kind: str, limits: StepLimits, context: int) -> int:
    num_bytes = (1 + limits.num_blocks(context)) * _block_bytes(facts, kind, limits)
    return _up_to(num_bytes, PAGE_BYTES) if kind == "cuda" else num_bytes


def _sink_bytes(facts: Facts, kind: str, limits: StepLimits) -> int:
    block_bytes = _block_bytes(facts, kind, limits)
    return _up_to(block_bytes, PAGE_BYTES) if kind == "cuda" else 3 * block_bytes


def _block_bytes(facts: Facts, kind: str, limits: StepLimits) -> int:
    dimensions, dtype = facts.dimensions, computed_dtype(facts.dtype, kind)
    return block_buffer(dimensions, dimensions.layers, dtype, limits.block_tokens).num_bytes


def _in_units(num_bytes: int, kind: str) -> int:
    return _up_to(num_bytes, PAGE_BYTES if kind == "cuda" else REGION_BYTES)


def _up_to(num_bytes: int, unit_bytes: int) -> int:
    return -(-num_bytes // unit_bytes) * unit_bytes

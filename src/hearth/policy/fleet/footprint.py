"""How much device memory a model takes, from the few facts that the registry keeps of it. Allocates nothing.

    | weights | workspace | tables and sampler | KV ...                    |
    |--------- fixed ------------------------- |- min, promised ->|- max ->|

The least KV holds one full context: whatever a request may ask for, every replica can serve it. So the
context is cut to what the budget of a worker can hold, where nobody has named one.

Workspace is that of `models/workspace.py`, rounded up: who takes memory by these numbers never needs more.
So are all parts, for the kind of device. CUDA memory comes in whole pages, and weights, workspace and KV
have pages of their own. Elsewhere all lies in one arena, whose regions begin at multiples of 4096 bytes, as
tensors of a layout do anyway. But an extent of KV is a run of blocks at multiples of their size, which need
not be one of 4096: of each free region that KV is taken from, almost a block is lost at either end.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from hearth.errors import ConfigError
from hearth.policy.fleet.events import Footprint

#: Bytes of one element of what is computed.
_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
#: Programs of a decode attention launch, 4 for each multiprocessor: more of these than any device has.
_MAX_PROGRAMS = {"cpu": 1, "cuda": 4 * 160}
#: What the workspace's buffers lose where each begins at a multiple of 256 bytes.
_WORKSPACE_PADDING_BYTES = 17 * 256
#: A conversation of this length is the least that makes sense.
_MIN_CONTEXT = 2048
#: A context that is cut is a multiple of this.
_CONTEXT_STEP = 16
#: Of mapped memory, as `memory/cuda_pages.py` has it.
PAGE_BYTES = 16 << 20
#: Regions of an arena begin at multiples of it, as tensors do in `models/layout.py`.
REGION_BYTES = 4096
#: Free regions of an arena that the least KV is taken from: the block of the sink has one to itself, and of
#: the others some lie between tensors and KV of other models.
MAX_EXTENTS = 4


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a deployed model without opening it. Becomes JSON."""

    num_bytes: int  #: as stored
    wide_bytes: int  #: in float32, as a CPU computes; what is quantised stays so
    dtype: str
    quant: str
    num_parameters: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    token_width: int  #: elements of workspace for each token of a step
    sample_width: int  #: elements of workspace for each row that samples; float32 logits come on top
    split_width: int  #: float32 elements that a program of split attention leaves behind
    rope_dim: int  #: 0: no rotary positions
    eos_ids: tuple[int, ...]
    has_chat_template: bool
    largest_bytes: int | None = None  #: of the largest tensor, as stored; None: not known


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What an engine is built for."""

    max_batch_tokens: int
    max_seqs: int
    block_tokens: int


def footprint(
    facts: Facts,
    kind: str,
    limits: StepLimits,
    context: int | None = None,
    floor_bytes: int | None = None,
    ceiling_bytes: int | None = None,
) -> Footprint:
    """What the model takes on a `kind` of device, "cpu" or "cuda". Floor and ceiling bound all of it.

    KV is as much as one full context or the floor needs, and up to the ceiling or what can be filled.

    Raises:
        ConfigError: a context beyond the model's, or a ceiling that leaves no room for one context.
    """
    context = context_of(facts, context)
    fixed_bytes = fixed_bytes_of(facts, kind, limits, context)
    unit_bytes = PAGE_BYTES if kind == "cuda" else _block_bytes(facts, kind, limits)
    least_bytes = _least_kv_bytes(facts, kind, limits, context)
    most_blocks = 1 + limits.max_seqs * _blocks_per_seq(limits, context)  # with the sink
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
    return Footprint(fixed_bytes, least_bytes, most_bytes)


def context_of(facts: Facts, wanted: int | None) -> int:
    """The context that the model is served with.

    Raises:
        ConfigError: it was made for less than is wanted.
    """
    if wanted is not None and not 2 <= wanted <= facts.max_positions:
        raise ConfigError(
            f"`context` must be from 2 to what the model was made for, {facts.max_positions}; given: {wanted}"
        )
    return wanted or facts.max_positions


def fitted_context(facts: Facts, kind: str, limits: StepLimits, budget_bytes: int) -> int:
    """The longest context of which one fits into the budget beside the weights, all of the model's if it may.

    Never below a length that makes sense: a model that does not fit with that does not fit.
    """

    def is_fitting(context: int) -> bool:
        kv_bytes = _least_kv_bytes(facts, kind, limits, context)
        return fixed_bytes_of(facts, kind, limits, context) + kv_bytes <= budget_bytes

    if facts.max_positions <= _MIN_CONTEXT or is_fitting(facts.max_positions):
        return facts.max_positions
    steps = range(_MIN_CONTEXT // _CONTEXT_STEP, -(-facts.max_positions // _CONTEXT_STEP))
    num_fitting = bisect_left(steps, True, key=lambda step: not is_fitting(step * _CONTEXT_STEP))
    return steps[max(0, num_fitting - 1)] * _CONTEXT_STEP


def fixed_bytes_of(facts: Facts, kind: str, limits: StepLimits, context: int) -> int:
    """All that does not grow with the number of tokens in flight."""
    weights_bytes = facts.num_bytes
    if facts.dtype != _computed(facts, kind):
        # It is widened in its place, one tensor at a time, of which there is a copy meanwhile.
        copied_bytes = facts.num_bytes if facts.largest_bytes is None else facts.largest_bytes
        weights_bytes = facts.wide_bytes + copied_bytes
    rest_bytes = workspace_bytes_of(facts, kind, limits) + _table_bytes(facts, kind, limits, context)
    if kind == "cuda":
        return _up_to(weights_bytes, PAGE_BYTES) + _up_to(rest_bytes, PAGE_BYTES)
    lost_bytes = arena_loss_bytes(facts, limits)
    return _up_to(weights_bytes, REGION_BYTES) + _up_to(rest_bytes, REGION_BYTES) + lost_bytes


def arena_loss_bytes(facts: Facts, limits: StepLimits) -> int:
    """What the least KV of a model may lose at the ends of the free regions that it is taken from."""
    return 2 * MAX_EXTENTS * _block_bytes(facts, "cpu", limits)


def workspace_bytes_of(facts: Facts, kind: str, limits: StepLimits) -> int:
    item_bytes = _ITEM_BYTES[_computed(facts, kind)]
    row_bytes = facts.sample_width * item_bytes + facts.vocab_size * 4
    return (
        limits.max_batch_tokens * facts.token_width * item_bytes
        + limits.max_seqs * row_bytes
        + _MAX_PROGRAMS[kind] * facts.split_width * 4
        + _WORKSPACE_PADDING_BYTES
    )


def _table_bytes(facts: Facts, kind: str, limits: StepLimits, context: int) -> int:
    """What an engine keeps on its device besides the workspace: `engine/inputs.py`, `engine/sampler.py`."""
    max_tokens, max_seqs = limits.max_batch_tokens, limits.max_seqs
    block_table = (max_seqs + 1) * -(-context // limits.block_tokens) * 4
    rotary = context * facts.rope_dim * 4
    inputs = 4 * (3 * max_tokens + 2 * max_seqs + 1) + 8 * (max_tokens + 2 * max_seqs + 1)
    counters = max_seqs * facts.num_kv_heads * 4
    # Penalties count in 5 bytes and a bias takes 4 for every slot and token, once a request asks for them.
    # On a CPU they are zeros that cost no memory before they are written.
    sampler = max_seqs * (facts.vocab_size * 9 + 28) if kind == "cuda" else 0
    return block_table + rotary + inputs + counters + sampler


def _least_kv_bytes(facts: Facts, kind: str, limits: StepLimits, context: int) -> int:
    """Of one full context and the sink."""
    num_bytes = (1 + _blocks_per_seq(limits, context)) * _block_bytes(facts, kind, limits)
    return _up_to(num_bytes, PAGE_BYTES) if kind == "cuda" else num_bytes


def _blocks_per_seq(limits: StepLimits, context: int) -> int:
    return -(-context // limits.block_tokens)


def _block_bytes(facts: Facts, kind: str, limits: StepLimits) -> int:
    item_bytes = _ITEM_BYTES[_computed(facts, kind)]
    return limits.block_tokens * facts.num_layers * 2 * facts.num_kv_heads * facts.head_dim * item_bytes


def _up_to(num_bytes: int, unit_bytes: int) -> int:
    """The next multiple."""
    return -(-num_bytes // unit_bytes) * unit_bytes


def _computed(facts: Facts, kind: str) -> str:
    """A CPU computes in float32, whatever is stored."""
    return "float32" if kind == "cpu" else facts.dtype

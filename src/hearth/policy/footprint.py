"""How much device memory a model takes, from the few facts that the registry keeps of it. Allocates nothing.

    | weights | workspace | tables and sampler | KV ...            |
    |--------- fixed ------------------------- |- min ->|- wanted -|

The least KV holds one full context: whatever a request may ask for, every replica can serve it. So the
context is cut to what the budget of a worker can hold, where nobody has named one.

Workspace is that of `models/workspace.py`, rounded up: who takes memory by these numbers never needs more.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from hearth.errors import ConfigError
from hearth.policy.events import Footprint

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
#: The share of its weights that a model gets as KV at least, where one context takes less.
_KV_SHARE = 0.25


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

    KV is as much as one full context or a quarter of the weights need, but no more than can be filled.

    Raises:
        ConfigError: a context beyond the model's, or a ceiling that leaves no room for one context.
    """
    context = context_of(facts, context)
    fixed_bytes = fixed_bytes_of(facts, kind, limits, context)
    block_bytes = limits.block_tokens * _kv_bytes_per_token(facts, kind)
    blocks_per_seq = -(-context // limits.block_tokens)
    most = 1 + limits.max_seqs * blocks_per_seq  # with the sink
    least = 1 + blocks_per_seq
    share = int(_KV_SHARE * facts.num_bytes) // block_bytes
    if floor_bytes is not None:
        least = max(least, min(most, -(-(floor_bytes - fixed_bytes) // block_bytes)))
    wanted = min(most, max(least, share))
    if ceiling_bytes is not None:
        room = (ceiling_bytes - fixed_bytes) // block_bytes
        if room < least:
            raise ConfigError(
                f"a memory ceiling of {ceiling_bytes} bytes is too low on a {kind} device: weights and "
                f"workspace take {fixed_bytes}, KV at least {least * block_bytes}; raise "
                "`memory_ceiling_bytes` or lower `context`, `engine.max_batch_tokens` or `engine.max_seqs`"
            )
        wanted = min(wanted, room)
    return Footprint(fixed_bytes, least * block_bytes, wanted * block_bytes)


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
    block_bytes = limits.block_tokens * _kv_bytes_per_token(facts, kind)

    def is_fitting(context: int) -> bool:
        kv_bytes = (1 + -(-context // limits.block_tokens)) * block_bytes
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
    return (
        weights_bytes + workspace_bytes_of(facts, kind, limits) + _table_bytes(facts, kind, limits, context)
    )


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


def _kv_bytes_per_token(facts: Facts, kind: str) -> int:
    item_bytes = _ITEM_BYTES[_computed(facts, kind)]
    return facts.num_layers * 2 * facts.num_kv_heads * facts.head_dim * item_bytes


def _computed(facts: Facts, kind: str) -> str:
    """A CPU computes in float32, whatever is stored."""
    return "float32" if kind == "cpu" else facts.dtype

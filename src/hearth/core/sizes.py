"""The memory of a model on a device besides its weights, buffer by buffer.

Allocations take their shapes from here, and promises add up the same buffers:

    workspace    `models/workspace.py` cuts it from bytes that all models of a worker share
    tables       inputs of a step, adapters of rows, sampler state, rotary table: each engine has its own
    graphs       captured steps, by the sizes that steps are padded to: on CUDA devices, beside the pool
    optional     tables of penalties and biases: in the pool, while a request needs one
    blocks       of KV, as many as a pool gives

Workspace and blocks are those of a range of layers, because an engine need not run all of a model.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import prod

ITEM_BYTES = {"bool": 1, "bfloat16": 2, "float16": 2, "float32": 4, "int32": 4, "int64": 8}
#: Buffers of a workspace, and tables, begin at multiples of it.
RUN_ALIGNMENT_BYTES = 256
#: Programs of a decode attention launch for each multiprocessor, of which at most so many are used.
PROGRAMS_PER_PROCESSOR, _MAX_PROCESSORS = 4, 192
#: Query heads that share k and v in a tile of decode attention. More get tiles of their own: reading k and v
#: again costs less than products of twice as many rows, most of them padding.
MAX_SUBGROUP = 64
#: Logits that the sampler works on at a time where it needs several temporaries of each.
_LOGITS_AT_ONCE = 1 << 25
#: Logits of a row that one program looks at.
LOGIT_CHUNK = 8192
#: Rows of an optional table at least, where there are as many slots.
_MIN_TABLE_ROWS = 8
#: Prompts are cut into tiles of at least this many tokens; numbers of each tile.
MIN_TILE_TOKENS, TILE_FIELDS = 32, 4
#: Rows of a tile of rows with adapters, without and with prompts.
ADAPTER_TILE_ROWS, ADAPTER_PROMPT_TILE_ROWS = 16, 64
#: Projections that an adapter may change. Least shares of the work of each, and of each tile, for about equal
#: work of all programs; numbers of each share.
ADAPTER_PROJECTIONS, ADAPTER_SHARES, _TILE_SHARES, ADAPTER_SHARE_FIELDS = 4, 528, 4, 2
#: Numbers by which kernels find the factors of an adapter for one projection (`kernels/adapter_rows.py`), and
#: the most slices of its outputs with factors of their own.
TARGET_FIELDS, MAX_ADAPTER_SLICES = 16, 3
#: Rows of an adapter's second factors are padded to a multiple of this, which kernels load at a time.
FACTOR_ROW_ALIGNMENT = 8
#: Most intermediates of a row between an adapter's two products: three slices of rank 256. In decode rows
#: they are sums of several parts, each of which is stored.
MAX_SHRUNK_RANK, ADAPTER_SPLITS = 768, 4


#: Inputs of a chunk of 4-bit codes, and int32 words of each of its outputs (`kernels/four_bits.py`).
CODE_CHUNK, CODE_WORDS = 128, 16


@dataclass(frozen=True, slots=True)
class Buffer:
    shape: tuple[int, ...]
    dtype: str  #: one of ITEM_BYTES

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Dimensions:
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    embed_size: int  #: width of the embedding, which some models project to `hidden_size`
    intermediate_size: int
    vocab_size: int
    rope_dim: int  #: leading dimensions of a head that are rotated; 0: no rotary positions
    is_gated: bool  #: the MLP computes a gate beside its activation
    is_parallel: bool  #: attention and MLP read the same hidden states
    num_ropes: int = 1  #: rotary tables, if any: layers may differ
    num_norms: int = 2  #: launches of norms in a layer

    @property
    def layers(self) -> range:
        return range(self.num_layers)

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        return self.q_size + 2 * self.kv_size

    @property
    def up_size(self) -> int:
        return (2 if self.is_gated else 1) * self.intermediate_size


@dataclass(frozen=True, slots=True)
class StepLimits:
    max_batch_tokens: int  #: of one step
    max_seqs: int  #: slots: sequences that run at the same time
    block_tokens: int  #: of KV

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)


@dataclass(frozen=True, slots=True)
class WantedLimits:
    max_batch_tokens: int | None  #: None: not set, as with the next one
    max_seqs: int | None
    block_tokens: int


@dataclass(frozen=True, slots=True)
class StepSize:
    max_tokens: int
    max_samples: int
    num_programs: int  #: of a decode attention launch; see SplitScratch

    @staticmethod
    def of(limits: StepLimits, kind: str, num_processors: int = _MAX_PROCESSORS) -> StepSize:
        num_programs = PROGRAMS_PER_PROCESSOR * min(num_processors, _MAX_PROCESSORS) if kind == "cuda" else 1
        return StepSize(limits.max_batch_tokens, limits.max_seqs, num_programs)


def computed_dtype(stored: str, kind: str) -> str:
    return "float32" if kind == "cpu" else stored


def bytes_of(buffers: Mapping[str, Buffer]) -> int:
    return sum(buffer.num_bytes for buffer in buffers.values())


# Workspace.


def workspace_buffers(
    dimensions: Dimensions, layers: range, dtype: str, size: StepSize
) -> Mapping[str, Buffer]:
    """Return the buffers of a forward pass through the layers, in the order of the workspace.

    A buffer that these layers do not write has no rows.
    """
    tokens, hidden = size.max_tokens, dimensions.hidden_size
    samples = size.max_samples if layers.stop == dimensions.num_layers else 0
    is_projected = dimensions.embed_size != hidden
    embedded = tokens if layers.start == 0 and is_projected else 0
    # The head writes float32 logits in their place, others beside it, to be widened.
    narrow = 0 if dtype == "float32" else samples
    # Each program of decode attention leaves at most two parts of results, for each q head of a group.
    partials = 2 * size.num_programs * (dimensions.num_heads // dimensions.num_kv_heads)
    return {
        "embedded": Buffer((embedded, dimensions.embed_size), dtype),
        "residual": Buffer((tokens, hidden), dtype),
        "delta": Buffer((tokens, hidden), dtype),
        "normed": Buffer((tokens, hidden), dtype),
        "mlp_out": Buffer((tokens if dimensions.is_parallel else 0, hidden), dtype),
        "qkv": Buffer((tokens, dimensions.qkv_size), dtype),
        "attended": Buffer((tokens, dimensions.q_size), dtype),
        "up": Buffer((tokens, dimensions.up_size), dtype),
        "activated": Buffer((tokens, dimensions.intermediate_size), dtype),
        "kept_residual": Buffer((samples, hidden), dtype),
        "kept_normed": Buffer((samples if dimensions.is_parallel else 0, hidden), dtype),
        "kept_attended": Buffer((samples, dimensions.q_size), dtype),
        "head_in": Buffer((samples if is_projected else 0, dimensions.embed_size), dtype),
        "head_out": Buffer((narrow, dimensions.vocab_size), dtype),
        "logits": Buffer((samples, dimensions.vocab_size), "float32"),
        "partial": Buffer((partials * dimensions.head_dim,), "float32"),
        "stats": Buffer((partials * 2,), "float32"),
        "shrunk": Buffer((_shrunk_rows(dimensions, dtype, size), MAX_SHRUNK_RANK), "float32"),
    }


def _shrunk_rows(dimensions: Dimensions, dtype: str, size: StepSize) -> int:
    if size.num_programs == 1:  # a CPU, which keeps nothing between them
        return 0
    num_rows = max(size.max_tokens, ADAPTER_SPLITS * min(size.max_samples, size.max_tokens))
    # One of the MLP's two buffers is always free, of which this is the smaller.
    lent_bytes = size.max_tokens * dimensions.intermediate_size * ITEM_BYTES[dtype]
    return 0 if lent_bytes >= num_rows * MAX_SHRUNK_RANK * ITEM_BYTES["float32"] else num_rows


def workspace_bytes(dimensions: Dimensions, layers: range, dtype: str, size: StepSize) -> int:
    return run_bytes(workspace_buffers(dimensions, layers, dtype, size))


def padded_bytes(buffer: Buffer) -> int:
    return -(-buffer.num_bytes // RUN_ALIGNMENT_BYTES) * RUN_ALIGNMENT_BYTES


def run_bytes(buffers: Mapping[str, Buffer]) -> int:
    return sum(map(padded_bytes, buffers.values()))


# Tables.


def table_buffers(dimensions: Dimensions, limits: StepLimits, context: int) -> Mapping[str, Buffer]:
    parts = {
        "inputs": input_buffers(limits, context),
        "sampler": sampler_buffers(limits.max_seqs, dimensions.vocab_size),
        "attention": {"counters": counter_buffer(dimensions, limits.max_seqs)},
        "rotary": {"cos_sin": rotary_buffer(dimensions, context)},
    }
    return {f"{part}.{name}": buffer for part, buffers in parts.items() for name, buffer in buffers.items()}


def max_tiles(num_tokens: int, max_seqs: int) -> int:
    return num_tokens // MIN_TILE_TOKENS + min(max_seqs, num_tokens)


@dataclass(frozen=True, slots=True)
class PackedInputs:
    """Where the inputs of a step lie in one int32 array. Unused parts are at the end.

        | counts | logit rows | sample slots | sample positions | slots | positions | tokens | tiles |

    The first four have the same place for any number of rows. Each part begins at a multiple of 16 bytes,
    because kernels are compiled again for other addresses.
    """

    counts: slice  #: the number of decode rows and that of tiles
    logit_rows: slice  #: the rows whose logits are wanted, of a step with prompts
    sample_slots: slice  #: the slot that each of them samples for
    sample_positions: slice  #: the positions of these rows
    slots: slice
    positions: slice
    tokens: slice
    tiles: slice

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(num_rows: int, max_seqs: int) -> PackedInputs:
        num_tile_words = TILE_FIELDS * max_tiles(num_rows, max_seqs)
        lengths = (2, *[max_seqs] * 3, *[num_rows] * 3, num_tile_words)
        begins = accumulate(map(_aligned, lengths[:-1]), initial=0)
        return PackedInputs(*(slice(at, at + length) for at, length in zip(begins, lengths, strict=True)))

    def num_words(self, num_tiles: int) -> int:
        begin: int = self.tiles.start
        return begin + TILE_FIELDS * num_tiles


def _aligned(num_words: int) -> int:
    return -(-num_words // 4) * 4


def input_buffers(limits: StepLimits, context: int) -> Mapping[str, Buffer]:
    """Return the inputs of a step (`engine/inputs.py`), and which of its rows have adapters."""
    max_tokens, max_seqs = limits.max_batch_tokens, limits.max_seqs
    return {
        "packed": Buffer((PackedInputs.of(max_tokens, max_seqs).tiles.stop,), "int32"),
        "adapters": Buffer((PackedAdapters.of(max_tokens, max_seqs).shares.stop,), "int64"),
        "tokens": Buffer((max_tokens,), "int32"),
        "block_table": Buffer((max_seqs + 1, limits.num_blocks(context)), "int32"),
    }


def sampler_buffers(max_seqs: int, vocab_size: int) -> Mapping[str, Buffer]:
    return {
        "tokens": Buffer((max_seqs + 1,), "int64"),
        "chosen": Buffer((max_seqs, 2), "int32"),
        "parts": Buffer((max_seqs, -(-vocab_size // LOGIT_CHUNK), 2), "int32"),
        "knobs": Buffer((max_seqs + 1, 4), "float32"),
        "seeds": Buffer((max_seqs + 1,), "int64"),
    }


def sampled_pieces(num_rows: int, vocab_size: int) -> list[slice]:
    """Return the slices of logit rows that the sampler works on in turn, so that temporaries stay small."""
    num_at_once = max(1, _LOGITS_AT_ONCE // vocab_size)
    return [slice(begin, begin + num_at_once) for begin in range(0, max(1, num_rows), num_at_once)]


def counter_buffer(dimensions: Dimensions, max_samples: int) -> Buffer:
    num_parts = num_subgroups(dimensions.num_heads // dimensions.num_kv_heads)
    return Buffer((max_samples * dimensions.num_kv_heads * num_parts,), "int32")


def num_subgroups(num_sharing: int) -> int:
    return -(-num_sharing // MAX_SUBGROUP)


def rotary_buffer(dimensions: Dimensions, context: int) -> Buffer:
    return Buffer((dimensions.num_ropes, context, 2, dimensions.rope_dim // 2), "float32")


# Graphs. A step is padded to the next of a few sizes, so that few graphs serve every step.

#: Few rows are bound by reading weights, so more cost little. Larger products are computed by tiles, and rows
#: that fill up a tile are free. Each size takes time and memory. Some sizes are left out because the next one
#: takes no longer (`bench/engine/product_sizes.py`): cuBLAS is slower with 224, 240, 416, 448 and 832 rows.
_DECODE_SIZES = (
    1,
    2,
    4,
    *range(8, 32, 8),
    *range(32, 209, 16),
    *range(256, 385, 32),
    480,
    *range(512, 769, 64),
    896,
)
_SAMPLE_SIZES = (1, 8, *range(64, 256, 64), *range(256, 513, 128))
_MIXED_SIZES = (
    *range(64, 385, 64),
    *range(512, 769, 64),
    *range(896, 1024, 64),
    *range(1024, 2048, 128),
    *range(2048, 4097, 256),
)
#: Launches of a layer besides its norms, and around all layers, at most; and device memory for each when
#: it is captured.
_LAYER_NODES, _OTHER_NODES, _NODE_BYTES = 10, 16, 2700
#: Launches of a layer that adapters add: two for each of four projections.
_ADAPTER_NODES = 8


def decode_sizes(limits: StepLimits) -> tuple[int, ...]:
    """Rows that steps of decode rows alone are padded to."""
    return _up_to(_DECODE_SIZES, 64, min(limits.max_seqs, limits.max_batch_tokens))


def sample_sizes(limits: StepLimits) -> tuple[int, ...]:
    """Rows of logits that steps with prompts are padded to."""
    return _up_to(_SAMPLE_SIZES, 256, min(limits.max_seqs, limits.max_batch_tokens))


def mixed_sizes(limits: StepLimits) -> tuple[int, ...]:
    """Tokens that steps with prompts are padded to."""
    return _up_to(_MIXED_SIZES, 512, limits.max_batch_tokens)


def padded_size(sizes: Sequence[int], count: int) -> int:
    assert 0 < count <= sizes[-1], f"{count=} {sizes[-1]=}"
    return sizes[bisect_left(sizes, count)]


def graph_bytes(dimensions: Dimensions, limits: StepLimits, *, has_adapters: bool = False) -> int:
    """Return a high estimate of the device memory that graphs of all sizes take.

    Steps with adapters have graphs of their own.
    """
    num_whole, num_samples = len(decode_sizes(limits)) + len(mixed_sizes(limits)), len(sample_sizes(limits))
    layer_nodes = _LAYER_NODES + dimensions.num_norms + (_ADAPTER_NODES if has_adapters else 0)
    whole_nodes = layer_nodes * dimensions.num_layers + _OTHER_NODES
    return (num_whole * whole_nodes + num_samples * (layer_nodes + _OTHER_NODES)) * _NODE_BYTES


def _up_to(sizes: Sequence[int], apart: int, most: int) -> tuple[int, ...]:
    return (*(size for size in (*sizes, *range(sizes[-1] + apart, most, apart)) if size < most), most)


# Optional tables. The buffers of one may lie behind each other without a gap, so larger items come first.


def table_rows(num_requests: int, max_seqs: int) -> int:
    """Return the rows of a table for `num_requests`: a power of two, because growing copies it."""
    return min(max_seqs, max(_MIN_TABLE_ROWS, 1 << (num_requests - 1).bit_length()))


def penalty_buffers(num_rows: int, vocab_size: int) -> Mapping[str, Buffer]:
    return {
        "num_sampled": Buffer((num_rows, vocab_size), "int32"),
        "weights": Buffer((num_rows, 3), "float32"),
        "in_prompt": Buffer((num_rows, vocab_size), "bool"),
    }


def bias_buffers(num_rows: int, vocab_size: int) -> Mapping[str, Buffer]:
    return {"bias": Buffer((num_rows, vocab_size), "float32")}


# Adapters.


@dataclass(frozen=True, slots=True)
class PackedAdapters:
    """Where the lists of rows with adapters lie in one int64 array.

        | order of logits | shares of logits | order of rows | shares of rows |

    The first two have the same place for any number of rows. Without prompts they list all rows, and the
    other two are not needed.
    """

    logit_order: slice
    logit_shares: slice
    order: slice
    shares: slice

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(num_rows: int, max_seqs: int) -> PackedAdapters:
        share_words = ADAPTER_PROJECTIONS * ADAPTER_SHARE_FIELDS
        num_logit_shares, num_shares = map(adapter_shares, (max_seqs, max_adapter_tiles(num_rows, max_seqs)))
        lengths = (max_seqs, share_words * num_logit_shares, num_rows, share_words * num_shares)
        begins = accumulate(map(_aligned, lengths[:-1]), initial=0)
        return PackedAdapters(*(slice(at, at + length) for at, length in zip(begins, lengths, strict=True)))


def max_adapter_tiles(num_rows: int, max_seqs: int) -> int:
    return num_rows // ADAPTER_PROMPT_TILE_ROWS + min(max_seqs, num_rows)


def adapter_shares(num_tiles: int, least: int = ADAPTER_SHARES) -> int:
    """Return the most shares that the work of `num_tiles` is cut into, for each projection."""
    return max(least, _TILE_SHARES * num_tiles)


def target_fields(a: int, slices: Sequence[tuple[int, int, int, int]]) -> list[int]:
    """Return the numbers by which kernels find the factors of a target (`kernels/adapter_rows.py`).

    `a` and the first number of each slice are addresses; then come its rank, its first output and how many
    outputs.
    """
    missing = [(0, 0, 0, 0)] * (MAX_ADAPTER_SLICES - len(slices))
    b, ranks, begins, sizes = zip(*slices, *missing, strict=True)
    fields = [a, *b, *ranks, *begins, *sizes, sum(ranks)]
    return fields + [0] * (TARGET_FIELDS - len(fields))


def adapter_table_buffer(num_layers: int) -> Buffer:
    return Buffer((num_layers, ADAPTER_PROJECTIONS, TARGET_FIELDS), "int64")


# KV.


def block_buffer(dimensions: Dimensions, layers: range, dtype: str, block_tokens: int) -> Buffer:
    return Buffer((len(layers), 2, block_tokens, dimensions.num_kv_heads, dimensions.head_dim), dtype)

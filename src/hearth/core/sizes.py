"""The memory of a model on a device besides its weights, buffer by buffer. Allocates nothing.

Whoever allocates a buffer takes its shape from here, and whoever promises memory adds up the same buffers:

    workspace    `models/workspace.py` cuts it from bytes that all models of a worker have in common
    tables       the inputs of a step, also which rows have adapters, sampler state, rotary table: each engine
                 has its own, always
    graphs       captured steps, by the sizes that steps are padded to: on CUDA devices, beside the pool
    optional     the tables of penalties and of biases: in the pool, while a request needs one
    blocks       of KV, as many as a pool gives

Workspace and blocks are those of a range of layers, for an engine need not run all of a model.
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
#: Query heads that share k and v in a tile of decode attention. More of them have tiles of their own: to read
#: k and v once more costs less than products of twice as many rows, most of which are padding.
MAX_SUBGROUP = 64
#: Logits that the sampler works on at a time where it needs several temporaries of each.
_LOGITS_AT_ONCE = 1 << 25
#: Logits of a row that one program looks at.
LOGIT_CHUNK = 8192
#: Rows of an optional table at least, where there are as many slots.
_MIN_TABLE_ROWS = 8
#: Prompts are cut into tiles of at least so many tokens, each of which the device has this many numbers of.
MIN_TILE_TOKENS, TILE_FIELDS = 32, 4
#: Rows with adapters are cut into tiles of so many rows, in steps with prompts of more.
ADAPTER_TILE_ROWS, ADAPTER_PROMPT_TILE_ROWS = 16, 64
#: Projections that an adapter may change. The work of each is cut into so many shares at least, and at least
#: so many for each tile, so that programs have about as much to do as each other; numbers of each share.
ADAPTER_PROJECTIONS, ADAPTER_SHARES, _TILE_SHARES, ADAPTER_SHARE_FIELDS = 4, 528, 4, 2
#: Numbers by which kernels find the factors of an adapter for one projection (`kernels/adapter_rows.py`), and
#: how many parts of its outputs have factors of their own, at most.
TARGET_FIELDS, MAX_ADAPTER_SLICES = 16, 3
#: Rows of an adapter's second factors lie a multiple of so many numbers apart, which kernels load at a time.
FACTOR_ROW_ALIGNMENT = 8
#: Numbers that an adapter makes of a row between its two products, at most: three slices of rank 256. Where
#: requests decode they are sums of several parts, each of which is stored.
MAX_SHRUNK_RANK, ADAPTER_SPLITS = 768, 4


@dataclass(frozen=True, slots=True)
class Buffer:
    """A tensor as somebody will allocate it."""

    shape: tuple[int, ...]
    dtype: str  #: one of ITEM_BYTES

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Dimensions:
    """The numbers of an architecture that its memory follows from. Becomes JSON."""

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

    @property
    def layers(self) -> range:
        """All layers of the model."""
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
    """The largest batch, the slots and the block size that an engine is built for."""

    max_batch_tokens: int  #: of one step
    max_seqs: int  #: slots: sequences that run at the same time
    block_tokens: int  #: of KV

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks of KV that so many tokens of one sequence take."""
        return -(-num_tokens // self.block_tokens)


@dataclass(frozen=True, slots=True)
class WantedLimits:
    """The limits that a user has set; `policy/batch/step_limits.py` finds the others."""

    max_batch_tokens: int | None  #: None: not set, as with the next one
    max_seqs: int | None
    block_tokens: int


@dataclass(frozen=True, slots=True)
class StepSize:
    """The largest step that a workspace must hold."""

    max_tokens: int
    max_samples: int
    num_programs: int  #: of a decode attention launch; see SplitScratch

    @staticmethod
    def of(limits: StepLimits, kind: str, num_processors: int = _MAX_PROCESSORS) -> StepSize:
        """The largest step on a `kind` of device, "cpu" or "cuda"; by default on the largest of that kind."""
        num_programs = PROGRAMS_PER_PROCESSOR * min(num_processors, _MAX_PROCESSORS) if kind == "cuda" else 1
        return StepSize(limits.max_batch_tokens, limits.max_seqs, num_programs)


def computed_dtype(stored: str, kind: str) -> str:
    """The dtype that a kind of device computes in: a CPU takes float32, whatever is stored."""
    return "float32" if kind == "cpu" else stored


def bytes_of(buffers: Mapping[str, Buffer]) -> int:
    """The bytes of buffers that are allocated one by one."""
    return sum(buffer.num_bytes for buffer in buffers.values())


# Workspace.


def workspace_buffers(
    dimensions: Dimensions, layers: range, dtype: str, size: StepSize
) -> Mapping[str, Buffer]:
    """The buffers of a forward pass through the layers, in the order in which they lie in a workspace.

    A buffer that nothing is written to, by these layers of this architecture, has no rows.
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
    """Rows for what adapters leave between two products; none where the MLP has enough of them idle."""
    if size.num_programs == 1:  # a CPU, which keeps nothing between them
        return 0
    num_rows = max(size.max_tokens, ADAPTER_SPLITS * min(size.max_samples, size.max_tokens))
    # One of the MLP's two buffers is always free, of which this is the smaller.
    lent_bytes = size.max_tokens * dimensions.intermediate_size * ITEM_BYTES[dtype]
    return 0 if lent_bytes >= num_rows * MAX_SHRUNK_RANK * ITEM_BYTES["float32"] else num_rows


def workspace_bytes(dimensions: Dimensions, layers: range, dtype: str, size: StepSize) -> int:
    """The bytes of a workspace."""
    return run_bytes(workspace_buffers(dimensions, layers, dtype, size))


def padded_bytes(buffer: Buffer) -> int:
    """Return the bytes of a buffer in a run, rounded up to the alignment of the next one."""
    return -(-buffer.num_bytes // RUN_ALIGNMENT_BYTES) * RUN_ALIGNMENT_BYTES


def run_bytes(buffers: Mapping[str, Buffer]) -> int:
    """The bytes of a run in which buffers lie behind each other, each at its aligned place."""
    return sum(map(padded_bytes, buffers.values()))


# Tables.


def table_buffers(dimensions: Dimensions, limits: StepLimits, context: int) -> Mapping[str, Buffer]:
    """All that an engine always has besides weights, workspace and KV, whichever layers it runs."""
    parts = {
        "inputs": input_buffers(limits, context),
        "sampler": sampler_buffers(limits.max_seqs, dimensions.vocab_size),
        "attention": {"counters": counter_buffer(dimensions, limits.max_seqs)},
        "rotary": {"cos_sin": rotary_buffer(dimensions.rope_dim, context)},
    }
    return {f"{part}.{name}": buffer for part, buffers in parts.items() for name, buffer in buffers.items()}


def max_tiles(num_tokens: int, max_seqs: int) -> int:
    """The most tiles that the prompts of a step of so many tokens are cut into."""
    return num_tokens // MIN_TILE_TOKENS + min(max_seqs, num_tokens)


@dataclass(frozen=True, slots=True)
class PackedInputs:
    """Where the inputs of a step of so many rows lie in one int32 array. What a step does not need is behind.

        | counts | logit rows | sample slots | sample positions | slots | positions | tokens | tiles |

    The first four lie at the same place whatever the number of rows. Each part begins at a multiple of
    16 bytes, for kernels are compiled once more for addresses that do not.
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
        """Return the places of a step of so many rows; every step asks for them."""
        num_tile_words = TILE_FIELDS * max_tiles(num_rows, max_seqs)
        lengths = (2, *[max_seqs] * 3, *[num_rows] * 3, num_tile_words)
        begins = accumulate(map(_aligned, lengths[:-1]), initial=0)
        return PackedInputs(*(slice(at, at + length) for at, length in zip(begins, lengths, strict=True)))

    def num_words(self, num_tiles: int) -> int:
        """How much of the array a step with so many tiles needs."""
        begin: int = self.tiles.start
        return begin + TILE_FIELDS * num_tiles


def _aligned(num_words: int) -> int:
    """The next multiple of 16 bytes, in words."""
    return -(-num_words // 4) * 4


def input_buffers(limits: StepLimits, context: int) -> Mapping[str, Buffer]:
    """The inputs of a step (`engine/inputs.py`), and which of its rows have adapters."""
    max_tokens, max_seqs = limits.max_batch_tokens, limits.max_seqs
    return {
        "packed": Buffer((PackedInputs.of(max_tokens, max_seqs).tiles.stop,), "int32"),
        "adapters": Buffer((PackedAdapters.of(max_tokens, max_seqs).shares.stop,), "int64"),
        "tokens": Buffer((max_tokens,), "int32"),
        "block_table": Buffer((max_seqs + 1, limits.num_blocks(context)), "int32"),
    }


def sampler_buffers(max_seqs: int, vocab_size: int) -> Mapping[str, Buffer]:
    """The state that a sampler has of every slot, and its scratch (`engine/sampler.py`)."""
    return {
        "tokens": Buffer((max_seqs + 1,), "int64"),
        "chosen": Buffer((max_seqs, 2), "int32"),
        "parts": Buffer((max_seqs, -(-vocab_size // LOGIT_CHUNK), 2), "int32"),
        "knobs": Buffer((max_seqs + 1, 4), "float32"),
        "seeds": Buffer((max_seqs + 1,), "int64"),
    }


def sampled_pieces(num_rows: int, vocab_size: int) -> list[slice]:
    """Rows of logits that the sampler works on one after the other, so that its temporaries stay small."""
    num_at_once = max(1, _LOGITS_AT_ONCE // vocab_size)
    return [slice(begin, begin + num_at_once) for begin in range(0, max(1, num_rows), num_at_once)]


def counter_buffer(dimensions: Dimensions, max_samples: int) -> Buffer:
    """Counters of split attention, which mean something between steps."""
    num_parts = num_subgroups(dimensions.num_heads // dimensions.num_kv_heads)
    return Buffer((max_samples * dimensions.num_kv_heads * num_parts,), "int32")


def num_subgroups(num_sharing: int) -> int:
    """Into how many parts decode attention cuts the query heads that share k and v."""
    return -(-num_sharing // MAX_SUBGROUP)


def rotary_buffer(rope_dim: int, context: int) -> Buffer:
    """The table of rotary cosines and sines (`models/rope.py`)."""
    return Buffer((context, 2, rope_dim // 2), "float32")


# Graphs. A step is padded to the next of a few sizes, so that few graphs serve every step.

#: Few rows are bound by reading weights, so more of them cost little. Larger products are computed by tiles,
#: and what only fills a tile up is free; what is beyond costs its share. Each size takes time and memory.
#: Some sizes are not there because the next one takes no longer (`bench/engine/product_sizes.py`): with 224,
#: 240, 416, 448 and 832 rows the library has kernels that are up to a third slower than those for a few more.
_DECODE_SIZES = (
    *(1, 2, 4, *range(8, 32, 8), *range(32, 209, 16), *range(256, 385, 32)),
    *(480, *range(512, 769, 64), 896),
)
_SAMPLE_SIZES = (1, 8, *range(64, 256, 64), *range(256, 513, 128))
_MIXED_SIZES = (
    *(*range(64, 385, 64), *range(512, 769, 64), *range(896, 1024, 64)),
    *(*range(1024, 2048, 128), *range(2048, 4097, 256)),
)
#: Launches of a layer, and around all layers, at most; and device memory for each when it is captured.
_LAYER_NODES, _OTHER_NODES, _NODE_BYTES = 12, 16, 2700
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
    """Return the smallest size that holds `count`."""
    assert 0 < count <= sizes[-1], f"{count=} {sizes[-1]=}"
    return sizes[bisect_left(sizes, count)]


def graph_bytes(dimensions: Dimensions, limits: StepLimits, *, has_adapters: bool = False) -> int:
    """An estimate, rather too high, of the device memory that graphs of all sizes take once captured.

    Steps in which a row has an adapter have graphs of their own beside the others, once there are such steps.
    """
    num_whole, num_samples = len(decode_sizes(limits)) + len(mixed_sizes(limits)), len(sample_sizes(limits))
    layer_nodes = _LAYER_NODES + (_ADAPTER_NODES if has_adapters else 0)
    whole_nodes = layer_nodes * dimensions.num_layers + _OTHER_NODES
    return (num_whole * whole_nodes + num_samples * (layer_nodes + _OTHER_NODES)) * _NODE_BYTES


def _up_to(sizes: Sequence[int], apart: int, most: int) -> tuple[int, ...]:
    """Sizes below `most`, behind the last of them so far apart, and `most` itself: full load runs that."""
    return (*(size for size in (*sizes, *range(sizes[-1] + apart, most, apart)) if size < most), most)


# Optional tables. The buffers of one may lie behind each other without a gap, so larger items come first.


def table_rows(num_requests: int, max_seqs: int) -> int:
    """Rows of a table that so many requests need: a power of two, for to grow is to copy, or one per slot."""
    return min(max_seqs, max(_MIN_TABLE_ROWS, 1 << (num_requests - 1).bit_length()))


def penalty_buffers(num_rows: int, vocab_size: int) -> Mapping[str, Buffer]:
    """The counts that penalties go by (`engine/sampling_tables.py`)."""
    return {
        "num_sampled": Buffer((num_rows, vocab_size), "int32"),
        "weights": Buffer((num_rows, 3), "float32"),
        "in_prompt": Buffer((num_rows, vocab_size), "bool"),
    }


def bias_buffers(num_rows: int, vocab_size: int) -> Mapping[str, Buffer]:
    """The rows that are added to logits (`engine/sampling_tables.py`)."""
    return {"bias": Buffer((num_rows, vocab_size), "float32")}


# Adapters.


@dataclass(frozen=True, slots=True)
class PackedAdapters:
    """Where the lists of rows that have adapters lie in one int64 array, for a step of so many rows.

        | order of logits | shares of logits | order of rows | shares of rows |

    The first two lists are of rows of logits, and lie at the same place whatever the number of rows. Without
    prompts these are all rows, and the other two are not needed.
    """

    logit_order: slice
    logit_shares: slice
    order: slice
    shares: slice

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(num_rows: int, max_seqs: int) -> PackedAdapters:
        """Return the places of a step of so many rows."""
        share_words = ADAPTER_PROJECTIONS * ADAPTER_SHARE_FIELDS
        num_logit_shares, num_shares = map(adapter_shares, (max_seqs, max_adapter_tiles(num_rows, max_seqs)))
        lengths = (max_seqs, share_words * num_logit_shares, num_rows, share_words * num_shares)
        begins = accumulate(map(_aligned, lengths[:-1]), initial=0)
        return PackedAdapters(*(slice(at, at + length) for at, length in zip(begins, lengths, strict=True)))


def max_adapter_tiles(num_rows: int, max_seqs: int) -> int:
    """The most tiles that the rows of a step with prompts are cut into, each of one adapter."""
    return num_rows // ADAPTER_PROMPT_TILE_ROWS + min(max_seqs, num_rows)


def adapter_shares(num_tiles: int, least: int = ADAPTER_SHARES) -> int:
    """The most shares that the work of so many tiles is cut into, for each projection."""
    return max(least, _TILE_SHARES * num_tiles)


def target_fields(a: int, slices: Sequence[tuple[int, int, int, int]]) -> list[int]:
    """The numbers by which kernels find the factors of a target (`kernels/adapter_rows.py`).

    `a` and the first number of each slice are addresses; then come its rank, the first of its outputs and how
    many these are.
    """
    missing = [(0, 0, 0, 0)] * (MAX_ADAPTER_SLICES - len(slices))
    b, ranks, begins, sizes = zip(*slices, *missing, strict=True)
    fields = [a, *b, *ranks, *begins, *sizes, sum(ranks)]
    return fields + [0] * (TARGET_FIELDS - len(fields))


def adapter_table_buffer(num_layers: int) -> Buffer:
    """The table by which kernels find an adapter's factors (`engine/adapter_table.py`)."""
    return Buffer((num_layers, ADAPTER_PROJECTIONS, TARGET_FIELDS), "int64")


# KV.


def block_buffer(dimensions: Dimensions, layers: range, dtype: str, block_tokens: int) -> Buffer:
    """One block of KV: k and v of all the layers."""
    return Buffer((len(layers), 2, block_tokens, dimensions.num_kv_heads, dimensions.head_dim), dtype)

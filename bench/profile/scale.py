"""How much `bench.profile` measures on which machine. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from bench.elastic.cpu import SHAPE as SMOLLM2
from bench.random_model import TINY as TINY_CONFIG
from bench.shape import Shape, llama_shape
from hearth.core.sizes import StepLimits
from hearth.store.format.manifest import CHUNK_BYTES

MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class Scale:
    shapes: tuple[Shape, ...]
    limits: StepLimits
    max_kv_bytes: int  #: of an engine whose steps are measured
    max_prefill_tokens: int  #: computed to bring sequences to a context
    batches: tuple[int, ...]  #: rows of decode steps
    contexts: tuple[int, ...]  #: tokens of each of them
    prompts: tuple[int, ...]  #: tokens of one prompt that is computed by one step
    num_prompts: int  #: at once, in steps with several
    busy_rows: tuple[int, ...]  #: that decode while a prompt comes: few, and many
    busy_context: int
    num_steps: int  #: that each time is taken from
    num_rounds: int  #: through all kinds of prompts
    quantile: float  #: of times that is taken for all: the lowest where others work on the machine
    num_switches: int  #: between each two models
    switch_prompt: int  #: tokens
    turn_tokens: int  #: that a model is asked for which is to answer until it has to give way
    host_bytes: int  #: of the store, for all models
    disk_ring_bytes: int  #: of host memory through which a model is read from disk
    page_bytes: int = CHUNK_BYTES  #: of the worker's pool, and what its budget is rounded to
    memory_place: str | None = "/dev/shm"  #: of models that go to host memory
    small: Scale | None = None  #: whose first shape a service is asked for; None: the first one here

    def typical(self, times: Iterable[float]) -> float:
        """Return the time that stands for some runs of the same."""
        ranked = sorted(times)
        return ranked[int(self.quantile * len(ranked))]

    @property
    def max_context(self) -> int:
        """Tokens that a sequence has room for: its prompt, and what it says while it is measured."""
        num_decoding = max(self.contexts) + self.num_decode_tokens
        return max(num_decoding, self.busy_context + self.num_busy_tokens, *self.prompts) + 1

    @property
    def num_decode_tokens(self) -> int:
        """Tokens that a row says at most while decode steps are measured, and others still have prompts."""
        num_prefills = -(-self.max_prefill_tokens // self.limits.max_batch_tokens)
        return 2 * num_prefills + (self.num_steps + 8) * (len(self.batches) + 1)

    @property
    def num_busy_tokens(self) -> int:
        """Tokens that a row says at most while prompts beside it are measured."""
        return 16 * self.num_steps * len(self.prompts)


#: A GPU of 80 GB or more, within three minutes.
GPU = Scale(
    shapes=(
        llama_shape("1B", "Llama-3.2-1B", 16384),
        llama_shape("3B", "Llama-3.2-3B", 16384),
        llama_shape("7B", "Llama-2-7B", 16384),
    ),
    limits=StepLimits(max_batch_tokens=8192, max_seqs=1024, block_tokens=16),
    max_kv_bytes=56 * GIB,
    max_prefill_tokens=1 << 18,
    batches=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
    contexts=(64, 512, 2048, 8192),
    prompts=(16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
    num_prompts=8,
    busy_rows=(1, 32),
    busy_context=512,
    num_steps=3,
    num_rounds=3,
    quantile=0.5,
    num_switches=4,
    switch_prompt=128,
    turn_tokens=2048,
    host_bytes=26 * GIB,
    disk_ring_bytes=GIB,
)

#: The same to see that it runs, within a minute; its numbers mean nothing.
TINY_GPU = replace(
    GPU,
    shapes=GPU.shapes[:1],
    max_kv_bytes=4 * GIB,
    batches=(1, 8),
    contexts=(64, 512),
    prompts=(16, 128, 512),
    busy_rows=(4,),
    num_steps=2,
    num_rounds=1,
    num_switches=1,
    host_bytes=8 * GIB,
)

#: Everything within seconds on a CPU; its numbers mean nothing.
TINY_CPU = Scale(
    shapes=(
        Shape("tiny", "tiny", TINY_CONFIG, "float32"),
        Shape("small", "small", {**TINY_CONFIG, "num_hidden_layers": 3}, "float32"),
    ),
    limits=StepLimits(max_batch_tokens=64, max_seqs=4, block_tokens=4),
    max_kv_bytes=4 * MIB,
    max_prefill_tokens=1024,
    batches=(1, 2, 4),
    contexts=(16, 64),
    prompts=(8, 32),
    num_prompts=2,
    busy_rows=(2,),
    busy_context=16,
    num_steps=3,
    num_rounds=1,
    quantile=0.5,
    num_switches=1,
    switch_prompt=8,
    turn_tokens=500,
    host_bytes=32 * MIB,
    disk_ring_bytes=16 * MIB,
    page_bytes=4 << 10,
    memory_place=None,
)

#: A CPU of a few cores, within some minutes.
CPU = Scale(
    shapes=(Shape("135M", "SmolLM2-135M", SMOLLM2, "float32"),),
    limits=StepLimits(max_batch_tokens=512, max_seqs=16, block_tokens=16),
    max_kv_bytes=GIB,
    max_prefill_tokens=1 << 12,
    batches=(1, 2, 4, 8, 16),
    contexts=(32, 256, 1024),
    prompts=(16, 64, 256),
    num_prompts=4,
    busy_rows=(4,),
    busy_context=32,
    num_steps=3,
    num_rounds=1,
    quantile=0.0,
    num_switches=4,
    switch_prompt=32,
    turn_tokens=96,
    host_bytes=GIB,
    disk_ring_bytes=128 * MIB,
    memory_place=None,
    small=TINY_CPU,
)

"""How much `bench.engine` asks, and of which shapes. Measures nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from bench.random_model import TINY as TINY_CONFIG
from bench.shape import Shape, llama_shape
from bench.sharegpt import Lengths, conversations
from hearth.core.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Work:
    """Requests that are submitted at once."""

    text: str  #: in tables
    requests: Sequence[Lengths]
    counts_prompts: bool = False  #: its rate is that of all tokens, not of those that come out
    shared: int = 0  #: tokens that all prompts begin with, before their own
    turns: int = 1  #: each follows when all have their answers, with those before in its prompt

    @property
    def unit(self) -> str:
        return f"{'prompt and ' if self.counts_prompts else ''}output tokens/s"

    @property
    def num_tokens(self) -> int:
        tokens = sum(one.new + (one.prompt if self.counts_prompts else 0) for one in self.requests)
        return self.turns * tokens


def even(num_requests: int, prompt: int, new: int, *, counts_prompts: bool = False) -> Work:
    text = f"{num_requests} requests of {prompt:,} + {new}"
    return Work(text, [Lengths(prompt, new)] * num_requests, counts_prompts)


def shared_prefix(num_requests: int, shared: int, prompt: int, new: int) -> Work:
    text = f"{num_requests} requests of {shared:,} shared + {prompt} + {new}"
    return Work(text, [Lengths(prompt, new)] * num_requests, shared=shared)


def returning(num_users: int, turns: int, prompt: int, new: int) -> Work:
    text = f"{num_users} conversations of {turns} turns of {prompt} + {new}"
    return Work(text, [Lengths(prompt, new)] * num_users, turns=turns)


def sharegpt(num_requests: int, most: Lengths | None = None) -> Work:
    requests = conversations()[:num_requests]
    text = f"{num_requests} requests, ShareGPT lengths"
    return Work(text, [one.clipped(most) for one in requests])


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests that come one by one."""

    shares: tuple[float, ...] = (0.5, 0.8, 0.95)  #: of the rate at which the engine is saturated
    ramp_s: float = 8.0  #: in which the engine fills; what happens then is not counted
    window_s: float = 10.0
    patience_s: float = 15.0  #: for first tokens, after the last arrival
    max_lengths: Lengths | None = None  #: None: as they are in ShareGPT
    num_running: int = 64  #: while long prompts come
    running: Lengths = field(default=Lengths(128, 2000))
    long_prompt: Lengths = field(default=Lengths(3500, 16))
    long_every_s: float = 0.5  #: in the mean
    long_begin_s: float = 2.0
    long_window_s: float = 8.0


@dataclass(frozen=True, slots=True)
class Scale:
    shapes_by_part: Mapping[str, tuple[Shape, ...]]
    engine: EngineConfig
    traffic: Mapping[str, Work]  #: by arm
    fill: Sequence[Work]  #: brings all kernels to the cache on disk
    prompts: tuple[int, ...] = (128, 512, 2048)  #: to their first token
    fixed: Lengths = field(default=Lengths(128, 128))  #: of one request, and of those below
    batches: tuple[int, int] = (64, 256)  #: that are asked for at once
    one_request: Lengths = field(default=Lengths(32, 256))  #: whose speed is compared with the bound
    num_runs: int = 3
    num_prompt_runs: int = 15
    arrivals: Arrivals = field(default_factory=Arrivals)

    @property
    def shapes(self) -> dict[str, Shape]:
        """All shapes by name."""
        return {shape.name: shape for shapes in self.shapes_by_part.values() for shape in shapes}


def _shape(name: str, model: str, family: str, architecture: str, **config: object) -> Shape:
    common = {"model_type": family, "architectures": [architecture], "max_position_embeddings": 4096}
    return Shape(name, model, {**common, **config}, "bfloat16")


LLAMA_2_7B = llama_shape("7B", "Llama-2-7B", max_positions=4096)
LLAMA_3_8B = llama_shape("8B", "Llama-3.1-8B", max_positions=8192)

#: Sizes that are nobody's favourites: few and many heads, wide and narrow, small and large vocabularies.
ODD_SHAPES = (
    _shape(
        "0.5B",
        "Qwen2.5-0.5B",
        "qwen2",
        "Qwen2ForCausalLM",
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151936,
        tie_word_embeddings=True,
    ),
    llama_shape("1B", "Llama-3.2-1B", max_positions=4096),
    _shape(
        "70B",
        "4 layers of Llama-3-70B",
        "llama",
        "LlamaForCausalLM",
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=4,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        tie_word_embeddings=False,
    ),
    _shape(
        "256k",
        "sizes of Gemma-2B, 256k words",
        "llama",
        "LlamaForCausalLM",
        hidden_size=2048,
        intermediate_size=16384,
        num_hidden_layers=18,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=256,
        vocab_size=256000,
        tie_word_embeddings=True,
    ),
    _shape(
        "falcon",
        "8 layers of Falcon-7B, 71 heads",
        "falcon",
        "FalconForCausalLM",
        hidden_size=4544,
        num_hidden_layers=8,
        num_attention_heads=71,
        vocab_size=65024,
        multi_query=True,
        parallel_attn=True,
        new_decoder_architecture=False,
        alibi=False,
        bias=False,
    ),
)

GPU = Scale(
    shapes_by_part={
        "engine": (LLAMA_2_7B,),
        "traffic": (LLAMA_2_7B, LLAMA_3_8B),
        "arrivals": (LLAMA_2_7B, LLAMA_3_8B),
        "shapes": ODD_SHAPES,
        "eight_bit": (
            replace(LLAMA_3_8B, name="8B-int8", model="Llama-3.1-8B in int8", quant="int8"),
            replace(LLAMA_3_8B, name="8B-fp8", model="Llama-3.1-8B in fp8", quant="fp8"),
        ),
        "four_bit": (
            LLAMA_3_8B,
            replace(LLAMA_3_8B, name="8B-int4", model="Llama-3.1-8B in int4", quant="int4"),
        ),
    },
    engine=EngineConfig(memory_fraction=0.8),
    traffic={
        "sharegpt": sharegpt(600),
        "long_prompts": even(64, 3500, 64, counts_prompts=True),
        "even": even(256, 128, 128),
        "long_answers": even(256, 32, 256),
        "shared_prefix": shared_prefix(256, 1024, 64, 64),
        "conversations": returning(64, 8, 128, 128),
    },
    fill=(sharegpt(64, Lengths(2000, 24)), even(4, 3500, 8), even(256, 32, 4), even(1, 128, 8)),
)

_TINY_SHAPE = Shape("tiny", "a tiny Llama", TINY_CONFIG, "float32")
_WIDE_SHAPE = replace(_TINY_SHAPE, name="wide", config={**TINY_CONFIG, "num_key_value_heads": 2})

#: Everything within seconds on a CPU; its numbers mean nothing.
TINY = Scale(
    shapes_by_part={
        "engine": (_TINY_SHAPE,),
        "traffic": (_TINY_SHAPE, _WIDE_SHAPE),
        "arrivals": (_TINY_SHAPE,),
        "shapes": (_WIDE_SHAPE,),
        "eight_bit": (replace(_TINY_SHAPE, name="tiny-int8", quant="int8"),),
        "four_bit": (replace(_TINY_SHAPE, name="tiny-int4", quant="int4"),),
    },
    engine=EngineConfig(max_batch_tokens=64, max_seqs=4, block_tokens=4, kv_bytes=1 << 20),
    traffic={
        "sharegpt": sharegpt(6, Lengths(60, 8)),
        "long_prompts": even(3, 90, 4, counts_prompts=True),
        "even": even(6, 8, 4),
        "long_answers": even(6, 4, 8),
        "shared_prefix": shared_prefix(6, 16, 4, 4),
        "conversations": returning(3, 3, 8, 4),
    },
    fill=(even(2, 8, 2),),
    prompts=(8, 80),
    fixed=Lengths(8, 6),
    batches=(2, 4),
    one_request=Lengths(4, 8),
    num_runs=1,
    num_prompt_runs=2,
    arrivals=Arrivals(
        shares=(0.5,),
        ramp_s=0.1,
        window_s=0.3,
        max_lengths=Lengths(60, 8),
        num_running=2,
        running=Lengths(8, 900),
        long_prompt=Lengths(90, 2),
        long_every_s=0.05,
        long_begin_s=0.1,
        long_window_s=0.3,
    ),
)

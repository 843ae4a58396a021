"""The setting of `bench.turns`: arms, models, memory and aims. Runs nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from bench.hosting import config_of
from bench.random_model import TINY

GIB = 1 << 30
#: A token is on time if it comes so long after its request's arrival, and a tenth of a second later for each
#: token before it.
FIRST_TOKEN_S = 1.0
TOKENS_PER_S = 10.0
#: How fast the traffic comes that a service has seen before anything is measured.
WARM_SPEED = 8.0
#: The speed of the trace that the aims are about.
AIM_SPEED = 3.0
#: Of requests with every token on time, at the highest speed that a device can be said to serve.
GOOD_SHARE = 0.9
#: What pausing one model and starting another may take besides the bytes and the prefill.
MAX_SWITCH_S = 0.02
#: How far the simulator may be from what was measured.
MAX_DIFFERENCE = 0.15


class Arm(StrEnum):
    """A way to share a device among models that do not fit together."""

    TURNS = "turns"
    DRAIN = "drain"  #: a busy model ends what it has for those that have waited too long
    ONE_AT_A_TIME = "one-at-a-time"  #: in order of arrival; those behind of the same model join in

    @property
    def title(self) -> str:
        return self.value.replace("-", " ")

    @property
    def takes_turns(self) -> bool:
        """True if the service is to take turns."""
        return self is Arm.TURNS


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A random model; its number in the setting is its seed."""

    name: str
    shape: str  #: as profiles name it
    config: Mapping[str, object]

    @property
    def vocab_size(self) -> int:
        size = self.config["vocab_size"]
        assert isinstance(size, int), f"{size=}"
        return size


@dataclass(frozen=True, slots=True)
class Setting:
    """The models and what they share."""

    models: tuple[BenchModel, ...]
    dtype: str
    kind: str  #: of the device
    max_prompt_tokens: int
    max_output_tokens: int
    warm_rows: int  #: requests that each model is warmed up with at once
    warm_window_s: (
        float  #: of the trace, from behind what is measured, that is replayed before at `WARM_SPEED`
    )
    copied_bytes: int  #: to measure the rate to the device
    start_s: float  #: about what a service takes until it is warm
    memory_bytes: int | None = None  #: None: for all models but the weights of one
    engine: Mapping[str, int] | None = None  #: settings of engines

    @property
    def shapes(self) -> dict[str, str]:
        """The shape of each model, by its name."""
        return {model.name: model.shape for model in self.models}


@dataclass(frozen=True, slots=True)
class Curve:
    """Models that are seldom asked for, all in host memory: how many of them can one device serve?"""

    shape: str
    memory_bytes: int  #: of the device
    rates_per_s: tuple[float, ...]  #: of requests for each model, by Poisson
    window_s: float
    max_models: int


_CONTEXT = 2048
_SHAPES = {"1B": "Llama-3.2-1B", "3B": "Llama-3.2-3B", "7B": "Llama-2-7B"}
H200 = Setting(
    models=tuple(
        BenchModel(f"m{number}-{shape.lower()}", shape, config_of(_SHAPES[shape], _CONTEXT))
        for number, shape in enumerate(("1B", "7B", "3B", "1B", "7B", "1B", "3B", "1B"))
    ),
    dtype="bfloat16",
    kind="cuda",
    max_prompt_tokens=1500,
    max_output_tokens=300,
    warm_rows=24,
    warm_window_s=60.0,
    copied_bytes=4 * GIB,
    start_s=60.0,
    memory_bytes=24 * GIB,
)
#: A whole H200, as a worker takes it if nothing else is said.
H200_CURVE = Curve("7B", 125 * GIB, (0.05, 0.1, 0.2, 0.5), 120.0, 128)
_SMALL = {
    **TINY,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "max_position_embeddings": 128,  # or KV would be most of what a model needs
}
SMALL = Setting(
    models=tuple(BenchModel(f"m{number}", "tiny", _SMALL) for number in range(3)),
    dtype="float32",
    kind="cpu",
    max_prompt_tokens=64,
    max_output_tokens=32,
    warm_rows=4,
    warm_window_s=6.0,
    copied_bytes=GIB // 4,
    start_s=15.0,
    engine={"max_batch_tokens": 512, "max_seqs": 16},
)

"""Ids and small frozen values that every folder may use."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum, StrEnum
from operator import attrgetter
from pathlib import Path
from typing import Literal, NewType

from hearth.core.errors import BadSampling

RequestId = NewType("RequestId", str)
ModelId = NewType("ModelId", str)  #: the name under which a model is deployed
Digest = NewType("Digest", str)  #: BLAKE3 in hexadecimal
AdapterId = NewType("AdapterId", str)  #: digest of the adapter's manifest
ChunkId = NewType("ChunkId", str)  #: `DIGEST-NUM_BYTES`
WorkerId = NewType("WorkerId", str)  #: one life of a worker process
NodeId = NewType("NodeId", str)  #: one life of a machine in the cluster

#: The node of the head, the machine that runs the gateway.
LOCAL = NodeId("local")
#: The name in its certificate.
HEAD = "head"


def node_of(worker: WorkerId) -> NodeId:
    """Return the node of a worker by its name: `gpu-2/w0`, or `w0` on the head's own node."""
    node, slash, _ = worker.rpartition("/")
    return NodeId(node) if slash else LOCAL


def stage_socket(stages_path: Path, worker: WorkerId) -> Path:
    """Return where a worker of this machine takes connections: `w0.1.sock` for `gpu-2/w0.1`."""
    return stages_path / f"{worker.rpartition('/')[2]}.sock"


def name_of(node: str) -> str:
    """Return the name of a node, without its lives: `gpu-2` for `gpu-2.1`."""
    return node.partition(".")[0]


def pool_of(kind: str, labels: Mapping[str, str]) -> str:
    """Return the pool of a worker: its kind of device and the labels of its node, like `cuda zone=a`."""
    return " ".join((kind, *sorted(f"{key}={value}" for key, value in labels.items())))


def kind_of(pool: str) -> str:
    return pool.partition(" ")[0]


def labels_of(pool: str) -> frozenset[str]:
    return frozenset(pool.split()[1:])


def server_name(node: str) -> str:
    """Return the name in the certificate of a node, by its own name or that of one of its lives."""
    return f"{HEAD if node == LOCAL else name_of(node)}.node.hearth"


def where_on_nodes(digest: str) -> str:
    """Return where nodes find a model or an adapter: at each other."""
    return f"hearth://{digest}"


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers of a model, which one member of a pipeline runs.

    The first stage has the embedding, too, and the last one the head.
    """

    layers: range


@dataclass(frozen=True, slots=True)
class Member:
    """A worker in a pipeline, with its layers: from `begin` up to, not including, `end`."""

    worker: WorkerId
    begin: int
    end: int
    gpu: int | None = None  #: the index of the worker's GPU on its node; None: a CPU


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Workers that run a model together, in the order of their layers, which are all of it."""

    name: str  #: never used again: other members make another pipeline
    members: tuple[Member, ...]
    num_blocks: int  #: of KV: promised on every member, without the sink

    @property
    def described(self) -> str:
        text = ""
        for at, one in enumerate(self.members):
            if at:
                before = self.members[at - 1]
                text += f", {transport_between(before.worker, before.gpu, one.worker, one.gpu)}, "
            text += f"layers {one.begin} to {one.end - 1} on {one.worker}"
        return text


def pipeline_name(model: ModelId, number: int) -> ModelId:
    """Return a name for stages of a model beside the whole model. No model is deployed under such a name."""
    return ModelId(f"{model}~{number}")


def model_of(hosted: ModelId) -> ModelId:
    """Return the deployed model that is hosted under a name."""
    return ModelId(hosted.partition("~")[0])


class Transport(StrEnum):
    """How hidden states get from one member of a pipeline to the next, and weights to another node."""

    DEVICE = "device memory"  #: that both map
    SHARED = "shared memory"
    TLS = "TLS"
    TCP = "TCP"  #: not encrypted, for weights alone


def transport_between(one: WorkerId, gpu: int | None, other: WorkerId, other_gpu: int | None) -> Transport:
    if node_of(one) != node_of(other):
        return Transport.TLS
    return Transport.SHARED if gpu is None or gpu != other_gpu else Transport.DEVICE


class Rung(StrEnum):
    """Where a chunk may be found, nearest to the device first."""

    HOST = "host"
    DISK = "disk"
    PEER = "peer"  #: host memory or disk of another node
    OBJECT = "object"


class Hold(IntEnum):
    """How firmly a model is held in memory, weakest first. An int, because books are indexed with it."""

    RETAINED = 0  #: idle past its keep_alive: its bytes stay until the memory is needed
    WARM = 1  #: idle within its keep_alive: its bytes go only when nothing retained is left
    PAUSED = 2  #: has requests and waits for its turn: its bytes go when nothing idle is left
    BUSY = 3  #: has requests, and its turn if turns are taken
    PINNED = 4  #: never gives way


#: A batch request is queued as if it came this much later, so it yields to interactive ones until then.
BATCH_PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Pace:
    """When the tokens of a request are due: earlier ones leave slack, which other requests may use."""

    first_token_s: float = 0.5  #: after its arrival
    tokens_per_s: float = 10.0  #: from then on; 0: not interactive
    max_pause_s: float = 1.5  #: between two tokens, however many were sent ahead

    @property
    def is_batch(self) -> bool:
        return self.tokens_per_s == 0

    @property
    def patience_s(self) -> float:
        """How long after its arrival the request yields to later ones."""
        return BATCH_PATIENCE_S if self.is_batch else 0.0


@dataclass(frozen=True, slots=True)
class WindowStatus:
    limit: int
    remaining: int
    reset_s: float  #: until all of it is left, if nothing more is taken


@dataclass(frozen=True, slots=True)
class RateStatus:
    requests: WindowStatus | None
    tokens: WindowStatus | None


class TurnEnd(StrEnum):
    IDLE = "idle"  #: it has no requests any more
    AHEAD = "ahead"  #: all its requests are ahead of their pace, and another model needs its room
    TIME = "time"  #: its time was over, and another model needs its room


class SnapshotOutcome(StrEnum):
    MADE = "made"
    FAILED = "failed"  #: none could be made
    USED = "used"
    PARTIAL = "partial"  #: it was used, and made before its model had adapters
    MISSING = "missing"  #: the model had none
    OUTDATED = "outdated"  #: it had one of another machine, software or configuration
    REFUSED = "refused"  #: the file is damaged, or not of this installation
    DISCARDED = "discarded"  #: it was used, and computed otherwise than an ordinary start


class SnapshotPhase(StrEnum):
    LOADING = "loading"  #: the model, for it has to be there
    WAITING = "waiting"  #: until no model of the worker has requests
    MEASURING = "measuring"  #: steps of all sizes, which captures them


class SamplingTable(StrEnum):
    """A table of [slots, vocabulary] that a sampler has only while a request needs it."""

    PENALTIES = "penalties"
    BIAS = "bias"


class Pooling(StrEnum):
    LAST = "last"  #: that of the last token, which alone has seen all of them
    MEAN = "mean"  #: the mean over all tokens


class FinishReason(StrEnum):
    STOP = "stop"  #: a stop token, a stop string or the end-of-sequence token
    LENGTH = "length"  #: `max_tokens` or the context is used up
    CANCELLED = "cancelled"  #: the caller gave up


@dataclass(frozen=True, slots=True)
class ThinkingSpec:
    """The thinking before an answer, which no schema or grammar applies to."""

    open: str  #: its marks
    close: str
    is_open: bool  #: the prompt ends with the opening mark; False: the model may write it, or answer at once
    budget_tokens: int | None  #: after which the closing mark is forced; None: unlimited


@dataclass(frozen=True, slots=True)
class GuideSpec:
    kind: Literal["any", "json_object", "json_schema", "lark", "grammar", "regex"]
    text: str = ""  #: the schema as JSON, the grammar (`grammar`: GBNF, too) or expression, if there is one
    thinking: ThinkingSpec | None = None  #: None: the output is the answer


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters, with the names of vLLM."""

    temperature: float = 1.0  #: 0 is greedy
    top_k: int = 0  #: 0 or -1 keeps every token
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  #: counts tokens of prompt and output
    presence_penalty: float = 0.0  #: counts tokens of the output
    frequency_penalty: float = 0.0  #: counts tokens of the output
    seed: int | None = None  #: None draws one per request
    max_tokens: int | None = 16  #: None: up to the end of the context; 0: only the prompt is computed
    min_tokens: int = 0  #: stop tokens are forbidden before
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  #: 0: only of the chosen token; n: also of the n best
    prompt_logprobs: int | None = None  #: the same for the tokens of the prompt
    logit_bias: Mapping[int, float] | None = field(default_factory=dict, hash=False)
    allowed_token_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias or {}))
        object.__setattr__(self, "top_k", 0 if self.top_k == -1 else self.top_k)
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        _check(self)

    # The same as the fields, in the one form that they have once they are checked.

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop or ())

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return tuple(self.stop_token_ids or ())

    @property
    def bias_by_token(self) -> Mapping[int, float]:
        return self.logit_bias or {}

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def resolved(
        self, *, stop: tuple[str, ...], stop_token_ids: tuple[int, ...], seed: int
    ) -> SamplingParams:
        """Return a copy with these stops and a seed, which are not checked again."""
        same = object.__new__(SamplingParams)  # `copy` takes six times as long
        for name, value in zip(_NAMES, _values(self), strict=True):
            object.__setattr__(same, name, value)
        object.__setattr__(same, "stop", stop)
        object.__setattr__(same, "stop_token_ids", stop_token_ids)
        object.__setattr__(same, "seed", seed)
        return same


def seed_of_answer(seed: int, index: int) -> int:
    """Return the seed of one of several answers to a prompt."""
    return (seed + index + 2**63) % 2**64 - 2**63


_NAMES = tuple(one.name for one in fields(SamplingParams))
_values = attrgetter(*_NAMES)

MAX_LOGPROBS = 20
MAX_BIAS = 100.0
#: Limits of the repetition penalty: logits are divided and multiplied by it, and must stay finite.
MIN_PENALTY, MAX_PENALTY = 1e-6, 1e6


def _check(p: SamplingParams) -> None:
    _in_range("temperature", p.temperature, 0.0, math.inf)
    _whole("top_k", p.top_k, 0, math.inf)
    _in_range("top_p", p.top_p, 0.0, 1.0, above=True)
    _in_range("min_p", p.min_p, 0.0, 1.0)
    _in_range("repetition_penalty", p.repetition_penalty, MIN_PENALTY, MAX_PENALTY)
    _in_range("presence_penalty", p.presence_penalty, -2.0, 2.0)
    _in_range("frequency_penalty", p.frequency_penalty, -2.0, 2.0)
    _whole("min_tokens", p.min_tokens, 0, math.inf)
    if p.max_tokens is not None:
        _whole("max_tokens", p.max_tokens, 0, math.inf)
        if p.min_tokens > p.max_tokens:
            raise BadSampling(
                f"`min_tokens` must not exceed `max_tokens`: {p.min_tokens} > {p.max_tokens}; "
                "raise `max_tokens` or lower `min_tokens`"
            )
    if p.seed is not None:
        _whole("seed", p.seed, -(2**63), 2**63 - 1)
    if p.logprobs is not None:
        _whole("logprobs", p.logprobs, 0, MAX_LOGPROBS)
    if p.prompt_logprobs is not None:
        _whole("prompt_logprobs", p.prompt_logprobs, 0, MAX_LOGPROBS)
    for stop in p.stop_strings:
        if not isinstance(stop, str):
            raise BadSampling(f"`stop` must hold strings, given: {stop!r}")
    if not all(p.stop_strings):
        raise BadSampling("`stop` holds an empty string; every stop string needs a character")
    if p.allowed_token_ids is not None and not p.allowed_token_ids:
        raise BadSampling("`allowed_token_ids` is empty, so no token could follow; name one or leave it out")
    for token, bias in p.bias_by_token.items():
        _in_range(f"logit_bias[{token}]", bias, -MAX_BIAS, MAX_BIAS)


def _whole(name: str, value: int, low: float, high: float) -> None:
    if isinstance(value, float):
        raise BadSampling(f"`{name}` must be a whole number, given: {value}")
    _in_range(name, value, low, high)


def _in_range(name: str, value: float, low: float, high: float, *, above: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadSampling(f"`{name}` must be a number, given: {value!r}")
    is_inside = (low < value if above else low <= value) and value <= high and not math.isinf(value)
    if not is_inside:
        bounds = f"{'above' if above else 'at least'} {low:g}"
        if not math.isinf(high):
            bounds += f" and at most {high:g}"
        raise BadSampling(f"`{name}` must be {bounds}, given: {value}")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The logprob of one sampled token, and those of the most likely tokens, best first."""

    logprob: float
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class RankedLogprobs:
    """The logprob and rank of one prompt token, and the logprobs of the most likely, best first."""

    logprob: float
    rank: int  #: among all tokens; 1: the most likely
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The logprobs of all tokens of a prompt but the first, in columns of little-endian 4-byte numbers."""

    num_top: int
    logprobs: bytes  #: float32 [tokens], of the prompt's own tokens
    ranks: bytes  #: int32 [tokens], of the same
    top_ids: bytes  #: int32 [tokens, num_top], of the most likely tokens, best first
    top_logprobs: bytes  #: float32 [tokens, num_top]

    def __len__(self) -> int:
        return len(self.logprobs) // 4

    def __iter__(self) -> Iterator[RankedLogprobs]:
        own, ranks = memoryview(self.logprobs).cast("f"), memoryview(self.ranks).cast("i")
        ids, best = memoryview(self.top_ids).cast("i"), memoryview(self.top_logprobs).cast("f")
        for at in range(len(self)):
            places = range(at * self.num_top, (at + 1) * self.num_top)
            yield RankedLogprobs(own[at], ranks[at], tuple(TokenLogprob(ids[i], best[i]) for i in places))


@dataclass(frozen=True, slots=True)
class PromptReading:
    """Readings of a prompt. They come with the first token."""

    embedding: bytes | None = None  #: little-endian float32 numbers, of length 1 as a vector
    logprobs: PromptLogprobs | None = None

    @property
    def num_bytes(self) -> int:
        scores = self.logprobs
        num_bytes = 0 if scores is None else 2 * len(scores.logprobs) + 2 * len(scores.top_logprobs)
        return num_bytes + len(self.embedding or b"")

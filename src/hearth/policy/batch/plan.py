"""The plan of one engine step, in plain ints: all that crosses from policy to the engine.

A running sequence holds a *slot*. On the device a slot owns a row of the block table, its sampling parameters
and the token it sampled last, so a decode row needs no token from the host.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Protocol

from hearth.core.errors import HearthError
from hearth.core.types import AdapterId, FinishReason, Pace, Pooling, RequestId, SamplingParams


class Guide(Protocol):
    """Constrains one output to a grammar, token by token. Mutable; written only by its batcher."""

    @property
    def mask(self) -> bytes:
        """Allowed next tokens, a bit each, lowest first, in whole 32-bit words; never none."""

    @property
    def num_free(self) -> int:
        """How many of the next tokens need no mask, whatever they are."""

    def take(self, token: int) -> FinishReason | None:
        """Accept `token`, which the mask allowed; return a reason if it completes the output.

        Raises:
            GuideStuck: the output is not complete, but no next token is known to be allowed.
        """


@dataclass(frozen=True, slots=True)
class EngineRequest:
    request_id: RequestId
    prompt: Sequence[int]  #: never changed; from `Intake` an array of "I", which is fast to copy
    sampling: SamplingParams
    #: Keeps prefixes of different tenants apart. Never shown: a tenant who knows it could compute digests.
    salt: bytes = field(default=b"", repr=False)
    output: tuple[int, ...] = ()  #: sampled elsewhere before; counts for all limits
    guide: Guide | None = field(default=None, compare=False, repr=False)  #: has taken `output`
    pooling: Pooling | None = None  #: of its embedding; None: none is wanted
    adapter: AdapterId | None = None  #: None: the bare model
    is_batch: bool = False  #: not interactive: its first token is not urgent
    line_s: float = 0.0  #: place in the queue: a time by any clock; equal ones go by arrival
    is_streamed: bool = True  #: each token is sent as it comes; False: all at the end

    def in_line(self, pace: Pace, arrived_s: float, now_s: float) -> EngineRequest:
        line_s = max(now_s, arrived_s + pace.patience_s)
        return replace(self, is_batch=pace.is_batch, line_s=line_s)

    def is_stopped_by(self, token: int, num_before: int) -> bool:
        return num_before >= self.sampling.min_tokens and token in self.sampling.stop_ids


class Admission(NamedTuple):
    """A sequence takes a slot, for the first time or again after a preemption."""

    request_id: RequestId
    slot: int
    tokens: Sequence[int]  #: prompt and output so far
    num_prompt_tokens: int
    num_cached_tokens: int  #: found in the prefix cache, not computed again
    sampling: SamplingParams


class TableWrite(NamedTuple):
    """`block_table[slot][begin:][:len(blocks)] = blocks`, before the rows run; no entry twice in a plan.

    The writes of a slot with a new sequence begin at 0 and leave no gap.
    """

    slot: int
    begin: int
    blocks: tuple[int, ...]


@dataclass(slots=True)
class TableWrites:
    """All writes of a plan, in columns: there may be hundreds. Mutable; written while planning."""

    slots: list[int] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)  #: of the blocks of each
    blocks: list[int] = field(default_factory=list)  #: of all of them, one behind the other

    @staticmethod
    def of(*writes: TableWrite) -> TableWrites:
        made = TableWrites()
        for write in writes:
            made.add(write.slot, write.begin, write.blocks)
        return made

    def __len__(self) -> int:
        return len(self.slots)

    def __iter__(self) -> Iterator[TableWrite]:
        at = 0
        for slot, begin, count in zip(self.slots, self.begins, self.counts, strict=True):
            yield TableWrite(slot, begin, tuple(self.blocks[at : at + count]))
            at += count

    def add(self, slot: int, begin: int, blocks: Sequence[int]) -> None:
        self.slots.append(slot)
        self.begins.append(begin)
        self.counts.append(len(blocks))
        self.blocks += blocks


@dataclass(frozen=True, slots=True)
class RowReading:
    pooling: Pooling | None  #: its hidden states, pooled; None: they are not wanted
    num_logprobs: int | None  #: most likely tokens at each place; None: no logprobs are wanted
    #: The tokens whose logprobs are wanted: each follows one of the row's, from its first on.
    targets: tuple[int, ...]


class Row(NamedTuple):
    request_id: RequestId
    slot: int
    start: int  #: position of the first token in the sequence
    num_tokens: int
    #: An array of "I" where it comes from a batcher; None: the one token that the slot sampled last (decode).
    tokens: Sequence[int] | None
    samples: bool  #: a token is sampled after the last one
    mask: bytes | None = None  #: the tokens that may be sampled, as in `Guide`; None: all
    reading: RowReading | None = None
    adapter: AdapterId | None = None

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows of one token each, the one that the slot sampled last. All of them sample."""

    request_ids: Sequence[RequestId] = ()
    slots: Sequence[int] = ()
    positions: Sequence[int] = ()  #: of the token in its sequence
    masks: Mapping[int, bytes] = field(default_factory=dict)  #: of guided rows, by index, as in `Guide`
    #: One for each row, or empty if no row has one. While the same requests decode step after step,
    #: this is the same object.
    adapters: Sequence[AdapterId | None] = ()

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One engine step with at least one row. Decode rows come first, then prompts."""

    step_id: int
    admissions: tuple[Admission, ...]
    table_writes: TableWrites
    decode: DecodeRows
    prompts: tuple[Row, ...]  #: only the last may be one that does not sample
    #: Computed once, because the engine reads them often.
    num_prompt_tokens: int = field(init=False)
    has_readings: bool = field(init=False)  #: a row has a reading
    has_adapters: bool = field(init=False)  #: a row has an adapter

    def __post_init__(self) -> None:
        set_field, adapters = partial(object.__setattr__, self), [row.adapter for row in self.prompts]
        set_field("num_prompt_tokens", sum([row.num_tokens for row in self.prompts]))
        set_field("has_readings", any(row.reading is not None for row in self.prompts))
        set_field("has_adapters", bool(self.decode.adapters) or any(adapters))

    @property
    def rows(self) -> tuple[Row, ...]:
        adapters = self.decode.adapters or [None] * len(self.decode)
        columns = zip(
            self.decode.request_ids, self.decode.slots, self.decode.positions, adapters, strict=True
        )
        decode = [
            Row(request_id, slot, position, 1, None, True, self.decode.masks.get(index), adapter=adapter)
            for index, (request_id, slot, position, adapter) in enumerate(columns)
        ]
        return (*decode, *self.prompts)

    @property
    def num_rows(self) -> int:
        return len(self.decode) + len(self.prompts)

    @property
    def num_decode_rows(self) -> int:
        return len(self.decode)

    @property
    def num_tokens(self) -> int:
        return len(self.decode) + self.num_prompt_tokens

    @property
    def num_samples(self) -> int:
        prompts = self.prompts
        return len(self.decode) + len(prompts) - (bool(prompts) and not prompts[-1].samples)

    @property
    def request_ids(self) -> Sequence[RequestId]:
        return [*self.decode.request_ids, *[row.request_id for row in self.prompts]]

    @property
    def sampled_ids(self) -> Sequence[RequestId]:
        prompts = [row.request_id for row in self.prompts if row.samples]
        return [*self.decode.request_ids, *prompts] if prompts else self.decode.request_ids

    @property
    def context_tokens(self) -> int:
        decode_tokens = sum(self.decode.positions) + len(self.decode)
        return decode_tokens + sum([row.start for row in self.prompts]) + self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class RequestFailed:
    request_id: RequestId
    error: HearthError


@dataclass(slots=True)
class CommittedStep:
    """Tokens that live requests got in one step, in columns of equal length."""

    request_ids: Sequence[RequestId] = ()
    tokens: Sequence[int] = ()
    sample_indices: Sequence[int] = ()  #: which of the step's samples each one was
    finished: dict[RequestId, FinishReason] = field(default_factory=dict)
    failures: list[RequestFailed] = field(default_factory=list)  #: requests that ended, behind their tokens

    def without(self, lost: Collection[int]) -> CommittedStep:
        kept = [index for index in self.sample_indices if index not in lost]
        return replace(
            self,
            request_ids=[self.request_ids[index] for index in kept],
            tokens=[self.tokens[index] for index in kept],
            sample_indices=kept,
        )

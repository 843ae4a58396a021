"""The plan of one engine step, in plain ints: the only thing that crosses from policy to the engine.

A sequence that runs holds a *slot*. On the device a slot owns a row of the block table, its sampling
parameters and the token it sampled last, so a decode row needs no token from the host.

What a plan may have many of is a named tuple, which is made in a fifth of the time of a frozen dataclass.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Protocol

from hearth.core.errors import HearthError
from hearth.core.types import AdapterId, FinishReason, Pace, Pooling, RequestId, SamplingParams


class Guide(Protocol):
    """Holds one output to a grammar, token by token. Mutable; written only by the batcher it was given to."""

    @property
    def mask(self) -> bytes:
        """Tokens that may come next, a bit each, lowest first, in whole words of 32 bits; never none."""

    def take(self, token: int) -> FinishReason | None:
        """Go on with `token`, which the mask allowed; return a reason if it completes the output.

        Raises:
            GuideStuck: the output is not complete, but no further token can be said to be allowed.
        """


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request as the batcher takes it: checked, with seed, stop ids and max_tokens resolved."""

    request_id: RequestId
    prompt: Sequence[int]  #: which nobody changes; from `Intake` an array of "I", which is copied as a whole
    sampling: SamplingParams
    #: Keeps prefixes of different tenants apart. A secret one also keeps tenants from computing digests of
    #: their own, so it is shown nowhere.
    salt: bytes = field(default=b"", repr=False)
    output: tuple[int, ...] = ()  #: what it had sampled before it came here; all limits count it
    guide: Guide | None = field(default=None, compare=False, repr=False)  #: has taken `output`
    pooling: Pooling | None = None  #: its embedding is wanted; None: it is not
    adapter: AdapterId | None = None  #: adds to the model, and keeps prefixes apart; None: the bare model
    is_batch: bool = False  #: nobody reads along, so that its first token is no more urgent than the others
    line_s: float = 0.0  #: since when it stands in line, by any clock; of equals the first that came is first
    is_streamed: bool = True  #: somebody sees each token as it comes; False: nobody sees one before the last

    def in_line(self, pace: Pace, arrived_s: float, now_s: float) -> EngineRequest:
        """Return the request at its place in line, now that its engine gets it.

        Nobody stands before those who were here earlier, but before batch requests while they give way.
        """
        line_s = max(now_s, arrived_s + pace.patience_s)
        return replace(self, is_batch=pace.is_batch, line_s=line_s)

    def is_stopped_by(self, token: int, num_before: int) -> bool:
        """True if a token that follows `num_before` sampled ones ends the request."""
        return num_before >= self.sampling.min_tokens and token in self.sampling.stop_ids


class Admission(NamedTuple):
    """A sequence takes a slot, for the first time or again after a preemption."""

    request_id: RequestId
    slot: int
    tokens: Sequence[int]  #: prompt and what has been sampled so far
    num_prompt_tokens: int
    num_cached_tokens: int  #: found in the prefix cache, not computed again
    sampling: SamplingParams


class TableWrite(NamedTuple):
    """`block_table[slot][begin:][:len(blocks)] = blocks`, before the rows run; no entry twice in a plan.

    Those of a slot that is given to a new sequence begin at 0 and leave no gap.
    """

    slot: int
    begin: int
    blocks: tuple[int, ...]


@dataclass(slots=True)
class TableWrites:
    """All writes of a plan, in columns, for there may be hundreds. Mutable; written by who makes the plan."""

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
        """Yield one by one, so not for a step in a hurry."""
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
    """A wish for more than a sample of a row; that of a whole prompt is that of all its rows."""

    pooling: Pooling | None  #: its hidden states, pooled; None: they are not wanted
    num_logprobs: int | None  #: most likely tokens at each place; None: no logprobs are wanted
    #: The tokens whose logprobs are wanted: each follows one of the row's, from its first on.
    targets: tuple[int, ...]


class Row(NamedTuple):
    """Consecutive tokens of one sequence."""

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
        """The position behind the last token."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows of one token each: what the slot sampled last. Every one of them samples.

    There may be a thousand of them in every step, so they are columns of equal length rather than `Row`s.
    """

    request_ids: Sequence[RequestId] = ()
    slots: Sequence[int] = ()
    positions: Sequence[int] = ()  #: of the token in its sequence
    masks: Mapping[int, bytes] = field(default_factory=dict)  #: of guided rows, by index, as in `Guide`
    #: One for each row, or none at all where no row has one. While the same requests decode step after step,
    #: it is the same object.
    adapters: Sequence[AdapterId | None] = ()

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One engine step; it has at least one row. Decode rows come first, then prompts."""

    step_id: int
    admissions: tuple[Admission, ...]
    table_writes: TableWrites
    decode: DecodeRows
    prompts: tuple[Row, ...]  #: only the last may be one that does not sample
    #: What whoever launches and measures a step asks for again and again.
    num_prompt_tokens: int = field(init=False)
    has_readings: bool = field(init=False)  #: more than samples is wanted of a row
    has_adapters: bool = field(init=False)  #: a row has an adapter

    def __post_init__(self) -> None:
        set_field, adapters = partial(object.__setattr__, self), [row.adapter for row in self.prompts]
        set_field("num_prompt_tokens", sum([row.num_tokens for row in self.prompts]))
        set_field("has_readings", any(row.reading is not None for row in self.prompts))
        set_field("has_adapters", bool(self.decode.adapters) or any(adapters))

    @property
    def rows(self) -> tuple[Row, ...]:
        """All rows one by one. Made anew by every call, so not for a step in a hurry."""
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
        """The request of each row, in order."""
        return [*self.decode.request_ids, *[row.request_id for row in self.prompts]]

    @property
    def sampled_ids(self) -> Sequence[RequestId]:
        """The request of each row that samples, in order."""
        prompts = [row.request_id for row in self.prompts if row.samples]
        return [*self.decode.request_ids, *prompts] if prompts else self.decode.request_ids

    @property
    def context_tokens(self) -> int:
        """Tokens that the rows look back on, their own included."""
        decode_tokens = sum(self.decode.positions) + len(self.decode)
        return decode_tokens + sum([row.start for row in self.prompts]) + self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A live request that ended in an error of its own; others are not affected."""

    request_id: RequestId
    error: HearthError


@dataclass(slots=True)
class CommittedStep:
    """Tokens that live requests got by one step, in columns of equal length. Written by its `StepCommit`."""

    request_ids: Sequence[RequestId] = ()
    tokens: Sequence[int] = ()
    sample_indices: Sequence[int] = ()  #: which of the step's samples each one was
    #: Requests that ended by their token.
    finished: dict[RequestId, FinishReason] = field(default_factory=dict)
    failures: list[RequestFailed] = field(default_factory=list)  #: requests that ended, behind their tokens

    def without(self, lost: Collection[int]) -> CommittedStep:
        """Return the step less the tokens of some samples."""
        kept = [index for index in self.sample_indices if index not in lost]
        return replace(
            self,
            request_ids=[self.request_ids[index] for index in kept],
            tokens=[self.tokens[index] for index in kept],
            sample_indices=kept,
        )

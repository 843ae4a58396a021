"""The plan of one engine step, in plain ints: the only thing that crosses from policy to the engine.

A sequence that runs holds a *slot*. On the device a slot owns a row of the block table, its sampling
parameters and the token it sampled last, so a decode row needs no token from the host.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from hearth.errors import HearthError
from hearth.types import FinishReason, RequestId, SamplingParams


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
    prompt: tuple[int, ...]
    sampling: SamplingParams
    #: Keeps prefixes of different adapters or tenants apart. A secret one also keeps tenants from computing
    #: digests of their own, so it is shown nowhere.
    salt: bytes = field(default=b"", repr=False)
    output: tuple[int, ...] = ()  #: what it had sampled before it came here; all limits count it
    guide: Guide | None = field(default=None, compare=False, repr=False)  #: has taken `output`


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence takes a slot, for the first time or again after a preemption."""

    request_id: RequestId
    slot: int
    tokens: tuple[int, ...]  #: prompt and what has been sampled so far
    num_prompt_tokens: int
    num_cached_tokens: int  #: found in the prefix cache, not computed again
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class TableWrite:
    """`block_table[slot][index:][:len(blocks)] = blocks`, before the rows run."""

    slot: int
    index: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """Consecutive tokens of one sequence."""

    request_id: RequestId
    slot: int
    start: int  #: position of the first token in the sequence
    num_tokens: int
    tokens: tuple[int, ...] | None  #: None: the one token that the slot sampled last (decode)
    samples: bool  #: a token is sampled after the last one
    mask: bytes | None = None  #: the tokens that may be sampled, as in `Guide`; None: all


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One engine step."""

    step_id: int
    admissions: tuple[Admission, ...]
    table_writes: tuple[TableWrite, ...]
    #: Decode rows first, then prefill rows; never empty. Only the last may be one that does not sample.
    rows: tuple[Row, ...]

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def num_decode_rows(self) -> int:
        return sum(row.tokens is None for row in self.rows)


@dataclass(frozen=True, slots=True)
class Emission:
    """One committed token of a live request."""

    request_id: RequestId
    token: int
    sample_index: int  #: which of the step's samples it was
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A live request that ended in an error of its own; others are not affected."""

    request_id: RequestId
    error: HearthError


@dataclass(frozen=True, slots=True)
class CommittedStep:
    """The result of one commit. Its lists are written by `Batcher.commit` alone."""

    emissions: list[Emission] = field(default_factory=list)
    failures: list[RequestFailed] = field(default_factory=list)

"""Sampling: from logits to tokens, all on the device. Neither detokenises nor decides when a request ends.

Logits pass, in this order: repetition penalty (prompt and output), presence and frequency penalties
(output), logit bias, allowed-token mask, the mask of a guide, ban of stop tokens before `min_tokens`.
Logprobs are taken here, from the log-softmax before temperature. Then come temperature, top-k, top-p, min-p
and the choice: the highest logit, for a random request after Gumbel noise is added. What runs is decided from
what the host knows of each slot, so the host never waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag

import numpy as np
import numpy.typing as npt
import torch

from hearth.engine.logit_bias import LogitBias, is_biased
from hearth.engine.noise import gumbel, noise_keys
from hearth.engine.optional_table import OptionalTable
from hearth.engine.penalties import Penalties, is_penalised
from hearth.engine.top_k_top_p import rank_cutoff
from hearth.engine.upload import Uploads
from hearth.models.buffers import zeros
from hearth.policy.batch.plan import Admission
from hearth.sizes import bias_buffers, bytes_of, penalty_buffers, sampled_pieces, sampler_buffers
from hearth.types import MAX_LOGPROBS, RequestId, SamplingTable

#: Beyond these a temperature is as good as greedy or uniform, and float32 quotients would not stay finite.
_MIN_TEMPERATURE, _MAX_TEMPERATURE = 1e-6, 1e6


@dataclass(frozen=True, slots=True)
class SampleRows:
    """Rows of logits, and the tokens that are to be sampled from them."""

    slots: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]  #: index in its sequence of each token to be sampled
    masks: Mapping[int, bytes]  #: by row, the tokens that its guide allows, as in `plan.Guide`

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, slots=True)
class Samples:
    """Sampled tokens on the device, one per row. If one row wants logprobs, they are there for all rows."""

    tokens: torch.Tensor  #: int64 [n], always of the vocabulary
    #: [n], the highest logit that the rules leave. Where it is not finite the row held NaN or infinity, or no
    #: token was allowed, and its sampled token and logprobs mean nothing.
    best_logits: torch.Tensor
    logprobs: torch.Tensor | None  #: [n], of the sampled tokens
    top_ids: torch.Tensor | None  #: [n, k], most likely first; k is the most that a row asked for
    top_logprobs: torch.Tensor | None  #: [n, k], minus infinity for a forbidden token
    num_logprobs: tuple[int | None, ...]  #: how many of the k each row asked for; None: no logprobs at all


class _Part(IntFlag):
    """A part of sampling that a request may need. One of which no part is asked takes its highest logit."""

    PENALTIES = 1
    BIAS = 2
    BAN = 4  #: of stop tokens, at first
    LOGPROBS = 8
    DRAW = 16
    TOP = 32  #: top-k or top-p
    MIN_P = 64


@dataclass(frozen=True, slots=True)
class _RowParts:
    """The parts that each row of a step needs."""

    by_row: npt.NDArray[np.uint8]
    needed: _Part  #: by any of them

    @staticmethod
    def of(by_row: npt.NDArray[np.uint8]) -> _RowParts:
        return _RowParts(by_row, _Part(int(np.bitwise_or.reduce(by_row, initial=0))))

    def rows(self, part: _Part) -> npt.NDArray[np.int64]:
        """Return the rows that need a part."""
        return np.flatnonzero(self.by_row & part.value) if self.needed & part else _NO_ROWS


_NO_ROWS = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class _Rules:
    """The rules of sampling for the request in a slot, as the host keeps them."""

    parts: _Part
    banned: tuple[int, ...]  #: stop ids, forbidden at positions before `banned_before`
    banned_before: int
    num_logprobs: int | None
    seed: int
    top_k: int  #: the vocabulary size where it is off


@dataclass(frozen=True, slots=True)
class _Work:
    """Which rows need which part of sampling. The host knows a tensor's length: `len` waits for nothing."""

    num_logprobs: tuple[int | None, ...]  #: of every row
    has_min_p: bool
    top_ks: list[int]  #: of the topped rows
    masks: torch.Tensor | None  #: of the guided rows, int32 [rows, words]
    slots: torch.Tensor  #: of every row
    penalised: torch.Tensor  #: rows
    penalty_rows: torch.Tensor  #: of the penalised rows, in their table
    biased: torch.Tensor  #: rows
    bias_rows: torch.Tensor  #: of the biased rows, in their table
    banned: torch.Tensor  #: row * vocabulary size + token
    random: torch.Tensor  #: rows
    keys: torch.Tensor  #: of the random rows
    topped: torch.Tensor  #: indices into `random` of rows with top-k or top-p
    guided: torch.Tensor  #: rows


class Sampler:
    """Samples the tokens of one engine. Mutable; one thread calls it, in the order of the steps."""

    def __init__(self, num_slots: int, vocab_size: int, uploads: Uploads) -> None:
        self._vocab_size = vocab_size
        self._uploads = uploads
        buffers = sampler_buffers(num_slots)
        #: The token that each slot sampled last, at a fixed address. The last row is a dummy for padding.
        self.tokens = zeros(buffers["tokens"], uploads.device)
        self._rules_by_slot: dict[int, _Rules] = {}
        #: The parts that the request in each slot needs, and its seed modulo 2^64.
        self._parts = np.zeros(num_slots, np.uint8)
        self._seeds = np.zeros(num_slots, np.uint64)
        #: Temperature, top-k, top-p, log of min-p; meaningful in slots with a random request.
        self._knobs = zeros(buffers["knobs"], uploads.device)
        self._penalties = OptionalTable(
            lambda num_rows, memory: Penalties(num_rows, vocab_size, uploads, memory),
            *(bytes_of(penalty_buffers(1, vocab_size)), num_slots),
        )
        self._bias = OptionalTable(
            lambda num_rows, memory: LogitBias(num_rows, vocab_size, uploads, memory),
            *(bytes_of(bias_buffers(1, vocab_size)), num_slots),
        )
        self._tables: dict[SamplingTable, OptionalTable[Penalties] | OptionalTable[LogitBias]] = {
            SamplingTable.PENALTIES: self._penalties,
            SamplingTable.BIAS: self._bias,
        }

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Give each slot to a request, forgetting the one before. Greedy requests alone cost no copy.

        A table that one of them needs, and that nobody has placed, is placed where torch finds memory; and so
        is one that has too few rows.
        """
        rules = [_rules(admission, self._vocab_size) for admission in admissions]
        for admission, rule in zip(admissions, rules, strict=True):
            self._rules_by_slot[admission.slot] = rule
            self._parts[admission.slot] = rule.parts
            self._seeds[admission.slot] = rule.seed % (1 << 64)
        if random := [a for a, r in zip(admissions, rules, strict=True) if r.parts & _Part.DRAW]:
            (slots,) = self._uploads.ints([a.slot for a in random])
            knobs = [knob for a in random for knob in _knobs(a, self._vocab_size)]
            self._knobs.index_copy_(0, slots, self._uploads.floats(knobs).view(-1, 4))
        self._penalties.admit([a for a in admissions if is_penalised(a.sampling)])
        self._bias.admit([a for a in admissions if is_biased(a.sampling)])

    def has_table(self, table: SamplingTable) -> bool:
        return self._tables[table].is_there

    def place_table(self, table: SamplingTable, memory: torch.Tensor | None) -> None:
        """Have a table lie in `memory`, with what it holds if it is there; None: where torch finds some.

        Steps in flight may still read it where it was.
        """
        self._tables[table].place(memory)

    def drop_table(self, table: SamplingTable) -> None:
        """Let go of a table, which may take some hundreds of MB: no row that needs it will be sampled.

        Steps in flight may still read it: whoever gets its memory next is queued behind those.
        """
        self._tables[table].drop()

    def free_row(self, table: SamplingTable, request_id: RequestId) -> None:
        """Give the row that a request had in a table to others: no row of the request will be sampled."""
        self._tables[table].free_row(request_id)

    def sample(self, logits: torch.Tensor, rows: SampleRows) -> Samples:
        """Choose a token for each row of float32 `logits`, which are overwritten, and note it in `tokens`."""
        assert logits.shape == (len(rows), self._vocab_size), f"{logits.shape=} {len(rows)=}"
        assert logits.dtype == torch.float32, f"{logits.dtype=}"
        work = self._sort_out(rows)
        self._process(logits, work)
        # Both propagate NaN, so that the best logit also tells whether the whole row is sound.
        if len(work.random) == len(rows):
            best = logits.amax(-1)
            tokens = self._draw(logits, best, work)
        else:
            # The index of `max` rather than `argmax`: several times faster on a CPU.
            best, tokens = logits.max(-1)
            if len(work.random):
                drawn = self._draw(logits[work.random], best[work.random], work)
                tokens.index_copy_(0, work.random, drawn)
        self.tokens.index_copy_(0, work.slots, tokens)
        if len(work.penalised):
            self._penalties.table.record(work.penalty_rows, tokens[work.penalised])
        return _with_logprobs(tokens, best, logits, work.num_logprobs)

    def _sort_out(self, rows: SampleRows) -> _Work:
        """Find which rows need which part, and send that to the device in one piece."""
        parts = _RowParts.of(self._parts[rows.slots])
        random = parts.rows(_Part.DRAW)
        topped = np.flatnonzero(parts.by_row[random] & _Part.TOP.value) if len(random) else random
        keys = noise_keys(self._seeds[rows.slots[random]], rows.positions[random]) if len(random) else random
        penalised, biased = parts.rows(_Part.PENALTIES), parts.rows(_Part.BIAS)
        num_logprobs: tuple[int | None, ...] = (None,) * len(rows)
        if parts.needed & _Part.LOGPROBS:
            num_logprobs = tuple(self._rules_by_slot[slot].num_logprobs for slot in rows.slots.tolist())
        return _Work(
            num_logprobs,
            bool(parts.needed & _Part.MIN_P),
            [self._rules_by_slot[slot].top_k for slot in rows.slots[random[topped]].tolist()],
            self._uploads.words(list(rows.masks.values())) if rows.masks else None,
            *self._uploads.ints(
                rows.slots,
                penalised,
                [self._penalties.row(slot) for slot in rows.slots[penalised].tolist()],
                biased,
                [self._bias.row(slot) for slot in rows.slots[biased].tolist()],
                self._banned(rows, parts.rows(_Part.BAN)),
                random,
                keys,
                topped,
                list(rows.masks),
            ),
        )

    def _banned(self, rows: SampleRows, early: npt.NDArray[np.int64]) -> list[int]:
        """Return the flat indices of logits that are forbidden because a stop token would come too early."""
        banned = []
        for row in early.tolist():
            rule = self._rules_by_slot[int(rows.slots[row])]
            if rows.positions[row] < rule.banned_before:
                banned += [row * self._vocab_size + token for token in rule.banned]
        return banned

    def _process(self, logits: torch.Tensor, work: _Work) -> None:
        """Apply every rule that shapes the distribution before temperature, in place.

        What is forbidden has minus infinity added rather than set, so that NaN and infinity stay to be seen.
        """
        if len(work.penalised):
            self._penalties.table.apply(logits, work.penalised, work.penalty_rows)
        if len(work.biased):
            self._bias.table.apply(logits, work.biased, work.bias_rows)
        if work.masks is not None:
            apply_masks(logits, work.guided, work.masks)
        if len(work.banned):
            flat = logits.view(-1)
            flat.index_add_(0, work.banned, flat.new_full((len(work.banned),), -math.inf))

    def _draw(self, logits: torch.Tensor, best: torch.Tensor, work: _Work) -> torch.Tensor:
        """Draw a token for each random row, given the processed logits of just these rows."""
        slots = work.slots[work.random]
        temperature, top_k, top_p, log_min_p = self._knobs[slots].unsqueeze(-1).unbind(1)
        # With the best at 0, min-p is a cutoff as it stands, and no temperature makes the best infinite.
        scaled = (logits - best.unsqueeze(-1)).div_(temperature)
        cutoff = log_min_p
        if work.top_ks:
            at = work.topped
            ranked = rank_cutoff(scaled[at], top_k[at], top_p[at], work.top_ks)
            cutoff = cutoff.index_copy(0, at, torch.maximum(cutoff[at], ranked))
        if work.top_ks or work.has_min_p:
            scaled.masked_fill_(scaled < cutoff, -math.inf)
        drawn = [
            scaled[piece].add_(gumbel(work.keys[piece], self._vocab_size)).max(-1).indices
            for piece in sampled_pieces(*scaled.shape)
        ]
        return torch.cat(drawn)


def _rules(admission: Admission, vocab_size: int) -> _Rules:
    sampling = admission.sampling
    # Top-k of 1 is greedy too; left to chance it would choose among ties.
    is_random = not sampling.is_greedy and sampling.top_k != 1
    assert sampling.seed is not None or not is_random, f"no seed: {admission.request_id}"
    top_k = min(sampling.top_k or vocab_size, vocab_size)
    # An id beyond the vocabulary is never sampled. Where only stop tokens are allowed, they stay allowed.
    stop_ids = {token for token in sampling.stop_ids if 0 <= token < vocab_size}
    allowed = sampling.allowed_token_ids or range(vocab_size)
    can_ban = sampling.min_tokens > 0 and not all(token in stop_ids for token in allowed)
    needs = {
        _Part.PENALTIES: is_penalised(sampling),
        _Part.BIAS: is_biased(sampling),
        _Part.BAN: can_ban and bool(stop_ids),
        _Part.LOGPROBS: sampling.logprobs is not None,
        _Part.DRAW: is_random,
        _Part.TOP: is_random and (top_k < vocab_size or sampling.top_p < 1.0),
        _Part.MIN_P: is_random and sampling.min_p > 0.0,
    }
    return _Rules(
        parts=_Part(sum(part for part, is_needed in needs.items() if is_needed)),
        banned=tuple(stop_ids),
        banned_before=admission.num_prompt_tokens + sampling.min_tokens,
        num_logprobs=sampling.logprobs,
        seed=sampling.seed or 0,
        top_k=top_k,
    )


def _knobs(admission: Admission, vocab_size: int) -> tuple[float, float, float, float]:
    sampling = admission.sampling
    return (
        min(max(sampling.temperature, _MIN_TEMPERATURE), _MAX_TEMPERATURE),
        min(sampling.top_k or vocab_size, vocab_size),
        sampling.top_p if sampling.top_p < 1.0 else math.inf,
        math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf,
    )


def apply_masks(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """Forbid in `logits[rows]`, in place, the tokens whose bit is 0. `masks`: int32 [rows, words]."""
    bits = 1 << torch.arange(8, dtype=torch.uint8, device=logits.device)
    for piece in sampled_pieces(len(rows), logits.shape[1]):
        is_forbidden = (masks[piece].view(torch.uint8).unsqueeze(-1) & bits == 0).flatten(1)
        is_forbidden = is_forbidden[:, : logits.shape[1]]
        bias = torch.zeros_like(is_forbidden, dtype=logits.dtype).masked_fill_(is_forbidden, -math.inf)
        logits.index_add_(0, rows[piece], bias)


def _with_logprobs(
    tokens: torch.Tensor, best: torch.Tensor, logits: torch.Tensor, num_logprobs: tuple[int | None, ...]
) -> Samples:
    num_top = max((num for num in num_logprobs if num is not None), default=None)
    if num_top is None:
        return Samples(tokens, best, None, None, None, num_logprobs)
    log_sum = logits.logsumexp(-1, keepdim=True)
    logprobs = (logits.gather(1, tokens.unsqueeze(-1)) - log_sum).squeeze(-1)
    if num_top == 0:
        return Samples(tokens, best, logprobs, None, None, num_logprobs)
    # Always as many as anybody may ask for: which of equals come first may depend on how many are ranked.
    top = logits.topk(min(MAX_LOGPROBS, logits.shape[-1]))
    ids, values = top.indices[:, :num_top].contiguous(), top.values[:, :num_top]
    return Samples(tokens, best, logprobs, ids, values - log_sum, num_logprobs)

"""Sampling: from logits to tokens, all on the device.

Logits pass, in this order: repetition penalty (prompt and output), presence and frequency penalties (output),
logit bias, allowed-token mask, the mask of a guide, ban of stop tokens before `min_tokens`. Logprobs are
taken here, from the log-softmax before temperature. Then come temperature, top-k, top-p, min-p and the
choice: the highest logit, with Gumbel noise added for a random request. What runs is decided by what the host
knows of each slot, so the host never waits for the device.

The highest logit of every row is always found, at the end of the captured part of a step (`take_best`). Most
rows need no more. `sample` does the rest for the others, and corrects their choice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from hearth.core.sizes import sampled_pieces
from hearth.core.types import MAX_LOGPROBS, SamplingParams
from hearth.engine.sampling_tables import SamplingTables, is_biased, is_penalised
from hearth.engine.upload import Uploads
from hearth.kernels.best_token import best_tokens
from hearth.kernels.draw import draw_tokens
from hearth.kernels.noise import signed64
from hearth.policy.batch.plan import Admission

#: Beyond these a temperature is greedy or uniform, and float32 quotients overflow.
_MIN_TEMPERATURE, _MAX_TEMPERATURE = 1e-6, 1e6


@dataclass(frozen=True, slots=True)
class SampleRows:
    slots: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]  #: of the last token of each sequence; the next is sampled
    masks: Mapping[int, bytes]  #: by row: allowed tokens, as in `plan.Guide`
    #: The same on the device, with a dummy slot for rows that do not sample.
    device_slots: torch.Tensor
    device_positions: torch.Tensor

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, slots=True)
class Samples:
    """Sampled tokens on the device, one per row. If one row requests logprobs, all rows have them."""

    #: int32 [n, 2]: a token of the vocabulary, and the bits of the highest logit after all rules. If that is
    #: not finite, the row held NaN or infinity or no token was allowed, and token and logprobs are
    #: meaningless. The next step overwrites it.
    chosen: torch.Tensor
    logprobs: torch.Tensor | None  #: [n], of the sampled tokens
    top_ids: torch.Tensor | None  #: [n, k], most likely first; k is the most that a row requests
    top_logprobs: torch.Tensor | None  #: [n, k], minus infinity for a forbidden token
    num_logprobs: tuple[int | None, ...]  #: how many of the k each row requests; None: no logprobs

    @property
    def tokens(self) -> torch.Tensor:
        return self.chosen[:, 0]


class _Part(IntEnum):
    """A part of sampling that a request may need. Without any, it takes its highest logit.

    Sets of parts are sums, as plain ints: Python's flags are ten times slower.
    """

    PENALTIES = 1
    BIAS = 2
    BAN = 4  #: of stop tokens, at first
    LOGPROBS = 8
    DRAW = 16  #: at random, with or without top-k, top-p and min-p


@dataclass(frozen=True, slots=True)
class _RowParts:
    by_row: npt.NDArray[np.uint8]
    needed: int  #: by any of them

    @staticmethod
    def of(by_row: npt.NDArray[np.uint8]) -> _RowParts:
        return _RowParts(by_row, int(np.bitwise_or.reduce(by_row, initial=0)))

    def rows(self, part: _Part) -> npt.NDArray[np.int64]:
        return np.flatnonzero(self.by_row & part.value) if self.needed & part else _NO_ROWS


_NO_ROWS = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class _Rules:
    parts: int  #: the sum of those that it needs
    banned: tuple[int, ...]  #: stop ids, forbidden at positions before `banned_before`
    banned_before: int
    num_logprobs: int | None


@dataclass(frozen=True, slots=True)
class _Work:
    num_logprobs: tuple[int | None, ...]  #: of every row
    masks: torch.Tensor | None  #: of the guided rows, int32 [rows, words]
    penalised: torch.Tensor  #: rows
    penalty_rows: torch.Tensor  #: of the penalised rows, in their table
    biased: torch.Tensor  #: rows
    bias_rows: torch.Tensor  #: of the biased rows, in their table
    banned: torch.Tensor  #: row * vocabulary size + token
    guided: torch.Tensor  #: rows


class Sampler:
    """Samples the tokens of one engine. Mutable; one thread calls it, in step order."""

    def __init__(self, buffers: Mapping[str, torch.Tensor], vocab_size: int, uploads: Uploads) -> None:
        self._vocab_size = vocab_size
        self._uploads = uploads
        #: The last token of each slot, at a fixed address. The last row is a dummy for padding.
        self.tokens = buffers["tokens"]
        #: `Samples.chosen` of the step that was queued last, at a fixed address.
        self.chosen = buffers["chosen"]
        num_slots = len(self.chosen)
        self._rules_by_slot: dict[int, _Rules] = {}
        self._parts = np.zeros(num_slots, np.uint8)
        self._parts_of_rows = buffers["parts"]  #: scratch of `best_tokens`
        #: As in `draw_tokens`; temperature is 0 for slots without a random request, and the dummy.
        self._knobs, self._seeds = buffers["knobs"], buffers["seeds"]
        self.tables = SamplingTables(num_slots, vocab_size, uploads)

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Give slots to requests. Greedy requests cost no copy.

        A needed table that is not placed, or has too few rows, is allocated by torch.
        """
        if not admissions:
            return
        admitted = [admission.slot for admission in admissions]
        rules = [_rules(admission, self._vocab_size) for admission in admissions]
        self._rules_by_slot.update(zip(admitted, rules, strict=True))
        new, before = np.array([one.parts for one in rules], np.uint8), self._parts[admitted]
        self._parts[admitted] = new
        needed, drawing = int(np.bitwise_or.reduce(new)), list[Admission]()
        if (needed | int(np.bitwise_or.reduce(before))) & _Part.DRAW:  # they draw, or follow one that did
            drawing = [admissions[at] for at in np.flatnonzero((new | before) & _Part.DRAW.value).tolist()]
        if drawing:
            seeds = [signed64(admission.sampling.seed or 0) for admission in drawing]
            slots, device_seeds = self._uploads.ints([admission.slot for admission in drawing], seeds)
            knobs = [knob for admission in drawing for knob in _knobs(admission, self._vocab_size)]
            self._knobs.index_copy_(0, slots, self._uploads.floats(knobs).view(-1, 4))
            self._seeds.index_copy_(0, slots, device_seeds)
        if needed & _Part.PENALTIES:
            self.tables.penalties.admit([a for a in admissions if is_penalised(a.sampling)])
        if needed & _Part.BIAS:
            self.tables.bias.admit([a for a in admissions if is_biased(a.sampling)])

    def take_best(self, logits: torch.Tensor, slots: torch.Tensor) -> None:
        """Choose the highest logit of each row, and write it to `tokens` for its slot.

        Needs nothing from the host, so it can be captured. `slots` (int32) may be longer than `logits`, and
        holds dummies where no row samples.
        """
        # NaN propagates, so the best logit shows whether the whole row is finite.
        best_tokens(
            logits,
            slots,
            chosen=self.chosen[: len(logits)],
            last_tokens=self.tokens,
            parts=self._parts_of_rows,
        )

    def sample(self, logits: torch.Tensor, rows: SampleRows, wide: torch.Tensor | None = None) -> Samples:
        """Choose a token for each row of `logits`, after `take_best` has seen them, and write it to `tokens`.

        `logits` may have more rows than `rows`; those do not sample. More than the highest is computed in
        float32: in place, or in `wide` if logits have fewer bits.
        """
        assert len(rows) <= len(logits), f"{logits.shape=} {len(rows)=}"
        assert logits.shape[1:] == (self._vocab_size,), f"{logits.shape=} {self._vocab_size=}"
        samples = Samples(self.chosen[: len(logits)], None, None, None, ())
        parts = _RowParts.of(self._parts[rows.slots])
        if not parts.needed and not rows.masks:
            return samples
        if logits.dtype != torch.float32:
            assert wide is not None, f"no memory for wide logits: {logits.dtype=}"
            logits = wide[: len(logits)].copy_(logits)
        work = self._sort_out(rows, parts) if parts.needed & ~_Part.DRAW or rows.masks else None
        sampled = logits[: len(rows)]
        if work is not None and self._process(sampled, work):
            self.take_best(sampled, rows.device_slots)
        if parts.needed & _Part.DRAW:
            self.draw(logits, rows)
        if work is None:
            return samples
        tokens = samples.tokens[: len(rows)].long()
        if len(work.penalised):
            self.tables.penalties.table.record(work.penalty_rows, tokens[work.penalised])
        return _with_logprobs(samples, tokens, sampled, work.num_logprobs)

    def draw(self, logits: torch.Tensor, rows: SampleRows) -> None:
        draw_tokens(
            logits,
            rows.device_slots,
            rows.device_positions,
            self._knobs,
            self._seeds,
            chosen=self.chosen[: len(logits)],
            last_tokens=self.tokens,
        )

    def _sort_out(self, rows: SampleRows, parts: _RowParts) -> _Work:
        penalised, biased = parts.rows(_Part.PENALTIES), parts.rows(_Part.BIAS)
        num_logprobs: tuple[int | None, ...] = (None,) * len(rows)
        if parts.needed & _Part.LOGPROBS:
            num_logprobs = tuple(self._rules_by_slot[slot].num_logprobs for slot in rows.slots.tolist())
        return _Work(
            num_logprobs,
            self._uploads.words(list(rows.masks.values())) if rows.masks else None,
            *self._uploads.ints(
                penalised,
                [self.tables.penalties.row(slot) for slot in rows.slots[penalised].tolist()],
                biased,
                [self.tables.bias.row(slot) for slot in rows.slots[biased].tolist()],
                self._banned(rows, parts.rows(_Part.BAN)),
                list(rows.masks),
            ),
        )

    def _banned(self, rows: SampleRows, early: npt.NDArray[np.int64]) -> list[int]:
        banned = []
        for row in early.tolist():
            rule = self._rules_by_slot[int(rows.slots[row])]
            if rows.positions[row] + 1 < rule.banned_before:
                banned += [row * self._vocab_size + token for token in rule.banned]
        return banned

    def _process(self, logits: torch.Tensor, work: _Work) -> bool:
        """Apply the rules that come before temperature, in place; False: there are none.

        Minus infinity is added rather than set, so that NaN and infinity stay visible.
        """
        if len(work.penalised):
            self.tables.penalties.table.apply(logits, work.penalised, work.penalty_rows)
        if len(work.biased):
            self.tables.bias.table.apply(logits, work.biased, work.bias_rows)
        if work.masks is not None:
            apply_masks(logits, work.guided, work.masks)
        if len(work.banned):
            flat = logits.view(-1)
            flat.index_add_(0, work.banned, flat.new_full((len(work.banned),), -math.inf))
        return work.masks is not None or any(map(len, (work.penalised, work.biased, work.banned)))


def _rules(admission: Admission, vocab_size: int) -> _Rules:
    sampling, parts = admission.sampling, 0
    if is_penalised(sampling):
        parts |= _Part.PENALTIES
    if is_biased(sampling):
        parts |= _Part.BIAS
    if sampling.logprobs is not None:
        parts |= _Part.LOGPROBS
    if _is_random(sampling):
        assert sampling.seed is not None, f"no seed: {admission.request_id}"
        parts |= _Part.DRAW
    if sampling.min_tokens > 0:
        # Ids beyond the vocabulary are never sampled. If only stop tokens are allowed, they stay allowed.
        stop_ids = {token for token in sampling.stop_ids if 0 <= token < vocab_size}
        allowed = sampling.allowed_token_ids or range(vocab_size)
        if stop_ids and not all(token in stop_ids for token in allowed):
            before = admission.num_prompt_tokens + sampling.min_tokens
            return _Rules(parts | _Part.BAN, tuple(stop_ids), before, sampling.logprobs)
    return _rules_without_ban(parts, sampling.logprobs)


@lru_cache(maxsize=256)
def _rules_without_ban(parts: int, num_logprobs: int | None) -> _Rules:
    return _Rules(parts, (), 0, num_logprobs)


def _is_random(sampling: SamplingParams) -> bool:
    """True if tokens are drawn. Top-k of 1 is greedy too: a draw would choose among ties."""
    return not sampling.is_greedy and sampling.top_k != 1


def _knobs(admission: Admission, vocab_size: int) -> tuple[float, float, float, float]:
    sampling = admission.sampling
    if not _is_random(sampling):
        return (0.0, vocab_size, math.inf, -math.inf)
    return (
        min(max(sampling.temperature, _MIN_TEMPERATURE), _MAX_TEMPERATURE),
        min(sampling.top_k or vocab_size, vocab_size),
        sampling.top_p if sampling.top_p < 1.0 else math.inf,
        math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf,
    )


def apply_masks(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """Forbid in `logits[rows]`, in place, tokens whose bit is 0. `masks`: int32 [rows, words]."""
    bits = 1 << torch.arange(8, dtype=torch.uint8, device=logits.device)
    for piece in sampled_pieces(len(rows), logits.shape[1]):
        is_forbidden = (masks[piece].view(torch.uint8).unsqueeze(-1) & bits == 0).flatten(1)
        is_forbidden = is_forbidden[:, : logits.shape[1]]
        bias = torch.zeros_like(is_forbidden, dtype=logits.dtype).masked_fill_(is_forbidden, -math.inf)
        logits.index_add_(0, rows[piece], bias)


def _with_logprobs(
    samples: Samples, tokens: torch.Tensor, logits: torch.Tensor, num_logprobs: tuple[int | None, ...]
) -> Samples:
    num_top = max((num for num in num_logprobs if num is not None), default=None)
    if num_top is None:
        return samples
    log_sum = logits.logsumexp(-1, keepdim=True)
    logprobs = (logits.gather(1, tokens.unsqueeze(-1)) - log_sum).squeeze(-1)
    if num_top == 0:
        return Samples(samples.chosen, logprobs, None, None, num_logprobs)
    # Always the maximum: which of equal logits comes first may depend on how many are ranked.
    top = logits.topk(min(MAX_LOGPROBS, logits.shape[-1]))
    ids, values = top.indices[:, :num_top].contiguous(), top.values[:, :num_top]
    return Samples(samples.chosen, logprobs, ids, values - log_sum, num_logprobs)

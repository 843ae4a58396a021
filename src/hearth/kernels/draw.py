"""Draws the tokens of random requests from their logits: temperature, top-k, top-p, min-p, Gumbel noise.

The torch reference sorts each row to find which tokens top-k and top-p keep. The kernels do not: they draw
from all tokens, and then check whether the drawn token is kept, which takes one more pass over the row. The
draw is the highest sum of logit and noise, so if it is kept it is also the highest of those kept: the token
that the reference draws. If it is not kept, neither is any token that is no more likely, and the next draw is
from the others. With a top-p of 0.9, nine of ten first draws are kept.

    x        (logit - highest logit) / temperature: 0 or less
    above    the tokens with a higher x: their number, and their mass, the sum of exp(x)
    kept     fewer than top-k are above, and with less mass than top-p of all that top-k keeps
"""

from __future__ import annotations

import math

import torch

from hearth.core.sizes import LOGIT_CHUNK, sampled_pieces
from hearth.kernels.best_token import highest
from hearth.kernels.jit import cdiv, launch, next_power_of_2, runs_triton, tl, triton
from hearth.kernels.noise import gumbel, noise_keys
from hearth.kernels.top_k_top_p import rank_cutoff

_BLOCK = 2048


def draw_tokens(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    knobs: torch.Tensor,
    seeds: torch.Tensor,
    *,
    chosen: torch.Tensor,
    last_tokens: torch.Tensor,
) -> None:
    """Set `chosen[row, 0]` and `last_tokens[slot]` to a token drawn from a row of float32 `logits`.

    `chosen` (int32 [rows, 2]) has the bits of the highest logit of each row after the token. `knobs` of a
    slot are temperature, top-k, top-p and the log of min-p; the last three are the vocabulary size, infinity
    and minus infinity if off. At temperature 0 nothing is drawn, and the row is unchanged. The noise depends
    on the slot's seed and on the position after the row's, `positions`. There may be more slots and positions
    than rows.
    """
    impl = draw_tokens_triton if runs_triton(logits) else draw_tokens_reference
    impl(logits, slots, positions, knobs, seeds, chosen=chosen, last_tokens=last_tokens)


def draw_tokens_reference(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    knobs: torch.Tensor,
    seeds: torch.Tensor,
    *,
    chosen: torch.Tensor,
    last_tokens: torch.Tensor,
) -> None:
    own_slots, vocab_size = slots[: len(logits)].long(), logits.shape[1]
    rows = knobs[own_slots, 0].nonzero().flatten()
    if not len(rows):
        return
    own_slots = own_slots[rows]
    temperature, top_k, top_p, log_min_p = knobs[own_slots].unsqueeze(-1).unbind(1)
    best = chosen[rows, 1].view(torch.float32).unsqueeze(-1)
    # With the best at 0, log(min-p) is the cutoff, and no temperature makes the best infinite.
    scaled = ((logits if len(rows) == len(logits) else logits[rows]) - best).div_(temperature)
    cutoff = log_min_p
    topped = ((top_k < vocab_size) | top_p.isfinite()).flatten().nonzero().flatten()
    if len(topped):
        top_ks = top_k[topped].flatten().int().tolist()
        ranked = rank_cutoff(scaled[topped], top_k[topped], top_p[topped], top_ks)
        cutoff = cutoff.index_copy(0, topped, torch.maximum(cutoff[topped], ranked))
    scaled.masked_fill_(scaled < cutoff, -math.inf)
    keys = noise_keys(seeds[own_slots], positions[rows] + 1)
    drawn = torch.cat(
        [
            highest(scaled[piece].add_(gumbel(keys[piece], vocab_size)))
            for piece in sampled_pieces(*scaled.shape)
        ]
    )
    chosen[rows, 0] = drawn.int()
    last_tokens[own_slots] = drawn


def draw_tokens_triton(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    knobs: torch.Tensor,
    seeds: torch.Tensor,
    *,
    chosen: torch.Tensor,
    last_tokens: torch.Tensor,
) -> None:
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == chosen.stride(1) == knobs.stride(1) == 1, "rows must be contiguous"
    assert knobs.stride(0) == 4, f"{knobs.stride()=}"
    assert chosen.stride(0) == 2, f"{chosen.stride()=}"
    if not num_rows:
        return
    # Chunks do not depend on the number of rows: sums are bitwise the same in any batch.
    num_chunks = cdiv(vocab_size, LOGIT_CHUNK)
    # Per chunk: score, x and id of the drawn token, and the mass of all tokens.
    firsts = torch.empty((num_rows, num_chunks, 4), dtype=torch.float32, device=logits.device)
    launch(
        _first_draw_kernel,
        (num_rows, num_chunks),
        firsts,
        logits,
        chosen,
        slots,
        positions,
        knobs,
        seeds,
        logits.stride(0),
        vocab_size,
        CHUNK=LOGIT_CHUNK,
        BLOCK=_BLOCK,
        num_warps=8,
    )
    launch(
        _draw_kernel,
        (num_rows,),
        chosen,
        last_tokens,
        firsts,
        logits,
        slots,
        positions,
        knobs,
        seeds,
        logits.stride(0),
        vocab_size,
        num_chunks,
        CHUNKS=next_power_of_2(num_chunks),
        BLOCK=_BLOCK,
        num_warps=8,
    )


@triton.jit(do_not_specialize=["stride", "vocab_size"])
def _first_draw_kernel(
    firsts,
    logits,
    chosen,
    slots,
    positions,
    knobs,
    seeds,
    stride,
    vocab_size,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    temperature = tl.load(knobs + 4 * slot)
    if temperature > 0.0:
        best = tl.load(chosen + 2 * row + 1).to(tl.float32, bitcast=True)
        key = _noise_key(tl.load(seeds + slot), tl.load(positions + row) + 1)
        begin = chunk * CHUNK
        end = tl.minimum(begin + CHUNK, vocab_size)
        source = logits + row * stride
        floor = tl.load(knobs + 4 * slot + 3)
        score, x, token, mass = _draw_between(
            source, best, temperature, key, begin, end, floor, -float("inf"), BLOCK
        )
        out = firsts + (row * tl.num_programs(1) + chunk) * 4
        tl.store(out, score)
        tl.store(out + 1, x)
        tl.store(out + 2, token.to(tl.float32, bitcast=True))
        tl.store(out + 3, mass)


@triton.jit(do_not_specialize=["stride", "vocab_size", "num_chunks"])
def _draw_kernel(
    chosen,
    last_tokens,
    firsts,
    logits,
    slots,
    positions,
    knobs,
    seeds,
    stride,
    vocab_size,
    num_chunks,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    temperature = tl.load(knobs + 4 * slot)
    if temperature > 0.0:
        best = tl.load(chosen + 2 * row + 1).to(tl.float32, bitcast=True)
        source = logits + row * stride
        chunk = tl.arange(0, CHUNKS)
        first, is_chunk = firsts + (row * num_chunks + chunk) * 4, chunk < num_chunks
        scores = tl.load(first, is_chunk, other=-float("inf"))
        tokens = tl.load(first + 2, is_chunk, other=0.0).to(tl.int32, bitcast=True)
        score = tl.max(scores, 0)
        token = tl.min(tl.where(is_chunk & (scores == score), tokens, vocab_size - 1), 0)
        x = tl.max(
            tl.where(
                is_chunk & (tokens == token), tl.load(first + 1, is_chunk, other=-float("inf")), -float("inf")
            ),
            0,
        )
        mass = tl.sum(tl.load(first + 3, is_chunk, other=0.0), 0)

        top_k, top_p = tl.load(knobs + 4 * slot + 1).to(tl.int32), tl.load(knobs + 4 * slot + 2)
        has_top_k, has_top_p = top_k < vocab_size, top_p < float("inf")
        if has_top_k & has_top_p:
            mass = _mass_of_top_k(source, best, temperature, vocab_size, top_k, BLOCK)
        # If sums are not finite, nothing can be drawn, and the loop ends.
        is_open = (has_top_k | has_top_p) & (x < 0.0) & (x > -float("inf"))
        while is_open:
            num_above, mass_above = _above(source, best, temperature, vocab_size, x, BLOCK)
            is_kept = (num_above < top_k) & ((top_p == float("inf")) | (mass_above < top_p * mass))
            if is_kept:
                is_open = is_open & False
            else:
                key = _noise_key(tl.load(seeds + slot), tl.load(positions + row) + 1)
                floor = tl.load(knobs + 4 * slot + 3)
                score, x, token, _ = _draw_between(
                    source, best, temperature, key, 0, vocab_size, floor, x, BLOCK
                )
                is_open = (x < 0.0) & (x > -float("inf"))
        tl.store(chosen + 2 * row, token)
        tl.store(last_tokens + slot, token.to(tl.int64))


@triton.jit
def _draw_between(source, best, temperature, key, begin, end, floor, beyond, BLOCK: tl.constexpr):
    """Return score, x and id of the token with the highest score, and the mass of all from `begin` to `end`.

    Only tokens with x >= `floor` and x > `beyond` are drawn; if there is none, x is minus infinity.
    """
    lane = tl.arange(0, BLOCK)
    best_score = tl.full((BLOCK,), -float("inf"), tl.float32)
    best_x = tl.full((BLOCK,), -float("inf"), tl.float32)
    best_token = tl.zeros((BLOCK,), tl.int32)
    masses = tl.zeros((BLOCK,), tl.float32)
    for at in range(begin, end, BLOCK):
        token = at + lane
        x = (tl.load(source + token, token < end, other=-float("inf")) - best) / temperature
        masses += tl.exp(x)
        score = x + _gumbel(key, token)
        is_better = (x >= floor) & (x > beyond) & (score > best_score)
        best_score = tl.where(is_better, score, best_score)
        best_x = tl.where(is_better, x, best_x)
        best_token = tl.where(is_better, token, best_token)
    score = tl.max(best_score, 0)
    # Of equals the first, like `max`.
    found = tl.min(tl.where(best_score == score, best_token, end - 1), 0)
    x = tl.max(tl.where((best_score == score) & (best_token == found), best_x, -float("inf")), 0)
    return score, x, found, tl.sum(masses, 0)


@triton.jit
def _above(source, best, temperature, vocab_size, limit, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    counts = tl.zeros((BLOCK,), tl.int32)
    masses = tl.zeros((BLOCK,), tl.float32)
    for at in range(0, vocab_size, BLOCK):
        token = at + lane
        x = (tl.load(source + token, token < vocab_size, other=-float("inf")) - best) / temperature
        is_above = x > limit
        counts += is_above.to(tl.int32)
        masses += tl.where(is_above, tl.exp(x), 0.0)
    return tl.sum(counts, 0), tl.sum(masses, 0)


@triton.jit
def _mass_of_top_k(source, best, temperature, vocab_size, top_k, BLOCK: tl.constexpr):
    """Return the mass of the `top_k` tokens with the highest x, exactly as many also with ties.

    Bisects the bits of -x, whose order as integers is that of the numbers.
    """
    low = tl.zeros((), tl.int32)  # no more than top_k are above this one
    high = tl.full((), 0x7F800000, tl.int32)  # more than top_k are above this one, or it is infinite
    is_open = low < high - 1
    while is_open:
        middle = low + (high - low) // 2
        num_above, _ = _above(
            source, best, temperature, vocab_size, -middle.to(tl.float32, bitcast=True), BLOCK
        )
        low = tl.where(num_above <= top_k, middle, low)
        high = tl.where(num_above <= top_k, high, middle)
        is_open = (low < high - 1) & (num_above != top_k)
    x = -low.to(tl.float32, bitcast=True)
    num_above, mass_above = _above(source, best, temperature, vocab_size, x, BLOCK)
    # If fewer are above, the rest are ties.
    return mass_above + (top_k - num_above) * tl.exp(x)


@triton.jit
def _noise_key(seed, position):
    """As `noise.noise_keys`."""
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    return _mix64(_mix64(seed.to(tl.uint64) + golden) + position.to(tl.uint64) * golden)


@triton.jit
def _mix64(x):
    x = (x ^ (x >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def _gumbel(key, token):
    """As `noise.gumbel`. log1p is not available everywhere, so small v use a series."""
    low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    bits = _mix32(_mix32(token.to(tl.uint32) ^ low) ^ high) & 0x7FFFFFFF
    v = tl.minimum((bits.to(tl.int32).to(tl.float32) + 0.5) * 2.0**-31, 1.0 - 2.0**-24)
    s = v / (2.0 - v)
    s2 = s * s
    series = 1.0 / 11 + s2 * (1.0 / 13 + s2 * (1.0 / 15))
    series = 1.0 + s2 * (1.0 / 3 + s2 * (1.0 / 5 + s2 * (1.0 / 7 + s2 * (1.0 / 9 + s2 * series))))
    return -tl.log(tl.where(v < 0.5, 2.0 * s * series, -tl.log(1.0 - v)))


@triton.jit
def _mix32(x):
    x = (x ^ (x >> 16)) * tl.full((), 0x7FEB352D, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full((), 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)

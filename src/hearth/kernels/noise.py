"""Random numbers that are a function of seed, position and token id, without state.

Gumbel noise added to logits makes the highest sum a draw from their softmax. Each number is a hash, so a
request draws the same noise in any batch, in any slot, on any device and after any preemption.
"""

from __future__ import annotations

import torch

_MASK64 = (1 << 64) - 1


def noise_key(seed: int, position: int) -> int:
    """As `noise_keys`, for one token."""
    return int(noise_keys(torch.tensor([signed64(seed)]), torch.tensor([position]))[0])


def noise_keys(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return an int64 key for each seed, as by `signed64`, and position; neighbouring keys share nothing."""
    return _mix64(_mix64(seeds + _GOLDEN) + positions.long() * _GOLDEN)


def signed64(number: int) -> int:
    return (number + (1 << 63) & _MASK64) - (1 << 63)


_GOLDEN = signed64(0x9E3779B97F4A7C15)
_MIX64 = signed64(0xBF58476D1CE4E5B9), signed64(0x94D049BB133111EB)


def gumbel(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return Gumbel noise for every token under each key: float32 [keys, vocab_size], always finite."""
    low, high = keys.contiguous().view(torch.int32).view(-1, 2, 1).unbind(1)
    bits = torch.arange(vocab_size, dtype=torch.int32, device=keys.device) ^ low
    _mix32_(bits).bitwise_xor_(high)
    _mix32_(bits).bitwise_and_(0x7FFFFFFF)
    # v is in (0, 1) and -log(-log(1 - v)) is Gumbel. The winners are the smallest v, where float32 is finest:
    # 31 bits reach 22, while -log(-log(v)) of a v near 1 would end at 16 in coarse steps. Large v would round
    # to 1, which is minus infinity, so they stop one float below.
    minus_v = bits.float().add_(0.5).mul_(-(2.0**-31)).clamp_(min=-(1.0 - 2.0**-24))
    return minus_v.log1p_().neg_().log_().neg_()


def _mix64(x: torch.Tensor) -> torch.Tensor:
    """Return the finaliser of splitmix64. int64 products wrap; shifts copy the sign, hence the masks."""
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * _MIX64[0]
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * _MIX64[1]
    return x ^ (x >> 31 & (1 << 33) - 1)


def _mix32_(x: torch.Tensor) -> torch.Tensor:
    """Hash by lowbias32 in place. int32 products wrap; shifts of int32 copy the sign, hence the masks."""
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= 0x7FEB352D
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= 0x846CA68B - (1 << 32)
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x

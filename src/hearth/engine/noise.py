"""Random numbers that are a function of seed, position and token id. Keeps no state and chooses no token.

Gumbel noise added to logits makes the highest sum a draw from their softmax. Each number is a hash, so a
request draws the same noise in any batch, in any slot, on any device and after any preemption.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK64 = (1 << 64) - 1


def noise_key(seed: int, position: int) -> int:
    """Return a signed 64-bit key for the token at `position`; neighbouring keys share nothing."""
    return int(noise_keys(np.array([seed & _MASK64], np.uint64), np.array([position]))[0])


def noise_keys(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the key of each pair of a seed, modulo 2^64, and a position."""
    return _mix64(_mix64(seeds + _GOLDEN) + positions.astype(np.uint64) * _GOLDEN).view(np.int64)


def gumbel(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return Gumbel noise for every token under each key: float32 [keys, vocab_size], always finite."""
    low, high = keys.contiguous().view(torch.int32).view(-1, 2, 1).unbind(1)
    bits = torch.arange(vocab_size, dtype=torch.int32, device=keys.device) ^ low
    _mix32_(bits).bitwise_xor_(high)
    _mix32_(bits).bitwise_and_(0x7FFFFFFF)
    # v lies in (0, 1) and -log(-log(1 - v)) is Gumbel. The winners are the smallest v, where float32 is
    # finest: 31 bits reach 22, while -log(-log(v)) of a v near 1 would end at 16 in coarse steps. Large v
    # would round to 1, that is to minus infinity, so they stop one float below.
    minus_v = bits.float().add_(0.5).mul_(-(2.0**-31)).clamp_(min=-(1.0 - 2.0**-24))
    return minus_v.log1p_().neg_().log_().neg_()


def _mix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the finaliser of splitmix64. Products wrap."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mix32_(x: torch.Tensor) -> torch.Tensor:
    """Hash by lowbias32 in place. int32 products wrap; shifts of int32 copy the sign, hence the masks."""
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= 0x7FEB352D
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= 0x846CA68B - (1 << 32)
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x

"""The random stream: a function of seed, position and token id, with the shape of a Gumbel distribution."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hearth.kernels.noise import gumbel, noise_key

KEYS = torch.tensor([noise_key(seed=7, position=position) for position in range(512)])


def test_noise_follows_the_gumbel_distribution() -> None:
    noise = gumbel(KEYS, 2048).double()

    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)
    for x in (-1.0, 0.0, 2.0, 5.0, 8.0):
        above = (noise > x).double().mean().item()
        assert above == pytest.approx(1 - math.exp(-math.exp(-x)), rel=0.1, abs=1e-4)


def test_neighbouring_tokens_positions_and_seeds_are_uncorrelated() -> None:
    noise = gumbel(KEYS, 2048)
    other_seed = gumbel(torch.tensor([noise_key(seed=8, position=p) for p in range(512)]), 2048)
    pairs = [(noise[:, 1:], noise[:, :-1]), (noise[1:], noise[:-1]), (noise, other_seed)]

    correlations = [torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].item() for a, b in pairs]

    assert max(map(abs, correlations)) < 0.005


def test_noise_of_a_token_does_not_depend_on_the_vocabulary_or_the_batch() -> None:
    whole = gumbel(KEYS, 1000)

    assert torch.equal(gumbel(KEYS[100:103], 64), whole[100:103, :64])


def test_noise_is_finite_at_both_ends_of_the_hash() -> None:
    # Keys that hash token 0 to all zeros and to all ones, found by running the hash backwards.
    smallest, largest = _key_for(0), _key_for(0x7FFFFFFF)

    noise = gumbel(torch.tensor([smallest, largest]), 1).flatten().tolist()

    assert noise == pytest.approx([math.log(2**32), -math.log(24 * math.log(2))], rel=1e-3)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**20))
def test_a_key_fits_64_bits_and_changes_with_seed_and_position(seed: int, position: int) -> None:
    key = noise_key(seed, position)

    assert -(2**63) <= key < 2**63
    assert key != noise_key(seed, position + 1)
    assert key != noise_key(seed + 1, position)


def _key_for(bits: int) -> int:
    """The key under which token 0 hashes to `bits`. Its low half is zero, so the first round yields zero."""
    high = bits
    high ^= high >> 16
    high = high * pow(0x846CA68B, -1, 1 << 32) % (1 << 32)
    high ^= (high >> 15) ^ (high >> 30)
    high = high * pow(0x7FEB352D, -1, 1 << 32) % (1 << 32)
    high ^= high >> 16
    return (high - (1 << 32) if high >> 31 else high) << 32

from __future__ import annotations

import pytest

from hearth.cli.figures import count, duration, precise, size


@pytest.mark.parametrize(
    ("num_bytes", "told"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (538 << 20, "538 MiB"), (3 << 29, "1.5 GiB")],
)
def test_sizes_have_the_largest_unit_that_fits(num_bytes: int, told: str) -> None:
    assert size(num_bytes) == told


@pytest.mark.parametrize(("number", "told"), [(12, "12"), (135_000_000, "135M"), (7_240_000_000, "7.2B")])
def test_parameters_are_counted_in_millions_and_billions(number: int, told: str) -> None:
    assert count(number) == told


@pytest.mark.parametrize(
    ("seconds", "told"), [(-1, "0s"), (0.4, "0s"), (59.6, "1m"), (252, "4m12s"), (93784, "1d2h")]
)
def test_durations_have_two_units(seconds: float, told: str) -> None:
    assert duration(seconds) == told


@pytest.mark.parametrize(
    ("seconds", "told"), [(0.00042, "0.4 ms"), (0.25, "250 ms"), (1.23456, "1.235 s"), (75.21, "75.2 s")]
)
def test_short_times_keep_their_digits(seconds: float, told: str) -> None:
    assert precise(seconds) == told

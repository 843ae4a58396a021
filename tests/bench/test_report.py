from __future__ import annotations

import pytest

from bench.report import percentiles


@pytest.mark.parametrize(
    ("values", "p50", "p90", "p99"),
    [
        ([3.0], 3.0, 3.0, 3.0),
        ([4.0, 1.0, 3.0, 2.0], 2.0, 4.0, 4.0),
        ([float(i) for i in range(1, 201)], 100, 180, 198),
    ],
)
def test_a_percentile_is_the_smallest_value_that_so_many_percent_do_not_exceed(
    values: list[float], p50: float, p90: float, p99: float
) -> None:
    found = percentiles(values)

    assert (found["p50"], found["p90"], found["p99"]) == (p50, p90, p99)
    assert (found["min"], found["max"], found["n"]) == (min(values), max(values), len(values))

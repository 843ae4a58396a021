"""Quantising a real model keeps its quality: perplexity on questions that it has not seen."""

from __future__ import annotations

import pytest

from bench.engine.perplexity import measure


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_int8_and_int4_cost_less_than_one_percent_and_fp8_less_than_five() -> None:
    """Int4 less than for other models: the file is in Q4_1, whose groups are the same."""
    found = measure(num_questions=3)

    assert found["int8"] < 1.01 * found["none"]
    assert found["int4"] < 1.01 * found["none"]
    assert found["fp8"] < 1.05 * found["none"]
    assert found["none"] < 40  # a model that has understood nothing is at thousands

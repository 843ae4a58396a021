"""Tables of adapters are made from answers that were measured; a part that failed has no line."""

from __future__ import annotations

import pytest

from bench.lora import rows


def test_a_step_with_adapters_stands_beside_their_bytes_and_one_without_beside_the_bare_model() -> None:
    step = {
        "step": "32 rows, ranks 8",
        "base_ms": 4.0,
        "base_with_adapters_loaded_ms": 4.1,
        "adapters_ms": 5.0,
        "bound_of_bytes_ms": 0.4,
        "aim_ms": 4.7,
    }

    found = rows.of_steps([{"projection": "qkv", "us": 3.0}, step, {"error": "RuntimeError()"}])

    assert [(row.measure, row.value, row.bound) for row in found] == [
        ("32 rows, ranks 8: an adapter each", 5.0, pytest.approx(4.5)),
        ("32 rows, ranks 8: none of them used", 4.1, 4.0),
    ]


def test_a_swap_stands_beside_one_copy_and_the_memory_of_adapters_beside_their_bytes() -> None:
    swap = {"part": "swap", "median_s": 0.002, "until_s": {"asked": 1e-5}, "copy_s": 0.0015, "aim_s": 0.002}
    memory = {"part": "memory", "place_s": 1e-5, "bytes": 4_000_000_000, "taken_bytes": 4_010_000_000}

    found = rows.of_swaps([swap, {"part": "swap", "error": "RuntimeError()"}, memory])

    assert [(row.unit, row.value, row.bound) for row in found] == [("ms", 2.0, 1.5), ("GB", 4.01, 4.0)]
    assert found[0].peers == {"FlashServe": 2.1, "S-LoRA": 12.5}


def test_what_requests_feel_stands_beside_the_same_with_all_adapters_there() -> None:
    times = {"p50": 0.004, "p99": 0.006}
    answers: list[rows.Answer] = [
        {"part": "cold", "cold_s": {"p50": 0.01}, "warm_s": {"p50": 0.007}, "aim_s": 0.005},
        {"part": "steps", "beside_adapters_there_s": times, "beside_adapters_that_come_s": times},
        {"part": "zipf, room for all", "tokens_per_s": 8000.0},
        {"part": "zipf, room for 100", "tokens_per_s": 7200.0},
        {"part": "zipf in waves, room for all", "error": "RuntimeError()"},
        {"part": "zipf in waves, room for 100", "tokens_per_s": 7200.0},
    ]

    found = rows.of_serving(answers)

    assert [(row.unit, row.value, row.bound) for row in found] == [
        ("ms", 10.0, 7.0),
        ("ms", 4.0, 4.0),
        ("ms", 6.0, 6.0),
        ("tokens/s", 7200.0, 8000.0),
    ]

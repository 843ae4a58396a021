"""Compilations are counted by whether a step waited for them, and those are logged."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from hearth.kernels.compilations import Compilations


def tell(counts: Compilations, *, cache_hit: bool) -> None:
    """Tell of a kernel as Triton does."""
    source = SimpleNamespace(
        name="_norm_kernel",
        fn=SimpleNamespace(arg_names=["out", "BLOCK"]),
        signature={"out": "*bf16", "BLOCK": "constexpr"},
        constants={(1,): 1024},
    )
    counts._note(src=source, metadata={}, times=SimpleNamespace(total=250_000), cache_hit=cache_hit)


def test_a_kernel_that_a_launch_has_to_compile_is_counted_and_logged_with_its_variant(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counts = Compilations()
    tell(counts, cache_hit=False)
    assert (counts.num_while_serving, counts.num_loads_while_serving, counts.num_ahead) == (1, 0, 0)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "kernel_compiled_while_serving kernel=_norm_kernel seconds=0.250 variant=`out=*bf16, BLOCK=1024`"
    )


def test_a_kernel_that_was_compiled_before_and_is_only_loaded_is_counted_apart() -> None:
    counts = Compilations()
    tell(counts, cache_hit=True)
    assert (counts.num_while_serving, counts.num_loads_while_serving, counts.num_ahead) == (0, 1, 0)


def test_what_nobody_waits_for_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    counts = Compilations()
    with counts.ahead():
        tell(counts, cache_hit=True)
        tell(counts, cache_hit=False)
    assert (counts.num_while_serving, counts.num_loads_while_serving, counts.num_ahead) == (0, 0, 1)
    assert caplog.records == []
    tell(counts, cache_hit=False)
    assert counts.num_while_serving == 1

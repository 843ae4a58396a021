"""How a worker's memory is drawn, on terminals of all kinds."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from hearth.cli.pool_bars import ASCII, MAX_BAR, MIN_BAR, UNICODE, keys_of, pool_lines, signs_for
from hearth.control.observe.pool_views import fallbacks
from hearth.control.observe.views import PartView, PoolView, ResidentView, WorkerView
from tests.cli.fake_service import PROCESSES

(WORKER,) = PROCESSES.workers
GIB = 1 << 30


def drawn(worker: WorkerView, width: int = 100, signs: dict[str, str] = UNICODE) -> list[str]:
    return [line.plain for line in pool_lines(worker, keys_of(PROCESSES.models), signs, width)]


def holding(*parts: PartView) -> WorkerView:
    pool = PoolView(0.0, parts, 0, {})
    return replace(WORKER, pool=pool, budget_bytes=sum(part.num_bytes for part in parts))


def test_a_bar_shows_whose_bytes_are_in_use_kept_and_free() -> None:
    assert drawn(WORKER) == [
        "",
        "w0  8.0 GiB",
        "  ░░░░░░░░░░░░░░░░░░░░░░████▒≈································",
        "  aaaaaaaaaaaaaaaaaaaaaabbbbb",
        "  █ weights 538 MiB  ░ retained 3.0 GiB  ▒ KV 100 MiB  ≈ workspace 100 MiB  · free 4.3 GiB",
    ]


def test_a_terminal_without_such_signs_gets_plain_ones() -> None:
    assert signs_for("ascii") is signs_for("latin-1") is signs_for("no-such-encoding") is ASCII
    assert signs_for("utf-8") is UNICODE
    bar, owners, legend = drawn(WORKER, signs=ASCII)[2:]
    assert bar == "  ======================####+~................................"
    assert owners == "  aaaaaaaaaaaaaaaaaaaaaabbbbb"
    assert legend.isascii()


def test_a_narrow_terminal_gets_a_shorter_bar_and_more_lines() -> None:
    assert drawn(WORKER, width=40) == [
        "",
        "w0  8.0 GiB",
        "  ░░░░░░░░░░░░░░██▒≈··················",
        "  aaaaaaaaaaaaaabbb",
        "  █ weights 538 MiB  ░ retained 3.0 GiB",
        "  ▒ KV 100 MiB  ≈ workspace 100 MiB",
        "  · free 4.3 GiB",
    ]
    assert len(drawn(WORKER, width=1)[2]) == MIN_BAR + 2


def test_models_differ_in_colour_too() -> None:
    bar = list(pool_lines(WORKER, keys_of(PROCESSES.models), UNICODE, 100))[2]
    assert isinstance(bar, Text)
    styles = [str(span.style) for span in bar.spans]
    assert styles == ["cyan", "magenta", "magenta", "dim", "dim"]


def test_shared_and_lost_bytes_have_signs_of_their_own() -> None:
    shared = PartView("weights", "active", None, 3 * GIB)
    lost = PartView("lost", "spare", None, GIB)
    lines = drawn(holding(PartView("weights", "active", "smol", 2 * GIB), shared, lost))
    assert lines[2:] == [
        "  " + "█" * 50 + "-" * 10,
        "  " + "b" * 20 + "*" * 30,
        "  █ weights 5.0 GiB  - lost 1.0 GiB",
    ]


def test_tables_have_a_sign_of_their_own() -> None:
    parts = (PartView("kv", "active", "smol", 3 * GIB), PartView("tables", "active", "smol", GIB))
    assert drawn(holding(*parts))[2:] == [
        "  " + "▒" * 45 + "≡" * 15,
        "  " + "b" * 60,
        "  ▒ KV 3.0 GiB  ≡ tables 1.0 GiB",
    ]


def test_an_empty_worker_is_free_and_has_no_owners() -> None:
    assert drawn(holding(PartView("free", "spare", None, GIB)))[2:] == ["  " + "·" * 60, "  · free 1.0 GiB"]


def test_a_worker_that_has_not_told_has_no_bar() -> None:
    assert drawn(replace(WORKER, pool=None)) == []


def test_what_was_told_long_ago_is_shown_with_its_age() -> None:
    assert WORKER.pool is not None
    old = replace(WORKER, pool=replace(WORKER.pool, age_s=75.0))
    assert drawn(old)[1] == "w0  8.0 GiB, reported 1m15s ago"


def test_fallbacks_are_named_below() -> None:
    assert WORKER.pool is not None
    fallen = replace(WORKER, pool=replace(WORKER.pool, fallbacks={"other": 2, "address": 1, "tables": 0}))
    assert list(fallbacks(fallen)) == [
        "fallback address: 1 at another address than planned",
        "fallback other: 2 times",
    ]
    assert drawn(fallen)[-2].strip() == "fallback address: 1 at another address than planned"


def test_every_worker_starts_with_the_first_letter() -> None:
    models = [
        ResidentView(f"m{number:02}", worker, "warm", 0, 0, 0, 0, None)
        for worker in ("w0", "w1")
        for number in range(64)
    ]
    keys = keys_of(models)
    assert (keys["w0", "m00"], keys["w1", "m00"], keys["w1", "m01"]) == ("a", "a", "b")
    assert (keys["w0", "m61"], keys["w0", "m62"], keys["w0", "m63"]) == ("9", "?", "?")


@given(
    st.lists(st.integers(1, 1 << 40), min_size=1, max_size=100),
    st.integers(1, 200),
    st.sampled_from([UNICODE, ASCII]),
)
def test_a_bar_is_as_long_as_it_may_be_and_few_parts_are_all_seen(
    sizes: list[int], width: int, signs: dict[str, str]
) -> None:
    kinds = ("weights", "kv")
    parts = [PartView(kinds[n % 2], "active", f"m{n // 2:03}", size) for n, size in enumerate(sizes)]
    worker = holding(*parts)
    models = [ResidentView(f"m{n:03}", "w0", "warm", 0, 0, 0, 0, None) for n in range(50)]
    bar = list(pool_lines(worker, keys_of(models), signs, width))[2].plain.removeprefix("  ")
    assert len(bar) == max(MIN_BAR, min(MAX_BAR, width - 4))
    if len(sizes) <= MIN_BAR // 2:
        runs = 1 + sum(one != other for one, other in pairwise(bar))
        assert runs == len(sizes)

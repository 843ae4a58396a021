from __future__ import annotations

from dataclasses import replace

from hearth.cli.waterfall import MIN_BAR, REASONS, waterfall
from hearth.control.observe.views import TimelineSpan
from hearth.core.types import WorkerId
from hearth.policy.fleet.events import Option, Why
from tests.cli.fake_service import EXPLANATION


def test_every_reason_of_the_scheduler_is_a_sentence() -> None:
    assert REASONS.keys() == set(Why)


def test_bars_lie_on_one_axis_of_time() -> None:
    lines = waterfall(EXPLANATION, width=60)

    assert lines == [
        "r1  smol  stop",
        "on w0: loaded into free memory",
        "38 prompt tokens (16 cached), 21 output tokens, 40.0 tokens/s after the first",
        "first token after 500 ms",
        "",
        "queue    █                                 1.0 ms",
        "load     █████████████                     399 ms  from disk",
        "prefill              ████                  100 ms",
        "decode                   ████████████████  500 ms",
        "         0                        1.000 s",
        "",
        "events",
        "  0.0 ms  queued",
        "  1.0 ms  placed       on w0",
        "  500 ms  first_token",
        "",
        "bytes loaded",
        "  device  286 MiB  already there, 477 MiB had to be loaded",
        "  disk    477 MiB  in 250 ms, 2.00 GB/s",
        "",
        "estimated cost per worker",
        "  w0  425 ms: queue 0.0 ms, load 400 ms of 477 MiB, 25 ms for 50% utilisation",
        "  w1  busy models fill it",
    ]


def test_the_cost_of_a_replica_includes_what_is_not_cached_of_the_prompt() -> None:
    option = Option(WorkerId("w0"), 0.0, 0.0, 1.0, 0.2, prompt_s=0.2, cached_tokens=1024)
    assert waterfall(replace(EXPLANATION, options=(option,)), width=60)[-1] == (
        "  w0  200 ms: queue 0.0 ms, load 0.0 ms, prompt 200 ms beyond 1024 cached tokens, "
        "0.0 ms for 100% utilisation"
    )


def test_a_request_that_never_ran_still_has_its_explanation() -> None:
    refused = replace(
        EXPLANATION,
        outcome="overloaded",
        error="512 requests wait",
        worker=None,
        why=None,
        options=(),
        rungs=(),
        reused_bytes=0,
        shared_bytes=0,
        marks=(),
        spans=(),
        tokens_per_s=None,
        first_token_s=None,
    )

    assert waterfall(refused, 80) == [
        "r1  smol  overloaded",
        "512 requests wait",
        "38 prompt tokens (16 cached), 21 output tokens",
        "",
    ]


def test_a_load_for_which_nothing_had_to_come_says_so() -> None:
    lines = waterfall(replace(EXPLANATION, rungs=(), reused_bytes=3 << 30), 80)
    assert "  device  3.0 GiB  already there, 0 B had to be loaded" in lines


def test_a_load_onto_an_empty_device_tells_of_its_rungs_alone() -> None:
    lines = waterfall(replace(EXPLANATION, reused_bytes=0), 80)
    assert lines[lines.index("bytes loaded") + 1] == "  disk  477 MiB  in 250 ms, 2.00 GB/s"


def test_what_another_load_was_reading_had_to_come_too() -> None:
    lines = waterfall(replace(EXPLANATION, shared_bytes=1 << 30), 80)
    at = lines.index("bytes loaded")
    assert lines[at + 1] == "  device  286 MiB  already there, 1.5 GiB had to be loaded"
    assert lines[at + 3] == "  shared  1.0 GiB  read by another load"


def test_preemptions_and_resumes_are_told() -> None:
    lines = waterfall(replace(EXPLANATION, num_preemptions=2, num_resumes=1), 80)
    assert "2 preemptions, 1 resumes on another worker" in lines


def test_a_span_of_no_time_is_still_seen_and_none_leaves_the_axis() -> None:
    spans = (TimelineSpan("queue", 0.0, 0.0), TimelineSpan("end", 2.0, 2.0))
    first, last, axis = waterfall(replace(EXPLANATION, spans=spans), width=1)[5:8]

    assert first.count("█") == last.count("█") == 1
    assert last.index("█") == len("queue  ") + MIN_BAR - 1
    assert axis.endswith("2.000 s")


def test_pauses_are_told_with_their_reason() -> None:
    spans = (*EXPLANATION.spans, TimelineSpan("paused", 0.6, 0.9, "its time was over"))
    paused = replace(EXPLANATION, why="turns", num_pauses=3, paused_s=0.3, num_late_tokens=2, spans=spans)
    lines = waterfall(paused, 80)
    assert lines[1] == "on w0: busy models fill the memory, so they take turns"
    assert "paused 3 times for other models, 300 ms in all" in lines
    assert "2 tokens later than its pace" in lines
    assert "1 token later than its pace" in waterfall(replace(paused, num_late_tokens=1), 80)
    assert any(line.startswith("paused ") and line.endswith("300 ms  its time was over") for line in lines)


def test_a_request_shows_what_its_client_calls_it() -> None:
    named = replace(EXPLANATION, client_request_id="order-17", traceparent="00-ab-cd-01")

    assert waterfall(named, 80)[:3] == [
        "r1  smol  stop",
        "client request id order-17",
        "traceparent 00-ab-cd-01",
    ]

"""Timelines become explanations: what they say of a warm, a cold and a resumed request."""

from __future__ import annotations

from msgspec import structs

from hearth.cli.waterfall import waterfall
from hearth.control.observe.explanation import explain
from hearth.control.observe.load_log import LoadLog
from hearth.control.observe.timeline import MAX_EXPLAINED, MAX_WAITS, Timeline, Timelines
from hearth.control.requests.caller import ANYBODY, OPERATOR, Caller, GroupId
from hearth.control.requests.correlation import Correlation, TraceParent
from hearth.core.messages import AdapterLoaded, ModelLoaded, RungBytes
from hearth.core.types import AdapterId, ModelId, RequestId, Rung, Transport, TurnEnd, WorkerId
from hearth.policy.fleet.events import Option

W0, W1 = WorkerId("w0"), WorkerId("w1")


def timeline() -> Timeline:
    return Timeline(RequestId("r"), "m", 100.0, arrived_at_s=5e9, num_prompt_tokens=7, group=ANYBODY.group)


def loaded() -> ModelLoaded:
    rungs = (RungBytes(Rung.HOST, 3_000_000, 0.1), RungBytes(Rung.DISK, 1_000_000, 0.3))
    return ModelLoaded(
        ModelId("m"),
        1,
        rungs,
        reused_bytes=6_000_000,
        shared_bytes=0,
        open_s=0.05,
        assemble_s=0.3,
        first_layer_s=0.1,
        total_s=0.5,
        place_s=0.2,
    )


def test_bytes_of_another_node_are_told_with_node_transport_and_speed() -> None:
    line = timeline()
    load = LoadLog(W0, 100.0)
    line.placed(100.0, W0, "free_room", (), load)
    rungs = (RungBytes(Rung.DISK, 1_000_000, 0.1), RungBytes(Rung.PEER, 3 << 30, 3.0, "gpu-2"))
    load.succeed(104.0, structs.replace(loaded(), rungs=rungs))
    assert [use.transport for use in explain(line, 105.0).rungs] == [None, Transport.TLS]
    told = "\n".join(waterfall(explain(line, 105.0, Transport.TCP), 80))
    assert "peer gpu-2 by TCP  3.0 GiB  in 3.000 s, 1.07 GB/s" in told


def test_a_warm_request_is_queue_prefill_and_decode() -> None:
    line = timeline()
    option = Option(W0, 0.0, 0.0, 0.5, 0.1)
    line.placed(100.5, W0, "resident", (option,), None)
    line.started(100.6, num_cached_tokens=4, waited_s=0.1)
    for now_s in (101.0, 101.5, 102.0):
        line.token(now_s)
    line.ended(102.0, "stop")
    told = explain(line, now_s=200.0)
    assert (told.outcome, told.worker, told.why, told.options) == ("stop", "w0", "resident", (option,))
    assert (told.queue_s, told.load_s, told.first_token_s, told.total_s) == (0.5, None, 1.0, 2.0)
    assert (told.num_cached_tokens, told.num_output_tokens, told.tokens_per_s) == (4, 3, 2.0)
    assert [(span.what, round(span.begin_s, 6), round(span.end_s, 6)) for span in told.spans] == [
        ("queue", 0.0, 0.5),
        ("prefill", 0.6, 1.0),
        ("decode", 1.0, 2.0),
    ]
    assert [mark.what for mark in told.marks] == ["queued", "placed", "started", "first_token", "ended"]


def test_a_request_for_an_adapter_shows_its_base_and_where_the_adapter_came_from() -> None:
    line = timeline()
    line.adapter = "tuned"
    line.placed(100.5, W0, "resident", (), None)
    assert explain(line, now_s=100.6).adapter_tier is None
    rungs = (RungBytes(Rung.HOST, 3_000_000, 0.001), RungBytes(Rung.DISK, 5_000_000, 0.2))
    line.adapter_loaded(100.8, AdapterLoaded(AdapterId("a"), (1,), 8_000_000, rungs, 0.05, 0.25))
    line.started(100.9, num_cached_tokens=0, waited_s=0.4)
    told = explain(line, now_s=101.0)

    assert (told.model, told.base, told.adapter_tier) == ("tuned", "m", "disk")
    assert (told.adapter_wait_s, told.adapter_load_s) == (0.05, 0.25)
    (span,) = (span for span in told.spans if span.what == "adapter")
    assert (round(span.begin_s, 6), round(span.end_s, 6)) == (0.55, 0.8)
    assert span.detail == "3.0 MB from host, 5.0 MB from disk, after 0.050 s until it had room"
    assert "loaded from disk in 250 ms after waiting 50 ms for memory" in "\n".join(waterfall(told, 80))


def test_kernels_that_came_to_the_device_are_shown_behind_the_engine() -> None:
    line, load = timeline(), LoadLog(W0, began_s=100.0)
    line.placed(100.0, W0, "free_room", (), load)
    load.succeed(100.8, structs.replace(loaded(), kernels_s=0.06))
    told = explain(line, now_s=101.0)
    spans = {span.what: (round(span.begin_s, 6), round(span.end_s, 6)) for span in told.spans}
    assert (spans["assemble"], spans["kernels"]) == ((0.25, 0.29), (0.29, 0.35))
    load.succeed(100.8, structs.replace(loaded(), kernels_s=1e-6))
    assert "kernels" not in {span.what for span in explain(line, now_s=101.0).spans}, "they were there"


def test_a_request_whose_adapter_was_there_says_so() -> None:
    line = timeline()
    line.adapter = "tuned"
    line.placed(100.5, W0, "resident", (), None)
    line.started(100.6, num_cached_tokens=0, waited_s=0.1)
    told = explain(line, now_s=101.0)

    assert (told.adapter_tier, told.adapter_load_s) == ("device", 0.0)
    assert "an adapter of m, already on the device" in waterfall(told, 80)


def test_a_cold_request_shows_the_load_that_it_waited_for() -> None:
    line = timeline()
    load = LoadLog(W0, began_s=100.0)
    line.placed(100.0, W0, "free_room", (), load)
    for number in range(1, 5):
        load.progressed(100.3 + number / 10, number)
    load.succeed(100.8, loaded())
    line.token(100.9)
    told = explain(line, now_s=101.0)
    assert told.outcome == "running"
    assert told.load_s is not None
    assert round(told.load_s, 6) == 0.8
    assert told.reused_bytes == 6_000_000
    assert {view.rung: view.num_bytes for view in told.rungs} == {Rung.HOST: 3_000_000, Rung.DISK: 1_000_000}
    spans = {span.what: (round(span.begin_s, 6), round(span.end_s, 6)) for span in told.spans}
    assert spans["open"] == (0.0, 0.05)
    assert spans["place"] == (0.05, 0.25)
    assert spans["assemble"] == (0.25, 0.35)
    assert "kernels" not in spans, "they were there"
    assert spans["load"] == (0.25, 0.75), "it begins before the engine is there"
    details = {span.what: span.detail for span in told.spans}
    assert details["load"] == "0.003 GB from host, 0.001 GB from disk, 0.006 GB were there"
    assert [mark.detail for mark in told.marks if mark.what == "layers_ready"] == [
        "1 layer can run",
        "2 layers can run",
        "3 layers can run",
    ]
    others = [mark.what for mark in told.marks if mark.what != "layers_ready"]
    assert others == ["queued", "placed", "first_layer", "loaded", "first_token"]


def test_a_load_that_began_before_the_request_begins_with_it() -> None:
    line = timeline()
    line.placed(100.0, W0, "loading", (), LoadLog(W0, began_s=90.0))
    (span,) = [span for span in explain(line, now_s=101.0).spans if span.what == "load"]
    assert (span.begin_s, span.end_s, span.detail) == (0.0, 1.0, "under way")


def test_a_load_that_nobody_ordered_began_before_it_was_heard_of() -> None:
    load = LoadLog(W0, began_s=101.0, is_again=True)
    load.succeed(101.0, loaded())
    assert (round(load.began_s, 6), round(load.first_layer_at_s or 0.0, 6)) == (100.25, 100.6)


def again(began_s: float) -> LoadLog:
    return LoadLog(W0, began_s=began_s, is_again=True)


def test_a_load_that_was_expected_and_never_came_does_not_outlive_its_request() -> None:
    line, load = timeline(), again(100.0)
    line.placed(100.0, W0, "resident", (), load)
    assert explain(line, now_s=100.5).load_s == 0.5
    line.ended(101.0, "bad_request", "no such grammar")
    assert explain(line, now_s=700.0).load_s == 1.0
    load.call_off()
    told = explain(line, now_s=700.0)
    assert (told.load_s, [span.what for span in told.spans]) == (None, ["queue"])


def test_a_load_that_was_expected_of_one_request_and_came_for_another_is_the_others_alone() -> None:
    first, second, load = timeline(), timeline(), again(100.0)
    first.placed(100.0, W0, "resident", (), load)
    first.ended(101.0, "cancelled")
    second.arrived_s = 300.0
    second.placed(300.0, W0, "resident", (), load)
    assert explain(second, now_s=300.5).load_s == 0.5
    load.progressed(300.6, 3)
    load.succeed(300.75, loaded())
    assert explain(second, now_s=310.0).load_s == 0.75
    told = explain(first, now_s=310.0)
    assert (told.load_s, told.rungs, told.total_s) == (None, (), 1.0)
    assert [mark.what for mark in told.marks] == ["queued", "placed", "ended"]


def test_a_request_that_was_cancelled_during_a_load_saw_it_until_then() -> None:
    line, load = timeline(), LoadLog(W0, began_s=100.0)
    line.placed(100.0, W0, "free_room", (), load)
    line.ended(100.5, "cancelled")
    load.succeed(100.75, loaded())
    told = explain(line, now_s=200.0)
    assert told.load_s == 0.5
    assert max(span.end_s for span in told.spans) == 0.5
    assert told.marks[-1].what == "ended"


def test_a_resumed_request_has_two_stays() -> None:
    line = timeline()
    line.placed(100.0, W0, "resident", (), None)
    line.started(100.0, 0, 0.0)
    line.token(101.0)
    line.lost(102.0, W0)
    line.placed(103.0, W1, "resident", (), None)
    line.started(103.0, 0, 0.0)
    line.token(104.0)
    line.ended(104.0, "length")
    told = explain(line, now_s=200.0)
    assert (told.worker, told.num_resumes, told.num_output_tokens) == ("w1", 1, 2)
    assert [(s.what, s.begin_s, s.end_s) for s in told.spans if s.what != "queue"] == [
        ("prefill", 0.0, 1.0),
        ("decode", 1.0, 2.0),
        ("prefill", 3.0, 4.0),
        ("decode", 4.0, 4.0),
    ]
    assert "worker_lost" in [mark.what for mark in told.marks]
    assert "resumed" in [mark.what for mark in told.marks]


def test_a_request_that_was_refused_is_explained_too() -> None:
    line = timeline()
    line.ended(100.2, "no_capacity", "needs 3 GB")
    told = explain(line, now_s=300.0)
    assert (told.outcome, told.error, told.worker) == ("no_capacity", "needs 3 GB", None)
    assert [span.what for span in told.spans] == ["queue"]


def all_of(_: Timeline) -> bool:
    return True


def test_the_last_thousand_are_kept() -> None:
    timelines = Timelines()
    for number in range(MAX_EXPLAINED + 5):
        timelines.add(Timeline(RequestId(f"r{number}"), "m", 0.0, 0.0, 1, ANYBODY.group))
    assert timelines.find("r4", all_of) is None
    assert timelines.find("r5", all_of) is not None
    assert timelines.find(f"r{MAX_EXPLAINED + 4}", all_of) is not None


def test_a_request_is_found_by_its_own_id_or_by_the_last_that_its_client_gave() -> None:
    timelines = Timelines()
    names = [("r0", "ada", "mine"), ("r1", "bob", "mine"), ("r2", "bob", "r0"), ("r3", "ada", "mine")]
    for request_id, group, client_id in names:
        correlation = Correlation(client_id)
        timelines.add(
            Timeline(RequestId(request_id), "m", 0.0, 0.0, 1, GroupId(group), correlation=correlation)
        )

    def found(request_id: str, caller: Caller) -> str | None:
        timeline = timelines.find(request_id, lambda one: caller.can_see(one.group))
        return None if timeline is None else timeline.request_id

    ada, bob = (Caller(name, "user", GroupId(name)) for name in ("ada", "bob"))
    assert [found("mine", caller) for caller in (ada, bob, OPERATOR)] == ["r3", "r1", "r3"]
    # Who calls a request by another's id hides nothing, and sees nothing but his own.
    assert [found("r0", caller) for caller in (ada, bob, OPERATOR)] == ["r0", "r2", "r0"]
    assert found("r1", ada) is None


def test_the_clients_names_of_a_request_are_explained() -> None:
    trace = TraceParent("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", is_sampled=True)
    line = Timeline(RequestId("r0"), "m", 0.0, 0.0, 1, ANYBODY.group, correlation=Correlation("mine", trace))
    told = explain(line, 1.0)
    assert (told.request_id, told.client_request_id) == ("r0", "mine")
    assert told.traceparent == "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_every_pause_is_counted_and_the_first_ones_are_told() -> None:
    line = timeline()
    line.placed(100.0, W0, "resident", (), None)
    line.turn_ended(100.0)
    assert line.turn_began(100.001) is None, "no token was sent before: that is no pause"
    line.token(100.5)
    for number in range(40):
        line.turn_ended(101.0 + number, TurnEnd.AHEAD)
        assert line.turn_began(101.25 + number) == 0.25
    line.turn_ended(150.0, TurnEnd.TIME)
    told = explain(line, now_s=152.0)
    assert (told.num_pauses, told.paused_s) == (41, 12.0)
    paused = [span for span in told.spans if span.what == "paused"]
    assert len(paused) == MAX_WAITS - 1, "one was the wait for the first turn, which took no time"
    assert (paused[0].begin_s, paused[0].end_s) == (1.0, 1.25)
    assert "turn" not in [span.what for span in told.spans]
    assert next(mark.detail for mark in told.marks if mark.what == "turn") == "after 0.250 s"


def test_a_request_that_ends_or_loses_its_worker_while_paused_is_paused_no_longer() -> None:
    line = timeline()
    line.placed(100.0, W0, "resident", (), None)
    line.token(100.5)
    line.turn_ended(101.0, TurnEnd.TIME)
    line.lost(102.0, W0)
    line.placed(103.0, W1, "free_room", (), None)
    line.turn_ended(104.0, TurnEnd.TIME)
    line.ended(105.0, "cancelled")
    told = explain(line, now_s=200.0)
    assert (told.num_pauses, told.paused_s) == (2, 2.0)
    assert [(span.begin_s, span.end_s) for span in told.spans if span.what == "paused"] == [
        (1.0, 2.0),
        (4.0, 5.0),
    ]


def test_the_last_request_is_the_last_that_may_be_seen() -> None:
    timelines = Timelines()
    assert timelines.find("last", all_of) is None
    for request_id, model in (("r0", "a"), ("r1", "a"), ("r2", "b")):
        timelines.add(Timeline(RequestId(request_id), model, 1.0, 1.0, 1, ANYBODY.group))
    found = [timelines.find("last", may_see) for may_see in (all_of, lambda one: one.model == "a")]
    assert [one.request_id for one in found if one is not None] == ["r2", "r1"]

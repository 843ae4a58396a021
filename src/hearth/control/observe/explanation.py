"""Explains a request: the phases and moments of its timeline, for people. Reads no clock."""

from __future__ import annotations

from collections.abc import Iterator

from hearth.control.observe.load_log import LoadLog, place_of, slowest_tier
from hearth.control.observe.timeline import MIN_WAIT_S, Timeline, TurnWait, adapter_bytes
from hearth.control.observe.views import Explanation, RequestView, RungView, TimelineMark, TimelineSpan
from hearth.core.types import Rung, Transport


def explain(timeline: Timeline, now_s: float, between_nodes: Transport = Transport.TLS) -> Explanation:
    """`between_nodes`: how weights get from one node to another."""
    began, load = timeline.arrived_s, _awaited(timeline)
    loaded = None if load is None else load.loaded
    return Explanation(
        request_id=timeline.request_id,
        model=timeline.adapter or timeline.model,
        arrived_at_s=timeline.arrived_at_s,
        outcome=timeline.outcome,
        error=timeline.error,
        worker=timeline.stays[-1].worker if timeline.stays else None,
        why=timeline.why,
        options=timeline.options,
        num_prompt_tokens=timeline.num_prompt_tokens,
        num_cached_tokens=timeline.num_cached_tokens,
        num_output_tokens=timeline.num_output_tokens,
        queue_s=_queue_end_s(timeline, now_s) - began,
        load_s=None if load is None else _load_s(timeline, load, now_s),
        first_token_s=_since(began, timeline.first_token_s),
        total_s=_since(began, timeline.ended_s),
        tokens_per_s=_tokens_per_s(timeline),
        reused_bytes=0 if loaded is None else loaded.reused_bytes,
        shared_bytes=0 if loaded is None else loaded.shared_bytes,
        rungs=tuple(
            RungView(
                use.rung,
                use.num_bytes,
                use.seconds,
                use.source,
                between_nodes if use.rung is Rung.PEER else None,
            )
            for use in (() if loaded is None else loaded.rungs)
        ),
        num_preemptions=timeline.num_preemptions,
        num_resumes=max(0, len(timeline.stays) - 1 - timeline.num_moves),
        num_pauses=timeline.num_pauses,
        paused_s=_paused_s(timeline, now_s),
        num_late_tokens=timeline.num_late_tokens,
        client_request_id=timeline.correlation.client_id,
        traceparent=None if timeline.correlation.trace is None else str(timeline.correlation.trace),
        spans=tuple(spans_of(timeline, now_s)),
        base=None if timeline.adapter is None else timeline.model,
        adapter_tier=timeline.adapter_tier,
        adapter_wait_s=0.0 if timeline.adapter_load is None else timeline.adapter_load.wait_s,
        adapter_load_s=0.0 if timeline.adapter_load is None else timeline.adapter_load.total_s,
        marks=tuple(
            TimelineMark(at_s - began, what, detail) for at_s, what, detail in marks_of(timeline, now_s)
        ),
    )


def summarise(timeline: Timeline) -> RequestView:
    load = _awaited(timeline)
    loaded = None if load is None else load.loaded
    return RequestView(
        request_id=timeline.request_id,
        client_request_id=timeline.correlation.client_id,
        model=timeline.adapter or timeline.model,
        worker=timeline.stays[-1].worker if timeline.stays else None,
        phase=phase_of(timeline),
        is_ended=timeline.ended_s is not None,
        arrived_at_s=timeline.arrived_at_s,
        num_prompt_tokens=timeline.num_prompt_tokens,
        num_output_tokens=timeline.num_output_tokens,
        queue_s=timeline.queue_s,
        tier=None if loaded is None else slowest_tier(use.rung for use in loaded.rungs),
        first_token_s=_since(timeline.arrived_s, timeline.first_token_s),
        total_s=_since(timeline.arrived_s, timeline.ended_s),
    )


def phase_of(timeline: Timeline) -> str:
    if timeline.ended_s is not None:
        return timeline.outcome
    if timeline.wait is not None and timeline.wait.is_pause:
        return "paused"
    load = _awaited(timeline)
    if timeline.worker is None or (timeline.wait is not None and load is None):
        return "queued"
    if load is not None and load.ended_s is None:
        return "loading"
    return "prefill" if timeline.stays[-1].first_token_s is None else "decode"


def _awaited(timeline: Timeline) -> LoadLog | None:
    load = timeline.load
    if load is None or load.is_void or load.awaits_turn:
        return None
    return None if timeline.ended_s is not None and load.began_s > timeline.ended_s else load


def _load_s(timeline: Timeline, load: LoadLog, now_s: float) -> float:
    end_s = min(load.ended_s or now_s, timeline.ended_s or now_s)
    return end_s - (max(load.began_s, timeline.arrived_s) if load.is_guessed else load.began_s)


def _paused_s(timeline: Timeline, now_s: float) -> float:
    is_paused = timeline.wait is not None and timeline.wait.is_pause
    return timeline.paused_s + (
        now_s - timeline.wait.began_s if timeline.wait is not None and is_paused else 0.0
    )


def _told_waits(timeline: Timeline, now_s: float) -> Iterator[TurnWait]:
    for wait in timeline.waits:
        if wait.is_pause or (wait.ended_s or now_s) - wait.began_s >= MIN_WAIT_S:
            yield wait


def _tokens_per_s(timeline: Timeline) -> float | None:
    if timeline.first_token_s is None or timeline.last_token_s is None or timeline.num_output_tokens < 2:
        return None
    seconds = timeline.last_token_s - timeline.first_token_s
    return (timeline.num_output_tokens - 1) / seconds if seconds > 0 else None


def _queue_end_s(timeline: Timeline, now_s: float) -> float:
    return timeline.stays[0].placed_s if timeline.stays else timeline.ended_s or now_s


def spans_of(timeline: Timeline, now_s: float) -> list[TimelineSpan]:
    end_s = timeline.ended_s or now_s
    spans = [_span(timeline, "queue", timeline.arrived_s, _queue_end_s(timeline, now_s), timeline.waits_for)]
    if (load := _awaited(timeline)) is not None:
        spans += _load_spans(timeline, load, end_s)
    if (adapter := timeline.adapter_load) is not None:
        copying_s = timeline.adapter_loaded_s - adapter.total_s
        spans.append(_span(timeline, "adapter", copying_s, timeline.adapter_loaded_s, adapter_bytes(adapter)))
    for stay in timeline.stays:
        stay_end_s = stay.ended_s or end_s
        if stay.started_s is not None:
            first_s = stay.first_token_s or stay_end_s
            spans.append(_span(timeline, "prefill", stay.started_s, first_s, f"on {stay.worker}"))
        if stay.first_token_s is not None:
            spans.append(_span(timeline, "decode", stay.first_token_s, stay_end_s, f"on {stay.worker}"))
    for wait in _told_waits(timeline, end_s):
        what = "paused" if wait.is_pause else "turn"
        spans.append(_span(timeline, what, wait.began_s, wait.ended_s or end_s, wait.reason))
    return sorted(spans, key=lambda span: span.begin_s)


def _load_spans(timeline: Timeline, load: LoadLog, end_s: float) -> list[TimelineSpan]:
    loaded = load.loaded
    if loaded is None:
        load_end_s = min(load.ended_s or end_s, end_s)
        return [_span(timeline, "load", load.began_s, load_end_s, load.failure or "under way")]
    found_s = min(load.found_s, end_s)
    assembled_s = min(found_s + loaded.assemble_s, end_s)
    copying_s = min(found_s + loaded.place_s, end_s)
    copied_s = min(copying_s + loaded.total_s, end_s)
    kernels_s = max(copying_s, assembled_s - loaded.kernels_s)
    gigabytes = [f"{use.num_bytes / 1e9:.3f} GB from {place_of(use)}" for use in loaded.rungs]
    if loaded.shared_bytes:
        gigabytes.append(f"{loaded.shared_bytes / 1e9:.3f} GB that another load was reading")
    if loaded.reused_bytes:
        gigabytes.append(f"{loaded.reused_bytes / 1e9:.3f} GB were there")
    spans = [
        _span(timeline, "open", found_s - loaded.open_s, found_s, "the model is looked up"),
        _span(timeline, "place", found_s, copying_s, "memory is taken, and the bytes are asked for"),
        _span(timeline, "load", copying_s, copied_s, ", ".join(gigabytes)),
        _span(timeline, "assemble", copying_s, kernels_s, "the engine, beside the load"),
    ]
    if loaded.kernels_s >= MIN_WAIT_S:  # else they were there
        what = "kernels come to the device, beside the load"
        spans.append(_span(timeline, "kernels", kernels_s, assembled_s, what))
    return spans


def _span(timeline: Timeline, what: str, begin_s: float, end_s: float, detail: str = "") -> TimelineSpan:
    began = timeline.arrived_s
    return TimelineSpan(what, max(0.0, begin_s - began), max(0.0, end_s - began), detail)


def marks_of(timeline: Timeline, now_s: float) -> list[tuple[float, str, str]]:
    what = "" if timeline.pooling is None else f"for an embedding, pooling: {timeline.pooling}"
    marks = [(timeline.arrived_s, "queued", what), *timeline.marks]
    for wait in _told_waits(timeline, timeline.ended_s or now_s):
        marks.append((wait.began_s, "paused" if wait.is_pause else "waits_for_turn", wait.reason))
        if wait.ended_s is not None and wait.ended_s != timeline.ended_s:
            marks.append((wait.ended_s, "turn", f"after {wait.ended_s - wait.began_s:.3f} s"))
    if (load := _awaited(timeline)) is not None:
        marks += [
            mark
            for mark in _load_marks(timeline, load)
            if timeline.ended_s is None or mark[0] <= timeline.ended_s
        ]
    if timeline.first_token_s is not None:
        marks.append((timeline.first_token_s, "first_token", ""))
    if timeline.ended_s is not None:
        marks.append((timeline.ended_s, "ended", timeline.error or timeline.outcome))
    return sorted((mark for mark in marks if mark[0] >= timeline.arrived_s), key=lambda mark: mark[0])


def _load_marks(timeline: Timeline, load: LoadLog) -> Iterator[tuple[float, str, str]]:
    if load.first_layer_at_s is not None:
        yield load.first_layer_at_s, "first_layer", "the first layer can run"
    for at_s, num_layers in load.layers:
        yield at_s, "layers_ready", f"{num_layers} layer{'s' * (num_layers > 1)} can run"
    if load.loaded is not None and load.ended_s is not None:
        yield load.ended_s, "loaded", f"on {load.worker}"


def _since(began_s: float, at_s: float | None) -> float | None:
    return None if at_s is None else at_s - began_s

"""Draws an explanation as lines of text: a bar per span on a time axis, then events, bytes and costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hearth.cli.figures import precise, size
from hearth.control.observe.views import Explanation, RungView, TimelineSpan
from hearth.policy.fleet.events import Option

MIN_BAR = 24
REASONS = {
    "resident": "the model was loaded and had a free slot",
    "loading": "the model was being loaded there",
    "free_room": "loaded into free memory",
    "evicted": "loaded after evicting other models",
    "turns": "busy models fill the memory, so they take turns",
    "waited": "a slot or memory became free",
    "demand": "loaded once more, because all slots elsewhere were in use",
    "staged": "workers that load the model run it together meanwhile",
    "switched": "moved to a worker that has the whole model",
    "dropped": "its replicas gave up layers for KV memory and run it together",
    "restored": "the layers that its replicas had given up for KV memory were loaded again",
}


def waterfall(explained: Explanation, width: int) -> list[str]:
    lines = [*_heading(explained), "", *_bars(explained.spans, width)]
    if explained.marks:
        ats = [precise(mark.at_s) for mark in explained.marks]
        whats = [mark.what for mark in explained.marks]
        lines += ["", "events"]
        for mark, at in zip(explained.marks, _right(ats), strict=True):
            lines.append(f"  {at}  {mark.what.ljust(max(map(len, whats)))}  {mark.detail}".rstrip())
    if explained.rungs or explained.reused_bytes or explained.shared_bytes:
        lines += ["", "bytes loaded", *_rungs(explained)]
    if explained.options:
        lines += ["", "estimated cost per worker", *_options(explained.options)]
    return lines


def _heading(explained: Explanation) -> Iterator[str]:
    yield f"{explained.request_id}  {explained.model}  {explained.outcome}"
    if explained.client_request_id is not None:
        yield f"client request id {explained.client_request_id}"
    if explained.traceparent is not None:
        yield f"traceparent {explained.traceparent}"
    if explained.error is not None:
        yield explained.error
    if explained.worker is not None:
        reason = REASONS.get(explained.why or "", explained.why or "")
        yield f"on {explained.worker}" + (f": {reason}" if reason else "")
    per_s = explained.tokens_per_s
    speed = "" if per_s is None else f", {per_s:.1f} tokens/s after the first"
    yield (
        f"{explained.num_prompt_tokens} prompt tokens ({explained.num_cached_tokens} cached), "
        f"{explained.num_output_tokens} output tokens{speed}"
    )
    if explained.first_token_s is not None:
        yield f"first token after {precise(explained.first_token_s)}"
    if explained.base is not None:
        yield f"an adapter of {explained.base}{_adapter(explained)}"
    if explained.num_preemptions or explained.num_resumes:
        yield f"{explained.num_preemptions} preemptions, {explained.num_resumes} resumes on another worker"
    if explained.num_pauses:
        times = "once" if explained.num_pauses == 1 else f"{explained.num_pauses} times"
        yield f"paused {times} for other models, {precise(explained.paused_s)} in all"
    if explained.num_late_tokens:
        tokens = "1 token" if explained.num_late_tokens == 1 else f"{explained.num_late_tokens} tokens"
        yield f"{tokens} later than its pace"


def _adapter(explained: Explanation) -> str:
    if explained.adapter_tier is None:
        return ""
    if explained.adapter_tier == "device":
        return ", already on the device"
    waited = (
        f" after waiting {precise(explained.adapter_wait_s)} for memory" if explained.adapter_wait_s else ""
    )
    return f", loaded from {explained.adapter_tier} in {precise(explained.adapter_load_s)}{waited}"


def _bars(spans: Sequence[TimelineSpan], width: int) -> Iterator[str]:
    if not spans:
        return
    end_s = max(max(span.end_s for span in spans), 1e-9)
    names = _left([span.what for span in spans])
    times = _right([precise(span.end_s - span.begin_s) for span in spans])
    beside = len(names[0]) + len(times[0]) + max(len(span.detail) for span in spans) + 6
    bar_width = max(MIN_BAR, width - beside)
    for name, time, span in zip(names, times, spans, strict=True):
        begin = min(int(span.begin_s / end_s * bar_width), bar_width - 1)
        end = max(begin + 1, round(span.end_s / end_s * bar_width))
        bar = (" " * begin + "█" * (end - begin)).ljust(bar_width)
        yield f"{name}  {bar}  {time}  {span.detail}".rstrip()
    margin = " " * len(names[0])
    yield f"{margin}  0{precise(end_s).rjust(bar_width - 1)}"


def _rungs(explained: Explanation) -> Iterator[str]:
    names = [_place(rung) for rung in explained.rungs]
    sizes = [size(rung.num_bytes) for rung in explained.rungs]
    remarks = [_pace(rung) for rung in explained.rungs]
    if explained.shared_bytes:
        names.append("shared")
        sizes.append(size(explained.shared_bytes))
        remarks.append("read by another load")
    if explained.reused_bytes:
        come_bytes = sum(rung.num_bytes for rung in explained.rungs) + explained.shared_bytes
        names.insert(0, "device")
        sizes.insert(0, size(explained.reused_bytes))
        remarks.insert(0, f"already there, {size(come_bytes)} had to be loaded")
    for row in zip(_left(names), _right(sizes), remarks, strict=True):
        yield "  " + "  ".join(row)


def _place(rung: RungView) -> str:
    how = f" by {rung.transport}" if rung.transport else ""
    return f"{rung.rung} {rung.source}".rstrip() + how


def _pace(rung: RungView) -> str:
    speed = f", {rung.num_bytes / rung.seconds / 1e9:.2f} GB/s" if rung.seconds > 0 else ""
    return f"in {precise(rung.seconds)}{speed}"


def _options(options: Sequence[Option]) -> Iterator[str]:
    names = _left([option.worker for option in options])
    for name, option in zip(names, options, strict=True):
        if option.obstacle is not None:
            yield f"  {name}  {option.obstacle}"
        else:
            missing = f" of {size(option.missing_bytes)}" if option.missing_bytes else ""
            evict = f"evict {precise(option.evict_s)}, " if option.evict_s else ""
            cached = f" beyond {option.cached_tokens} cached tokens" if option.cached_tokens else ""
            prompt = f"prompt {precise(option.prompt_s)}{cached}, " if option.prompt_s or cached else ""
            known_s = option.queue_s + option.load_s + option.evict_s + option.prompt_s
            rest_s = max(0.0, option.cost_s - known_s)
            yield (
                f"  {name}  {precise(option.cost_s)}: queue {precise(option.queue_s)}, "
                f"load {precise(option.load_s)}{missing}, {evict}{prompt}"
                f"{precise(rest_s)} for {option.utilisation:.0%} utilisation"
            )


def _left(texts: Sequence[str]) -> list[str]:
    return [text.ljust(max(map(len, texts))) for text in texts]


def _right(texts: Sequence[str]) -> list[str]:
    return [text.rjust(max(map(len, texts))) for text in texts]

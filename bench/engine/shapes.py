"""Is a shape that nobody tuned for as near to its own bound? One request, many at once, one long prompt."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from bench.engine import bounds
from bench.engine.finding import Arm, Found
from bench.engine.rig import Rig
from bench.engine.scale import even
from bench.report import Row, percentiles

_AIM = "within a tenth of the bound"


def arms(rig: Rig) -> Mapping[str, Arm]:
    return {
        "one_request": partial(_one_request, rig),
        "many_requests": partial(_many_requests, rig),
        "long_prompt": partial(_long_prompt, rig),
    }


def _one_request(rig: Rig) -> Found:
    lengths = rig.scale.one_request
    rates = percentiles(rig.rates(even(1, lengths.prompt, lengths.new), rig.scale.num_runs))
    bound = lengths.new / bounds.answers_s(rig.shape, 1, lengths.prompt, lengths.new)
    text = f"{rig.shape.model}: one request, {lengths.prompt} + {lengths.new}"
    return _found(text, "output tokens/s", rates, bound, rates["p50"] / bound)


def _many_requests(rig: Rig) -> Found:
    work = even(rig.scale.batches[0], rig.scale.fixed.prompt, rig.scale.fixed.new)
    rates = percentiles(rig.rates(work, rig.scale.num_runs))
    seconds = bounds.answers_s(rig.shape, len(work.requests), rig.scale.fixed.prompt, rig.scale.fixed.new)
    bound = work.num_tokens / seconds
    return _found(f"{rig.shape.model}: {work.text}", work.unit, rates, bound, rates["p50"] / bound)


def _long_prompt(rig: Rig) -> Found:
    length = rig.scale.prompts[-1]
    times = percentiles(rig.first_tokens_ms(length, rig.scale.num_prompt_runs))
    bound = 1e3 * bounds.prompts_s(rig.shape, 1, length)
    text = f"{rig.shape.model}: {length:,}-token prompt to first token"
    return _found(text, "ms", times, bound, bound / times["p50"])


def _found(text: str, unit: str, values: dict[str, float], bound: float, share: float) -> Found:
    row = Row(text, unit, values["p50"], bound, _AIM)
    return Found([row], {"measured": values, "bound": bound, "share_of_bound": share})

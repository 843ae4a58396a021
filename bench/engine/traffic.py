"""Traffic at once, beside vLLM: lengths of conversations, long prompts, many answers, prefixes; each twice.

The first pass over each kind of work is the first thing of its kind that the process does: what the engine
has to compile or load is in it. Steps are captured when it is opened, for which the weights of a stored model
leave time. All prompts are new, so that no cached prefix is found, but for those that a work shares: a text
that all of its requests begin with, and the turns before in a conversation.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from bench.engine import bounds
from bench.engine.finding import Arm, Found
from bench.engine.rig import Rig
from bench.engine.scale import Work, even
from bench.report import Row, peers, percentiles

_REST_S = 0.01  #: before each prompt, as where nobody else asks

#: By shape and arm: what the engine should reach.
_AIMS: Mapping[str, Mapping[str, str]] = {
    "7B": {
        "sharegpt": "at least 8,300",
        "long_prompts": "at least 32,000",
        "even": "at least 14,500",
        "one_request": "at least 262",
        "prompt_128": "at most 6.5",
        "prompt_2048": "at most 43",
    },
    "8B": {
        "sharegpt": "at least 13,400",
        "long_prompts": "at least 38,000",
        "one_request": "at least 245",
        "shared_prefix": "at least 14,170",
    },
}


def arms(rig: Rig) -> Mapping[str, Arm]:
    """Return the questions; the first passes of the large ones come before anything else has warmed up."""
    large = {name: partial(_passes, rig, name, work) for name, work in rig.scale.traffic.items()}
    return {**large, "one_request": partial(_one_request, rig), "first_token": partial(_first_tokens, rig)}


def _passes(rig: Rig, name: str, work: Work) -> Found:
    passes = {"first pass": rig.run(work), "second pass": rig.run(work)}
    rows = [
        _row(rig, name, f"{work.text}, {which}", work.unit, one.tokens_per_s) for which, one in passes.items()
    ]
    details = {
        which: {"seconds": one.seconds, "tokens_per_s": one.tokens_per_s, **one.steps, "clock": one.clock}
        for which, one in passes.items()
    }
    return Found(rows, {**details, "times_best_peer": _times_best_peer(rows), "engine": rig.describe()})


def _one_request(rig: Rig) -> Found:
    lengths = rig.scale.fixed
    rates = rig.rates(even(1, lengths.prompt, lengths.new), rig.scale.num_runs)
    bound = 1.0 / bounds.decode_s(rig.shape, 1, lengths.prompt)
    text = f"one request, {lengths.prompt} + {lengths.new}"
    row = _row(rig, "one_request", text, "output tokens/s", percentiles(rates)["p50"], bound)
    return Found([row], {"tokens_per_s": percentiles(rates), "times_best_peer": _times_best_peer([row])})


def _first_tokens(rig: Rig) -> Found:
    rows, details = list[Row](), dict[str, object]()
    rig.watch.take()
    for length in rig.scale.prompts:
        bound = 1e3 * bounds.prompts_s(rig.shape, 1, length)
        text = f"{length:,}-token prompt to first token"
        # Peers were asked without a pause.
        for key, how, rest_s in (
            (f"prompt_{length}", "", 0.0),
            (f"rested_{length}", ", after a pause", _REST_S),
        ):
            rig.clock.take()
            times = percentiles(rig.first_tokens_ms(length, rig.scale.num_prompt_runs, rest_s))
            rows.append(_row(rig, key, f"{text}{how}", "ms", times["p50"], bound))
            details[key] = {"ms": times, **rig.watch.take(), "clock": rig.clock.take()}
    return Found(rows, {**details, "times_best_peer": _times_best_peer(rows)})


def _row(rig: Rig, key: str, text: str, unit: str, value: float, bound: float | None = None) -> Row:
    figures = peers()["traffic"]["peers"]  # type: ignore[index] # JSON
    name = rig.shape.name
    reached = {peer: of[name][key] for peer, of in figures.items() if key in of.get(name, {})}
    aim = _AIMS.get(name, {}).get(key)
    return Row(f"{rig.shape.model}: {text}", unit, value, bound, aim, reached)


def _times_best_peer(rows: list[Row]) -> list[float | None]:
    """Return how many times as fast as the best peer each row is."""
    return [
        None
        if not row.peers
        else row.value / max(row.peers.values())
        if row.unit.endswith("/s")
        else min(row.peers.values()) / row.value
        for row in rows
    ]

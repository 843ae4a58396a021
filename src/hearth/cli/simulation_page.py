"""A simulation as one HTML page without scripts or other files: figures, and plots as inline SVG."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from html import escape

from hearth.policy.fleet.gpu_time import cost_of
from hearth.sim.report import Percentiles
from hearth.sim.service import SimulatedService

Points = list[tuple[float, float]]

NUM_BINS = 60
WIDTH, HEIGHT, LEFT, RIGHT, BOTTOM, TOP = 720, 190, 60, 20, 22, 24
TIME_UNITS = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
COLOURS = ("#1f6feb", "#d29922", "#cf222e", "#1a7f37", "#8250df")

_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:760px;margin:2em auto;padding:0 1em}
table{border-collapse:collapse}td,th{padding:2px 12px 2px 0;text-align:left;vertical-align:top}
th{font-weight:600;white-space:nowrap}svg text{font:11px system-ui,sans-serif;fill:#57606a}
h1{font-size:1.4em}h2{font-size:1.1em;margin-top:1.6em}"""


def page(title: str, facts: Mapping[str, object], service: SimulatedService) -> str:
    """Return the page. `facts`: the figures, each with its name."""
    length_s = max(1e-9, service.now_s)
    bin_s = length_s / NUM_BINS
    middles = [(number + 0.5) * bin_s for number in range(NUM_BINS)]

    def per_bin(times: Sequence[float]) -> Points:
        counts = Counter(min(NUM_BINS - 1, int(at_s / bin_s)) for at_s in times)
        return [(at_s, float(counts[number])) for number, at_s in enumerate(middles)]

    waits: list[list[float]] = [[] for _ in range(NUM_BINS)]
    for answer in service.answers.values():
        if answer.token_s:
            waits[min(NUM_BINS - 1, int(answer.arrived_s / bin_s))].append(answer.first_token_s)
    spreads = [Percentiles.of(values) for values in waits]
    percentiles: dict[str, Callable[[Percentiles], float]] = {
        "p50": lambda one: one.p50,
        "p90": lambda one: one.p90,
        "p99": lambda one: one.p99,
    }
    first_tokens = {
        name: [
            (at_s, of(spread)) for at_s, spread in zip(middles, spreads, strict=True) if spread is not None
        ]
        for name, of in percentiles.items()
    }
    held, spent = _held(service, length_s)
    rungs = sorted({str(rung) for _, rung in service.load_ends if rung is not None})
    loads = {
        f"from {rung}": per_bin([at_s for at_s, of in service.load_ends if of == rung]) for rung in rungs
    }
    busy = {"turns": per_bin(service.turns_s), **loads}
    plots = [
        ("First token by time of arrival (s)", first_tokens),
        ("GPUs in use", {"GPUs": held}),
        (f"Loads and turns in {bin_s:.3g} s", busy),
    ]
    if service.setting.device_hour_price is not None:
        plots.append(("Cost so far", {"cost": spent}))
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(str(of))}</td></tr>" for name, of in facts.items()
    )
    setting = service.setting
    lead = (
        f"{facts['requests']} requests for {len(setting.shapes)} models, on {setting.num_workers} GPUs: "
        f"on time are {facts['on time']}. GPU time: {facts['GPU time']}."
    )
    drawn = "".join(
        f"<h2>{escape(name)}</h2>{_plot(lines, length_s, is_logarithmic=lines is first_tokens)}"
        for name, lines in plots
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1><p><b>{escape(lead)}</b></p>"
        "<p>Simulated by <code>hearth simulate</code>: the scheduler is that of the service, and a profile "
        "says how long steps and loads take. Times are since the beginning of the workload.</p>"
        f"<table>{rows}</table>{drawn}</body></html>\n"
    )


def _held(service: SimulatedService, length_s: float) -> tuple[Points, Points]:
    """Return the devices in use as steps, and what they have cost until each of these."""
    steps, spent, gpu_s = Points(), Points(), 0.0
    for (since_s, number), until_s in zip(
        service.held, [*(at_s for at_s, _ in service.held[1:]), length_s], strict=True
    ):
        steps += [(since_s, float(number)), (until_s, float(number))]
        gpu_s += number * (until_s - since_s)
        spent.append((until_s, cost_of(gpu_s, service.setting.device_hour_price) or 0.0))
    return steps, spent


def _plot(lines: Mapping[str, Points], length_s: float, *, is_logarithmic: bool = False) -> str:
    values = [y for points in lines.values() for _, y in points]
    ticks = _decades(values) if is_logarithmic else _ticks(max(values, default=0.0) or 1.0)
    low, high = (math.log10(one) if is_logarithmic else one for one in (ticks[0], ticks[-1]))
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - BOTTOM - TOP

    def place(x: float, y: float) -> tuple[float, float]:
        scaled = math.log10(max(y, ticks[0])) if is_logarithmic else y
        return LEFT + width * x / length_s, TOP + height * (1 - (scaled - low) / (high - low))

    parts = []
    for tick in ticks:
        _, y = place(0.0, tick)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#d0d7de"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    unit_s, unit = next((one, name) for one, name in TIME_UNITS if length_s >= 2 * one or one == 1.0)
    for tick in _ticks(length_s / unit_s):
        if tick * unit_s <= length_s:
            x, _ = place(tick * unit_s, 0.0)
            parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 4}" text-anchor="middle">{tick:g} {unit}</text>')
    for number, (name, points) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        at = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
        parts.append(f'<polyline points="{at}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        x = LEFT + 110 * number
        parts.append(f'<text x="{x}" y="11" style="fill:{colour}">&#9644; {escape(name)}</text>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'


def _ticks(most: float) -> list[float]:
    """Return round numbers from 0 on; the last is at least `most`."""
    raw = most / 4
    base = 10.0 ** math.floor(math.log10(raw))
    step = next(base * one for one in (1, 2, 5, 10) if base * one >= raw)
    return [round(step * number, 12) for number in range(math.ceil(most / step) + 1)]


def _decades(values: Sequence[float]) -> list[float]:
    """Return powers of ten, the first below all values but zeros, the last above all."""
    known = [one for one in values if one > 0] or [1.0]
    first, last = math.floor(math.log10(min(known))), math.ceil(math.log10(max(known)))
    return [10.0**power for power in range(first, max(last, first + 1) + 1)]

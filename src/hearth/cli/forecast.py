"""`hearth forecast`: the requests for a model, as they came and as they are expected."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import msgspec
import typer
from rich.text import Text

from hearth.cli.console import DEFAULT_DATA_DIR, ApiKey, AsJson, DataDirectory, Url, app, out, print_columns
from hearth.cli.endpoint import reached
from hearth.cli.figures import duration, precise
from hearth.cli.tab_completion import ModelName
from hearth.control.observe.views import ForecastView
from hearth.core.forecast_messages import RequestForecast

#: Of the plot, in characters.
HEIGHT, MAX_WIDTH = 6, 96
DAY_S, HOUR_S = 86_400.0, 3600.0
#: From empty to full; the range up to the upper bound of a forecast; a step that was not recorded.
UNICODE, ASCII = (" ▁▂▃▄▅▆▇█", "░", "·"), (" #", ":", ".")


@app.command(rich_help_panel="Service")
def forecast(
    context: typer.Context,
    name: ModelName,
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDirectory = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Show recorded and expected requests for a model.

    Draws the last hour, and the last day with the forecast to the right of the line: what is expected, and
    shaded the upper bound that is exceeded with a probability of 10%. Shows which method forecasts, how good
    it has been and whether the model would be loaded ahead. Needs the setting service.prewarm.

    [bold]Examples[/bold]

      hearth forecast qwen-7b

      hearth forecast qwen-7b --json
    """
    with reached(context, url, api_key, data_dir) as client:
        view = client.forecast(name)
    if as_json:
        typer.echo(msgspec.json.encode(view))
        return
    for line in _drawn(view, out.encoding, min(out.width, MAX_WIDTH)):
        out.print(Text(line), soft_wrap=True)
    if view.forecast is not None:
        typer.echo()
        print_columns(["FROM", "EXPECTED", "AT MOST (90%)"], _rows(view.forecast, view.begin_at_s))
    typer.echo()
    for line in _summary(view):
        typer.echo(line)


def _drawn(view: ForecastView, encoding: str, width: int) -> Iterator[str]:
    try:
        "".join(UNICODE).encode(encoding)
        signs = UNICODE
    except (UnicodeEncodeError, LookupError):
        signs = ASCII
    yield f"{view.model}, requests per minute: the last hour"
    recent = [_per_min(one, view.recent_step_s) for one in view.recent_counts]
    yield from _plot(recent[-round(HOUR_S / view.recent_step_s) :], [], [], width, signs)
    yield ""
    yield "the last day" + ("" if view.forecast is None else " and the forecast")
    counts = [_per_min(one, view.step_s) for one in view.counts][-round(DAY_S / view.step_s) :]
    mean, high = ([], []) if view.forecast is None else (view.forecast.mean_per_s, view.forecast.high_per_s)
    yield from _plot(counts, [60.0 * one for one in mean], [60.0 * one for one in high], width, signs)


def _per_min(count: float | None, step_s: float) -> float | None:
    return None if count is None else 60.0 * count / step_s


def _plot(
    past: Sequence[float | None],
    mean: Sequence[float],
    high: Sequence[float],
    width: int,
    signs: tuple[str, str, str],
) -> Iterator[str]:
    """Draw a bar for each step, or for the mean of several, if there are too many."""
    levels, shade, unknown = signs
    per_bar = max(1, -(-len(past) // max(1, width - len(mean) - 10)))
    bars = [_mean(past[max(0, end - per_bar) : end]) for end in range(len(past), 0, -per_bar)][::-1]
    top = max([one for one in bars if one is not None] + [*high, *mean], default=0.0) or 1.0
    for row in range(HEIGHT - 1, -1, -1):
        label = f"{top:8.3g} " if row == HEIGHT - 1 else f"{0:8} " if row == 0 else " " * 9
        line = "".join(
            (unknown if row == 0 else " ") if one is None else _cell(one / top, row, levels) for one in bars
        )
        ahead = "".join(
            shade if cell == " " and most / top * HEIGHT > row else cell
            for most, cell in zip(high, (_cell(one / top, row, levels) for one in mean), strict=True)
        )
        yield (f"{label}{line}" + (f"|{ahead}" if mean else "")).rstrip()


def _mean(counts: Sequence[float | None]) -> float | None:
    known = [one for one in counts if one is not None]
    return sum(known) / len(known) if known else None


def _cell(share: float, row: int, levels: str) -> str:
    filled = min(1.0, max(0.0, share * HEIGHT - row))
    return levels[round(filled * (len(levels) - 1))]


def _rows(forecast: RequestForecast, begin_at_s: float) -> list[list[str]]:
    return [
        [
            time.strftime("%H:%M", time.localtime(begin_at_s + number * forecast.step_s)),
            f"{mean * forecast.step_s:.3g} requests",
            f"{high * forecast.step_s:.3g}",
        ]
        for number, (mean, high) in enumerate(zip(forecast.mean_per_s, forecast.high_per_s, strict=True))
    ]


def _summary(view: ForecastView) -> Iterator[str]:
    if view.forecast is None:
        yield f"no forecast: {view.reason}"
    else:
        yield f"method: {view.forecast.method}"
        if view.forecast.mase is not None:
            yield f"its mean error: {view.forecast.mase:.2f} of that of the last value as the forecast (MASE)"
    if view.num_wanted is not None and view.lead_s is not None and view.expected_per_s is not None:
        yield f"replicas worth loading: {view.num_wanted}, loaded: {view.num_loaded}"
        yield f"expected in {precise(view.lead_s)}, after a load: {60.0 * view.expected_per_s:.3g} per minute"
        yield f"device time that wrong forecasts may still cost: {duration(view.budget_s)}"
    if view.last_prewarm is not None and view.last_prewarm_at_s is not None:
        yield f"{duration(time.time() - view.last_prewarm_at_s)} ago: {view.last_prewarm}"
    if view.prewarm == "advise":
        yield "service.prewarm is advise: nothing is loaded ahead"

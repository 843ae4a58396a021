"""How well are requests forecast ten minutes ahead, and what does it cost?

    python -m bench.forecast TRACES [--save]

TRACES is a folder with the counts of ServeGen's clients (`servegen_client_rate_10min.csv.gz`, and
`servegen_total_rate_10min_14d.csv.gz`, which shows gaps) and Azure's requests (`azure_llm_2023_*.csv.gz`).

- `mase`: a client with 14 days of counts and 100 in ten minutes on average is a model. The last three days
  are held out; at the beginning of each a method is chosen by what came before. The MASE is the mean absolute
  error one step ahead relative to that of the last value. A client that never changes in those days has none.
- `poisson`: the MASE of a forecast that knows each count's expectation, if counts are Poisson distributed.
- percentage errors: of the sum of all clients of a ServeGen model, as above, and of Azure's requests in
  100 s, six steps ahead, with a choice at each step. Steps without requests do not count. Azure's traces last
  an hour.
- cost: processor time per hour with one choice a day, one fit an hour and forecasts every ten minutes. Times
  of one model are means over a quarter of the clients. The process holds the series of 1,000 models.
"""

from __future__ import annotations

import csv
import gzip
import resource
import time
from argparse import RawDescriptionHelpFormatter
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from bench.report import Row, arguments, emit, percentiles, step
from hearth.core.types import ModelId
from hearth.forecast.choice import HORIZON, TRIED_S, Fit, choose_one, fit_hedged, methods
from hearth.forecast.series import DAY_S, Numbers, Series

STEP_S, NUM_STEPS, DAY, LEAST_MEAN = 600.0, 14 * 144, 144, 100.0
NUM_HELD_OUT, DAYS = 3, range(3)
AZURE_STEP_S, CHOSEN = STEP_S / HORIZON, "chosen"
NUM_MODELS, HOUR_S = 1_000, 3600.0
PUBLISHED = {"FlashServe, other traces": 7.8}


@dataclass(frozen=True, slots=True)
class Costs:
    """Processor time in seconds: of training once, and of one model."""

    train_s: float
    choose_s: float
    refit_s: float
    forecast_s: float

    def share_of_core(self, num_models: int) -> float:
        daily_s = self.train_s + num_models * self.choose_s
        hourly_s = num_models * (self.refit_s + HOUR_S / STEP_S * self.forecast_s)
        return daily_s / DAY_S + hourly_s / HOUR_S


@dataclass(frozen=True, slots=True)
class Day:
    predicted: dict[str, Numbers]  #: by method, a row for each series
    chosen: list[str]
    costs: Costs
    num_bytes: int  #: of the process, at most


def main() -> None:
    command = arguments(__doc__)
    command.formatter_class = RawDescriptionHelpFormatter
    command.add_argument("traces", type=Path, metavar="TRACES")
    options = command.parse_args()
    clients, sums = read_clients(options.traces)
    series = [*clients, *sums.values()]
    with step("three days"), ProcessPoolExecutor(NUM_HELD_OUT) as processes:
        days = list(processes.map(forecast_day, [clients] * NUM_HELD_OUT, [series] * NUM_HELD_OUT, DAYS))
    by_method = {
        method: np.concatenate([day.predicted[method] for day in days], axis=1)
        for method in days[0].predicted
    }
    predicted = {method: rows[: len(clients)] for method, rows in by_method.items()}
    summed = by_method[CHOSEN][len(clients) :]
    num_chosen: Counter[str] = sum((Counter(day.chosen[: len(clients)]) for day in days), Counter())
    costs, num_bytes = days[0].costs, days[0].num_bytes
    by_client = {method: list(_mases(clients, expected)) for method, expected in predicted.items()}
    by_client["best in hindsight"] = np.min(list(by_client.values()), axis=0).tolist()
    mases = {method: sorted(values) for method, values in by_client.items()}
    apes = {f"ServeGen's {name}": _mape(sums[name], row) for name, row in zip(sums, summed, strict=True)}
    apes |= {f"Azure's {name}": azure_mape(options.traces, name) for name in ("conv", "code")}
    relative = f"error relative to the last value, {len(mases[CHOSEN])} clients"
    rows = [
        Row(f"{relative}: median", "MASE", float(np.median(mases[CHOSEN])), aim="at most 0.9"),
        Row(f"{relative}: highest", "MASE", mases[CHOSEN][-1], aim="at most 1.02"),
        *(
            Row(f"mean percentage error, {name}", "%", 100 * ape, peers=PUBLISHED, is_comparable=False)
            for name, ape in apes.items()
        ),
        Row(
            f"processor, {NUM_MODELS:,} models",
            "% of a core",
            100 * costs.share_of_core(NUM_MODELS),
            aim="at most 5",
        ),
        Row(f"memory, {NUM_MODELS:,} models", "MB", num_bytes / 1e6, aim="at most 700"),
    ]
    emit(
        "forecast",
        {
            "rows": [asdict(row) for row in rows],
            "mase": {method: percentiles(values) for method, values in mases.items()},
            "poisson": percentiles(sorted(_poisson(clients))),
            "num_chosen": num_chosen,
            "best": _best(clients, predicted),
            "costs": asdict(costs),
        },
        save=options.save,
    )


def forecast_day(clients: Sequence[Numbers], series: Sequence[Numbers], day: int) -> Day:
    torch.set_num_threads(1)  # as in the process that forecasts
    held = [clients[number % len(clients)].copy() for number in range(NUM_MODELS)]
    end = NUM_STEPS - (NUM_HELD_OUT - day) * DAY
    began_s = time.process_time()
    pasts = [Series(counts[:end], STEP_S) for counts in held[: len(clients)]]
    tried, fits = methods(pasts, TRIED_S), methods(pasts)
    trained_s = time.process_time()
    predicted = {method: np.full((len(series), DAY), np.nan) for method in (CHOSEN, *fits)}
    chosen = []
    for at, counts in enumerate(series):
        past = Series(counts[:end], STEP_S)
        chosen.append(choose_one(past, tried, fits))
        fitted = {method: fit_hedged(fit, past.without_gaps(), past) for method, fit in fits.items()}
        all_counts = Series(counts[: end + DAY], STEP_S).without_gaps()
        origins = np.arange(len(all_counts) - DAY, len(all_counts))
        for method, one in {CHOSEN: chosen[-1].fitted, **fitted}.items():
            if one is not None:
                predicted[method][at] = one.predict(all_counts, origins, HORIZON)[:, 0]
    costs = measured(
        [Series(counts[:end], STEP_S) for counts in clients[::4]], tried, fits, trained_s - began_s
    )
    num_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Day(predicted, [one.method for one in chosen], costs, num_bytes)


def measured(
    series: Sequence[Series], tried: Mapping[str, Fit], fits: Mapping[str, Fit], train_s: float
) -> Costs:
    began_s = time.process_time()
    chosen = [choose_one(one, tried, fits) for one in series]
    chosen_s = time.process_time()
    chosen = [one.refit(past) for one, past in zip(chosen, series, strict=True)]
    refitted_s = time.process_time()
    for one, past in zip(chosen, series, strict=True):
        one.forecast(ModelId("a"), past)
    ended_s = time.process_time()
    num = len(series)
    return Costs(
        train_s, (chosen_s - began_s) / num, (refitted_s - chosen_s) / num, (ended_s - refitted_s) / num
    )


def azure_mape(traces: Path, name: str) -> float:
    with gzip.open(traces / f"azure_llm_2023_{name}.csv.gz", "rt") as file:
        arrived_s = np.array([float(line["arrival_s"]) for line in csv.DictReader(file)])
    counts = np.bincount((arrived_s // AZURE_STEP_S).astype(int))[:-1].astype(float)
    expected = np.full_like(counts, np.nan)
    for end in range(1, len(counts) - HORIZON + 1):
        past = Series(counts[:end], AZURE_STEP_S)
        fits = methods([past])
        forecast = choose_one(past, fits, fits).forecast(ModelId("a"), past)
        expected[end + HORIZON - 1] = forecast.mean_per_s[-1] * AZURE_STEP_S
    return _mape(counts, expected)


def read_clients(traces: Path) -> tuple[list[Numbers], dict[str, Numbers]]:
    """Return the counts of busy clients, and the sum of all clients by ServeGen's model; NaN: a gap."""
    sums: dict[str, Numbers] = defaultdict(lambda: np.full(NUM_STEPS, np.nan))
    for line in _lines(traces / "servegen_total_rate_10min_14d.csv.gz"):
        if rate_per_s := float(line["rate_rps"]):
            sums[line["model"]][_step_of(line)] = rate_per_s * STEP_S
    sums = {name: counts for name, counts in sums.items() if np.any(counts[-NUM_HELD_OUT * DAY :] > 0)}
    by_client = {}
    for line in _lines(traces / "servegen_client_rate_10min.csv.gz"):
        if line["model"] in sums:
            client = line["model"], line["client"]
            if client not in by_client:
                by_client[client] = np.where(np.isnan(sums[line["model"]]), np.nan, 0.0)
            by_client[client][_step_of(line)] = float(line["rate_rps"]) * STEP_S
    return [counts for counts in by_client.values() if np.nanmean(counts) >= LEAST_MEAN], sums


def _lines(path: Path) -> Iterator[dict[str, str]]:
    with gzip.open(path, "rt") as file:
        yield from csv.DictReader(file)


def _step_of(line: Mapping[str, str]) -> int:
    return int(float(line["t_s"]) // STEP_S)


def _mases(clients: Sequence[Numbers], predicted: Numbers) -> Iterator[float]:
    for counts, expected in zip(clients, predicted, strict=True):
        if naive := _error(counts, _last_values(counts)):
            yield _error(counts, expected) / naive


def _poisson(clients: Sequence[Numbers]) -> Iterator[float]:
    """Yield the error that is left where all but the chance of single arrivals is known, as a MASE."""
    for counts in clients:
        if naive := _error(counts, _last_values(counts)):
            yield float(np.nanmean(np.sqrt(2 / np.pi * counts[-NUM_HELD_OUT * DAY :]))) / naive


def _best(clients: Sequence[Numbers], predicted: Mapping[str, Numbers]) -> Counter[str]:
    """Return for how many clients each method had the least error."""
    best: Counter[str] = Counter()
    for at, counts in enumerate(clients):
        errors = {method: _error(counts, rows[at]) for method, rows in predicted.items() if method != CHOSEN}
        if errors["last value"]:
            best[min(errors, key=errors.__getitem__)] += 1
    return best


def _last_values(counts: Numbers) -> Numbers:
    return Series(counts, STEP_S).without_gaps()[-NUM_HELD_OUT * DAY - 1 : -1]


def _error(counts: Numbers, expected: Numbers) -> float:
    return float(np.nanmean(np.abs(counts[-len(expected) :] - expected)))


def _mape(counts: Numbers, expected: Numbers) -> float:
    came = np.where(counts > 0, counts, np.nan)[-len(expected) :]
    return float(np.nanmean(np.abs(came - expected) / came))


if __name__ == "__main__":
    main()

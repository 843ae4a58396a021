"""How well are requests forecast ten minutes ahead, and what does it cost?

    python -m bench.forecast TRACES [--save]

TRACES is a folder with the counts of ServeGen's clients (`servegen_client_rate_10min.csv.gz`, and
`servegen_total_rate_10min_14d.csv.gz`, which shows gaps) and Azure's requests (`azure_llm_2023_*.csv.gz`).

- `mase`: a client with 14 days of counts and 100 in ten minutes on average is a model. The last three days
  are held out; at the beginning of each a method is chosen by what came before. The MASE is the mean absolute
  error one step ahead relative to that of the last value. A client that never changes in those days has none.
- percentage errors: of the sum of all clients of a ServeGen model, as above, and of Azure's requests in
  100 s, six steps ahead, with a choice at each step. Steps without requests do not count. Azure's traces last
  an hour.
- cost: processor time per hour with one choice a day, one fit an hour and forecasts every ten minutes. Times
  of one model are means over the clients. The process holds the series of 1,000 models.
"""

from __future__ import annotations

import csv
import gzip
import resource
import time
from argparse import RawDescriptionHelpFormatter
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from bench.report import Row, arguments, emit, percentiles, step, tell
from hearth.forecast.choice import HORIZON, Fit, choose_one, fit_hedged, methods
from hearth.forecast.series import DAY_S, Numbers, Series

STEP_S, NUM_STEPS, DAY, NUM_HELD_OUT, LEAST_MEAN = 600.0, 14 * 144, 144, 3, 100.0
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


def main() -> None:
    command = arguments(__doc__)
    command.formatter_class = RawDescriptionHelpFormatter
    command.add_argument("traces", type=Path, metavar="TRACES")
    options = command.parse_args()
    torch.set_num_threads(1)  # as in the process that forecasts
    clients, sums = read_clients(options.traces)
    held = [clients[number % len(clients)].copy() for number in range(NUM_MODELS)]
    predicted: dict[str, Numbers] = defaultdict(lambda: np.full((len(clients), NUM_HELD_OUT * DAY), np.nan))
    summed = np.full((len(sums), NUM_HELD_OUT * DAY), np.nan)
    num_chosen: Counter[str] = Counter()
    for day in range(NUM_HELD_OUT):
        end = NUM_STEPS - (NUM_HELD_OUT - day) * DAY
        begun_s = time.process_time()
        with step(f"day {day + 1}: training"):
            fits = methods([Series(counts[:end], STEP_S) for counts in clients])
        train_s = time.process_time() - begun_s
        held_out = slice(day * DAY, (day + 1) * DAY)
        with step(f"day {day + 1}: forecasting {len(clients)} clients"):
            for at, counts in enumerate(clients):
                for method, row in predict_day(counts, end, fits, num_chosen).items():
                    predicted[method][at, held_out] = row
        for at, counts in enumerate(sums.values()):
            summed[at, held_out] = predict_day(counts, end, fits, Counter())[CHOSEN]
    mases = {method: sorted(_mases(clients, expected)) for method, expected in predicted.items()}
    costs = measured(clients, fits, train_s)
    num_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tell(f"memory with {len(held):,} series: {num_bytes / 1e6:.0f} MB")
    apes = {f"ServeGen's {name}": _mape(sums[name], row) for name, row in zip(sums, summed, strict=True)}
    apes |= {f"Azure's {name}": azure_mape(options.traces, name) for name in ("conv", "code")}
    relative = f"error relative to the last value, {len(mases[CHOSEN])} clients"
    rows = [
        Row(f"{relative}: median", "", float(np.median(mases[CHOSEN])), aim="at most 0.9"),
        Row(f"{relative}: highest", "", mases[CHOSEN][-1], aim="at most 1.02"),
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
            "num_chosen": num_chosen,
            "best": _best(clients, predicted),
            "costs": asdict(costs),
        },
        save=options.save,
    )


def predict_day(
    counts: Numbers, end: int, fits: Mapping[str, Fit], num_chosen: Counter[str]
) -> dict[str, Numbers]:
    """Return what each method expects one step ahead on the day from `end` on, and what the chosen one."""
    past = Series(counts[:end], STEP_S)
    known = past.without_gaps()
    all_counts = Series(counts[: end + DAY], STEP_S).without_gaps()
    chosen = choose_one(past, fits)
    num_chosen[chosen.method] += 1
    by_method = {CHOSEN: chosen.fitted, **{name: fit_hedged(fit, known, past) for name, fit in fits.items()}}
    origins = np.arange(len(all_counts) - DAY, len(all_counts))
    return {
        method: fitted.predict(all_counts, origins, HORIZON)[:, 0]
        for method, fitted in by_method.items()
        if fitted is not None
    }


def measured(clients: Sequence[Numbers], fits: Mapping[str, Fit], train_s: float) -> Costs:
    series = [Series(counts, STEP_S) for counts in clients]
    began_s = time.process_time()
    chosen = [choose_one(one, fits) for one in series]
    chosen_s = time.process_time()
    chosen = [one.refit(past) for one, past in zip(chosen, series, strict=True)]
    refitted_s = time.process_time()
    for one, past in zip(chosen, series, strict=True):
        one.forecast(past)
    ended_s = time.process_time()
    num = len(clients)
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
        expected[end + HORIZON - 1] = (
            choose_one(past, methods([past])).forecast(past).mean_per_s[-1] * AZURE_STEP_S
        )
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

"""Hearth and its peers load the same weights by turns. Chooses neither the weights nor the medium."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from bench.load.models import tensor_bytes
from bench.load.peers import PeerFailed
from bench.load.setting import Setting
from bench.report import percentiles

#: A contestant that is so many times slower than Hearth in the first round is not asked again.
HOPELESS = 4.0


@dataclass(frozen=True, slots=True)
class Contest:
    """Seconds of every run, by contestant, and what became of peers that did not run."""

    times: Mapping[str, list[float]]
    errors: Mapping[str, str]
    versions: Mapping[str, str] = field(default_factory=dict)

    def peer_figures(self, setting: Setting, medium: str) -> dict[str, float]:
        """Return peers' medians; where one does not run here, what was measured on such a machine before."""
        figures = {
            f"{name} {version}": percentiles(self.times[name])["p50"]
            for name, version in self.versions.items()
            if name not in self.errors
        }
        for label, by_medium in setting.earlier.items():
            if any(label.startswith(f"{name} ") for name in self.errors):
                figures[f"{label} (measured before)"] = by_medium[medium]
        return figures

    def details(self) -> dict[str, object]:
        seconds = {name: percentiles(times) for name, times in self.times.items() if times}
        return {"seconds": seconds, "runs": self.times, "peers_not_run": self.errors}


def contest(
    setting: Setting,
    directory: Path,
    checkpoint: Path,
    others: Mapping[str, Callable[[], float]],
    prepare: Callable[[], None],
    *,
    num_rounds: int,
    num_warm_up: int = 0,
) -> Contest:
    """Have Hearth load its model and peers the checkpoint, beside `others`; a peer that fails is out.

    The first `num_warm_up` times of each do not count.
    """
    num_bytes = tensor_bytes(setting.scale.config)
    entrants: dict[str, Callable[[], float]] = {
        "Hearth": partial(_hearth_s, setting, directory, prepare),
        **{name: partial(_prepared, prepare, run) for name, run in others.items()},
        **{
            name: partial(_prepared, prepare, partial(process.load_s, checkpoint, num_bytes))
            for name, process in setting.peers.processes.items()
        },
    }
    times: dict[str, list[float]] = {name: [] for name in entrants}
    errors = dict(setting.peers.errors)
    for name in turns(list(entrants), num_rounds):
        slowest_s = HOPELESS * min(times["Hearth"], default=math.inf)
        if name in errors or (times[name] and min(times[name]) > slowest_s):
            continue
        try:
            times[name].append(entrants[name]())
        except PeerFailed as error:
            errors[name] = str(error)
    counted = {name: runs[min(num_warm_up, len(runs) - 1) :] for name, runs in times.items() if runs}
    return Contest({n: t for n, t in counted.items() if n not in errors}, errors, setting.peers.versions)


def turns(names: list[str], num_rounds: int) -> Iterator[str]:
    """Yield names by rounds: each begins with another one, every second goes backwards; neighbours change."""
    for start in range(num_rounds):
        order = names[::-1] if start % 2 else names
        at = order.index(names[start % len(names)])
        yield from order[at:] + order[:at]


def _prepared(prepare: Callable[[], None], run: Callable[[], float]) -> float:
    prepare()
    return run()


def _hearth_s(setting: Setting, directory: Path, prepare: Callable[[], None]) -> float:
    """Return the seconds of a load through a small host tier that holds nothing yet."""
    with setting.tiers(setting.scale.ring_bytes) as tiers:
        prepare()
        return setting.open_and_load(tiers, directory).seconds

"""Whose are the gaps between tokens that a client sees: the worker's, the gateway's or the client's own?

    python -m bench.coldstart.in_service [--only others burst] [--rounds N] [--tiny]

    others    16 streams of a 7B beside a 4B that comes and goes, and beside one that stays (`beside.py`)
    burst     64 requests at once to a 7B: in a worker that has come to rest, and in one that is just ready

A service whose worker and gateway note what they do (`service_trace.py`). Each part is told as the client
sees it, then by when the worker told of the same tokens: by what a gap met there, and the longest of each
kind with all that was done in them. Of `burst` the first, the last and the longest gaps of the client are
told with what all three did. On one H200 it takes 80 s, half of it to begin.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import traceback
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

from bench.coldstart.__main__ import _end
from bench.coldstart.arrivals import ask_at_once, first_steps
from bench.coldstart.beside import OTHER, RUNNING, others
from bench.coldstart.held_up import tell_parts
from bench.coldstart.in_worker import TELL
from bench.coldstart.ring import Noted, Ring
from bench.coldstart.service_trace import environment, notes_of
from bench.coldstart.setting import TINY_SCALE, Scale, Setting
from bench.report import percentiles, step, tell
from bench.service.client import Answer, Connection
from bench.service.gaps import Gap

PARTS = ("others", "burst")
OTHER_TOKEN, FIRST_TOKEN = "a token of the other", "the first token of the other"
#: So long before a token the load may have ended of which it is the first.
_FIRST_S = 0.03
#: Gaps in which nobody streamed.
_PAUSE_S = 0.1
_TOLD = 3  #: gaps of a kind
#: For one model, and for both.
_HOST_BYTES = {1: 16 * 10**9, 2: 23 * 10**9}
_LOAD_NEWS = ("ModelFound", "EngineReady", "Progressed", "AlmostLoaded", "WeightsLoaded")
#: What a gap of one model may meet, as the worker calls it; the first of these that it does is its kind.
_KINDS = {
    OTHER_TOKEN: (f"{TELL} {OTHER}",),
    "a drop": ("handle DropModel",),
    "a load": ("capture_substitutes", *(f"handle {news}" for news in _LOAD_NEWS)),
    "rehearsals": ("rehearse",),
    "graphs": ("native graph", "destroy graphs"),
}


class Notes:
    """Notes of a process, to be found by time."""

    def __init__(self, notes: Sequence[Noted]) -> None:
        self._notes = sorted(notes, key=lambda one: one.begin_s)
        self._begins_s = [one.begin_s for one in self._notes]
        self._longest_s = max((one.end_s - one.begin_s for one in notes), default=0.0)

    def during(self, gap: Gap) -> list[Noted]:
        first = bisect_left(self._begins_s, gap.begin_s - self._longest_s)
        last = bisect_left(self._begins_s, gap.end_s)
        return [one for one in self._notes[first:last] if one.end_s > gap.begin_s]

    def gaps_by_kind(self) -> dict[str, list[Gap]]:
        """Return a worker's gaps between tokens of the running model, as it told them, by what they met."""
        ends_s = [one.end_s for one in self._notes if one.what == f"{TELL} {RUNNING}"]
        found = dict[str, list[Gap]]()
        for gap in (Gap(begin_s, end_s) for begin_s, end_s in pairwise(ends_s)):
            if gap.seconds < _PAUSE_S:
                met = {one.what for one in self.during(gap)}
                kinds = [kind for kind, names in _KINDS.items() if met.intersection(names)]
                kind, *_ = kinds or ["nothing"]
                if kind == OTHER_TOKEN and self._has_loaded(gap.begin_s - _FIRST_S, gap.end_s):
                    kind = FIRST_TOKEN
                found.setdefault(kind, []).append(gap)
        return found

    def _has_loaded(self, begin_s: float, end_s: float) -> bool:
        return any(one.what == "handle WeightsLoaded" for one in self.during(Gap(begin_s, end_s)))


def tell_worker(name: str, noted: Sequence[Noted]) -> None:
    """Print the gaps of a part as the worker saw them."""
    notes = Notes(noted)
    by_kind = notes.gaps_by_kind()
    for kind, found in {"all": [gap for gaps in by_kind.values() for gap in gaps], **by_kind}.items():
        figures = percentiles([gap.seconds for gap in found])
        shown = " ".join(f"{key}={1e3 * figures[key]:.2f}" for key in ("p50", "p90", "p99", "max"))
        tell(f"{name}, worker, {kind}: {shown} n={len(found)}")
        for gap in sorted(found, key=lambda gap: -gap.seconds)[: 0 if kind == "all" else _TOLD]:
            tell(f"    {1e3 * gap.seconds:.1f} ms, in which")
            tell_parts(notes.during(gap), gap.begin_s, gap.end_s)


@dataclass(frozen=True, slots=True)
class ClientStep:
    """The longest gap of all streams before one of their tokens."""

    token: int  #: that it ended with; the first one is 0
    longest: Gap
    median_s: float  #: of all streams


def client_steps(answers: Sequence[Answer]) -> list[ClientStep]:
    """Return the steps of streams that began together, by the gaps of which `first_steps` speaks."""
    all_run_s = max(answer.events[0].at_s for answer in answers)
    gaps = defaultdict[int, list[Gap]](list)
    for answer in answers:
        for token, (before, after) in enumerate(pairwise(answer.events), 1):
            if before.at_s >= all_run_s:
                gaps[token].append(Gap(before.at_s, after.at_s))
    return [
        ClientStep(token, max(found, key=lambda gap: gap.seconds), median([gap.seconds for gap in found]))
        for token, found in sorted(gaps.items())
    ]


def tell_client(name: str, answers: Sequence[Answer], noted: Mapping[str, Sequence[Noted]]) -> None:
    """Print the first, the last and the longest gaps of a client with all that was done, by process."""
    steps = client_steps(answers)
    longest = sorted(steps, key=lambda one: -one.longest.seconds)[:_TOLD]
    notes = Notes(
        [replace(one, thread=f"{process} {one.thread}") for process, each in noted.items() for one in each]
    )
    for one in [*longest, *(each for each in (steps[0], steps[-1]) if each not in longest)]:
        gap = one.longest
        came_s = sorted(answer.events[one.token].at_s for answer in answers)
        tell(
            f"{name}, client, token {one.token} of {len(steps)}: {1e3 * gap.seconds:.1f} ms at most, "
            f"{1e3 * one.median_s:.1f} in the median, the first to come at "
            f"{1e3 * (came_s[0] - gap.begin_s):+.1f}, the last at {1e3 * (came_s[-1] - gap.begin_s):+.1f}"
        )
        tell_parts(notes.during(gap), gap.begin_s, gap.end_s)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=3, help="of streams beside the other model")
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU, without graphs")
    parser.add_argument("--place", type=Path, default=Path("/dev/shm"), help="where the models are made")
    chosen = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="hearth-bench-", dir=chosen.place))
    signal.signal(signal.SIGTERM, _end)  # so that no service outlives this
    models = (RUNNING, OTHER) if "others" in chosen.only else (RUNNING,)
    scale = TINY_SCALE if chosen.tiny else Scale(host_bytes=_HOST_BYTES[len(models)], rest_s=3.0)
    trace = place / "trace"
    variables = environment(trace)
    setting = Setting(replace(scale, beside_rounds=chosen.rounds), place, variables)
    has_failed = False
    own = Ring()
    own.trace(Connection, "data_received", "read")
    own.trace_garbage()

    def notes() -> list[Noted]:
        (worker,) = setting.service().client.ps().workers
        return notes_of(worker.pid, trace)

    def measure_others() -> None:
        part = others(setting)
        for name in ("alone_s", "while_restored_s", "beside_the_resident_model_s"):
            tell(f"others, client, {name}: {json.dumps(part.details[name])}")
        for name in ("by_phase_s", "by_phase_beside_the_resident_model_s"):
            phases = part.details[name]
            assert isinstance(phases, dict)
            for phase, figures in phases.items():
                tell(f"others, client, {name}, {phase}: {json.dumps(figures)}")
        tell(f"others: {part.error=}, over alone {part.details['restored_over_alone']}")
        tell(f"others: over resident {part.details['restored_over_resident']}")
        tell(f"others: share of gaps over the aim {part.details['share_over_aim']}")
        tell_worker("others", notes())

    def measure_burst() -> None:
        for name, does_rest in (("rested", True), ("just ready", False)):
            setting.bring_to_host(setting.service(), RUNNING)
            setting.replace_worker(does_rest=does_rest)
            watch = setting.watch(setting.service())
            answers = ask_at_once(setting, setting.service())
            client, worker = own.all(), notes()
            gateway = notes_of(setting.service().process.pid, trace)
            tell(f"burst, client, {name}: {first_steps(answers)}")
            tell(f"burst, client, {name}: {watch.use(1).as_json()}")
            tell_client(f"burst, {name}", answers, {"worker": worker, "gateway": gateway, "client": client})
            tell_worker(f"burst, {name}", worker)

    try:
        setting.make_ready(models)
        for name, measure in (("others", measure_others), ("burst", measure_burst)):
            if name in chosen.only:
                try:
                    with step(name):
                        measure()
                except Exception:  # the other part may do better
                    traceback.print_exc()
                    has_failed = True
    finally:
        setting.stop()
        shutil.rmtree(place, ignore_errors=True)
    sys.exit(has_failed)


if __name__ == "__main__":
    main()

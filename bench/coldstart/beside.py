"""Do others notice a model that is restored beside them? Gaps between the tokens of running streams.

Three arms with the same streams: alone, while another model comes and goes and is asked for a token each
time, and while it stays and is asked as often. A token of the other model is work in each of the latter; what
the second has beyond the third is what restoring costs. While streams run nothing else is done here: whoever
reads them late takes that for a gap.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.coldstart.part import Part
from bench.coldstart.setting import Setting
from bench.coldstart.start_log import LogTail, Restoring
from bench.report import Row, percentiles, step
from bench.service.client import Answer, ask, completion, request, uncollected
from bench.service.gaps import Gap, Window, gaps, load_windows
from bench.service.process import Service
from bench.service.streams import good

RUNNING, OTHER = "7B", "4B"
AIM = 1.1  #: times the gaps of a model that is alone
_PROMPT_TOKENS = 64
#: For graphs to be restored behind an answer, before the model is dropped.
_PATIENCE_S, _LOOK_S = 5.0, 0.02


@dataclass(frozen=True, slots=True)
class _Restore:
    """A model that was dropped, and came again for a request."""

    began_s: float
    answer: Answer

    @property
    def first_s(self) -> float:
        return self.answer.events[0].at_s


@dataclass(frozen=True, slots=True)
class _Round:
    """Streams beside a model that came and went, and the same beside one that stayed and was asked alike."""

    restored: Window
    resident_s: float  #: when the latter began

    def in_resident(self, window: Window) -> Window:
        """Return a time of the former as it was in the latter."""
        shift_s = self.resident_s - self.restored.begin_s
        return Window(window.begin_s + shift_s, window.end_s + shift_s)


@dataclass(slots=True)
class _Seen:
    """Gaps of streams, and what happened meanwhile. Mutable; filled by `_measure`."""

    alone: list[Gap] = field(default_factory=list)
    beside: list[Gap] = field(default_factory=list)  #: with another model that comes and goes
    resident: list[Gap] = field(default_factory=list)  #: with another model that stays
    restores: list[_Restore] = field(default_factory=list)
    asked: list[Window] = field(default_factory=list)  #: requests for the model that stays
    rounds: list[_Round] = field(default_factory=list)

    def arms(self, windows: Sequence[Window]) -> dict[str, list[Gap]]:
        """Return the gaps that count: alone, while the model is restored, which is then, and while it stays.

        Of the last those at the same moments: else the other model's tokens were a smaller share of them.
        """
        alike = [one.in_resident(w) for one in self.rounds for w in windows if _overlap(one.restored, w)]
        return {
            "alone": self.alone,
            "restored": [gap for gap in self.beside if any(window.meets(gap) for window in windows)],
            "resident": [gap for gap in self.resident if any(window.meets(gap) for window in alike)],
        }


def others(setting: Setting) -> Part:
    """Stream from one model while another comes, with its snapshot, and goes, again and again."""
    setting.need(RUNNING, OTHER)
    service = setting.service()
    coming = setting.watch(service)
    coming.use(setting.bring_to_host(service, RUNNING, OTHER))  # until their graphs are there as well
    watch = setting.watch(service)
    with step("others"), uncollected(), asyncio.Runner() as runner:
        seen = runner.run(_measure(setting, service))
    # A log has the time of day, streams that of a clock which never jumps.
    shift_s = time.perf_counter() - time.time()
    used, phases = watch.use(len(seen.restores)), _phases(service, seen.restores)
    graphs = [Window(one.end_s - one.seconds + shift_s, one.end_s + shift_s) for one in used.restored]
    arms = seen.arms([*phases["load"], *graphs])
    if lacking := [name for name, found in arms.items() if not found]:
        raise RuntimeError(
            f"{OTHER} was restored {len(seen.restores)} times, and no token came in these arms: {lacking}"
        )
    phases["graphs"] = [
        Window(window.begin_s + one.paused_s, window.end_s)
        for one, window in zip(used.restored, graphs, strict=True)
    ]
    while_graphs = [gap for gap in arms["restored"] if any(window.meets(gap) for window in graphs)]
    compared = _compared(arms)
    details = {
        "running": RUNNING,
        "restored": OTHER,
        "num_streams": setting.scale.beside_streams,
        **compared,
        "while_graphs_are_restored_s": _seconds(while_graphs),
        "with_the_other_model_s_first_token_s": _seconds(seen.beside),
        "by_phase_s": by_phase(seen.beside, phases),
        "by_phase_beside_the_resident_model_s": by_phase(arms["resident"], {"request": seen.asked}),
        "num_restores": len(seen.restores),
        "num_asked_of_the_resident_model": len(seen.asked),
        "snapshots": used.as_json(),
    }
    return Part(_rows(setting, arms), details, used.problem)


def _compared(arms: Mapping[str, Sequence[Gap]]) -> dict[str, object]:
    """Return the percentiles of all arms, and those while a model is restored over the others'."""
    alone_s, restored_s, resident_s = (_seconds(arms[name]) for name in ("alone", "restored", "resident"))
    over_alone = _ratios(restored_s, alone_s)
    return {
        "alone_s": alone_s,
        "while_restored_s": restored_s,
        "beside_the_resident_model_s": resident_s,
        "restored_over_alone": over_alone,
        "restored_over_resident": _ratios(restored_s, resident_s),
        #: Of the gaps of each arm, which one token of the other model in a hundred does not turn about.
        "share_over_aim": {name: _share_over(AIM * alone_s["p99"], found) for name, found in arms.items()},
        "p99_ratio": over_alone["p99"],
        "meets_aim": over_alone["p99"] <= AIM,
    }


def _rows(setting: Setting, arms: Mapping[str, Sequence[Gap]]) -> list[Row]:
    p99_ms = {name: 1e3 * _seconds(found)["p99"] for name, found in arms.items()}
    what, aim = (
        f"{RUNNING}: inter-token p99 of {setting.scale.beside_streams} streams",
        f"at most {AIM:g} times",
    )
    restored, resident = (
        f"while a {OTHER} is restored beside it",
        f"beside a {OTHER} that stays, asked as often",
    )
    return [
        Row(f"{what}, {restored}", "ms", p99_ms["restored"], p99_ms["alone"], f"{aim} the bound"),
        Row(f"{what}, {resident}", "ms", p99_ms["resident"], p99_ms["alone"]),
    ]


async def _measure(setting: Setting, service: Service) -> _Seen:
    scale, prompts, seen = setting.scale, setting.prompts(RUNNING, _PROMPT_TOKENS), _Seen()

    async def streams() -> list[Gap]:
        return await gaps(service, RUNNING, prompts.take(scale.beside_streams), scale.beside_tokens)

    await streams()
    for _ in range(scale.beside_rounds):
        seen.alone += await streams()
        running, began_s, restores = asyncio.create_task(streams()), time.perf_counter(), list[_Restore]()
        while not running.done():
            tail = LogTail(setting.log)
            restores.append(await _restore(service))
            if setting.has_graphs:
                await _wait_for_graphs(tail)
        seen.beside += await running
        seen.restores += restores
        await ask(service.port, completion(OTHER, [1], 1))  # its graph is tried once before it serves
        restored = Window(began_s, time.perf_counter())
        running, began_s = asyncio.create_task(streams()), time.perf_counter()
        seen.rounds.append(_Round(restored, began_s))
        due_s = [one.first_s - restored.begin_s + began_s for one in restores]
        seen.asked += await _ask_at(due_s, service, running)
        seen.resident += await running
    return seen


async def _restore(service: Service) -> _Restore:
    """Drop a model and have it restored for a token."""
    began_s = time.perf_counter()
    await ask(service.port, request("POST", f"/hearth/models/{OTHER}/unload", {"free": True}))
    return _Restore(began_s, good(await ask(service.port, completion(OTHER, [1], 1))))


async def _ask_at(due_s: Sequence[float], service: Service, running: asyncio.Task[list[Gap]]) -> list[Window]:
    """Ask for a token at each of these times, while something runs; return when that was."""
    asked = list[Window]()
    for one_s in due_s:
        await asyncio.sleep(one_s - time.perf_counter())
        if running.done():
            break
        answer = good(await ask(service.port, completion(OTHER, [1], 1)))
        asked.append(Window(answer.reply.asked_s, answer.events[0].at_s))
    return asked


def _phases(service: Service, restores: Sequence[_Restore]) -> dict[str, list[Window]]:
    """Return when the model went, was loaded, and made its first step."""
    phases: dict[str, list[Window]] = {"drop": [], "load": [], "first step": []}
    for one in restores:
        loads = load_windows(service, one.answer)
        if loads:  # else it was not dropped
            # The answer to the order to drop it does not wait for the worker, which does so before the load.
            phases["drop"].append(Window(one.began_s, loads[0].begin_s))
            phases["first step"].append(Window(loads[-1].end_s, one.first_s))
        phases["load"] += loads
    return phases


def by_phase(
    found: Sequence[Gap], windows_by_phase: Mapping[str, Sequence[Window]]
) -> dict[str, dict[str, float]]:
    """Return the gaps apart by all phases that each meets, and so by what may have made it long."""
    gaps_by_phases = dict[str, list[Gap]]()
    for gap in found:
        met = [
            phase
            for phase, windows in windows_by_phase.items()
            if any(window.meets(gap) for window in windows)
        ]
        gaps_by_phases.setdefault(", ".join(met) or "none", []).append(gap)
    return {phases: _seconds(gaps) for phases, gaps in sorted(gaps_by_phases.items())}


async def _wait_for_graphs(tail: LogTail) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while not any(map(Restoring.of, tail.new_events())) and time.monotonic() < deadline_s:
        await asyncio.sleep(_LOOK_S)


def _seconds(found: Sequence[Gap]) -> dict[str, float]:
    return percentiles([gap.seconds for gap in found]) if found else {}


def _share_over(limit_s: float, found: Sequence[Gap]) -> float:
    """Return the share of the gaps that are longer."""
    return sum(gap.seconds > limit_s for gap in found) / max(1, len(found))


def _overlap(one: Window, other: Window) -> bool:
    return one.begin_s < other.end_s and one.end_s > other.begin_s


def _ratios(found_s: Mapping[str, float], bound_s: Mapping[str, float]) -> dict[str, float]:
    """Return percentiles of one arm over those of another."""
    return {name: found_s[name] / bound_s[name] for name in ("p50", "p90", "p99", "max")}

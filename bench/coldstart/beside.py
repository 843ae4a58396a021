"""What others notice of a model that is restored beside them: gaps between the tokens of running streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.coldstart.part import Part
from bench.coldstart.setting import Setting
from bench.coldstart.start_log import restorings
from bench.report import Row, percentiles, step
from bench.service.client import ask, completion, request
from bench.service.gaps import Gap, Window, gaps
from bench.service.process import Service
from bench.service.streams import good

RUNNING, OTHER = "7B", "4B"
AIM = 1.1  #: times the gaps of a model that is alone
_PROMPT_TOKENS = 64
#: For graphs to be restored behind an answer, before the model is dropped.
_PATIENCE_S, _LOOK_S = 5.0, 0.02


@dataclass(slots=True)
class _Seen:
    """Gaps of streams, and what happened meanwhile. Mutable; filled by `_measure`."""

    alone: list[Gap] = field(default_factory=list)
    beside: list[Gap] = field(default_factory=list)  #: with another model
    drops: list[Window] = field(default_factory=list)  #: of that, before it comes again
    loads: list[Window] = field(default_factory=list)
    first_steps: list[Window] = field(default_factory=list)  #: from the end of its load to its first token
    num_restores: int = 0


def others(setting: Setting) -> Part:
    """Stream from one model while another comes, with its snapshot, and goes, again and again."""
    setting.need(RUNNING, OTHER)
    service = setting.service()
    setting.ask(service, OTHER)  # to host memory
    watch = setting.watch(service)
    with step("others"), asyncio.Runner() as runner:
        seen = runner.run(_measure(setting, service))
    # A log has the time of day, streams that of a clock which never jumps.
    shift_s = time.perf_counter() - time.time()
    used = watch.use(seen.num_restores)
    graphs = [Window(one.end_s - one.seconds + shift_s, one.end_s + shift_s) for one in used.restored]
    phases = {
        "drop": seen.drops,
        "load": seen.loads,
        "first step": seen.first_steps,
        "graphs": [
            Window(window.begin_s + one.paused_s, window.end_s)
            for one, window in zip(used.restored, graphs, strict=True)
        ],
    }
    met = [gap for gap in seen.beside if any(window.meets(gap) for window in (*seen.loads, *graphs))]
    if not met:
        raise RuntimeError(
            f"no token came while {OTHER} was restored, which it was {seen.num_restores} times"
        )
    alone_s, restored_s = _seconds(seen.alone), _seconds(met)
    ratio = restored_s["p99"] / alone_s["p99"]
    details = {
        "running": RUNNING,
        "restored": OTHER,
        "num_streams": setting.scale.beside_streams,
        "alone_s": alone_s,
        "while_restored_s": restored_s,
        "while_graphs_are_restored_s": _seconds([gap for gap in met if any(w.meets(gap) for w in graphs)]),
        "with_the_other_model_s_first_token_s": _seconds(seen.beside),
        "by_phase_s": by_phase(seen.beside, phases),
        "num_restores": seen.num_restores,
        "p99_ratio": ratio,
        "meets_aim": ratio <= AIM,
        "snapshots": used.as_json(),
    }
    what = f"{RUNNING}: inter-token p99 of {setting.scale.beside_streams} streams"
    aim = f"at most {AIM:g} times the bound"
    measure = f"{what}, while a {OTHER} is restored beside it"
    row = Row(measure, "ms", 1e3 * restored_s["p99"], 1e3 * alone_s["p99"], aim)
    return Part([row], details, used.problem)


async def _measure(setting: Setting, service: Service) -> _Seen:
    scale, prompts, seen = setting.scale, setting.prompts(RUNNING, _PROMPT_TOKENS), _Seen()

    async def streams() -> list[Gap]:
        return await gaps(service, RUNNING, prompts.take(scale.beside_streams), scale.beside_tokens)

    await streams()
    for _ in range(scale.beside_rounds):
        seen.alone += await streams()
        running = asyncio.create_task(streams())
        while not running.done():
            began_s = time.time()
            await _restore(service, seen)
            seen.num_restores += 1
            if setting.has_graphs:
                await _wait_for_graphs(setting.log, began_s)
        seen.beside += await running
    return seen


async def _restore(service: Service, seen: _Seen) -> None:
    """Drop a model and have it restored, and note when it went, was loaded, and made its first step."""
    began_s = time.perf_counter()
    await ask(service.port, request("POST", f"/hearth/models/{OTHER}/unload", {"free": True}))
    answer = good(await ask(service.port, completion(OTHER, [1], 1)))
    asked_s, explained = answer.reply.asked_s, service.client.explain(answer.reply.request_id)
    spans = [span for span in explained.spans if span.what == "load"]  # since the arrival at the gateway
    loads = [Window(asked_s + span.begin_s, asked_s + span.end_s) for span in spans]
    if loads:  # else it was not dropped
        # The answer to the order to drop it does not wait for the worker, which does so before the load.
        seen.drops.append(Window(began_s, loads[0].begin_s))
        seen.first_steps.append(Window(loads[-1].end_s, answer.events[0].at_s))
    seen.loads += loads


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


async def _wait_for_graphs(log: Path, began_s: float) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while not restorings(log, began_s) and time.monotonic() < deadline_s:
        await asyncio.sleep(_LOOK_S)


def _seconds(found: Sequence[Gap]) -> dict[str, float]:
    return percentiles([gap.seconds for gap in found]) if found else {}

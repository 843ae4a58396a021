"""Parts of `bench.coldstart` that ask a service: ready, first request, killed worker, model on a warm worker.

Parses no flags.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from bench.coldstart.part import Part, figures_of_peers
from bench.coldstart.setting import NEW_TOKENS, PROMPT_TOKENS, Setting
from bench.report import Row, percentiles, step
from bench.service.client import uncollected
from bench.service.gpu import Asked
from bench.service.gpu import kill as kill_worker
from hearth.core.types import Rung

AIM_READY_S = 5.0
#: Of the time that the bytes take from their rung, and beyond it.
AIM_FIRST, AIM_FIRST_S = 1.2, 0.5
AIM_KILL_S = 1.0  #: beyond the teardown
AIM_MODEL = 1.15  #: of the bytes' time over the bus
#: Shapes that have an aim; of others it is only told.
_AIMED = ("7B", "13B")


def ready(setting: Setting) -> Part:
    """Start a service whose caches are warm, until it has a worker. Those that were started before count."""
    setting.need("7B")
    with step("ready"):
        setting.start_service()
    best = min(setting.starts, key=lambda start: start.ready_s)
    details = {
        "ready_s": percentiles([start.ready_s for start in setting.starts]),
        "breakdown_s": best.parts,
        "starts": [{"ready_s": start.ready_s, **start.parts} for start in setting.starts],
        "meets_aim": best.ready_s <= AIM_READY_S,
    }
    aim = f"at most {AIM_READY_S:g} s"
    row = Row(
        *("`hearth serve` to ready", "s", best.ready_s, None, aim, figures_of_peers("start")),
        is_comparable=False,
    )
    return Part([row], details)


def first(setting: Setting) -> Part:
    """Ask a service that has just started, and, when it has come to rest, for a model that is as far away."""
    setting.need("7B", "13B")
    with step("first"):
        setting.start_service()
        service = setting.service()
        watch = setting.watch(service)
        asked = setting.ask(service, "7B")
        setting.rest()
        at_rest = setting.ask(service, "13B")
    used = watch.use(2)
    load_s = at_rest.explained.load_s or 0.0
    bound_s = load_s * setting.model_bytes("7B") / setting.model_bytes("13B")
    first_s, aim_s = asked.answer.first_s, AIM_FIRST * bound_s + AIM_FIRST_S
    details = {
        "first_s": first_s,
        "bound_s": bound_s,
        "rungs": [str(use.rung) for use in asked.explained.rungs],
        "load_at_rest_s": load_s,
        "first_at_rest_s": at_rest.answer.first_s,
        "host_bytes": setting.scale.host_bytes,
        "meets_aim": first_s <= aim_s,
        "just_started": asked.as_json(),
        "at_rest": at_rest.as_json(),
        "snapshots": used.as_json(),
    }
    aim = f"at most {AIM_FIRST:g} times the bound and {AIM_FIRST_S:g} s"
    row = Row("7B: first request of a service just started, to first text", "s", first_s, bound_s, aim)
    return Part([row], details, used.problem)


def kill(setting: Setting) -> Part:
    """Kill the worker in the middle of a stream; the model is in host memory."""
    setting.need("7B")
    with step("kill"):
        service = setting.service()
        setting.ask(service, "7B")
        setting.rest()
        watch = setting.watch(service)
        with uncollected(), asyncio.Runner() as runner:
            part = runner.run(kill_worker(service, setting.scale.kill, setting.bytes_per_s, "7B"))
    pause_s, teardown_s = (part.details[name] for name in ("pause_s", "teardown_s"))
    assert isinstance(pause_s, float)
    assert isinstance(teardown_s, float)
    aim = f"at most {AIM_KILL_S:g} s more than the bound, the driver's teardown"
    row = Row("7B: worker killed in mid-stream, pause", "s", pause_s, teardown_s, aim)
    used = watch.use(1)
    details = {
        **part.details,
        "meets_aim": pause_s <= teardown_s + AIM_KILL_S,
        "snapshots": used.as_json(),
    }
    return Part([row], details, used.problem)


def model(setting: Setting, names: Sequence[str]) -> Part:
    """Start models from host memory, each for the first time in the process of its worker."""
    setting.need(*names)
    parts = [_start_models(setting, group) for group in _groups(setting, names)]
    return Part(
        [row for part in parts for row in part.rows],
        {name: found for part in parts for name, found in part.details.items()} | {"new_tokens": NEW_TOKENS},
        "; ".join(part.error for part in parts if part.error is not None) or None,
    )


def _groups(setting: Setting, names: Sequence[str]) -> list[list[str]]:
    """Return models in groups that host memory holds together, so that few workers have to be replaced."""
    groups = list[list[str]]()
    for name in names:
        used_bytes = sum(setting.model_bytes(other) for other in groups[-1]) if groups else 0
        if groups and used_bytes + setting.model_bytes(name) <= setting.scale.host_bytes:
            groups[-1].append(name)
        else:
            groups.append([name])
    return groups


def _start_models(setting: Setting, names: Sequence[str]) -> Part:
    with step(f"model {', '.join(names)}"):
        service = setting.service()
        setting.bring_to_host(service, *names)
        worker_s = setting.replace_worker()
        watch = setting.watch(service)
        asked = {name: setting.ask(service, name) for name in names}
    used = watch.use(len(names))
    problems = [used.problem]
    rows, details = list[Row](), dict[str, object]()
    for name, one in asked.items():
        bound_s = setting.model_bytes(name) / setting.bytes_per_s
        details[name] = {**_model_details(one, bound_s), "worker_s": worker_s, "snapshots": used.as_json()}
        rungs = [str(use.rung) for use in one.explained.rungs]
        if setting.scale.kind == "cuda" and rungs != [Rung.HOST]:
            problems.append(f"{name} came from {rungs} instead of host memory")
        aim = f"at most {AIM_MODEL:g} times the bound" if name in _AIMED else None
        measure = f"{name}: start on a warm worker, to first text of {PROMPT_TOKENS} tokens"
        peers = figures_of_peers(f"{name} start")
        rows.append(Row(measure, "s", one.answer.first_s, bound_s, aim, peers, is_comparable=False))
    return Part(rows, details, "; ".join(problem for problem in problems if problem) or None)


def _model_details(asked: Asked, bound_s: float) -> dict[str, object]:
    ratio = asked.answer.first_s / bound_s
    return {"bound_s": bound_s, "ratio": ratio, "meets_aim": ratio <= AIM_MODEL, **asked.as_json()}

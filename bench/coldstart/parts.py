"""The questions of `bench.coldstart`: ready, first request, killed worker, model on a warm worker.

Parses no flags.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from bench.coldstart.setting import NEW_TOKENS, PROMPT_TOKENS, Setting
from bench.coldstart.start_log import breakdown
from bench.report import percentiles, step
from bench.service.gpu import SEVEN, TINY, Asked, Part, row
from bench.service.gpu import kill as kill_worker
from bench.service.process import Service
from hearth.control.datadir import DataDir

AIM_READY_S = 5.0
#: Of the time that the bytes take from their rung, and beyond it.
AIM_FIRST, AIM_FIRST_S = 1.2, 0.5
AIM_KILL_S = 1.0  #: beyond the teardown
AIM_MODEL = 1.15  #: of the bytes' time over the bus
_SHAPES = ("0.5B", "4B", "m1")
_LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class Start:
    """A start of `hearth serve`, until a worker can host models."""

    ready_s: float
    parts: dict[str, float]  #: see `breakdown`


def ready(setting: Setting) -> Part:
    """Start a service whose caches are warm, until it has a worker."""
    assert setting.is_warm
    starts = []
    for _ in range(setting.scale.num_starts):
        with step("ready"):
            starts.append(_started(setting))
    best = min(starts, key=lambda start: start.ready_s)
    details = {
        "ready_s": percentiles([start.ready_s for start in starts]),
        "breakdown_s": best.parts,
        "starts": [{"ready_s": start.ready_s, **start.parts} for start in starts],
        "aim": AIM_READY_S,
    }
    return Part([row("`hearth serve` to ready", "s", best.ready_s, None)], details)


def _started(setting: Setting) -> Start:
    began_s = time.time()
    with setting.service():
        ready_s = time.time() - began_s
    return Start(ready_s, breakdown(DataDir(setting.data_dir).log_path, began_s))


def first(setting: Setting) -> Part:
    """Ask a service that has just started, and for another such model when it has come to rest."""
    assert setting.is_warm
    setting.have("m1", "m2")
    with step("first"), setting.service() as service:
        asked = setting.ask(service, "m1")
        setting.rest()
        at_rest = setting.ask(service, "m2")
    bound_s = at_rest.explained.load_s or 0.0  # of the same bytes from the same files
    first_s = asked.answer.first_s
    details = {
        "first_s": first_s,
        "load_at_rest_s": bound_s,
        "first_at_rest_s": at_rest.answer.first_s,
        "host_bytes": setting.scale.host_bytes,
        "meets_aim": first_s <= AIM_FIRST * bound_s + AIM_FIRST_S,
        "just_started": asked.as_json(),
        "at_rest": at_rest.as_json(),
    }
    return Part(
        [row("first request of a service just started, to first text", "s", first_s, bound_s)], details
    )


def kill(setting: Setting) -> Part:
    """Kill the worker in the middle of a stream; the model is in host memory."""
    assert setting.is_warm
    scale = SEVEN if setting.scale.kind == "cuda" else TINY
    with step("kill"), setting.service() as service:
        setting.ask(service, "m1")
        setting.rest()
        with asyncio.Runner() as runner:
            part = runner.run(kill_worker(service, scale, setting.bytes_per_s))
    pause_s, teardown_s = (part.details[name] for name in ("pause_s", "teardown_s"))
    assert isinstance(pause_s, float)
    assert isinstance(teardown_s, float)
    return Part(part.rows, {**part.details, "meets_aim": pause_s <= teardown_s + AIM_KILL_S})


def model(setting: Setting) -> Part:
    """Start models from host memory, each for the first time in the process of its worker."""
    assert setting.is_warm
    setting.have(*_SHAPES)
    with step("model"), setting.service() as service:
        for name in _SHAPES:  # to host memory, and kernels to the disk
            setting.ask(service, name)
        _replace_worker(service)
        setting.rest()
        asked = {name: setting.ask(service, name) for name in _SHAPES}
    bounds_s = {name: setting.model_bytes(name) / setting.bytes_per_s for name in _SHAPES}
    what = f"start on a warm worker, to first text of {PROMPT_TOKENS} tokens"
    rows = [
        row(f"{what}, {_size(name)}", "s", asked[name].answer.first_s, bounds_s[name]) for name in _SHAPES
    ]
    details = {_size(name): _model_details(asked[name], bounds_s[name]) for name in _SHAPES}
    return Part(rows, {**details, "new_tokens": NEW_TOKENS})


def _model_details(asked: Asked, bound_s: float) -> dict[str, object]:
    ratio = asked.answer.first_s / bound_s
    return {"bound_s": bound_s, "ratio": ratio, "meets_aim": ratio <= AIM_MODEL, **asked.as_json()}


def _size(name: str) -> str:
    return "7B" if name == "m1" else name


def _replace_worker(service: Service) -> None:
    """Kill the worker and wait for the next one."""
    (worker,) = service.client.ps().workers
    os.kill(worker.pid, signal.SIGKILL)
    while service.client.ps().workers[0].pid in (0, worker.pid):
        time.sleep(_LOOK_S)
    service.wait_ready()


PARTS: dict[str, Callable[[Setting], Part]] = {"ready": ready, "first": first, "kill": kill, "model": model}

"""Calls of engines that a simulation skips, because their steps only decode. Changes no engine."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hearth.core.types import ModelId, RequestId
from hearth.policy.batch.decode_run import DecodeRun
from hearth.policy.batch.step_sharing import StepSharing
from hearth.sim.profile import LeastSeconds
from hearth.sim.stepped_engine import SteppedEngine, StepSeconds


@dataclass(frozen=True, slots=True)
class JumpedCall:
    model: ModelId
    request_ids: tuple[RequestId, ...]  #: of those that get a token by it
    began_s: float
    end_s: float
    flight_end_s: float  #: of the step that it launches
    seconds: StepSeconds  #: of that step


@dataclass(frozen=True, slots=True)
class Jump:
    """Consecutive calls that are skipped once they are over."""

    ready: Sequence[ModelId]  #: those that share the device meanwhile
    calls: list[JumpedCall]

    @property
    def end_s(self) -> float:
        return self.calls[-1].end_s

    def cut(self, now_s: float) -> None:
        del self.calls[bisect_left(self.calls, now_s, key=lambda call: call.end_s) + 1 :]


def plan_jump(
    engines: Mapping[ModelId, SteppedEngine],
    sharing: StepSharing,
    free_bytes: int,
    now_s: float,
    until_s: float,
    device_free_s: float,
    least: LeastSeconds,
) -> Jump | None:
    """Return the next calls that only decode, each begun before `until_s`; None: make the next call.

    `engines`: of the ready models, whose KV may take `free_bytes`. The device is busy until `device_free_s`,
    and steps take `least` or longer.
    """
    ready = list(engines)
    share_bytes = free_bytes // len(ready)
    runs, flight_ends_s = dict[ModelId, DecodeRun](), dict[ModelId, float]()
    for model, engine in engines.items():
        if engine.flight is None or (run := engine.decode_run(share_bytes)) is None or not run.num_steps:
            return None
        runs[model], flight_ends_s[model] = run, engine.flight.end_s
    tried = copy.deepcopy(sharing) if len(ready) > 1 else None
    num_calls, calls = dict.fromkeys(ready, 0), list[JumpedCall]()
    while now_s < until_s:
        model = ready[0] if tried is None else tried.next(ready)
        run, num_before = runs[model], num_calls[model]
        if num_before == run.num_steps:
            break
        num_rows = len(run.request_ids)
        context_tokens = run.context_tokens + num_before * num_rows
        seconds = engines[model].step_seconds(num_rows, num_rows, context_tokens, least)
        device_free_s = max(now_s, device_free_s) + seconds.step_s
        end_s = max(now_s, flight_ends_s[model])
        calls.append(JumpedCall(model, run.request_ids, now_s, end_s, device_free_s, seconds))
        flight_ends_s[model] = device_free_s
        if tried is not None:
            tried.stepped(model, end_s - now_s)
        num_calls[model] += 1
        now_s = end_s
    return Jump(ready, calls) if calls else None

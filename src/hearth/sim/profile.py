"""How long steps, loads and switches take on a simulated machine, as `python -m bench.profile` measured it.

A model that was not measured is scaled from the nearest by bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from msgspec.structs import replace as replace_struct

from hearth.core.errors import ConfigError
from hearth.core.types import Rung
from hearth.policy.batch.flights import StageTimes, choose_flights
from hearth.sim.estimates import MEASURED, SPECS, DeviceSpec, estimate
from hearth.sim.step_times import StepTimes
from hearth.snapshot.cost_profile import VERSION, MeasuredProfile, MeasuredShape, MeasuredStep

_KEPT = Path(__file__).parent / "profiles"
#: Names such as `7B` and `0.5B` are sizes: billions of parameters.
_SIZE = re.compile(r"(\d+(?:\.\d+)?)[Bb]")

_PARAMETER_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class LeastSeconds:
    step_s: float = 0.0
    told_s: float = 0.0  #: that an engine's timer tells of one that waits for the host, at most

    @staticmethod
    def of(step_s: float, told_s: float | None) -> LeastSeconds:
        """`told_s`: None if the timer was not read: it then equals the clock."""
        return LeastSeconds(step_s, step_s if told_s is None else told_s)


NO_LEAST = LeastSeconds()


@dataclass(frozen=True, slots=True)
class ShapeProfile:
    name: str
    weights_bytes: int
    kv_bytes_per_token: int
    times: StepTimes
    device_times: StepTimes  #: of the same steps, as an engine's timer tells them
    host_step_s: float
    capture_s: float  #: that the first step of a size takes longer
    eager_s: float  #: that a step behind a load takes at least which has no graph
    with_prompts: LeastSeconds  #: of steps with prompts
    shares: tuple[float, ...] = (1.0,)  #: of all layers, in each stage of the pipeline that runs the model
    hops_s: float = 0.0  #: of a step's way through all stages and back

    def step_s(self, num_tokens: int, num_rows: int, context_tokens: int) -> float:
        """Return the seconds of a step; as many rows as tokens: all of them decode.

        `context_tokens`: those that the rows attend to, their own included, over all rows.
        """
        return self.host_step_s + self._in_flights(self.times, num_tokens, num_rows, context_tokens)

    def device_s(self, num_tokens: int, num_rows: int, context_tokens: int) -> float:
        return self._in_flights(self.device_times, num_tokens, num_rows, context_tokens)

    def in_stages(self, shares: Sequence[float], own_share: float, hops_s: float) -> ShapeProfile:
        """Return the model as its pipeline runs it; `own_share`: of the worker."""
        kv_bytes = max(1, math.ceil(self.kv_bytes_per_token * own_share))
        return replace(self, kv_bytes_per_token=kv_bytes, shares=tuple(shares), hops_s=hops_s)

    def _in_flights(self, times: StepTimes, *sizes: int) -> float:
        """Return the seconds until every row has its token, each flight having its share of the rows."""
        num_stages = len(self.shares)
        if num_stages == 1:
            return times.step_s(*sizes)

        def flight_s(num_flights: int) -> float:
            return times.step_s(*(-(-size // num_flights) for size in sizes))

        stage_s = [share * flight_s(num_stages) for share in self.shares]
        num_flights = choose_flights(StageTimes(stage_s, self.hops_s), num_stages, num_stages + 1)
        through_s, slowest_s = flight_s(num_flights), max(self.shares) * flight_s(num_flights)
        return max(through_s + self.hops_s, min(num_flights, sizes[1]) * slowest_s)


class Profile:
    def __init__(self, measured: MeasuredProfile, spec: DeviceSpec | None = None) -> None:
        """`spec`: of the device, if it is known."""
        self.measured = measured
        self.memory_bytes = None if spec is None else int(spec.memory_bytes)
        self.is_estimate = spec is not None and spec is not SPECS[MEASURED]
        self.bytes_per_s: Mapping[Rung, float] = measured.bytes_per_s
        #: Of a load by an engine that is there, besides its bytes.
        self.give_way_s = measured.switch.give_way_s
        #: From the last byte of a load to the token of a step that has followed it.
        self.begin_s = measured.switch.begin_s
        self.assemble_s = measured.assemble_s
        self.request_s = measured.request_s
        self.wake_s = measured.wake_s
        self.beside_load = LeastSeconds.of(measured.beside_load_s, measured.beside_load_told_s)
        self.return_s = measured.return_s
        #: Between stages of one machine, and of two.
        self.hop_s, self.node_hop_s = measured.hop_s, measured.node_hop_s
        self.shapes: Mapping[str, ShapeProfile] = {one.name: self._shape(one) for one in measured.shapes}

    @staticmethod
    def load(path_or_name: str | Path) -> Profile:
        """Read a profile by name, such as `h200` or the estimate `a100`, or from a file.

        Raises:
            ConfigError: there is no such profile, or the file is invalid.
        """
        if (spec := SPECS.get(str(path_or_name))) is not None:
            kept = _read(_KEPT / f"{MEASURED}.json")
            return Profile(kept if spec is SPECS[MEASURED] else estimate(kept, spec), spec)
        path = Path(path_or_name)
        if path.suffix != ".json":
            path = _KEPT / f"{path_or_name}.json"
        if not path.is_file():
            known = ", ".join(f"`{name}`" for name in sorted({*kept_names(), *SPECS}))
            raise ConfigError(
                f"there is no profile `{path_or_name}`; name one of {known}, or a file that ends in `.json`"
            )
        return Profile.of(_read(path), str(path))

    @staticmethod
    def of(measured: MeasuredProfile, where: str) -> Profile:
        """Return the profile of a measurement; `where`: its name in messages.

        Raises:
            ConfigError: its fields contradict each other.
        """
        _check(measured, where)
        return Profile(measured)

    def shape(self, name: str) -> ShapeProfile:
        """Return a measured model, or one scaled from the nearest by a size such as `13B`.

        Raises:
            ConfigError: the name is neither.
        """
        for shape in self.shapes.values():
            if shape.name.casefold() == name.casefold():
                return shape
        size = _SIZE.fullmatch(name)
        if size is None or float(size[1]) == 0.0:
            known = ", ".join(f"`{one}`" for one in self.shapes)
            raise ConfigError(
                f"the profile has no model `{name}`; name one of {known}, or a size such as `13B`"
            )
        weights_bytes = int(float(size[1]) * 1e9 * _PARAMETER_BYTES[self.measured.shapes[0].dtype])
        nearest = self._nearest(weights_bytes)
        # Nothing is known of its KV: it grows as the weights do.
        kv_bytes = max(1, round(nearest.kv_bytes_per_token * weights_bytes / nearest.weights_bytes))
        return self.scaled(name, weights_bytes, kv_bytes)

    def scaled(self, name: str, weights_bytes: int, kv_bytes_per_token: int) -> ShapeProfile:
        nearest = self._nearest(weights_bytes)
        weights, kv = weights_bytes / nearest.weights_bytes, kv_bytes_per_token / nearest.kv_bytes_per_token
        return replace(
            nearest,
            name=name,
            weights_bytes=weights_bytes,
            kv_bytes_per_token=kv_bytes_per_token,
            times=nearest.times.scaled(weights, kv),
            device_times=nearest.device_times.scaled(weights, kv),
        )

    def _nearest(self, weights_bytes: int) -> ShapeProfile:
        return min(self.shapes.values(), key=lambda shape: abs(math.log(shape.weights_bytes / weights_bytes)))

    def _shape(self, measured: MeasuredShape) -> ShapeProfile:
        return ShapeProfile(
            measured.name,
            measured.weights_bytes,
            measured.kv_bytes_per_token,
            StepTimes.fitted(measured.steps),
            StepTimes.fitted([_as_timed(step) for step in measured.steps]),
            self.measured.host_step_s,
            measured.capture_s,
            measured.eager_s if measured.behind_load_s is None else measured.behind_load_s,
            LeastSeconds.of(self.measured.prompt_step_s, self.measured.prompt_step_told_s),
        )


def _as_timed(step: MeasuredStep) -> MeasuredStep:
    """Return a step as an engine's timer measured it; without one, as the clock did."""
    return step if step.device_s is None else replace_struct(step, seconds=step.device_s)


def kept_names() -> list[str]:
    return sorted(path.stem for path in _KEPT.glob("*.json"))


def _read(path: Path) -> MeasuredProfile:
    try:
        return msgspec.json.decode(path.read_bytes(), type=MeasuredProfile)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is no profile of version {VERSION}: {error}; write one with `python -m bench.profile`"
        ) from error


def _check(measured: MeasuredProfile, where: str) -> None:
    names = [shape.name for shape in measured.shapes]
    if len(set(names)) < len(names):
        raise ConfigError(f"{where}: `shapes` names a model twice: {', '.join(names)}")
    rungs = [rung for rung in Rung if rung is not Rung.PEER]  # a profile is of one machine
    for rung in rungs:
        if rung not in measured.bytes_per_s:
            raise ConfigError(
                f"{where}: `bytes_per_s` lacks `{rung}`; each of {', '.join(rungs)} needs a rate"
            )
    for shape in measured.shapes:
        for step in shape.steps:
            if not 1 <= step.num_rows <= step.num_tokens <= step.context_tokens or step.seconds <= 0.0:
                raise ConfigError(
                    f"{where}: a step of `{shape.name}` has 1 <= rows <= tokens <= context and takes time, "
                    f"given: {msgspec.json.encode(step).decode()}"
                )
        is_decode = {step.num_tokens == step.num_rows for step in shape.steps}
        if is_decode != {True, False}:
            raise ConfigError(
                f"{where}: `{shape.name}` needs steps of decode rows alone and steps with prompts, "
                f"given: {len(shape.steps)} steps of {len(is_decode)} kinds"
            )

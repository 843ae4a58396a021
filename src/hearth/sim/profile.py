"""How long everything takes on a machine that is simulated: steps, loads, switches. Measures nothing.

`python -m bench.profile` measures a machine and writes the file; `profiles/` keeps some, with their origin.
A model that was not measured is scaled from the measured one whose weights are nearest in bytes: its steps
take as much longer as it has more weights, and reading a token of KV as much longer as it has more KV.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from hearth.errors import ConfigError
from hearth.sim.step_times import MeasuredStep, StepTimes
from hearth.types import Rung

#: Of the file's fields. A file of another version is measured again.
VERSION: Literal[1] = 1
_KEPT = Path(__file__).parent / "profiles"
#: Names such as `7B` and `0.5B` are sizes: billions of parameters.
_SIZE = re.compile(r"(\d+(?:\.\d+)?)[Bb]")

#: Of weights, by how they are stored.
_PARAMETER_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

_Time = Annotated[float, Meta(ge=0)]
_Count = Annotated[int, Meta(gt=0)]


class Origin(Struct, frozen=True, forbid_unknown_fields=True):
    """Where and with what a profile was measured."""

    command: str
    commit: str | None
    date: str
    device: str
    num_cores: int
    versions: dict[str, str | None]  #: of Python and packages
    is_tiny: bool  #: measured to see that measuring works; its times mean nothing
    #: Fields that were not measured but assumed, each with the reason.
    assumed: dict[str, str]


class MeasuredSwitch(Struct, frozen=True, forbid_unknown_fields=True):
    """The cost of a switch to another model besides its missing bytes and its prompt."""

    how: str  #: what was done to measure it
    give_way_s: _Time  #: from the order until its missing bytes begin to cross
    begin_s: _Time  #: from the last byte to the first token, without the prompt's own time


class MeasuredMapping(Struct, frozen=True, forbid_unknown_fields=True):
    """The cost of mapping a page of device memory and unmapping it. Loads map ahead of their copies."""

    page_bytes: _Count
    page_s: _Time


class MeasuredShape(Struct, frozen=True, forbid_unknown_fields=True):
    """A model, and the steps that were measured with it."""

    name: Annotated[str, Meta(min_length=1)]
    model: str  #: whose shape it has
    dtype: Literal["bfloat16", "float16", "float32"]
    weights_bytes: _Count
    kv_bytes_per_token: _Count
    steps: list[MeasuredStep]


class MeasuredProfile(Struct, frozen=True, forbid_unknown_fields=True):
    """The file of a profile: what was measured, and nothing that follows from it."""

    version: Literal[1]
    origin: Origin
    bytes_per_s: dict[Rung, Annotated[float, Meta(gt=0)]]  #: that each rung delivers to the device
    mapping: MeasuredMapping | None  #: None: this device's memory is not mapped by pages
    switch: MeasuredSwitch
    assemble_s: _Time  #: of a model's first load here, before its bytes begin to cross
    host_step_s: _Time  #: that a worker adds to each step of an engine
    shapes: Annotated[list[MeasuredShape], Meta(min_length=1)]
    #: For which a request is on its way: from its arrival to a worker, tokenized, and its first token back.
    request_s: _Time = 0.0


@dataclass(frozen=True, slots=True)
class ShapeProfile:
    """One model on the machine of a profile."""

    name: str
    weights_bytes: int
    kv_bytes_per_token: int
    times: StepTimes
    host_step_s: float

    def step_s(self, num_tokens: int, num_rows: int, context_tokens: int) -> float:
        """Return the seconds of a step.

        Args:
            num_tokens: Tokens that the step computes, over all rows.
            num_rows: Sequences in it. As many as tokens: all of them decode.
            context_tokens: Tokens that the rows look back on, their own included, summed over rows.
        """
        return self.host_step_s + self.times.step_s(num_tokens, num_rows, context_tokens)


class Profile:
    """A machine, as simulations know it."""

    def __init__(self, measured: MeasuredProfile) -> None:
        self.measured = measured
        self.bytes_per_s: Mapping[Rung, float] = measured.bytes_per_s
        #: Of a switch between models that are not new here, besides missing bytes and prompt.
        self.switch_s = measured.switch.give_way_s + measured.switch.begin_s
        self.assemble_s = measured.assemble_s
        self.request_s = measured.request_s
        self.shapes: Mapping[str, ShapeProfile] = {one.name: self._shape(one) for one in measured.shapes}

    @staticmethod
    def load(path_or_name: str | Path) -> Profile:
        """Read a profile: the name of one that is kept here, such as `h200`, or the path of a file.

        Raises:
            ConfigError: there is no such profile, or the file is none.
        """
        path = Path(path_or_name)
        if path.suffix != ".json":
            path = _KEPT / f"{path_or_name}.json"
        if not path.is_file():
            kept = ", ".join(f"`{name}`" for name in kept_names())
            raise ConfigError(
                f"there is no profile `{path_or_name}`; name one of {kept}, or a file that ends in `.json`"
            )
        return Profile(_read(path))

    def shape(self, name: str) -> ShapeProfile:
        """Return a measured model, or by a size such as `13B` one that is scaled from the nearest.

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
        """Return a model of these sizes, scaled from the nearest one that was measured."""
        nearest = self._nearest(weights_bytes)
        times = nearest.times.scaled(
            weights_bytes / nearest.weights_bytes, kv_bytes_per_token / nearest.kv_bytes_per_token
        )
        return ShapeProfile(name, weights_bytes, kv_bytes_per_token, times, self.measured.host_step_s)

    def _nearest(self, weights_bytes: int) -> ShapeProfile:
        return min(self.shapes.values(), key=lambda shape: abs(math.log(shape.weights_bytes / weights_bytes)))

    def _shape(self, measured: MeasuredShape) -> ShapeProfile:
        return ShapeProfile(
            measured.name,
            measured.weights_bytes,
            measured.kv_bytes_per_token,
            StepTimes.fitted(measured.steps),
            self.measured.host_step_s,
        )


def kept_names() -> list[str]:
    """Return the names of the profiles that are kept here."""
    return sorted(path.stem for path in _KEPT.glob("*.json"))


def _read(path: Path) -> MeasuredProfile:
    try:
        measured = msgspec.json.decode(path.read_bytes(), type=MeasuredProfile)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is no profile of version {VERSION}: {error}; write one with `python -m bench.profile`"
        ) from error
    _check(measured, path)
    return measured


def _check(measured: MeasuredProfile, path: Path) -> None:
    """Raise ConfigError where fields that fit their types do not fit each other."""
    names = [shape.name for shape in measured.shapes]
    if len(set(names)) < len(names):
        raise ConfigError(f"{path}: `shapes` names a model twice: {', '.join(names)}")
    for rung in Rung:
        if rung not in measured.bytes_per_s:
            raise ConfigError(f"{path}: `bytes_per_s` lacks `{rung}`; each of {', '.join(Rung)} needs a rate")
    for shape in measured.shapes:
        for step in shape.steps:
            if not 1 <= step.num_rows <= step.num_tokens <= step.context_tokens or step.seconds <= 0.0:
                raise ConfigError(
                    f"{path}: a step of `{shape.name}` has 1 <= rows <= tokens <= context and takes time, "
                    f"given: {msgspec.json.encode(step).decode()}"
                )
        is_decode = {step.num_tokens == step.num_rows for step in shape.steps}
        if is_decode != {True, False}:
            raise ConfigError(
                f"{path}: `{shape.name}` needs steps of decode rows alone and steps with prompts, "
                f"given: {len(shape.steps)} steps of {len(is_decode)} kinds"
            )

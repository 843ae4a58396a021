"""Measured costs of a machine, which simulations run on: by `python -m bench.profile`, or by a worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from hearth.core.errors import SnapshotCorrupt
from hearth.core.types import Rung

SECTION = "cost"
#: A profile of another version is measured again.
VERSION: Literal[1] = 1

_Time = Annotated[float, Meta(ge=0)]
_Count = Annotated[int, Meta(gt=0)]

ComputedDtype = Literal["bfloat16", "float16", "float32"]


class MeasuredStep(Struct, frozen=True, forbid_unknown_fields=True):
    num_tokens: int  #: over all rows
    num_rows: int  #: sequences in it
    context_tokens: int  #: attended tokens, new ones included, summed over rows
    seconds: float  #: typical
    #: As measured by the engine's own timer, which chunks prompts; None: not measured.
    device_s: float | None = None


class PartOrigin(Struct, frozen=True, forbid_unknown_fields=True):
    """The origin of a field that was measured later than the rest, on the same device."""

    command: str
    commit: str | None
    date: str


class Origin(Struct, frozen=True, forbid_unknown_fields=True):
    command: str
    commit: str | None
    date: str
    device: str
    num_cores: int
    versions: dict[str, str | None]  #: of Python and packages
    is_tiny: bool  #: a test run; its times mean nothing
    assumed: dict[str, str]  #: fields that were not measured, each with the reason
    later: dict[str, PartOrigin] = {}  #: fields that were measured separately, by name


class MeasuredSwitch(Struct, frozen=True, forbid_unknown_fields=True):
    """The cost of a model switch besides the transfer of missing bytes and the prompt."""

    how: str  #: of the measurement
    give_way_s: _Time  #: fixed cost of a load
    begin_s: _Time  #: from the last byte to the first token; the prompt is computed during the load


class MeasuredMapping(Struct, frozen=True, forbid_unknown_fields=True):
    """The cost of mapping and unmapping a page of device memory. Loads map ahead of their copies."""

    page_bytes: _Count
    page_s: _Time


class MeasuredShape(Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1)]
    model: str  #: that has this shape
    dtype: ComputedDtype
    weights_bytes: _Count
    kv_bytes_per_token: _Count
    steps: list[MeasuredStep]
    capture_s: _Time = 0.0  #: extra time of the first step of a size, whose graph is captured
    eager_s: _Time = 0.0  #: least time of a step without a graph: the host launches every kernel
    #: The same right after a load, in a worker that serves other models; None: not measured, and `eager_s` is
    #: used, which is too little.
    behind_load_s: _Time | None = None


class MeasuredProfile(Struct, frozen=True, forbid_unknown_fields=True):
    version: Literal[1]
    origin: Origin
    bytes_per_s: dict[Rung, Annotated[float, Meta(gt=0)]]  #: from each rung to the device
    #: None: the device's memory is not mapped by pages, or that was not measured separately.
    mapping: MeasuredMapping | None
    switch: MeasuredSwitch
    assemble_s: _Time  #: of a model's first load, besides its bytes
    host_step_s: _Time  #: added by the worker to each step of an engine
    shapes: Annotated[list[MeasuredShape], Meta(min_length=1)]
    #: Overhead of a request: from arrival to the worker, tokenized, and the first token back.
    request_s: _Time = 0.0
    wake_s: _Time = 0.0  #: extra overhead through an idle service
    beside_load_s: _Time = 0.0  #: least time of a step during a load: the host does both
    #: The same as measured by the engine's timer; None: not measured.
    beside_load_told_s: _Time | None = None
    prompt_step_s: _Time = 0.0  #: least time of a step with prompts in a worker, because of the host
    prompt_step_told_s: _Time | None = None  #: the same as measured by the engine's timer
    return_s: _Time = 0.0  #: of hosting an evicted model again, besides its load
    hop_s: _Time = 0.0  #: from the end of a stage to the begin of the next one, on the same machine
    node_hop_s: _Time = 0.0  #: the same, to another machine


def cost_profile_of(sections: Mapping[str, memoryview]) -> MeasuredProfile:
    try:
        with sections[SECTION] as raw:
            return msgspec.json.decode(raw, type=MeasuredProfile)
    except (KeyError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SnapshotCorrupt(f"the snapshot has no cost profile: {error!r}") from error

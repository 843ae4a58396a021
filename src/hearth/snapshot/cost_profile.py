"""How long everything takes on a machine, as it was measured: the file that simulations run on.

`python -m bench.profile` measures a machine as such and writes one. Each snapshot has one of its model, of
what its worker measured while it served, and once more while the snapshot was made. Measures nothing itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from hearth.core.errors import SnapshotCorrupt
from hearth.core.types import Rung

SECTION = "cost"
#: Of the fields. A file of another version is measured again.
VERSION: Literal[1] = 1

_Time = Annotated[float, Meta(ge=0)]
_Count = Annotated[int, Meta(gt=0)]

#: What models are computed in.
ComputedDtype = Literal["bfloat16", "float16", "float32"]


class MeasuredStep(Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of step, and how long it took."""

    num_tokens: int  #: computed by the step, over all rows
    num_rows: int  #: sequences in it
    context_tokens: int  #: that the rows can look back on, their own included, summed over rows
    seconds: float  #: that it took as a rule
    #: That an engine's own timer tells of it, by which prompts are cut; None: it was not asked.
    device_s: float | None = None


class PartOrigin(Struct, frozen=True, forbid_unknown_fields=True):
    """Where a field comes from that was measured later than the rest of its profile, on the same device."""

    command: str
    commit: str | None
    date: str


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
    later: dict[str, PartOrigin] = {}  #: fields that were measured apart, by name


class MeasuredSwitch(Struct, frozen=True, forbid_unknown_fields=True):
    """The cost of a switch to another model besides its missing bytes and its prompt."""

    how: str  #: what was done to measure it
    give_way_s: _Time  #: of a load that does not grow with its bytes
    begin_s: _Time  #: from the last byte to the first token, whose prompt was computed behind the bytes


class MeasuredMapping(Struct, frozen=True, forbid_unknown_fields=True):
    """The cost of mapping a page of device memory and unmapping it. Loads map ahead of their copies."""

    page_bytes: _Count
    page_s: _Time


class MeasuredShape(Struct, frozen=True, forbid_unknown_fields=True):
    """A model, and the steps that were measured with it."""

    name: Annotated[str, Meta(min_length=1)]
    model: str  #: whose shape it has
    dtype: ComputedDtype
    weights_bytes: _Count
    kv_bytes_per_token: _Count
    steps: list[MeasuredStep]
    capture_s: _Time = 0.0  #: that the first step of a size takes longer, for a graph is captured of it
    eager_s: _Time = 0.0  #: that a step takes at least which has no graph: the host launches every kernel
    #: The same behind a load, in a worker where others answer; None: that was not measured, and `eager_s` is
    #: taken for it, which is too little.
    behind_load_s: _Time | None = None


class MeasuredProfile(Struct, frozen=True, forbid_unknown_fields=True):
    """The file of a profile: what was measured, and nothing that follows from it."""

    version: Literal[1]
    origin: Origin
    bytes_per_s: dict[Rung, Annotated[float, Meta(gt=0)]]  #: that each rung delivers to the device
    #: None: this device's memory is not mapped by pages, or that was not measured apart
    mapping: MeasuredMapping | None
    switch: MeasuredSwitch
    assemble_s: _Time  #: of a model's first load here, beside its bytes
    host_step_s: _Time  #: that a worker adds to each step of an engine
    shapes: Annotated[list[MeasuredShape], Meta(min_length=1)]
    #: For which a request is on its way: from its arrival to a worker, tokenized, and its first token back.
    request_s: _Time = 0.0
    wake_s: _Time = 0.0  #: that it takes longer through a service that rests
    beside_load_s: _Time = 0.0  #: that a step takes at least while bytes cross: the host sees to both
    #: That an engine's timer tells of a step which waits for that; None: it was not asked.
    beside_load_told_s: _Time | None = None
    prompt_step_s: _Time = 0.0  #: that a step with prompts takes at least in a worker, for the host
    prompt_step_told_s: _Time | None = None  #: likewise, as a timer tells it
    return_s: _Time = 0.0  #: of a model that was evicted and is hosted again, beside its load


def cost_profile_of(sections: Mapping[str, memoryview]) -> MeasuredProfile:
    """Return the profile in a snapshot. Raises SnapshotCorrupt: there is none."""
    try:
        with sections[SECTION] as raw:
            return msgspec.json.decode(raw, type=MeasuredProfile)
    except (KeyError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SnapshotCorrupt(f"the snapshot has no cost profile: {error!r}") from error

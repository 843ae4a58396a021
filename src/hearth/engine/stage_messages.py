"""Messages between the stages of a pipeline: steps go from stage to stage, results back to the first.

Every message names its pipeline, by a name that is never used again. The hidden states of a step travel
beside its message. `worker/stage_adapters.py` tells what the messages about adapters do, and
`policy/memory/stage_kv.py` those about memory for KV.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from hearth.core.messages import AdapterOrder
from hearth.core.types import WorkerId
from hearth.engine.pending_step import StepResult
from hearth.engine.sampling_tables import is_penalised
from hearth.policy.batch.blocks import BlockMove
from hearth.policy.batch.plan import StepPlan


class StageStep(msgspec.Struct, frozen=True, tag=True):
    pipeline: str
    plan: StepPlan
    #: How long stages between the first and this one compute for usual decode steps.
    stage_s: tuple[float, ...] = ()


class StageMoves(msgspec.Struct, frozen=True, tag=True):
    """Blocks to be copied behind all steps before it. No hidden states come with it."""

    pipeline: str
    moves: tuple[BlockMove, ...]


class StageBlocks(msgspec.Struct, frozen=True, tag=True):
    """Blocks of the first stage that later messages use, or use no more. No hidden states come with it."""

    pipeline: str
    begin: int
    end: int
    is_added: bool


class StageAdapter(msgspec.Struct, frozen=True, tag=True):
    """A request of the first stage needs an adapter on all stages."""

    pipeline: str
    run: int  #: of the request
    order: AdapterOrder
    age_s: float  #: how long ago the request arrived


class StageAdapterReady(msgspec.Struct, frozen=True, tag=True):
    """All stages up to the sender keep the adapter of a request on their devices until it ends."""

    pipeline: str
    run: int


class StageAdapterFailed(msgspec.Struct, frozen=True, tag=True):
    """A stage cannot have the adapter of a request."""

    pipeline: str
    run: int
    label: str  #: of the error
    reason: str


class StageAdapterEnded(msgspec.Struct, frozen=True, tag=True):
    """A request with an adapter has ended: no step behind this message uses it."""

    pipeline: str
    run: int


class StageKvGrowth(msgspec.Struct, frozen=True, tag=True):
    """All members up to the sender have so many blocks of KV, or the first one wants them."""

    pipeline: str
    num_blocks: int
    needed_blocks: int  #: as in `AskForKv`


class StageKvKept(msgspec.Struct, frozen=True, tag=True):
    """Behind all messages before it, a member needs no more than so many blocks of KV."""

    pipeline: str
    num_blocks: int


class StageKvReturn(msgspec.Struct, frozen=True, tag=True):
    """A later member needs the memory of all blocks of KV beyond so many."""

    pipeline: str
    num_blocks: int
    is_promised: bool  #: to another model, so that requests of this one give way


class StageKvSend(msgspec.Struct, frozen=True, tag=True):
    """Each member sends its layers of these blocks to another worker: see `worker/kv_moves.py`."""

    pipeline: str
    run: int  #: whose KV it is
    blocks: tuple[int, ...]  #: of the first stage
    target: WorkerId


class StageResult(msgspec.Struct, frozen=True, tag=True):
    pipeline: str
    number: int  #: of the step
    result: StepResult
    stage_s: tuple[float, ...] = ()  #: as in `StageStep`, up to the last one


#: What a runner carries out, in order.
StageWork = StageStep | StageMoves | StageBlocks
#: What the last stage tells the first about adapters.
AdapterAnswer = StageAdapterReady | StageAdapterFailed
AdapterMessage = StageAdapter | AdapterAnswer | StageAdapterEnded
KvAnswer = StageKvGrowth | StageKvReturn
KvMessage = KvAnswer | StageKvKept
#: What members tell each other beside steps, and those of it that have their place among the steps.
MemberMessage = AdapterMessage | KvMessage | StageKvSend
OrderedMessage = StageAdapterEnded | StageKvGrowth | StageKvKept | StageKvSend
StageMessage = StageWork | MemberMessage
MemberAnswer = AdapterAnswer | KvAnswer
StageAnswer = StageResult | MemberAnswer


def encode_message(message: StageMessage) -> bytes:
    return _encoder.encode(message)


def decode_message(frame: bytes) -> StageMessage:
    """Raises msgspec.MsgspecError."""
    return _messages.decode(frame)


def encode_result(result: StageAnswer) -> bytes:
    return _encoder.encode(result)


def decode_result(frame: bytes) -> StageAnswer:
    """Raises msgspec.MsgspecError."""
    return _results.decode(frame)


def without_tokens(plan: StepPlan) -> StepPlan:
    """Return what later stages need of a plan: tokens only where penalties count them."""
    if not plan.admissions and not plan.prompts:
        return plan
    admissions = [one if is_penalised(one.sampling) else one._replace(tokens=()) for one in plan.admissions]
    prompts = [row._replace(tokens=()) for row in plan.prompts]
    return replace(plan, admissions=tuple(admissions), prompts=tuple(prompts))


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    return list(value)  # an array of tokens


def _array(kind: type, value: Any) -> Any:
    dtype, shape, content = value
    return np.frombuffer(content, dtype).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_messages: msgspec.msgpack.Decoder[StageMessage] = msgspec.msgpack.Decoder(StageMessage)
_results: msgspec.msgpack.Decoder[StageAnswer] = msgspec.msgpack.Decoder(StageAnswer, dec_hook=_array)

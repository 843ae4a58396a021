"""KV of requests that move: sent by the workers that have it, and found by the next one as a cached prefix.

    sender      each member of the pipeline copies its layers of the request's full blocks to host memory and
                sends them over a connection of their own, behind its activations
    receiver    waits for all senders up to a deadline, puts the blocks of which it has all layers into its
                prefix cache, by the tokens and the salt of the request, and only then starts the request

So a request that moves is started as any other. What was late or lost is computed again.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import torch

from hearth.core.errors import HearthError
from hearth.core.messages import KvMove, KvMoved, SendKv, StartRequest
from hearth.core.types import ModelId, RequestId, WorkerId, node_of
from hearth.engine.pending_step import PendingCopy
from hearth.engine.stage_messages import StageKvSend
from hearth.policy.batch.digest_chain import DigestChain
from hearth.worker.hosted_model import HostedModel
from hearth.worker.hosted_models import HostedModels
from hearth.worker.stage_connections import StageConnections, StageHello
from hearth.worker.stage_link import Incoming, bytes_of
from hearth.worker.stage_sockets import give_way

#: A receiver that takes nothing for so long, or does not end the connection, has given up.
SEND_S = 10.0
_PIECE_BYTES = 1 << 20

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Which layers of each block are sent, and their size."""

    layers: range
    block_tokens: int
    layer_bytes: int  #: of one layer of a block

    @property
    def block_bytes(self) -> int:
        return len(self.layers) * self.layer_bytes


#: The first and the last layer, tokens of a block, bytes of a layer of a block, and the number of blocks.
_HEADER = struct.Struct("<HHIQI")


@dataclass(frozen=True, slots=True)
class KvPart:
    layers: range
    content: torch.Tensor  #: uint8, a row for each block


@dataclass(frozen=True, slots=True)
class KvArrived:
    """All that has come of the KV of a run."""

    model: ModelId
    run: int
    parts: Sequence[KvPart]
    seconds: float
    is_on_node: bool  #: all senders are on this worker's node

    def num_blocks(self, num_layers: int) -> int:
        """Return of how many blocks all layers have come."""
        end = 0
        for part in sorted(self.parts, key=lambda one: one.layers.start):
            if part.layers.start != end:
                return 0
            end = part.layers.stop
        return min(len(part.content) for part in self.parts) if end == num_layers else 0


class KvMoves:
    """Mutable; the step thread alone calls it."""

    def __init__(
        self,
        models: HostedModels,
        connections: StageConnections | None,
        post: Callable[[KvArrived], None],
    ) -> None:
        """`post` is called by another thread."""
        self._reclaimer, self._connections, self._post = models.reclaimer, connections, post

    def send_first(self, hosted: HostedModel, order: SendKv) -> None:
        """Send the KV of a request on the first member, and have the others do so. Raises StageLost."""
        served, member = hosted.served, hosted.member
        if served is None or member is None:
            return
        blocks = served.engine.batcher.computed_blocks(RequestId(str(order.run)))
        self.send(hosted, StageKvSend(member.pipeline, order.run, tuple(blocks), order.target))

    def send(self, hosted: HostedModel, message: StageKvSend) -> None:
        """Send this member's layers, behind all steps before the message. Raises StageLost."""
        served, member, connections = hosted.served, hosted.member, self._connections
        assert served is not None, f"`{hosted.model}` has no engine"
        assert member is not None, f"`{hosted.model}` is not in stages"
        assert connections is not None, "a worker in stages has connections"
        member.tell(message)
        runner = served.engine.runner
        copies = runner.read_blocks(member.own_blocks(message.blocks))
        layout = _layout_of(hosted)
        header = _HEADER.pack(
            layout.layers.start,
            layout.layers.stop,
            layout.block_tokens,
            layout.layer_bytes,
            len(message.blocks),
        )
        sending = partial(_send, connections, message.target, message.run, header, copies)
        threading.Thread(target=sending, name="hearth-kv-out", daemon=True).start()

    def expect(self, order: StartRequest, hosted: HostedModel) -> bool:
        """Return whether a request waits for its KV; then `KvArrived` is posted in any case."""
        if order.kv is None or self._connections is None or hosted.served is None:
            return False
        layout = _layout_of(hosted)
        # At least one token is computed, to sample from.
        max_blocks = (len(order.prompt) + len(order.output) - 1) // layout.block_tokens
        is_pinned = hosted.served.engine.runner.layers.kv.is_cuda
        receiver = _Receiver(self._connections, order.kv, layout, max_blocks, is_pinned=is_pinned)
        is_on_node = {node_of(self._connections.own)}.issuperset(map(node_of, order.kv.senders))

        def receive() -> None:
            began_s = time.monotonic()
            parts = receiver.receive()
            seconds = time.monotonic() - began_s
            self._post(KvArrived(order.model, order.run, parts, seconds, is_on_node))

        threading.Thread(target=receive, name="hearth-kv-in", daemon=True).start()
        return True

    def take(self, hosted: HostedModel, order: StartRequest, arrived: KvArrived) -> KvMoved:
        """Put what has come into the prefix cache. Raises ModelBroke if another model breaks by it.

        A model that is out of turn has no memory for it.
        """
        layout, served, num_tokens = _layout_of(hosted), hosted.served, 0
        num_blocks = arrived.num_blocks(len(layout.layers))
        if served is not None and hosted.has_turn and num_blocks:
            adapter = None if order.adapter is None else order.adapter.adapter
            chain = DigestChain((*order.prompt, *order.output), layout.block_tokens, order.salt, adapter)
            self._reclaimer.make_kv_room(hosted.model, num_blocks)
            parts = {part.layers: part.content[:num_blocks] for part in arrived.parts}
            num_tokens = served.engine.cache_prefix(chain, num_blocks, parts)
        num_bytes = sum(part.content.nbytes for part in arrived.parts)
        return KvMoved(order.run, num_tokens, num_bytes, arrived.seconds, arrived.is_on_node)


def _layout_of(hosted: HostedModel) -> KvLayout:
    assert hosted.served is not None, f"`{hosted.model}` has no engine"
    engine = hosted.served.engine
    layers = engine.runner.layers
    return KvLayout(layers.decoder.layers, engine.batcher.blocks.block_tokens, layers.stage_kv[0, 0].nbytes)


def _hello(run: int, sender: WorkerId) -> StageHello:
    return StageHello(f"kv of run {run} from {sender}", has_steps=False)


def _send(
    connections: StageConnections, target: WorkerId, run: int, header: bytes, copies: Sequence[PendingCopy]
) -> None:
    try:
        with closing(connections.connect(target, _hello(run, connections.own))) as connection:
            connection.settimeout(SEND_S)
            give_way(connection)
            connection.sendall(header)
            for copy in copies:
                connection.sendall(bytes_of(copy.wait()))
            connection.recv(1)  # the receiver closes it: before that, it may not have claimed it
    except (OSError, HearthError, RuntimeError) as error:  # RuntimeError: the device broke
        log.warning("kv_not_sent run=%d target=%s reason=%s", run, target, error)


class _Receiver:
    def __init__(
        self,
        connections: StageConnections,
        move: KvMove,
        layout: KvLayout,
        max_blocks: int,
        *,
        is_pinned: bool,
    ) -> None:
        self._connections, self._move, self._layout, self._max_blocks = connections, move, layout, max_blocks
        self._is_pinned, self._deadline_s = is_pinned, time.monotonic() + move.wait_s

    def receive(self) -> list[KvPart]:
        senders = self._move.senders
        with ThreadPoolExecutor(len(senders), thread_name_prefix="hearth-kv-in") as threads:
            return [part for part in threads.map(self._receive_from, senders) if part is not None]

    @property
    def _left_s(self) -> float:
        return max(1e-3, self._deadline_s - time.monotonic())

    def _receive_from(self, sender: WorkerId) -> KvPart | None:
        run = self._move.run
        try:
            arrival = self._connections.claim(
                _hello(run, sender),
                sender,
                lambda: time.monotonic() >= self._deadline_s,
                look_s=self._left_s,
            )
            if arrival is None:
                log.warning("kv_late run=%d sender=%s wait_s=%.3f", run, sender, self._move.wait_s)
                return None
            with closing(arrival):
                arrival.connection.settimeout(self._left_s)
                return self._read(Incoming(arrival.connection, None), arrival.connection.settimeout)
        except (OSError, ValueError) as error:
            log.warning("kv_lost run=%d sender=%s reason=%s", run, sender, error)
            return None

    def _read(self, incoming: Incoming, limit: Callable[[float], None]) -> KvPart | None:
        """Read a part up to the deadline, or its first blocks. Raises ValueError for KV of another layout."""
        header = incoming.read(_HEADER.size)
        if len(header) < _HEADER.size:
            return None
        begin, end, block_tokens, layer_bytes, num_blocks = _HEADER.unpack(header)
        own, sent = self._layout, KvLayout(range(begin, end), block_tokens, layer_bytes)
        is_same = (own.block_tokens, own.layer_bytes) == (block_tokens, layer_bytes)
        if not is_same or not own.layers.start <= begin < end <= own.layers.stop:
            raise ValueError(f"{sent} was sent, expected: parts of {own}")
        num_blocks = min(num_blocks, self._max_blocks)
        content = torch.empty(num_blocks, sent.block_bytes, dtype=torch.uint8, pin_memory=self._is_pinned)
        num_at_once, num_read = max(1, _PIECE_BYTES // sent.block_bytes), 0
        try:
            while num_read < num_blocks:
                limit(self._left_s)
                piece = content[num_read : num_read + num_at_once]
                if not incoming.read_into(bytes_of(piece)):
                    break
                num_read += len(piece)
        except OSError as error:
            log.warning(
                "kv_lost run=%d num_blocks=%d of=%d reason=%s", self._move.run, num_read, num_blocks, error
            )
        return KvPart(sent.layers, content[:num_read])

"""Connections between the stages of a pipeline: messages on a stream socket, hidden states beside them.

The sender fills places for hidden states in turn, as many as steps can be in flight. The message of a step is
sent before the step is launched, so that the receiver can prepare it. A frame without a message says that the
hidden states are in their place: in memory that both processes map, or behind the frame on the socket, which
between machines is encrypted.

    | message bytes, hidden bytes: 4 bytes each | message, or none | hidden states, unless in shared memory |
"""

from __future__ import annotations

import logging
import socket
import ssl
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue

import msgspec
import torch

from hearth.core.errors import ServiceError, StageLost
from hearth.core.wire import MAX_FRAME_BYTES
from hearth.engine.pending_step import PendingCopy
from hearth.engine.stage_messages import (
    MemberAnswer,
    StageAnswer,
    StageMessage,
    StageResult,
    StageStep,
    decode_message,
    decode_result,
    encode_message,
    encode_result,
)
from hearth.system.spin import Spin

log = logging.getLogger(__name__)

_HEADER = struct.Struct("<II")
_READ_BYTES = 1 << 16
#: More than the hidden states of any step have.
_MAX_HIDDEN_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class HiddenPlaces:
    """Memory for the hidden states of several steps, each of up to `max_tokens`."""

    memory: torch.Tensor  #: [places, max_tokens, hidden size]
    is_shared: bool  #: the other end maps the same memory

    @staticmethod
    def num_bytes(num_places: int, max_tokens: int, like: torch.Tensor) -> int:
        return num_places * max_tokens * like.shape[1] * like.element_size()

    @staticmethod
    def over(memory: torch.Tensor, num_places: int, like: torch.Tensor, *, is_shared: bool) -> HiddenPlaces:
        """View `memory` (uint8, of `num_bytes`) as places for rows like those of `like`."""
        return HiddenPlaces(memory.view(like.dtype).view(num_places, -1, like.shape[1]), is_shared)

    def place(self, number: int, num_tokens: int) -> torch.Tensor:
        return self.memory[number % len(self.memory), :num_tokens]


class FrameSender:
    """Sends frames in order and never blocks its caller: a thread sends what has to wait.

    One thread calls it; any may close it. The descriptor is closed by the thread if there is one: its number
    could be another connection's while the thread sends.
    """

    def __init__(
        self, connection: socket.socket, pipeline: str, ended: Callable[[], None] = lambda: None
    ) -> None:
        """`ended` is called by the thread once nothing can be sent any more."""
        self._connection, self._pipeline, self._ended = connection, pipeline, ended
        self._waiting: SimpleQueue[Callable[[], None] | None] | None = None
        self._lock = threading.Lock()  #: keeps `close` out while the caller sends or starts the thread
        self._is_lost = False

    def send(self, frame: bytes) -> None:
        """Raises StageLost once the other end is gone."""
        if self._waiting is None and not isinstance(self._connection, ssl.SSLSocket):
            try:
                with self._lock:
                    frame = frame[self._connection.send(frame, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                pass  # a stage that hangs must not hold up other models here
            except OSError as error:
                raise self._lost(error) from error
        if frame:
            self.send_later(partial(self._connection.sendall, frame))

    def send_later(self, send: Callable[[], None]) -> None:
        """Have the thread call `send` behind all before it. Raises as `send`."""
        self.check()
        with self._lock:
            if self._waiting is None:
                self._waiting = SimpleQueue()
                threading.Thread(
                    target=self._run, args=(self._waiting,), name="hearth-stage", daemon=True
                ).start()
            self._waiting.put(send)

    def check(self) -> None:
        """Raise StageLost if the thread could not send."""
        if self._is_lost:
            raise self._lost("see the log")

    def close(self) -> None:
        cut(self._connection)
        with self._lock:
            if self._waiting is None:
                self._connection.close()
            else:
                self._waiting.put(None)

    def _lost(self, reason: OSError | str) -> StageLost:
        return StageLost(f"another stage of pipeline {self._pipeline} is gone: {reason}")

    def _run(self, waiting: SimpleQueue[Callable[[], None] | None]) -> None:
        try:
            while (send := waiting.get()) is not None:
                send()
        except (OSError, RuntimeError) as error:  # RuntimeError: the device broke
            log.warning("stage_cut_off pipeline=%s reason=%s", self._pipeline, error)
        finally:  # the other end, and so the first stage, notices as well
            self._is_lost = True
            shut(self._connection)
            self._ended()


class Incoming:
    """Reads what comes over a connection. One thread calls it."""

    def __init__(self, connection: socket.socket, spin: Spin | None) -> None:
        """`spin`: before the thread sleeps; not where the connection has read ahead."""
        self._connection, self._content = connection, bytearray()
        self._spin = None if isinstance(connection, ssl.SSLSocket) else spin

    def read(self, num_bytes: int) -> bytes:
        """Return the next bytes, fewer if the end comes first."""
        while len(self._content) < num_bytes:
            if self._spin is not None:
                self._spin.until_readable(self._connection.fileno())
            part = self._connection.recv(max(num_bytes - len(self._content), _READ_BYTES))
            if not part:
                break
            self._content += part
        found = bytes(self._content[:num_bytes])
        del self._content[:num_bytes]
        return found

    def read_into(self, memory: memoryview) -> bool:
        """Fill `memory` with the next bytes; False: the end came first."""
        num_read = min(len(memory), len(self._content))
        memory[:num_read] = self.read(num_read)
        while num_read < len(memory) and (num_more := self._connection.recv_into(memory[num_read:])):
            num_read += num_more
        return num_read == len(memory)


class StageOutlet:
    """The way to the next stage: a `NextStage`. One thread calls it; any may close it."""

    def __init__(self, connection: socket.socket, places: HiddenPlaces, pipeline: str) -> None:
        self._connection, self._places = connection, places
        self._sender = FrameSender(connection, pipeline)
        self._num_placed = 0
        self._announced: StageStep | None = None

    @property
    def num_places(self) -> int:
        return len(self._places.memory)

    def place(self, num_tokens: int) -> torch.Tensor:
        self._num_placed += 1
        return self._places.place(self._num_placed - 1, num_tokens)

    def announce(self, step: StageStep) -> None:
        """Raises StageLost once the other end is gone."""
        self._announced = step
        self._sender.send(_frame(encode_message(step)))

    def send(self, message: StageMessage, hidden: PendingCopy | None = None) -> None:
        """Raises StageLost once the other end is gone."""
        if message is self._announced:
            self._announced = None
        else:  # it may come between the two frames of a step
            self._sender.send(_frame(encode_message(message)))
        if hidden is None:
            return
        if self._places.is_shared and hidden.end is None:
            self._sender.send(_frame(b""))
        else:
            self._sender.send_later(partial(self._send, hidden))

    def close(self) -> None:
        self._sender.close()

    def _send(self, hidden: PendingCopy) -> None:
        landed = hidden.wait()
        content = memoryview(b"") if self._places.is_shared else bytes_of(landed)
        self._connection.sendall(_HEADER.pack(0, len(content)))
        if content:
            self._connection.sendall(content)


@dataclass(frozen=True, slots=True)
class _Announced:
    step: StageStep
    hidden: torch.Tensor  #: where its hidden states go
    is_wanted: bool


class StageInlet:
    """Where messages of the stage before arrive. One thread receives."""

    def __init__(
        self, connection: socket.socket, places: HiddenPlaces, pipeline: str, spin: Spin | None = None
    ) -> None:
        self._connection, self._places = connection, places
        self._pipeline = pipeline
        self.num_dropped = 0  #: messages of another pipeline, and steps that came before
        self._incoming = Incoming(connection, spin)
        self._num_placed = 0
        self._last_step = -1  #: the highest number of a step that came
        self._announced: deque[_Announced] = deque()  #: without their hidden states, oldest first

    def receive(self) -> tuple[StageMessage, torch.Tensor | None] | None:
        """Return the next message, a step twice: announced, and with its hidden states.

        These stay until the step has ended. None at the end. Raises ServiceError for anything else.
        """
        while (received := self._receive_message()) is not None:
            message, hidden_bytes = received
            if message is None:
                if not self._announced:
                    raise ServiceError("hidden states came without a step")
                announced = self._announced.popleft()
                if not self._receive_hidden(announced.hidden, hidden_bytes):
                    return None
                if announced.is_wanted:
                    return announced.step, announced.hidden
                continue
            is_wanted = self._is_wanted(message)
            if isinstance(message, StageStep):
                self._announced.append(self._announce(message, is_wanted=is_wanted))
            if is_wanted:
                return message, None
            self.num_dropped += 1
        return None

    def _announce(self, step: StageStep, *, is_wanted: bool) -> _Announced:
        hidden = self._places.place(self._num_placed, step.plan.num_tokens)
        if not is_wanted:
            return _Announced(step, torch.empty_like(hidden), is_wanted=False)  # the place may be in use
        self._num_placed += 1
        self._last_step = step.plan.step_id
        return _Announced(step, hidden, is_wanted=True)

    def _is_wanted(self, message: StageMessage) -> bool:
        is_repeated = isinstance(message, StageStep) and message.plan.step_id <= self._last_step
        return message.pipeline == self._pipeline and not is_repeated

    def _receive_message(self) -> tuple[StageMessage | None, int] | None:
        """Return the next message, if the frame has one, and how many bytes of hidden states follow it."""
        header = self._incoming.read(_HEADER.size)
        if len(header) < _HEADER.size:
            return None
        body_bytes, hidden_bytes = _HEADER.unpack(header)
        if body_bytes > MAX_FRAME_BYTES or hidden_bytes > _MAX_HIDDEN_BYTES:
            raise ServiceError(
                f"the stage before announced {body_bytes} and {hidden_bytes} bytes, "
                f"limits: {MAX_FRAME_BYTES} and {_MAX_HIDDEN_BYTES}"
            )
        if not body_bytes:
            return None, hidden_bytes
        body = self._incoming.read(body_bytes)
        if len(body) < body_bytes:
            return None
        try:
            return decode_message(body), hidden_bytes
        except msgspec.MsgspecError as error:
            raise ServiceError(f"a frame of {body_bytes} bytes holds no message: {error}") from error

    def _receive_hidden(self, hidden: torch.Tensor, num_bytes: int) -> bool:
        """Read the hidden states of a step, unless they are in shared memory; False: the end came first."""
        if bool(num_bytes) is self._places.is_shared:
            where = "in shared memory" if self._places.is_shared else "on the socket"
            raise ServiceError(f"hidden states are expected {where}, {num_bytes} bytes came with a step")
        return self._places.is_shared or self._read_into(hidden, num_bytes)

    def close(self) -> None:
        """End the connection. The receiving thread calls `end` when it notices."""
        cut(self._connection)

    def end(self) -> None:
        """Close the descriptor as well, when no thread receives any more."""
        shut(self._connection)

    def _read_into(self, hidden: torch.Tensor, num_bytes: int) -> bool:
        content = bytes_of(hidden)
        if len(content) != num_bytes:
            raise ServiceError(
                f"a step of {len(hidden)} tokens came with {num_bytes} bytes: {len(content)} expected"
            )
        return self._incoming.read_into(content)


def result_frame(result: StageAnswer) -> bytes:
    return _frame(encode_result(result))


class StageLinks:
    """All stages but the first, by an outlet and the connection that results come back on."""

    def __init__(
        self,
        pipeline: str,
        devices: Sequence[int],
        outlet: StageOutlet,
        results: socket.socket,
        arrived: Callable[[], None] = lambda: None,
        told: Callable[[MemberAnswer], None] = lambda answer: None,
        spin: Spin | None = None,
    ) -> None:
        """`devices`: of all stages, as in `LaterStages`.

        Another thread calls `arrived` when a result has come, and when none can come any more. It also passes
        answers about KV and adapters to `told`.
        """
        self.pipeline, self.devices, self.num_flights = pipeline, devices, len(set(devices))
        self.max_flights = outlet.num_places
        self.place, self.announce, self.send = outlet.place, outlet.announce, outlet.send
        self._outlet, self._connection, self._arrived, self._told = outlet, results, arrived, told
        self._incoming = Incoming(results, spin)
        self._results: SimpleQueue[StageResult | None] = SimpleQueue()
        self._is_lost = False  #: and every result was taken that had come before
        self._is_over = False
        self.num_dropped = 0  #: answers of another pipeline, and results that came before
        threading.Thread(target=self._receive, name="hearth-stages", daemon=True).start()

    def result(self, *, waits: bool) -> StageResult | None:
        """Return the next result; None: it has not come. Raises StageLost if none can come any more."""
        if self._is_lost:
            raise StageLost(f"a stage of pipeline {self.pipeline} was lost")
        try:
            found = self._results.get(block=waits)
        except Empty:
            return None
        if found is None:
            self._is_lost = True
            return self.result(waits=waits)
        return found

    def check(self) -> None:
        """Raise StageLost if no result can come any more."""
        if self._is_over:
            raise StageLost(f"a stage of pipeline {self.pipeline} was lost")

    def close(self) -> None:
        self._outlet.close()
        cut(self._connection)

    def _receive(self) -> None:
        last_result = -1
        try:
            while len(header := self._incoming.read(_HEADER.size)) == _HEADER.size:
                body_bytes, _ = _HEADER.unpack(header)
                answer = decode_result(self._incoming.read(min(body_bytes, MAX_FRAME_BYTES)))
                if answer.pipeline != self.pipeline:
                    self.num_dropped += 1
                elif not isinstance(answer, StageResult):
                    self._told(answer)
                elif answer.number <= last_result:
                    self.num_dropped += 1
                else:
                    last_result = answer.number
                    self._results.put(answer)
                    self._arrived()
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("stages_lost pipeline=%s reason=%s", self.pipeline, error)
        finally:
            shut(self._connection)
            self._is_over = True
            self._results.put(None)
            self._arrived()


def _frame(body: bytes) -> bytes:
    return _HEADER.pack(len(body), 0) + body


def bytes_of(rows: torch.Tensor) -> memoryview:
    return memoryview(rows.view(torch.uint8).numpy().reshape(-1))  # type: ignore[arg-type] # torch is typed so


def cut(connection: socket.socket) -> None:
    """End a connection for all threads that use it. Its descriptor stays open, for they know its number."""
    with suppress(OSError):  # the other end may have been first
        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # that of TLS would go on in clear


def shut(connection: socket.socket) -> None:
    """End a connection and close its descriptor, which no other thread may use any more."""
    cut(connection)
    connection.close()

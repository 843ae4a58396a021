"""A pipeline is cut at every point of a step; its requests, resumed, get the undisturbed tokens."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hearth.core.messages import HostingFailed
from hearth.core.types import WorkerId
from hearth.worker.stage_link import _HEADER
from tests.engine.harness import prompts_for
from tests.store.stored import converted
from tests.worker.harness import greedy
from tests.worker.in_process import LoopGateway
from tests.worker.test_stage_member import CONTEXT, NAME, PAGE_BYTES, Workers, workers

PROMPTS = prompts_for(160, (3, 21, 7))
SAMPLING = greedy(12)
CUT_STEP = 7  #: of 36: no request has all of its tokens
#: What passes of the frame of that step: bytes of the header, shares of the message and of the hidden states.
POINTS = {
    "before header": (0, 0.0, 0.0),
    "in header": (3, 0.0, 0.0),
    "after header": (_HEADER.size, 0.0, 0.0),
    "in message": (_HEADER.size, 0.5, 0.0),
    "after message": (_HEADER.size, 1.0, 0.0),
    "in hidden states": (_HEADER.size, 1.0, 0.5),
    "after hidden states": (_HEADER.size, 1.0, 1.0),
}
WITHOUT_HIDDEN = list(POINTS)[:5]


class CutSocket(socket.socket):
    """Loses its connection at a point of one frame; who sends is told when it sends behind that."""

    def __init__(self, end: socket.socket, point: str) -> None:
        super().__init__(fileno=end.detach())
        self._point = POINTS[point]
        self._is_greeted = self._is_hidden_next = self._is_cut_step = self._is_cut = False

    def sendmsg(self, *hello: Any) -> int:
        self._is_greeted = True
        return super().sendmsg(*hello)

    def send(self, content: bytes, flags: int = 0) -> int:  # type: ignore[override] # as it is called
        self.sendall(content)
        return len(content)

    def sendall(self, content: bytes | memoryview, flags: int = 0) -> None:  # type: ignore[override] # too
        """Take a hello, a header with its message if it has one, or hidden states."""
        if not self._is_greeted or self._is_cut:
            self._is_greeted = True
            super().sendall(content)
            return
        is_hidden, self._is_hidden_next = self._is_hidden_next, False
        rest = len(content) - _HEADER.size
        if not is_hidden:
            self._is_hidden_next = _HEADER.unpack(content[: _HEADER.size])[1] > 0
            if rest:
                self._is_cut_step = step_of(content[_HEADER.size :]) == CUT_STEP
        if not self._is_cut_step:
            super().sendall(content)
            return
        header, message, hidden = self._point
        if is_hidden:
            num_bytes, is_last = int(hidden * len(content)), True
        elif rest:
            num_bytes, is_last = header + int(message * rest), hidden == 0.0
        else:  # the hidden states are in place, or follow
            num_bytes, is_last = len(content), not self._is_hidden_next
        super().sendall(content[:num_bytes])
        if is_last:
            self._is_cut = True
            super().shutdown(socket.SHUT_RDWR)


def step_of(body: bytes | memoryview) -> int | None:
    """Return the number of a step or a result; None: it is another message."""
    told = msgspec.msgpack.decode(body)
    number = told["plan"]["step_id"] if told["type"] == "StageStep" else told.get("number")
    assert number is None or isinstance(number, int)
    return number


@dataclass(slots=True)
class Rig:
    """Mutable: tests set where the next pipeline is cut."""

    four: Workers
    expected: list[list[int]]  #: tokens of requests that nothing disturbs
    cut: tuple[int, str] | None = None  #: the number of the worker that the connection leads to, and a point

    @property
    def members(self) -> Sequence[LoopGateway]:
        return self.four.gateways[:3]

    @property
    def whole(self) -> LoopGateway:
        """A worker that has all of the model."""
        return self.four.gateways[3]

    def resumed(self, gateway: LoopGateway, outputs: Sequence[Sequence[int]]) -> list[list[int]]:
        runs = [
            gateway.start(NAME, prompt, SAMPLING, output=output)
            for prompt, output in zip(PROMPTS, outputs, strict=True)
        ]
        more = gateway.until_ended(*runs)
        return [[*output, *one.tokens] for output, one in zip(outputs, more, strict=True)]


@contextmanager
def rig_of(root: Path, nodes: Sequence[str]) -> Iterator[Rig]:
    def opened(worker: WorkerId, end: socket.socket) -> socket.socket:
        if rig.cut is None or not worker.endswith(f"w{rig.cut[0]}"):
            return end
        return CutSocket(end, rig.cut[1])

    with workers(root, num_workers=4, nodes=nodes, opened=opened) as four:
        rig = Rig(four, [])
        rig.whole.load(NAME, converted(NAME, chunk_bytes=PAGE_BYTES), max_context=CONTEXT)
        rig.expected = rig.resumed(rig.whole, [()] * len(PROMPTS))
        yield rig


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Workers of one machine, which share the memory of hidden states."""
    with rig_of(tmp_path_factory.mktemp("near"), ()) as rig:
        yield rig


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Workers of several machines, which send hidden states."""
    with rig_of(tmp_path_factory.mktemp("far"), ("", "n1", "n2", "n3")) as rig:
        yield rig


@pytest.mark.parametrize("point", [*WITHOUT_HIDDEN, "after hidden states"])
def test_requests_cut_in_a_step_of_one_machine_are_resumed(near: Rig, point: str) -> None:
    assert resumed_elsewhere(near, 1, point) == near.expected


@pytest.mark.parametrize("target", [1, 2])
@pytest.mark.parametrize("point", POINTS)
def test_requests_cut_in_a_step_between_machines_are_resumed(far: Rig, target: int, point: str) -> None:
    assert resumed_elsewhere(far, target, point) == far.expected


@pytest.mark.parametrize("point", WITHOUT_HIDDEN)
def test_requests_cut_in_a_result_are_resumed(far: Rig, point: str) -> None:
    assert resumed_elsewhere(far, 0, point) == far.expected


def resumed_elsewhere(rig: Rig, target: int, point: str) -> list[list[int]]:
    """Cut a pipeline under its requests, and let the whole model or another pipeline go on with them."""
    first = rig.members[0]
    rig.cut = target, point
    rig.four.host(NAME, [1, 2])
    runs = [first.start(NAME, prompt, SAMPLING) for prompt in PROMPTS]
    failed = first.until(HostingFailed)
    rig.cut = None
    assert failed.is_cut_off, f"{failed}"
    emitted = [first.answers[run].tokens for run in runs]
    assert any(emitted), "the cut came before the first token"
    assert not any(first.answers[run].is_ended for run in runs), "the cut came after the last token"
    for gateway in rig.members:
        gateway.drop(NAME)
    if target == 1:
        return rig.resumed(rig.whole, emitted)
    rig.four.host(NAME, [2])
    tokens = rig.resumed(first, emitted)
    for gateway in rig.members:
        gateway.drop(NAME)
    return tokens

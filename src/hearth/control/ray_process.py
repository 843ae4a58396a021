"""The process that asks Ray for nodes. It is apart from the service because Ray ends it when Ray itself ends.

Nodes then go on serving until Ray ends them, too, within a minute. The next process starts when Ray is back.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from asyncio.subprocess import Process
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hearth.core.config import HearthConfig, load, plain
from hearth.core.errors import ConfigError, HearthError
from hearth.core.messages import ProcessAnswer
from hearth.core.types import name_of
from hearth.node import processes
from hearth.policy.fleet.events import Action, AddWorkers, Event, ReleaseWorkers
from hearth.system.die_with_parent import die_with_parent

if TYPE_CHECKING:
    from hearth.control.ray_cluster import RayNodes

#: Before the process is started again, as often as Ray is not there.
RESTART_S = 5.0

log = logging.getLogger(__name__)


class RaySetup(msgspec.Struct, frozen=True):
    sections: dict[str, dict[str, object]]  #: of the configuration, without models
    cluster_path: str
    uses_own_node: bool


class RayOrder(msgspec.Struct, frozen=True):
    released: str | None = None  #: the node to give back; None: add one


class RayProcess:
    """Mutable; used on the event loop alone."""

    def __init__(
        self, config: HearthConfig, cluster_path: Path, errors: processes.ErrorFile, *, uses_own_node: bool
    ) -> None:
        """Arguments as in `RayNodes`. `errors`: the standard error of the process."""
        sections = {name: section for name, section in plain(config).items() if name != "models"}
        self._setup = RaySetup(sections, str(cluster_path), uses_own_node)  # type: ignore[arg-type] # of sections
        self._manager, self._start_s = config.cluster.manager, config.service.start_s
        self._errors = errors
        self._process: Process | None = None
        self._orders: asyncio.StreamWriter | None = None  #: None: it is not told that the head listens
        self._keeping: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        """Returns when Ray is reached and this machine is the head of a cluster. Raises HearthError."""
        if find_spec("ray") is None:
            raise ConfigError(
                f"`cluster.manager` is {self._manager}, but Ray is not installed; install "
                "`hearth-inference[ray]` on all machines"
            )
        self._process = await processes.spawn("hearth.control.ray_process", self._setup, self._errors)
        await processes.answer_of(
            self._process, "the connection to Ray", self._start_s, "look at `ray status`"
        )

    def start(self) -> None:
        """Have nodes started. Call it when the head listens."""
        self._keeping = processes.run_vital(self._keep())

    async def close(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        if self._process is not None:
            await processes.end(self._process)

    def observe(self, _: Event, actions: Sequence[Action]) -> None:
        """Pass the brain's orders about machines on, if the process runs. Else its nodes end anyway."""
        for action in actions:
            match action:
                case AddWorkers():
                    self._send(RayOrder())
                case ReleaseWorkers(node):
                    self._send(RayOrder(released=name_of(node)))

    def _send(self, order: RayOrder) -> None:
        if self._orders is not None:
            self._orders.write(msgspec.json.encode(order) + b"\n")

    async def _keep(self) -> None:
        while True:
            assert self._process is not None, "it was started before"
            if self._process.returncode is None:
                self._orders = self._process.stdin
                assert self._orders is not None, "asked for a pipe"
                self._orders.write(b"\n")
            code = await self._process.wait()
            self._orders = None
            log.error("ray_process_ended code=%d next_try_s=%g", code, RESTART_S)
            await asyncio.sleep(RESTART_S)
            try:
                await self.connect()
            except (HearthError, OSError) as error:
                log.error("ray_not_reached reason=%s", error)


async def run() -> int:
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin.buffer
    )
    setup = msgspec.json.decode(await lines.readline(), type=RaySetup)
    config = load(
        None, {f"{name}.{key}": one for name, part in setup.sections.items() for key, one in part.items()}
    )
    logging.basicConfig(
        level=config.log.level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    # Not at the top: the service imports this file. And the classes of actors must not be in `__main__`.
    from hearth.control.ray_cluster import RayNodes

    try:
        nodes = RayNodes(config, Path(setup.cluster_path), uses_own_node=setup.uses_own_node)
    except HearthError as error:
        _say(ProcessAnswer(error.label, str(error)))
        return 1
    _say(ProcessAnswer())
    os.dup2(2, 1)  # what Ray prints is read from there
    if await lines.readline():  # the head listens
        await _follow(nodes, lines)
    return 0


def _say(answer: ProcessAnswer) -> None:
    print(msgspec.json.encode(answer).decode(), flush=True)


async def _follow(nodes: RayNodes, lines: asyncio.StreamReader) -> None:
    """Run until the head closes standard input. Raises what ends it before."""
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(nodes.follow())
        while line := await lines.readline():
            order = msgspec.json.decode(line, type=RayOrder)
            if order.released is None:
                nodes.add()
            else:
                nodes.release(order.released)
        following.cancel()
    await nodes.close()


if __name__ == "__main__":
    die_with_parent()
    sys.exit(asyncio.run(run()))

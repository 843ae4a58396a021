"""The sockets of a node, and what its keeper and workers are told of them. No process runs."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest

from hearth.core.config import HearthConfig
from hearth.core.types import WorkerId, stage_socket
from hearth.node.devices import Devices
from hearth.node.local_node import AGENT_SOCKET, LocalNode, socket_directory
from tests.node.test_link import Record


@pytest.mark.parametrize("is_deep", [False, True])
def test_workers_are_told_of_a_directory_for_their_sockets(is_deep: bool) -> None:
    async def scene(path: Path) -> None:
        left_behind = path / "run" / "sockets-1"
        left_behind.mkdir(parents=True)
        (left_behind / "w0.sock").touch()
        with socket_directory(path) as stages_path:
            assert not left_behind.exists()
            look(path, stages_path)
        assert not stages_path.exists()

    def look(path: Path, stages_path: Path) -> None:
        node = LocalNode(HearthConfig(), Devices("cpu", (0,), 1), path, stages_path, None, Record())
        setup = node._setup_of(0, WorkerId("w0"))
        assert setup.stages_path == str(stages_path)
        assert (setup.agent_socket, setup.credentials) == (None, None)
        assert stages_path.is_relative_to(path) is not is_deep, "a long path is replaced"
        assert len(bytes(stage_socket(stages_path, WorkerId("gpu-1/w0.123456789")))) < 108
        assert stages_path.stat().st_mode & 0o777 == 0o700
        sockets = [stage_socket(stages_path, WorkerId(name)) for name in ("gpu-1/w0.1", "gpu-1/w01.1")]
        for one in sockets:
            one.touch()
        node._setup_of(0, WorkerId("gpu-1/w0.2"))
        assert [one.exists() for one in sockets] == [False, True], "those of earlier lives go"

    with tempfile.TemporaryDirectory(prefix="hearth-") as folder:
        asyncio.run(scene(Path(folder) / ("d" * 80 if is_deep else "d")))


def test_workers_and_keeper_of_a_machine_in_a_cluster_ask_at_its_own_socket(tmp_path: Path) -> None:
    async def scene() -> None:
        node = LocalNode(
            HearthConfig(), Devices("cpu", (0,), 1), tmp_path, tmp_path, None, Record(), credentials=tmp_path
        )
        setup = node._setup_of(0, WorkerId("w0"))
        assert (setup.agent_socket, setup.credentials) == (str(tmp_path / AGENT_SOCKET), str(tmp_path))
        assert node.supervisor.keeper._setup.agent_socket == str(tmp_path / AGENT_SOCKET)
        await node.close()

    asyncio.run(scene())

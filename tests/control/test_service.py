from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from hearth.control.datadir import DataDir
from hearth.control.keys import keys
from hearth.control.service import keys_of, running
from hearth.core.config import HearthConfig, ServiceConfig
from hearth.core.errors import ConfigError
from hearth.node.devices import Devices


@pytest.fixture
def data_dir(tmp_path: Path) -> DataDir:
    return DataDir.open(tmp_path / "data")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_on_this_machine_no_keys_are_needed(data_dir: DataDir, host: str) -> None:
    assert not keys_of(ServiceConfig(host=host), data_dir).are_required


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_keys_that_there_are_must_be_used(data_dir: DataDir, host: str) -> None:
    key = keys.add(data_dir.keys_path, "ada", "user").key

    found = keys_of(ServiceConfig(host=host), data_dir)

    assert found.are_required
    assert found.check(key) is not None


def test_an_address_that_others_reach_needs_keys(data_dir: DataDir) -> None:
    with pytest.raises(ConfigError, match=r"`service.host` is 0\.0\.0\.0, which other machines can reach"):
        keys_of(ServiceConfig(host="0.0.0.0"), data_dir)


def test_a_file_of_keys_that_was_named_must_hold_some(data_dir: DataDir, tmp_path: Path) -> None:
    service = ServiceConfig(api_keys_file=str(tmp_path / "none.json"))
    with pytest.raises(ConfigError, match="holds no API key; make one with `hearth keys add NAME --api-keys"):
        keys_of(service, data_dir)


def test_a_service_without_workers_needs_a_cluster(data_dir: DataDir) -> None:
    async def scene() -> None:
        async with running(HearthConfig(), data_dir, Devices("cpu", (0,), 0)):
            raise AssertionError("it started")

    with pytest.raises(ConfigError, match="is 0, which only the head of a cluster can have"):
        asyncio.run(scene())

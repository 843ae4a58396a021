"""How much of each model lies on the rungs of the machine reaches the brain."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from hearth.control.datadir import DataDir
from hearth.control.deploy.catalog import Catalog
from hearth.control.deploy.deployed import Deployed
from hearth.control.deploy.registry import Registry
from hearth.control.residency import ResidencyReporter
from hearth.core.config import EngineConfig
from hearth.core.types import ModelId, Rung
from hearth.store.keeper_client import KeeperClient
from tests.control.gateway_rig import GatewayRig

COUNTED = {Rung.HOST: 5, Rung.DISK: 7}


class Keeper(KeeperClient):
    """Answers without a process."""

    def __init__(self) -> None:
        super().__init__(Path("nowhere"))
        self.asked: list[list[str]] = []

    async def count(self, digests: Sequence[str]) -> dict[str, Mapping[Rung, int]]:
        self.asked.append(list(digests))
        return dict.fromkeys(digests, COUNTED)


def test_every_name_of_the_same_bytes_is_reported(data_dir: DataDir, deployed: Deployed) -> None:
    with Registry.open(data_dir) as registry:
        registry.add(replace(deployed, name="another"))
        registry.add(replace(deployed, name="other", digest="of other bytes"))

    async def scene() -> None:
        with closing(GatewayRig(data_dir)) as rig:
            keeper = Keeper()
            reporter = ResidencyReporter(keeper, Catalog(rig.registry, {}, EngineConfig(), 1.0), rig.driver)
            reporter.ask()
            models = rig.driver.fleet.models
            async with asyncio.timeout(60):
                while any(model.bytes_by_rung is None for model in models.values()):
                    await asyncio.sleep(0.001)
            await reporter.close()
            assert models.keys() == {ModelId("tiny"), ModelId("another"), ModelId("other")}
            assert {name: model.bytes_by_rung for name, model in models.items()} == dict.fromkeys(
                models, COUNTED
            )
            assert [sorted(digests) for digests in keeper.asked] == [
                sorted({deployed.digest, "of other bytes"})
            ]

    asyncio.run(scene())

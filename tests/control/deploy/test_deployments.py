"""Models that come and go, with a real registry and brain; the keeper only notes what it is told."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from hearth.control.datadir import DataDir
from hearth.control.deploy import deployments as deployments_module
from hearth.control.deploy.catalog import Catalog
from hearth.control.deploy.deploy import DeployOrder, register, remove_files
from hearth.control.deploy.deployed import Deployed, DeployedAdapter, ModelLocation
from hearth.control.deploy.deployer import carry_out
from hearth.control.deploy.deployments import Deployments
from hearth.control.deploy.preset import Preset
from hearth.control.deploy.registry import Registry
from hearth.control.driver import Driver
from hearth.control.journal import Journal
from hearth.control.observe.metrics import Metrics
from hearth.control.observe.observer import Observer
from hearth.control.observe.pool_reports import PoolReports
from hearth.control.observe.views import ModelView, UpstreamView
from hearth.control.requests.caller import OPERATOR, KeyTerms
from hearth.control.snapshots import Snapshots
from hearth.core.config import EngineConfig, HearthConfig, ModelConfig
from hearth.core.errors import ConfigError, HasAdapters, NameTaken, RequestError, StoreError, UnknownModel
from hearth.core.messages import AdapterOrder
from hearth.core.types import AdapterId, Digest, ModelId, WorkerId
from hearth.policy.fleet.events import BrainConfig, WorkerJoined
from hearth.policy.fleet.fleet import Fleet
from hearth.snapshot.directory import SnapshotDirectory
from hearth.store.format.convert import convert
from hearth.store.keeper_client import KeeperClient
from hearth.text.tokenizer import Tokenizer
from tests.control.requests.test_active_request import request_of
from tests.snapshot.fingerprints import FINGERPRINT
from tests.store.format.peft_files import write_peft
from tests.store.stored import files_of, serving


class Keeper(KeeperClient):
    """Forgets, looks, fails or never answers."""

    def __init__(self) -> None:
        super().__init__(Path("/nowhere"))
        self.forgotten: list[str] = []
        self.versions: dict[str, str] = {}  #: which sources have which versions now
        self.looked: list[str] = []
        self.failure: Exception | None = None
        self.is_silent = False

    async def forget(self, where: str) -> None:
        if self.is_silent:
            await asyncio.Event().wait()
        if self.failure is not None:
            raise self.failure
        self.forgotten.append(where)

    async def look_upstream(self, source: str) -> str:
        self.looked.append(source)
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        return self.versions[source]


class DeploymentsRig:
    """Deployments and all that they are made of."""

    def __init__(self, data_dir: DataDir, models: dict[str, ModelConfig]) -> None:
        config, brain = HearthConfig(), BrainConfig()
        self.data_dir, self.keeper = data_dir, Keeper()
        self.registry = Registry(data_dir)
        self.journal = Journal(data_dir.journal_path, brain, 1 << 30)
        catalog = Catalog(self.registry, models, config.engine, config.service.keep_alive)
        metrics = Metrics()
        self.driver = Driver(
            Fleet(brain),
            self.journal,
            Observer(metrics),
            PoolReports(),
            Snapshots(metrics),
            catalog.host_order,
            catalog.prepare_orders,
        )
        self.deployments = Deployments(self.registry, catalog, self.driver, self.keeper, data_dir)

    def brain_knows(self) -> set[str]:
        return set(self.driver.fleet.models)

    async def deploy(
        self, source: Path, name: str, quant: str = "none", overwrite: bool = False
    ) -> ModelView:
        order = DeployOrder(str(source), name, quant=quant, overwrite=overwrite)
        *_, view = [event async for event in self.deployments.deploy(order)]
        assert isinstance(view, ModelView)
        return view

    def close(self) -> None:
        self.registry.close()
        self.journal.close()


def with_shop(
    data_dir: DataDir,
    scene: Callable[[DeploymentsRig], Awaitable[None]],
    models: dict[str, ModelConfig] | None = None,
) -> None:
    async def run() -> None:
        with closing(DeploymentsRig(data_dir, models or {})) as rig:
            await scene(rig)

    asyncio.run(run())


def made(data_dir: DataDir, source: Path | str, name: str) -> Deployed:
    """Deployed and registered without the service."""
    deployed = carry_out(DeployOrder(str(source), name), data_dir, lambda *_: None)
    with Registry(data_dir) as registry:
        registry.add(deployed)
    return deployed


@pytest.mark.e2e
def test_a_model_is_replaced_at_once_and_its_old_files_go(data_dir: DataDir, checkpoint: Path) -> None:
    old = made(data_dir, checkpoint, "tiny")

    async def scene(rig: DeploymentsRig) -> None:
        with pytest.raises(NameTaken):
            await rig.deploy(checkpoint, "tiny")
        assert rig.deployments.find("tiny").deployed == old
        new = await rig.deploy(checkpoint, "tiny", quant="int8", overwrite=True)
        assert rig.deployments.find("tiny").deployed.digest == new.digest != old.digest
        assert new.warning is None
        assert list(data_dir.models_path.iterdir()) == [Path(new.where)]
        assert rig.keeper.forgotten == [old.where]
        assert rig.driver.fleet.models["tiny"].profile.digest == new.digest

    with_shop(data_dir, scene)


@pytest.mark.e2e
@pytest.mark.parametrize("is_in_place", [False, True])
def test_a_model_that_the_configuration_forbids_leaves_everything_as_it_was(
    data_dir: DataDir, checkpoint: Path, converted: Path, is_in_place: bool
) -> None:
    old = made(data_dir, checkpoint, "tiny")

    async def scene(rig: DeploymentsRig) -> None:
        with pytest.raises(ConfigError, match="the alias `other` of model `tiny` means model `other` too"):
            await rig.deploy(converted if is_in_place else checkpoint, "other")
        assert [entry.deployed for entry in rig.deployments.entries()] == [old]
        assert rig.registry.all() == [old]
        assert rig.brain_knows() == {"tiny"}
        assert list(data_dir.models_path.iterdir()) == [Path(old.directory)]
        assert (converted / "weights.bin").exists()

    with_shop(data_dir, scene, {"tiny": ModelConfig(aliases=("other",))})


def test_a_new_upload_is_shown_and_changes_nothing_until_it_is_deployed(
    data_dir: DataDir, converted: Path, checkpoint: Path, tmp_path: Path
) -> None:
    convert(checkpoint, tmp_path / "int8", quant="int8", chunk_bytes=64 << 10)
    with serving(converted) as server:
        url = f"{server.url}/tiny"
        old, twin = made(data_dir, url, "far"), made(data_dir, url, "twin")
        server.files = files_of(tmp_path / "int8")
        new = made(data_dir, url, "new")

    async def scene(rig: DeploymentsRig) -> None:
        rig.keeper.versions[url] = new.digest
        found = rig.deployments.find("far").deployed
        assert (found, await rig.deployments.upstream(old, look=False)) == (old, unlooked(old))
        seen = await rig.deployments.upstream(old, look=True)
        assert seen is not None
        assert (seen.state, seen.deployed_version, seen.current_version) == (
            "changed",
            old.digest,
            new.digest,
        )
        assert seen.remedy == f"hearth deploy {url} --name far --overwrite"
        assert seen.noticed_at_s is not None
        assert await rig.deployments.upstream(new, look=True) == UpstreamView("unchanged", new.digest)
        rig.keeper.failure = StoreError("no keeper answers")
        assert await rig.deployments.upstream(old, look=True) == replace(seen, reason="no keeper answers")
        assert await rig.deployments.upstream(new, look=True) == replace(
            unlooked(new), reason="no keeper answers"
        )
        rig.keeper.failure = None
        await rig.deployments.remove("far")
        assert Path(twin.directory).is_dir()
        await rig.deployments.remove("twin")
        assert rig.keeper.forgotten == [old.where]
        assert not Path(twin.directory).exists()
        assert Path(new.directory).is_dir()

    with_shop(data_dir, scene)


@pytest.fixture
def far(data_dir: DataDir, converted: Path) -> Deployed:
    """A model that was deployed from a URL, at which nobody answers any more."""
    with serving(converted) as server:
        return made(data_dir, f"{server.url}/tiny", "far")


def test_upstream_is_looked_at_once_at_a_time_and_rarely_for_those_who_only_ask(
    data_dir: DataDir, far: Deployed
) -> None:
    url = far.source

    async def scene(rig: DeploymentsRig) -> None:
        rig.keeper.versions[url] = far.digest
        keeper, upstream = rig.keeper, rig.deployments.upstream
        versions = await asyncio.gather(*(keeper.upstream_version(url, 0.0) for _ in range(5)))
        assert set(versions) == {far.digest}
        assert keeper.looked == [url]
        keeper.looked.clear()
        unchanged = UpstreamView("unchanged", far.digest)
        assert await upstream(far, look=True) == unchanged
        keeper.failure = StoreError("no keeper answers")
        assert await upstream(far, look=True, max_age_s=30.0) == unchanged
        assert keeper.looked == [url]
        for max_age_s in (0.0, 30.0):  # a failure is kept, too
            view = await upstream(far, look=True, max_age_s=max_age_s)
            assert view == replace(unlooked(far), reason="no keeper answers")
        assert keeper.looked == [url, url]

    with_shop(data_dir, scene)


def test_who_leaves_while_upstream_is_looked_at_does_not_end_it_for_others(
    data_dir: DataDir, far: Deployed
) -> None:
    url = far.source

    async def scene(rig: DeploymentsRig) -> None:
        rig.keeper.versions[url] = far.digest
        first, second = (asyncio.create_task(rig.keeper.upstream_version(url, 0.0)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        assert await second == far.digest

    with_shop(data_dir, scene)


def unlooked(deployed: Deployed) -> UpstreamView:
    return UpstreamView("unknown", deployed.digest)


def test_a_model_from_a_path_has_no_upstream(data_dir: DataDir, converted: Path) -> None:
    deployed = made(data_dir, converted, "tiny")

    async def scene(rig: DeploymentsRig) -> None:
        assert await rig.deployments.upstream(deployed, look=True) is None

    with_shop(data_dir, scene)


def test_a_removed_model_is_gone_and_its_files_too(data_dir: DataDir, checkpoint: Path) -> None:
    deployed = made(data_dir, checkpoint, "tiny")
    kept = SnapshotDirectory.open(data_dir.snapshots_path, 1 << 20)
    snapshot = kept.save(replace(FINGERPRINT, manifest=deployed.digest), {"memory": b"1"})

    async def scene(rig: DeploymentsRig) -> None:
        await rig.deployments.remove("small")
        assert (rig.deployments.entries(), rig.brain_knows()) == ([], set())
        assert rig.keeper.forgotten == [deployed.where]
        with pytest.raises(UnknownModel):
            await rig.deployments.remove("tiny")

    with_shop(data_dir, scene, {"tiny": ModelConfig(aliases=("small",))})
    assert list(data_dir.models_path.iterdir()) == []
    assert not snapshot.parent.exists()


@pytest.mark.parametrize("failure", [StoreError("no keeper answers"), None])
def test_a_keeper_that_does_not_answer_keeps_no_files(
    data_dir: DataDir, checkpoint: Path, failure: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(data_dir, checkpoint, "tiny")
    monkeypatch.setattr(deployments_module, "FORGET_S", 0.01)

    async def scene(rig: DeploymentsRig) -> None:
        rig.keeper.failure, rig.keeper.is_silent = failure, failure is None
        await rig.deployments.remove("tiny")

    with_shop(data_dir, scene)
    assert list(data_dir.models_path.iterdir()) == []


def test_what_another_model_is_loaded_from_is_neither_forgotten_nor_removed(
    data_dir: DataDir, checkpoint: Path
) -> None:
    deployed = made(data_dir, checkpoint, "tiny")
    made(data_dir, Path(deployed.directory), "twin")

    async def scene(rig: DeploymentsRig) -> None:
        await rig.deployments.remove("tiny")
        assert rig.keeper.forgotten == []
        assert (Path(deployed.directory) / "weights.bin").exists()
        await rig.deployments.remove("twin")
        assert rig.keeper.forgotten == [deployed.where]

    with_shop(data_dir, scene)
    assert list(data_dir.models_path.iterdir()) == []


@pytest.mark.e2e
def test_of_two_deployments_of_a_name_at_once_one_is_refused_and_leaves_nothing(
    data_dir: DataDir, checkpoint: Path
) -> None:
    async def scene(rig: DeploymentsRig) -> None:
        events = rig.deployments.deploy(DeployOrder(str(checkpoint), "tiny"))
        await anext(events)  # it has seen that the name is free
        first = made(data_dir, checkpoint, "tiny")
        with pytest.raises(NameTaken):
            _ = [event async for event in events]
        assert rig.deployments.find("tiny").deployed == first
        assert list(data_dir.models_path.iterdir()) == [Path(first.directory)]

    with_shop(data_dir, scene)


def test_a_model_whose_files_went_meanwhile_is_not_registered(data_dir: DataDir, checkpoint: Path) -> None:
    deployed = carry_out(DeployOrder(str(checkpoint), "tiny"), data_dir, lambda *_: None)
    remove_files(deployed.location, data_dir)

    async def scene(rig: DeploymentsRig) -> None:
        with pytest.raises(StoreError, match="the files of `tiny` were removed meanwhile; deploy it again"):
            rig.deployments._register(deployed, overwrite=False)
        assert rig.registry.locations() == []

    with_shop(data_dir, scene)


def test_files_are_deleted_away_from_the_event_loop_and_whoever_asked_may_leave(
    data_dir: DataDir, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(data_dir, checkpoint, "tiny")
    begun, may_go_on = threading.Event(), threading.Event()

    def slow(place: ModelLocation, data_dir: DataDir) -> None:
        begun.set()
        assert may_go_on.wait(60)
        remove_files(place, data_dir)

    monkeypatch.setattr(deployments_module, "remove_files", slow)

    async def scene(rig: DeploymentsRig) -> None:
        removing = asyncio.create_task(rig.deployments.remove("tiny"))
        await asyncio.to_thread(begun.wait, 60)
        removing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await removing
        assert list(data_dir.models_path.iterdir()) != []
        may_go_on.set()
        await asyncio.gather(*rig.deployments._clearing)

    with_shop(data_dir, scene)
    assert list(data_dir.models_path.iterdir()) == []


def test_models_that_come_and_go_without_the_service_are_followed(
    data_dir: DataDir, checkpoint: Path, converted: Path
) -> None:
    async def scene(rig: DeploymentsRig) -> None:
        assert rig.deployments.entries() == []
        deployed = made(data_dir, converted, "tiny")
        assert rig.deployments.find("tiny").deployed == deployed
        assert rig.brain_knows() == {"tiny"}
        with Registry(data_dir) as other:
            other.replace(replace(deployed, digest="1" * 32))
            assert rig.deployments.find("tiny").deployed.digest == "1" * 32
            assert rig.driver.fleet.models["tiny"].profile.digest == "1" * 32
            other.remove("tiny")
        with pytest.raises(UnknownModel):
            rig.deployments.find("tiny")
        assert rig.brain_knows() == set()

    with_shop(data_dir, scene)


def test_what_the_configuration_forbids_is_not_followed(data_dir: DataDir, converted: Path) -> None:
    tiny = made(data_dir, converted, "tiny")

    async def scene(rig: DeploymentsRig) -> None:
        made(data_dir, converted, "other")
        assert [entry.deployed for entry in rig.deployments.entries()] == [tiny]
        assert rig.deployments.find("tiny").deployed == tiny

    with_shop(data_dir, scene, {"tiny": ModelConfig(aliases=("other",))})


def test_a_row_that_cannot_be_read_can_be_removed(data_dir: DataDir, checkpoint: Path) -> None:
    made(data_dir, checkpoint, "tiny")
    with closing(sqlite3.connect(data_dir.registry_path)) as connection, connection:
        connection.execute("update models set facts = '{}'")

    async def scene(rig: DeploymentsRig) -> None:
        assert rig.deployments.entries() == []
        await rig.deployments.remove("tiny")

    with_shop(data_dir, scene)
    assert list(data_dir.models_path.iterdir()) == []


@pytest.mark.e2e
def test_a_base_that_changes_keeps_its_adapters_and_warns_of_them(
    data_dir: DataDir, checkpoint: Path, converted: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = made(data_dir, checkpoint, "tiny")
    order = DeployOrder(str(write_peft(tmp_path / "lora", targets=["q_proj"])), "shop", base="tiny")
    with Registry(data_dir) as registry:
        registry.add(carry_out(order, data_dir, lambda *_: None))
        assert register(base, True, registry, data_dir).warning is None, "its weights are the same"

    async def scene(rig: DeploymentsRig) -> None:
        view = await rig.deploy(converted, "tiny", overwrite=True)
        assert view.warning is not None
        assert "adapters trained on its previous weights are still deployed: shop; redeploy" in view.warning
        assert f"deployed_with_warning model=tiny reason={view.warning}" in caplog.messages
        assert [entry.name for entry in rig.deployments.adapters()] == ["shop"]

    with_shop(data_dir, scene)


@pytest.mark.e2e
def test_a_model_that_no_node_may_run_is_deployed_with_a_warning(data_dir: DataDir, converted: Path) -> None:
    async def scene(rig: DeploymentsRig) -> None:
        rig.driver.post(WorkerJoined(rig.driver.now_s, WorkerId("w0"), "cpu", 1 << 40))
        order = DeployOrder(str(converted), "tiny", labels=("zone=a", "disk=ssd"))
        *_, deployed = [event async for event in rig.deployments.deploy(order)]
        shown = await rig.deployments.show("tiny", OPERATOR, look=False)
        for view in (deployed, shown):
            assert isinstance(view, ModelView)
            assert view.labels == ("zone=a", "disk=ssd", "gpu=l4"), "also those of its settings"
            assert view.warning is not None
            assert "needs nodes labelled zone=a, disk=ssd, gpu=l4, which `cpu` is not" in view.warning
        for wrong in ("zone", "zone = a", "=a"):
            with pytest.raises(RequestError, match=f"KEY=VALUE without spaces, .* given: '{wrong}'"):
                await anext(rig.deployments.deploy(replace(order, name="other", labels=(wrong,))))

    with_shop(data_dir, scene, {"tiny": ModelConfig(labels=("gpu=l4", "zone=a"))})


def test_a_base_goes_with_its_adapters_and_their_files_and_memory(
    data_dir: DataDir, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = made(data_dir, checkpoint, "tiny")
    lora = write_peft(tmp_path / "lora", targets=["q_proj"])

    async def scene(rig: DeploymentsRig) -> None:
        told = list[AdapterId]()
        monkeypatch.setattr(rig.driver, "forget_adapter", told.append)
        order = DeployOrder(str(lora), "shop", base="tiny")
        adapter = carry_out(order, data_dir, lambda *_: None)
        assert isinstance(adapter, DeployedAdapter)
        with Registry(data_dir) as other:
            other.add(adapter)
        (entry,) = rig.deployments.adapters()
        assert entry == rig.deployments.find("clerk")
        assert (entry.name, entry.adapter, entry.deployed) == ("shop", adapter, base)
        with pytest.raises(HasAdapters, match="shop"):
            await rig.deployments.remove("tiny")
        assert len(list(data_dir.models_path.iterdir())) == 2
        with Registry(data_dir) as other:  # the same once more
            other.add(replace(adapter, name="stall"))
        await rig.deployments.remove("stall")
        assert told == []
        await rig.deployments.remove("tiny", with_adapters=True)
        assert rig.keeper.forgotten == [base.where, adapter.where]
        assert told == [adapter.adapter_id]
        assert list(data_dir.models_path.iterdir()) == []
        assert rig.deployments.entries() == rig.deployments.adapters() == []

    with_shop(data_dir, scene, {"shop": ModelConfig(aliases=("clerk",))})


@pytest.mark.parametrize("removed", ["shop", "tiny"])
def test_files_stay_for_requests_that_run_when_their_model_or_adapter_is_removed(
    removed: str, data_dir: DataDir, checkpoint: Path, tmp_path: Path
) -> None:
    """They may have given way and have to be loaded once more, before the last token."""
    base = made(data_dir, checkpoint, "tiny")
    lora = write_peft(tmp_path / "lora", targets=["q_proj"])
    adapter = carry_out(DeployOrder(str(lora), "shop", base="tiny"), data_dir, lambda *_: None)
    assert isinstance(adapter, DeployedAdapter)
    with Registry(data_dir) as registry:
        registry.add(adapter)
    all_files = set(data_dir.models_path.iterdir())

    async def scene(rig: DeploymentsRig) -> None:
        requests, tokenizer = rig.driver.requests, Tokenizer.load(Path(base.directory))
        running = [request_of(tokenizer, name, ModelId("tiny")) for name in ("mine", "bare")]
        running[0].adapter = AdapterOrder(adapter.adapter_id, "shop", adapter.where)
        for request in running:
            requests.add(request)
        await rig.deployments.remove(removed, with_adapters=True)
        await asyncio.sleep(0)
        assert set(data_dir.models_path.iterdir()) == all_files
        assert rig.keeper.forgotten == []

        ends = running[:1] if removed == "shop" else running[::-1]
        clearing = list(rig.deployments._clearing)
        for request in ends:
            assert not any(task.done() for task in clearing)
            requests.end(request)
        await asyncio.gather(*clearing)
        left = {Path(base.directory)} if removed == "shop" else set()
        assert set(data_dir.models_path.iterdir()) == left

    with_shop(data_dir, scene)


@pytest.mark.e2e
def test_a_replaced_version_stays_known_until_its_requests_have_ended(
    data_dir: DataDir, checkpoint: Path
) -> None:
    old = made(data_dir, checkpoint, "tiny")

    async def scene(rig: DeploymentsRig) -> None:
        told: list[dict[Digest, str]] = []
        rig.deployments.tell_nodes = lambda: told.append(rig.deployments.places())
        requests, tokenizer = rig.driver.requests, Tokenizer.load(Path(old.directory))
        running = request_of(tokenizer, "mine", ModelId("tiny"))
        requests.add(running)
        new = await rig.deploy(checkpoint, "tiny", quant="int8", overwrite=True)
        now = {Digest(new.digest): new.where}
        assert rig.deployments.places() == now | {Digest(old.digest): old.where}
        clearing = list(rig.deployments._clearing)
        requests.end(running)
        await asyncio.gather(*clearing)
        assert told[-1] == rig.deployments.places() == now

    with_shop(data_dir, scene)


def test_an_adapter_goes_alone_by_its_alias(data_dir: DataDir, checkpoint: Path, tmp_path: Path) -> None:
    base = made(data_dir, checkpoint, "tiny")
    lora = write_peft(tmp_path / "lora", targets=["q_proj"])
    with Registry(data_dir) as registry:
        registry.add(carry_out(DeployOrder(str(lora), "shop", base="tiny"), data_dir, lambda *_: None))

    async def scene(rig: DeploymentsRig) -> None:
        await rig.deployments.remove("clerk")
        assert [entry.deployed for entry in rig.deployments.entries()] == [base]
        assert list(data_dir.models_path.iterdir()) == [Path(base.directory)]
        assert rig.brain_knows() == {"tiny"}

    with_shop(data_dir, scene, {"shop": ModelConfig(aliases=("clerk",))})


def test_a_preset_is_its_base_to_the_brain_and_a_name_of_its_own_to_keys(
    data_dir: DataDir, converted: Path
) -> None:
    made(data_dir, converted, "tiny")

    async def scene(rig: DeploymentsRig) -> None:
        view = rig.deployments.put_preset("pirate", "tiny", Preset(system="Arr."))
        assert (view.name, view.base, view.preset) == ("pirate", "tiny", Preset(system="Arr."))
        assert rig.brain_knows() == {"tiny"}
        entry = rig.deployments.find("pirate:latest")
        assert (entry.name, entry.deployed.name, entry.profile.model) == ("pirate", "tiny", "tiny")
        assert [one.name for one in rig.deployments.models(OPERATOR)] == ["tiny", "pirate"]
        only = replace(OPERATOR, terms=KeyTerms(models=("pirate",)))
        assert [one.name for one in rig.deployments.models(only)] == ["pirate"]
        with pytest.raises(UnknownModel):
            rig.deployments.find_for("tiny", only)
        await rig.deployments.remove("pirate")
        assert rig.brain_knows() == {"tiny"}
        with pytest.raises(UnknownModel):
            rig.deployments.find("pirate")

    with_shop(data_dir, scene)


def test_a_preset_may_have_aliases_and_no_other_settings(data_dir: DataDir, converted: Path) -> None:
    made(data_dir, converted, "tiny")
    with Registry(data_dir) as registry:
        registry.put_preset("pirate", "tiny", Preset(), 1.0)

    async def scene(rig: DeploymentsRig) -> None:
        assert rig.deployments.find("captain").name == "pirate"

    with_shop(data_dir, scene, {"pirate": ModelConfig(aliases=("captain",))})
    with (
        Registry(data_dir) as registry,
        pytest.raises(ConfigError, match="sets pinned, but `pirate` is a preset: only aliases can"),
    ):
        Catalog(registry, {"pirate": ModelConfig(pinned=True)}, EngineConfig(), 300.0)

"""Snapshots as the gateway orders and follows them, with a worker that only keeps what it is sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from hearth.control.datadir import DataDir
from hearth.control.deploy.deployed import AdapterFacts, Deployed, DeployedAdapter
from hearth.control.deploy.registry import Registry
from hearth.control.observe.metrics import Metrics
from hearth.control.requests.caller import ANYBODY
from hearth.control.snapshots import Snapshots
from hearth.core.errors import SnapshotError, UnknownModel
from hearth.core.messages import (
    HostModel,
    MakeSnapshot,
    ModelLoaded,
    SnapshotLooked,
    SnapshotMade,
    SnapshotProgress,
)
from hearth.core.types import ModelId, SnapshotOutcome, WorkerId
from hearth.snapshot.directory import SnapshotDirectory
from tests.control.gateway_rig import GatewayRig, RecordingLink, ask, emit, with_rig
from tests.control.shown_metrics import shown_value
from tests.node.test_supervisor import PATIENCE_S
from tests.snapshot.fingerprints import FINGERPRINT

TINY = ModelId("tiny")


def hosting_of(link: RecordingLink) -> int:
    return next(order.hosting for order in reversed(link.orders) if isinstance(order, HostModel))


def load(rig: GatewayRig, link: RecordingLink) -> None:
    """Have all of the model be on the worker."""
    rig.receive(link, ModelLoaded(TINY, hosting_of(link), (), 0, 0, 0.0, 0.0, 0.0, 0.0))


def made_orders(link: RecordingLink) -> list[MakeSnapshot]:
    return [order for order in link.orders if isinstance(order, MakeSnapshot)]


async def loading(rig: GatewayRig) -> RecordingLink:
    """Have a worker load the model, for a request that waits for it."""
    link = rig.join()
    await rig.submit(ask(), ANYBODY)
    return link


def counted(rig: GatewayRig, outcome: SnapshotOutcome) -> float:
    return shown_value(rig.metrics, f'hearth_snapshots_total{{outcome="{outcome}"}}')


def test_a_model_that_started_without_a_snapshot_gets_one(data_dir: DataDir, deployed: Deployed) -> None:
    async def scene(rig: GatewayRig) -> None:
        link = await loading(rig)
        hosting = hosting_of(link)
        load(rig, link)
        assert made_orders(link) == [], "nobody has looked"
        rig.receive(link, SnapshotLooked(TINY, hosting, SnapshotOutcome.MISSING))
        load(rig, link)
        load(rig, link)  # as models do that take turns
        assert made_orders(link) == [MakeSnapshot(TINY, hosting)]
        assert rig.snapshots.notes == ()
        rig.receive(link, SnapshotProgress(TINY, hosting, 1, 2))
        rig.receive(link, SnapshotMade(TINY, hosting - 1, failure="the disk is full"))  # of another stay
        assert rig.snapshots.notes == ()
        rig.receive(link, SnapshotMade(TINY, hosting, num_bytes=5))
        assert (counted(rig, SnapshotOutcome.MISSING), counted(rig, SnapshotOutcome.MADE)) == (1, 1)
        assert counted(rig, SnapshotOutcome.FAILED) == 1
        load(rig, link)
        assert len(made_orders(link)) == 1

    with_rig(data_dir, scene)


def test_a_snapshot_that_is_used_is_not_made_anew(data_dir: DataDir, deployed: Deployed) -> None:
    async def scene(rig: GatewayRig) -> None:
        link = await loading(rig)
        rig.receive(link, SnapshotLooked(TINY, hosting_of(link), SnapshotOutcome.USED))
        load(rig, link)
        assert made_orders(link) == []
        assert counted(rig, SnapshotOutcome.USED) == 1
        # It serves, and is found to compute something else.
        rig.receive(link, SnapshotLooked(TINY, hosting_of(link), SnapshotOutcome.DISCARDED, "size 4 differs"))
        assert len(made_orders(link)) == 1
        assert "size 4 differs" in rig.snapshots.notes[0]

    with_rig(data_dir, scene)


def test_a_model_that_left_too_soon_gets_its_snapshot_when_it_is_back(
    data_dir: DataDir, deployed: Deployed
) -> None:
    async def scene(rig: GatewayRig) -> None:
        link = await loading(rig)
        first = hosting_of(link)
        rig.receive(link, SnapshotLooked(TINY, first, SnapshotOutcome.MISSING))
        load(rig, link)
        emit(rig, link, 5, finished=True)
        await rig.gateway.unload("tiny", free=True)
        await rig.submit(ask(), ANYBODY)
        load(rig, link)  # with the engine that it had: nobody looks again
        assert made_orders(link) == [MakeSnapshot(TINY, first), MakeSnapshot(TINY, hosting_of(link))]
        assert hosting_of(link) != first

    with_rig(data_dir, scene)


def test_a_look_that_is_told_when_the_stay_has_ended_counts_all_the_same(
    data_dir: DataDir, deployed: Deployed, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine may be kept, and then nobody looks again."""

    async def scene(rig: GatewayRig) -> None:
        link = await loading(rig)
        first = hosting_of(link)
        emit(rig, link, 5, finished=True)
        await rig.gateway.unload("tiny", free=True)
        rig.receive(link, SnapshotLooked(TINY, first, SnapshotOutcome.REFUSED, "it is damaged"))
        assert counted(rig, SnapshotOutcome.REFUSED) == 1
        assert "snapshot_unused model=tiny" in caplog.text
        assert any("it is damaged" in note for note in rig.snapshots.notes)
        assert made_orders(link) == [], "the model is not there"
        await rig.submit(ask(), ANYBODY)
        load(rig, link)
        assert made_orders(link) == [MakeSnapshot(TINY, hosting_of(link))]

    with_rig(data_dir, scene)


def test_a_look_at_a_snapshot_of_a_model_that_was_removed_leaves_no_note(
    data_dir: DataDir, deployed: Deployed
) -> None:
    async def scene(rig: GatewayRig) -> None:
        link = await loading(rig)
        first = hosting_of(link)
        emit(rig, link, 5, finished=True)
        await rig.gateway.deployments.remove("tiny")
        rig.receive(link, SnapshotLooked(TINY, first, SnapshotOutcome.REFUSED, "it is damaged"))
        assert rig.snapshots.notes == ()

    with_rig(data_dir, scene)


def test_a_snapshot_that_is_written_while_its_model_is_removed_goes_as_well(
    data_dir: DataDir, deployed: Deployed
) -> None:
    async def scene(rig: GatewayRig) -> None:
        link = await loading(rig)
        first = hosting_of(link)
        rig.receive(link, SnapshotLooked(TINY, first, SnapshotOutcome.MISSING))
        load(rig, link)
        emit(rig, link, 5, finished=True)
        await rig.gateway.deployments.remove("tiny")
        directory = SnapshotDirectory.open(data_dir.snapshots_path, 1 << 20)
        path = directory.save(replace(FINGERPRINT, manifest=deployed.digest), {"memory": b"x"})
        rig.receive(link, SnapshotMade(TINY, first, num_bytes=100))
        assert counted(rig, SnapshotOutcome.MADE) == 1
        async with asyncio.timeout(PATIENCE_S):
            while path.parent.exists():
                await asyncio.sleep(0.01)

    with_rig(data_dir, scene)


def test_why_a_snapshot_is_not_used_is_noted_until_there_is_a_new_one(
    data_dir: DataDir, deployed: Deployed
) -> None:
    async def scene(rig: GatewayRig) -> None:
        link = await loading(rig)
        hosting = hosting_of(link)
        rig.receive(link, SnapshotLooked(TINY, hosting, SnapshotOutcome.OUTDATED, "`torch` is 2 here"))
        (note,) = rig.snapshots.notes
        assert "`torch` is 2 here" in note
        rig.receive(link, SnapshotMade(TINY, hosting, failure="the disk is full"))
        (note,) = rig.snapshots.notes
        assert "the disk is full" in note
        assert counted(rig, SnapshotOutcome.FAILED) == 1
        rig.receive(link, SnapshotMade(TINY, hosting))
        assert rig.snapshots.notes == ()

    with_rig(data_dir, scene)


async def first_events(rig: GatewayRig, link: RecordingLink) -> AsyncIterator[dict[str, object]]:
    """Order a snapshot by hand, and serve the request that has the model loaded."""
    events = rig.gateway.make_snapshot("tiny", ANYBODY)
    assert (await anext(events))["phase"] == "loading"
    waiting = asyncio.ensure_future(anext(events))
    while not any(isinstance(order, HostModel) for order in link.orders):
        await asyncio.sleep(0)
        assert not waiting.done()
    load(rig, link)
    emit(rig, link, 5, finished=True)
    assert (await waiting)["phase"] == "waiting"
    return events


def test_a_snapshot_by_hand_is_followed_to_its_end(data_dir: DataDir, deployed: Deployed) -> None:
    async def scene(rig: GatewayRig) -> None:
        link = rig.join()
        events = await first_events(rig, link)
        coming = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        hosting = hosting_of(link)
        assert made_orders(link) == [MakeSnapshot(TINY, hosting)]
        rig.receive(link, SnapshotProgress(TINY, hosting, 0, 2))
        progress = {"event": "progress", "phase": "measuring", "num_done": 0, "num_steps": 2}
        assert await coming == progress
        rig.receive(link, SnapshotProgress(TINY, hosting, 1, 2))
        assert await anext(events) == {**progress, "num_done": 1}
        rig.receive(link, SnapshotMade(TINY, hosting, 100, 200, 1.5))
        (done,) = [event async for event in events]
        assert done["event"] == "done"
        assert done["snapshot"].num_bytes == 100  # type: ignore[attr-defined] # it is a view

    with_rig(data_dir, scene)


@pytest.mark.parametrize("is_worker_lost", [True, False])
def test_a_snapshot_by_hand_ends_with_the_stay_of_its_model(
    data_dir: DataDir, deployed: Deployed, is_worker_lost: bool
) -> None:
    async def scene(rig: GatewayRig) -> None:
        link = rig.join()
        events = await first_events(rig, link)
        coming = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        if is_worker_lost:
            rig.receive(link, None)
        else:
            await rig.gateway.unload("tiny", free=True)
        with pytest.raises(SnapshotError, match="gone" if is_worker_lost else "left device memory"):
            await coming

    with_rig(data_dir, scene)


def test_a_service_that_can_keep_none_says_why() -> None:
    assert Snapshots(Metrics(), "the key is broken").notes == ("no snapshots are kept: the key is broken",)
    assert Snapshots(Metrics()).notes == ()


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"obstacle": "the key is broken"}, "the key is broken"), ({"is_off": True}, r"store\.snapshot_bytes")],
    ids=["cannot", "should not"],
)
def test_a_service_that_keeps_none_loads_no_model_for_one(
    data_dir: DataDir, deployed: Deployed, changes: dict[str, Any], why: str
) -> None:
    async def scene(rig: GatewayRig) -> None:
        link = rig.join()
        rig.gateway._snapshots = Snapshots(Metrics(), **changes)
        with pytest.raises(SnapshotError, match=why):
            await anext(rig.gateway.make_snapshot("tiny", ANYBODY))
        with pytest.raises(UnknownModel):
            await anext(rig.gateway.make_snapshot("nobody", ANYBODY))
        assert not any(isinstance(order, HostModel) for order in link.orders)

    with_rig(data_dir, scene)


def deploy_adapter(data_dir: DataDir, deployed: Deployed, name: str = "shop") -> None:
    facts = AdapterFacts(4096, 64, "float32", 8, ("qkv",), deployed.facts.dimensions)
    with Registry(data_dir) as registry:
        registry.add(DeployedAdapter(name, "tiny", "/lora", "/there", "/there", "ab" * 32, facts, 1.0))


def test_a_snapshot_made_before_the_first_adapter_is_made_anew_with_it(
    data_dir: DataDir, deployed: Deployed
) -> None:
    async def scene(rig: GatewayRig) -> None:
        link = await loading(rig)
        hosting = hosting_of(link)
        rig.receive(link, SnapshotLooked(TINY, hosting, SnapshotOutcome.USED, lacks_adapters=True))
        load(rig, link)
        assert made_orders(link) == [], "it has no adapters"
        deploy_adapter(data_dir, deployed)
        assert len(rig.gateway.deployments.models(ANYBODY)) == 2  # which looks what is deployed
        assert made_orders(link) == [MakeSnapshot(TINY, hosting, has_adapters=True)]
        (note,) = rig.snapshots.notes
        assert "made before it had adapters" in note
        assert counted(rig, SnapshotOutcome.PARTIAL) == 1
        deploy_adapter(data_dir, deployed, "another")
        assert len(rig.gateway.deployments.models(ANYBODY)) == 3
        rig.receive(link, SnapshotMade(TINY, hosting))
        load(rig, link)
        assert len(made_orders(link)) == 1
        assert rig.snapshots.notes == ()

    with_rig(data_dir, scene)


@pytest.mark.parametrize("lacks_adapters", [True, False])
def test_a_start_with_adapters_tells_whether_its_snapshot_knows_them(
    data_dir: DataDir, deployed: Deployed, lacks_adapters: bool
) -> None:
    deploy_adapter(data_dir, deployed)

    async def scene(rig: GatewayRig) -> None:
        link = await loading(rig)
        hosting = hosting_of(link)
        looked = SnapshotLooked(TINY, hosting, SnapshotOutcome.USED, lacks_adapters=lacks_adapters)
        rig.receive(link, looked)
        assert made_orders(link) == [], "it is not loaded"
        load(rig, link)
        assert len(made_orders(link)) == len(rig.snapshots.notes) == lacks_adapters

    with_rig(data_dir, scene)


def test_an_adapter_that_comes_while_a_snapshot_is_made_is_in_the_next(
    data_dir: DataDir, deployed: Deployed
) -> None:
    """One that was asked for with adapters, and has not got them, is not asked for again and again."""

    async def scene(rig: GatewayRig) -> None:
        link = await loading(rig)
        hosting = hosting_of(link)
        rig.receive(link, SnapshotLooked(TINY, hosting, SnapshotOutcome.MISSING))
        load(rig, link)
        deploy_adapter(data_dir, deployed)
        assert len(rig.gateway.deployments.models(ANYBODY)) == 2
        for _ in range(3):
            rig.receive(link, SnapshotMade(TINY, hosting, lacks_adapters=True))
        wishes = [order.has_adapters for order in made_orders(link)]
        assert wishes == [False, True]

    with_rig(data_dir, scene)


def test_a_snapshot_made_with_adapters_by_one_worker_is_not_made_anew_by_the_next() -> None:
    bases, orders = set[ModelId](), list[MakeSnapshot]()
    snapshots = Snapshots(Metrics(), bases=lambda: bases)
    for worker in (WorkerId("w0"), WorkerId("w1")):
        link = RecordingLink()
        link.orders = orders  # type: ignore[assignment] # nothing else is sent
        snapshots.joined(worker, link)  # type: ignore[arg-type] # all that is used of one
        looked = SnapshotLooked(TINY, 1, SnapshotOutcome.USED, lacks_adapters=True)
        snapshots.receive(worker, looked, is_current=True)
        snapshots.loaded(worker, TINY, 1)
    bases.add(TINY)
    snapshots.adapters_deployed()
    assert orders == [MakeSnapshot(TINY, 1, has_adapters=True)]
    (maker,) = snapshots._makings
    snapshots.receive(maker[0], SnapshotMade(TINY, 1), is_current=True)

    bases.add(ModelId("another"))
    snapshots.adapters_deployed()
    assert len(orders) == 1
    assert snapshots.notes == ()


def test_nodes_make_snapshots_of_their_own() -> None:
    snapshots, links = Snapshots(Metrics()), {}
    for worker in map(WorkerId, ("w0", "w1", "gpu-2/w0")):
        links[worker] = RecordingLink()
        snapshots.joined(worker, links[worker])  # type: ignore[arg-type] # as much of a link as is needed
        looked = SnapshotLooked(TINY, 1, SnapshotOutcome.MISSING)
        snapshots.receive(worker, looked, is_current=True)
        snapshots.loaded(worker, TINY, 1)
    assert [len(made_orders(link)) for link in links.values()] == [1, 0, 1]
    snapshots.receive(WorkerId("w0"), SnapshotMade(TINY, 1, num_bytes=5), is_current=True)
    snapshots.loaded(WorkerId("w1"), TINY, 2)
    assert made_orders(links[WorkerId("w1")]) == [], "it finds that of its machine"


def test_workers_make_snapshots_of_their_own_stages() -> None:
    snapshots, links = Snapshots(Metrics()), {}
    for worker in map(WorkerId, ("w0", "w1")):
        links[worker] = RecordingLink()
        snapshots.joined(worker, links[worker])  # type: ignore[arg-type] # as much of a link as is needed
        looked = SnapshotLooked(TINY, 1, SnapshotOutcome.MISSING)
        snapshots.receive(worker, looked, is_current=True)
        snapshots.loaded(worker, TINY, 1, is_stage=True)
    assert [len(made_orders(link)) for link in links.values()] == [1, 1]
    snapshots.receive(WorkerId("w0"), SnapshotMade(TINY, 1, num_bytes=5), is_current=True)
    snapshots.left(WorkerId("w1"), TINY)  # too soon
    snapshots.loaded(WorkerId("w1"), TINY, 2, is_stage=True)
    assert [len(made_orders(link)) for link in links.values()] == [1, 2]

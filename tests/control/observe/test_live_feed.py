"""What subscribers are told, by a gateway with everything real but the processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator

import pytest

from hearth.control.datadir import DataDir
from hearth.control.deploy.deployed import Deployed
from hearth.control.keys import keys
from hearth.control.observe import live_feed
from hearth.control.observe.live_feed import MAX_BEHIND, MAX_SUBSCRIBERS, MAX_SUBSCRIBERS_OF_KEY
from hearth.control.requests.caller import ANYBODY, OPERATOR, Caller, GroupId, KeyId, KeyTerms
from hearth.core.errors import Overloaded
from tests.control.gateway_rig import GatewayRig, ask, emit, with_rig
from tests.control.shown_metrics import shown_value

ANN, EVE = Caller("ann", "user", GroupId("ann's")), Caller("eve", "user", GroupId("eve's"))


class Watcher:
    """A subscriber that keeps all it is told."""

    def __init__(self, rig: GatewayRig, caller: Caller) -> None:
        self._messages: AsyncGenerator[bytes, None] = rig.live.subscribe(caller)
        self.told: list[tuple[str, object]] = []
        self.is_over = False

    async def hear(self, *names: str) -> None:
        """Read until each of these events has come again."""
        missing = set(names)
        while missing:
            for frame in (await anext(self._messages)).decode().split("\n\n")[:-1]:
                name, data = ("comment", "null") if frame == ":" else frame[7:].split("\ndata: ")
                self.told.append((name, json.loads(data)))
                missing.discard(name)

    async def end(self) -> None:
        await self._messages.aclose()

    def last(self, name: str) -> object:
        return next(data for told, data in reversed(self.told) if told == name)

    def rows(self) -> list[dict[str, object]]:
        return [row for name, rows in self.told if name == "requests" for row in rows]  # type: ignore[attr-defined]

    def tags(self) -> list[list[str]]:
        found = [one for name, all_of in self.told if name == "decisions" for one in all_of]  # type: ignore[attr-defined]
        return [[one["event"][0], *(tag for tag, _ in one["actions"])] for one in found]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_feed, "PAUSE_S", 0.001)


def test_a_subscriber_is_told_what_was_then_what_happens(data_dir: DataDir, deployed: Deployed) -> None:
    async def scene(rig: GatewayRig) -> None:
        link = rig.join()
        before = await rig.submit(ask(), ANYBODY)
        watcher = Watcher(rig, ANYBODY)
        await watcher.hear("hello", "requests", "state", "decisions")
        assert watcher.last("hello")["health"]["status"] == "starting"
        assert watcher.rows()[0]["request_id"] == before.request_id
        assert ["WorkerJoined"] in watcher.tags()
        assert ["RequestArrived", "LoadModel", "Dispatch"] in watcher.tags()
        assert watcher.last("state")["ps"]["models"][0]["state"] == "loading"

        emit(rig, link, 1, 2, finished=True)
        await watcher.hear("requests")
        while not watcher.rows()[-1]["is_ended"]:
            await watcher.hear("requests")
        assert (watcher.rows()[-1]["phase"], watcher.rows()[-1]["num_output_tokens"]) == ("stop", 2)
        rig.receive(link, None)
        while ["WorkerLost"] not in watcher.tags():
            await watcher.hear("decisions")
        await watcher.end()
        await rig.live.close()

    with_rig(data_dir, scene)


def test_a_key_is_told_of_the_requests_of_its_group_and_else_that_the_stream_lives(
    data_dir: DataDir, deployed: Deployed
) -> None:
    async def scene(rig: GatewayRig) -> None:
        link = rig.join()
        anns = await rig.submit(ask(), ANN)
        ann, eve, monitor = Watcher(rig, ANN), Watcher(rig, EVE), Watcher(rig, OPERATOR)
        for one in (ann, eve, monitor):
            await one.hear("hello")
        eves = await rig.submit(ask(), EVE)
        emit(rig, link, 1, finished=True)
        for one, ids in (
            (ann, {anns.request_id}),
            (eve, {eves.request_id}),
            (monitor, {anns.request_id, eves.request_id}),
        ):
            while {row["request_id"] for row in one.rows() if row["is_ended"]} != ids:
                await one.hear("requests")
            assert {row["request_id"] for row in one.rows()} == ids
        assert {name for one in (ann, eve) for name, _ in one.told} == {"hello", "requests"}
        rig.live.sampled()
        await ann.hear("comment")
        for one in (ann, eve, monitor):
            await one.end()
        await rig.live.close()

    with_rig(data_dir, scene)


def test_a_key_of_other_models_does_not_see_the_requests_of_its_group(
    data_dir: DataDir, deployed: Deployed
) -> None:
    async def scene(rig: GatewayRig) -> None:
        rig.join()
        await rig.submit(ask(), ANN)
        watcher = Watcher(rig, Caller("liz", "user", ANN.group, KeyTerms(models=("shop",))))
        await watcher.hear("hello")
        assert watcher.rows() == []
        await watcher.end()

    with_rig(data_dir, scene)


def test_who_reads_too_slowly_is_dropped_and_counted(data_dir: DataDir, deployed: Deployed) -> None:
    async def scene(rig: GatewayRig) -> None:
        rig.join()
        slow, quick = Watcher(rig, ANYBODY), Watcher(rig, ANYBODY)
        await slow.hear("hello")
        await quick.hear("hello")
        for _ in range(MAX_BEHIND + 2):
            rig.gateway.live.sampled()
            await quick.hear("state")
        with pytest.raises(StopAsyncIteration):
            await slow.hear("nothing more")
        assert shown_value(rig.metrics, 'hearth_fallbacks_total{what="dashboard_dropped"}') == 1.0
        await quick.end()

    with_rig(data_dir, scene)


def test_the_stream_of_a_removed_key_ends(data_dir: DataDir, deployed: Deployed) -> None:
    async def scene(rig: GatewayRig) -> None:
        key = keys.add(data_dir.keys_path, "ann", "user").key
        caller = rig.gateway.keys.check(key)
        assert caller is not None
        watcher = Watcher(rig, caller)
        await watcher.hear("hello")
        rig.live.sampled()
        keys.remove(data_dir.keys_path, "ann")
        rig.live.sampled()
        with pytest.raises(StopAsyncIteration):
            await watcher.hear("nothing more")

    with_rig(data_dir, scene)


def test_so_many_may_watch_and_nothing_runs_when_nobody_does(data_dir: DataDir, deployed: Deployed) -> None:
    async def scene(rig: GatewayRig) -> None:
        rig.join()
        num_tasks = len(asyncio.all_tasks())
        watchers = [Watcher(rig, ANYBODY) for _ in range(MAX_SUBSCRIBERS)]
        for one in watchers:
            await one.hear("hello")
        with pytest.raises(Overloaded, match="64 dashboards are open, the limit"):
            await Watcher(rig, ANYBODY).hear("hello")
        for one in watchers:
            await one.end()
        await Watcher(rig, ANYBODY).hear("hello")
        await rig.live.close()
        assert len(asyncio.all_tasks()) == num_tasks

    with_rig(data_dir, scene)


def test_one_key_does_not_keep_others_out(data_dir: DataDir, deployed: Deployed) -> None:
    async def scene(rig: GatewayRig) -> None:
        rig.join()
        liz = Caller("liz", "user", GroupId("liz's"), key_id=KeyId("liz-1"))
        watchers = [Watcher(rig, liz) for _ in range(MAX_SUBSCRIBERS_OF_KEY)]
        for one in watchers:
            await one.hear("hello")
        with pytest.raises(Overloaded, match="16 dashboards are open with the key 'liz', its limit"):
            await Watcher(rig, liz).hear("hello")
        await Watcher(rig, EVE).hear("hello")
        await rig.live.close()

    with_rig(data_dir, scene)


def test_dashboards_connect_again_after_a_fault(
    data_dir: DataDir, deployed: Deployed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene(rig: GatewayRig) -> None:
        rig.join()
        watcher = Watcher(rig, ANYBODY)
        await watcher.hear("hello")
        with monkeypatch.context() as broken:
            broken.setattr(rig.live, "_state", lambda: 1 / 0)
            with pytest.raises(StopAsyncIteration):
                await watcher.hear("nothing more")
        assert "ZeroDivisionError" in caplog.text
        again = Watcher(rig, ANYBODY)
        await again.hear("hello")
        rig.live.sampled()
        await again.hear("state")
        await again.end()
        await rig.live.close()

    with_rig(data_dir, scene)

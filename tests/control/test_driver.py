"""Orders reach workers, and their facts the brain and whoever looks, as weights come, stay and go."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from hearth.control.datadir import DataDir
from hearth.control.deploy.deployed import AdapterFacts, Deployed, DeployedAdapter
from hearth.control.deploy.registry import Registry
from hearth.control.observe.exchange_record import ExchangeRecord
from hearth.control.observe.views import Explanation, UnloadView
from hearth.control.requests.caller import ANYBODY
from hearth.control.requests.generation import AnswerStream
from hearth.core.errors import EngineFailed, LogitsNotFinite, RequestError, StoreError, UnknownModel
from hearth.core.messages import (
    AdapterLoaded,
    AdapterOrder,
    Admitted,
    CancelRequest,
    DeviceResidency,
    DropModel,
    HoldModel,
    HostingFailed,
    HostModel,
    KvMove,
    KvMoved,
    LoadProgress,
    ModelLoaded,
    ModelTurn,
    ModelUse,
    Ping,
    PipelineUse,
    Pong,
    PrepareModel,
    RetireModel,
    RunFailed,
    RungBytes,
    SendKv,
    StartRequest,
    StepDone,
)
from hearth.core.sizes import StepLimits
from hearth.core.types import LOCAL, AdapterId, Hold, ModelId, Pace, Rung, TurnEnd, WorkerId
from hearth.policy.fleet.events import (
    Action,
    CancelRun,
    Dispatch,
    Event,
    MoveKv,
    RequestFinished,
    ResidencyReported,
    TimerFired,
    Why,
)
from tests.control.broken_driver import run_broken_driver
from tests.control.gateway_rig import GatewayRig, RecordingLink, ask, emit, with_rig
from tests.control.shown_metrics import shown_value

TINY = ModelId("tiny")
BYTES = 1000
#: Of a model that nobody has set limits of, in a service that knows of no GPU.
LIMITS = StepLimits(max_batch_tokens=512, max_seqs=256, block_tokens=16)


def host_orders(link: RecordingLink) -> list[HostModel]:
    return [order for order in link.orders if isinstance(order, HostModel)]


def loaded(rig: GatewayRig, link: RecordingLink, come_bytes: int = BYTES) -> None:
    """The model is whole; so many bytes had to come for that."""
    hosting = host_orders(link)[-1].hosting
    rungs = (RungBytes(Rung.HOST, come_bytes, 0.1),) if come_bytes else ()
    rig.receive(link, DeviceResidency({TINY: BYTES}))
    rig.receive(link, ModelLoaded(TINY, hosting, rungs, BYTES - come_bytes, 0, 0.0, 0.0, 0.0, 0.1))


async def answered(rig: GatewayRig, link: RecordingLink, come_bytes: int | None = None) -> Explanation:
    """A request from its arrival to its end, with the load that it causes."""
    stream = await rig.submit(ask(), ANYBODY)
    if come_bytes is not None:
        loaded(rig, link, come_bytes)
    emit(rig, link, 5, finished=True)
    explained = rig.gateway.views.explain(stream.request_id, ANYBODY)
    assert explained is not None
    return explained


def metric(rig: GatewayRig, name: str) -> float:
    return shown_value(rig.metrics, name)


def test_a_model_is_hosted_with_its_floor_and_its_most_of_kv(data_dir: DataDir, deployed: Deployed) -> None:
    async def scene(rig: GatewayRig) -> None:
        link = rig.join()
        await rig.submit(ask(), ANYBODY)
        (order,) = host_orders(link)
        assert 0 < order.kv_floor_bytes <= order.max_kv_bytes
        rig.gateway.end_all()

    with_rig(data_dir, scene)


def test_workers_with_kernels_to_compile_are_told_of_deployed_models(
    data_dir: DataDir, deployed: Deployed
) -> None:
    async def scene(rig: GatewayRig) -> None:
        link = rig.join(kind="cuda")
        limits = rig.catalog.find("tiny").limits_by_pool["cuda"]
        assert link.orders == [PrepareModel(TINY, deployed.directory, limits)]
        other = PrepareModel(ModelId("other"), "/elsewhere", LIMITS)
        rig.driver.prepare(lambda node, kind: other)
        assert link.orders[1:] == [other]

    with_rig(data_dir, scene)


def test_a_cpu_is_told_of_no_kernels(data_dir: DataDir, deployed: Deployed) -> None:
    async def scene(rig: GatewayRig) -> None:
        link = rig.join()
        rig.driver.prepare(lambda node, kind: PrepareModel(TINY, deployed.directory, LIMITS))
        assert link.orders == []

    with_rig(data_dir, scene)


def test_a_model_that_makes_room_is_retired_and_its_bytes_stay(data_dir: DataDir, deployed: Deployed) -> None:
    with Registry(data_dir) as registry:
        registry.add(replace(deployed, name="other"))

    async def scene(rig: GatewayRig) -> None:
        profile = rig.driver.fleet.models[TINY].profile
        assert profile is not None
        link = rig.join(budget_bytes=profile.footprints["cpu"].least_bytes * 3 // 2)
        await answered(rig, link, BYTES)
        await rig.submit(replace(ask([1, 2]), model="other"), ANYBODY)
        assert [type(order) for order in link.orders[2:]] == [RetireModel, HostModel, StartRequest]
        assert metric(rig, "hearth_evictions_total") == 1
        rig.gateway.end_all()

    with_rig(data_dir, scene)


def test_a_stopped_model_is_held_as_retained_and_a_freed_one_is_dropped(
    data_dir: DataDir, deployed: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hearth.control.observe.service_views.LOOK_S", 0.0)  # nobody answers

    async def scene(rig: GatewayRig) -> None:
        link = rig.join()
        await answered(rig, link, BYTES)
        await rig.gateway.unload("tiny", free=False)
        orders = [order for order in link.orders if not isinstance(order, Ping)]
        assert orders[2:] == [HoldModel(TINY, Hold.RETAINED)]
        await rig.gateway.unload("tiny", free=True)
        orders = [order for order in link.orders if not isinstance(order, Ping)]
        assert orders[3:] == [DropModel(TINY)]
        assert metric(rig, "hearth_evictions_total") == 0, "nobody needed its room"

    with_rig(data_dir, scene)


def test_stopping_tells_what_there_was_to_stop_in_every_state(data_dir: DataDir, deployed: Deployed) -> None:
    async def scene(rig: GatewayRig) -> None:
        async def stopped(*, free: bool = False) -> tuple[bool, int]:
            view = await rig.gateway.unload("tiny", free)
            assert (view.unloaded, view.free) == ("tiny", free)
            return view.was_loaded, view.num_requests

        assert await stopped() == (False, 0), "deployed and never asked for"
        stream = await rig.submit(ask(), ANYBODY)
        assert await stopped() == (False, 1), "waits for a worker"
        link = rig.join()
        assert await stopped() == (True, 1), "loading"
        rig.driver.cancel(stream.request_id)
        assert await stopped() == (True, 0), "loading for nobody"
        assert await stopped(free=True) == (True, 0)
        assert await stopped() == (False, 0), "called off"
        await answered(rig, link, BYTES)
        assert await stopped() == (True, 0), "warm"
        assert await stopped(free=True) == (True, 0), "retained"
        assert await stopped(free=True) == (False, 0), "freed"

    with_rig(data_dir, scene)


def test_what_was_on_the_device_is_explained_and_counted(data_dir: DataDir, deployed: Deployed) -> None:
    async def scene(rig: GatewayRig) -> None:
        link = rig.join()
        explained = await answered(rig, link, come_bytes=300)
        assert explained.reused_bytes == 700
        assert [(rung.rung, rung.num_bytes) for rung in explained.rungs] == [(Rung.HOST, 300)]
        assert metric(rig, "hearth_reused_bytes_total") == 700
        assert metric(rig, 'hearth_loaded_bytes_total{tier="host"}') == 300
        assert metric(rig, 'hearth_cold_start_seconds_count{tier="host"}') == 1

    with_rig(data_dir, scene)


def test_a_load_without_a_byte_has_a_tier_of_its_own(data_dir: DataDir, deployed: Deployed) -> None:
    async def scene(rig: GatewayRig) -> None:
        explained = await answered(rig, rig.join(), come_bytes=0)
        assert (explained.reused_bytes, explained.rungs) == (BYTES, ())
        assert metric(rig, 'hearth_cold_start_seconds_count{tier="device"}') == 1

    with_rig(data_dir, scene)


def test_a_request_shows_the_load_that_a_worker_does_unasked(data_dir: DataDir, deployed: Deployed) -> None:
    async def scene(rig: GatewayRig) -> None:
        link = rig.join()
        await answered(rig, link, BYTES)
        warm = await answered(rig, link)
        assert (warm.load_s, warm.rungs) == (None, ())
        rig.receive(link, DeviceResidency({TINY: 600}))
        again = await answered(rig, link, come_bytes=400)
        assert len(host_orders(link)) == 1
        assert again.load_s is not None
        assert (again.reused_bytes, again.rungs[0].num_bytes) == (600, 400)
        assert (await answered(rig, link)).load_s is None

    with_rig(data_dir, scene)


def test_a_request_that_comes_between_the_end_of_a_load_and_word_of_the_bytes_waits_for_no_load(
    data_dir: DataDir, deployed: Deployed
) -> None:
    async def scene(rig: GatewayRig) -> None:
        link = rig.join()
        await answered(rig, link, BYTES)
        rig.receive(link, DeviceResidency({TINY: 600}))
        await rig.submit(ask(), ANYBODY)
        rungs = (RungBytes(Rung.HOST, 400, 0.1),)
        rig.receive(link, ModelLoaded(TINY, host_orders(link)[-1].hosting, rungs, 600, 0, 0.0, 0.0, 0.0, 0.1))
        assert (await answered(rig, link)).load_s is None

    with_rig(data_dir, scene)


def test_a_request_that_is_preempted_and_admitted_again_in_one_step_is_shown_so(
    data_dir: DataDir, deployed: Deployed
) -> None:
    async def scene(rig: GatewayRig) -> None:
        link = rig.join()
        stream = await rig.submit(ask(), ANYBODY)
        loaded(rig, link)
        (run,) = rig.driver.requests.by_run
        rig.receive(link, StepDone(TINY, [], [], admitted=[Admitted(run, 1, 0.0)]))
        rig.receive(link, StepDone(TINY, [], [], admitted=[Admitted(run, 9, 0.0)], preempted=[run]))
        explained = rig.gateway.views.explain(stream.request_id, ANYBODY)
        assert explained is not None
        assert [mark.what for mark in explained.marks][-2:] == ["preempted", "started"]
        assert (explained.num_preemptions, explained.num_cached_tokens) == (1, 1)
        rig.gateway.end_all()

    with_rig(data_dir, scene)


@pytest.mark.parametrize("is_lost", [False, True])
def test_the_brain_is_told_how_long_a_prompt_took_unless_two_workers_computed_it(
    data_dir: DataDir, deployed: Deployed, is_lost: bool
) -> None:
    async def scene(rig: GatewayRig) -> None:
        found: list[Event] = []
        rig.driver.add_sink(lambda event, _: found.append(event))
        link = rig.join()
        await rig.submit(ask([5] * 8), ANYBODY)
        loaded(rig, link)
        (run,) = rig.driver.requests.by_run
        rig.receive(link, StepDone(TINY, [], [], admitted=[Admitted(run, 3, 0.0)], step_s=2.0))
        if is_lost:
            rig.receive(link, None)
            link = rig.join()
        emit(rig, link, 5, 6, finished=True)
        (finished,) = [event for event in found if isinstance(event, RequestFinished)]
        if is_lost:
            assert finished.prompt is None
        else:
            assert finished.prompt is not None
            assert finished.prompt.num_tokens == 5
            assert 2.0 <= finished.prompt.seconds < 3.0

    with_rig(data_dir, scene)


def test_weights_that_are_taken_while_a_request_is_on_its_way_are_shown_too(
    data_dir: DataDir, deployed: Deployed
) -> None:
    async def scene(rig: GatewayRig) -> None:
        link = rig.join()
        await answered(rig, link, BYTES)
        stream = await rig.submit(ask(), ANYBODY)
        rig.receive(link, DeviceResidency({TINY: 600}))
        rig.receive(link, LoadProgress(TINY, host_orders(link)[-1].hosting, 100, 1))
        loaded(rig, link, come_bytes=400)
        emit(rig, link, 5, finished=True)
        explained = rig.gateway.views.explain(stream.request_id, ANYBODY)
        assert explained is not None
        assert (explained.reused_bytes, explained.rungs[0].num_bytes) == (600, 400)

    with_rig(data_dir, scene)


def test_a_load_that_fails_when_the_model_was_ready_before_moves_its_requests(
    data_dir: DataDir, deployed: Deployed
) -> None:
    async def scene(rig: GatewayRig) -> None:
        link = rig.join()
        await answered(rig, link, BYTES)
        rig.receive(link, DeviceResidency({TINY: 600}))
        stream = await rig.submit(ask(), ANYBODY)
        rig.receive(
            link, HostingFailed(TINY, host_orders(link)[-1].hosting, "store_error", "the disk is gone")
        )
        explained = rig.gateway.views.explain(stream.request_id, ANYBODY)
        assert explained is not None
        assert "worker_lost" in [mark.what for mark in explained.marks]
        rig.gateway.end_all()

    with_rig(data_dir, scene)


def test_a_model_that_breaks_at_its_first_step_is_loaded_once_and_clients_are_told_when_again(
    data_dir: DataDir, deployed: Deployed
) -> None:
    async def scene(rig: GatewayRig) -> None:
        link = rig.join()
        stream = await rig.submit(ask(), ANYBODY)
        loaded(rig, link)
        reason = "its engine broke: RuntimeError('no kernel')"
        rig.receive(link, HostingFailed(TINY, host_orders(link)[-1].hosting, "engine_failed", reason))
        with pytest.raises(EngineFailed, match=r"no kernel.*; it is tried again in 2 s") as failed:
            await stream.next(1.0)
        assert failed.value.retry_s == 2.0
        for _ in range(20):
            with pytest.raises(EngineFailed, match="no kernel") as refused:
                await (await rig.submit(ask(), ANYBODY)).next(1.0)
            assert refused.value.retry_s is not None
        assert len(host_orders(link)) == 1

    with_rig(data_dir, scene)


def test_a_load_that_fails_says_when_it_is_tried_again(data_dir: DataDir, deployed: Deployed) -> None:
    async def scene(rig: GatewayRig) -> None:
        link = rig.join()
        stream = await rig.submit(ask(), ANYBODY)
        rig.receive(link, HostingFailed(TINY, host_orders(link)[-1].hosting, "store", "the disk is gone"))
        with pytest.raises(StoreError, match="the disk is gone; it is tried again in 2 s") as failed:
            await stream.next(1.0)
        assert (failed.value.http_status, failed.value.retry_s) == (503, 2.0)

    with_rig(data_dir, scene)


def test_the_brain_learns_what_is_on_the_device(data_dir: DataDir, deployed: Deployed) -> None:
    async def scene(rig: GatewayRig) -> None:
        link = rig.join()
        rig.receive(link, DeviceResidency({TINY: 600}))
        last = rig.journal.path.read_text().splitlines()[-1]
        assert '"DeviceReported"' in last
        assert '"bytes_by_model":{"tiny":600}' in last

    with_rig(data_dir, scene)


def test_the_brain_is_told_how_long_stages_take_if_it_is_new(data_dir: DataDir, deployed: Deployed) -> None:
    async def scene(rig: GatewayRig) -> None:
        link, use = rig.join(), ModelUse(TINY, Hold.WARM, True, 600, BYTES, 0, 0)
        for stage_s in ((), (1.0, 2.0), (1.05, 1.95), (1.0, 3.0)):
            staged = structs.replace(use, pipeline=PipelineUse(2, stage_s))
            rig.receive(link, Pong(1, 10_000, 9400, 0, 0, 0, {}, (staged,)))
        told = [line for line in rig.journal.path.read_text().splitlines() if '"StagesMeasured"' in line]
        assert ["[1.0,2.0]" in told[0], "[1.0,3.0]" in told[1], len(told)] == [True, True, 2]

    with_rig(data_dir, scene)


def test_whoever_looks_has_workers_asked_and_sees_what_is_left_of_retired_models(
    data_dir: DataDir, deployed: Deployed
) -> None:
    async def scene(rig: GatewayRig) -> None:
        link = rig.join()
        looking = asyncio.create_task(rig.gateway.views.fresh_ps())
        await asyncio.sleep(0)
        (ping,) = link.orders
        assert isinstance(ping, Ping)
        use = ModelUse(TINY, Hold.RETAINED, False, 600, BYTES, 0, 0)
        told = Pong(1, 10_000, 9400, 0, 0, 0, {}, (use,))
        rig.receive(link, told)
        await asyncio.sleep(0)
        assert not looking.done()  # that was the answer to a ping before
        rig.receive(link, structs.replace(told, number=ping.number))
        view = await looking
        assert [(one.model, one.state, one.loaded_bytes, one.is_hosted) for one in view.models] == [
            ("tiny", "retained", 600, False)
        ]
        (worker,) = view.workers
        assert worker.used_bytes == 600
        assert worker.pool is not None
        assert [(part.kind, part.state, part.num_bytes) for part in worker.pool.parts] == [
            ("weights", "retained", 600),
            ("free", "spare", 9400),
        ]
        assert metric(rig, "hearth_device_used_bytes") == 600

    with_rig(data_dir, scene)


def test_who_stops_a_model_hears_what_it_has_on_devices_and_what_stays_in_host_memory(
    data_dir: DataDir, deployed: Deployed
) -> None:
    async def scene(rig: GatewayRig) -> None:
        link = rig.join()
        await rig.submit(ask(), ANYBODY)
        loaded(rig, link)
        rig.driver.post(ResidencyReported(rig.driver.now_s, TINY, {Rung.HOST: 700, Rung.DISK: BYTES}))
        stopping = asyncio.create_task(rig.gateway.unload("tiny", free=True))
        await asyncio.sleep(0)
        ping = link.orders[-1]
        assert isinstance(ping, Ping)
        use = ModelUse(TINY, Hold.WARM, True, BYTES, BYTES, 0, 50)
        rig.receive(link, Pong(ping.number, 10_000, 8950, 0, 0, 0, {}, (use,)))

        assert await stopping == UnloadView("tiny", True, True, 1, BYTES + 50, 700)
        emit(rig, link, 5, finished=True)
        assert isinstance(link.orders[-1], DropModel)

    with_rig(data_dir, scene)


def test_stopping_a_model_does_not_promise_bytes_that_another_model_has_as_well(
    data_dir: DataDir, deployed: Deployed
) -> None:
    async def scene(rig: GatewayRig) -> None:
        link = rig.join()
        await answered(rig, link, BYTES)
        stopping = asyncio.create_task(rig.gateway.unload("tiny", free=True))
        await asyncio.sleep(0)
        ping = link.orders[-1]
        assert isinstance(ping, Ping)
        use = ModelUse(TINY, Hold.WARM, True, BYTES, BYTES, shared_bytes=300, kv_bytes=50)
        rig.receive(link, Pong(ping.number, 10_000, 8950, 0, 0, 0, {}, (use,)))

        assert (await stopping).device_bytes == BYTES + 50 - 300

    with_rig(data_dir, scene)


def test_stopping_a_model_that_is_removed_meanwhile_finds_none(data_dir: DataDir, deployed: Deployed) -> None:
    async def scene(rig: GatewayRig) -> None:
        link = rig.join()
        stopping = asyncio.create_task(rig.gateway.unload("tiny", free=True))
        await asyncio.sleep(0)
        ping = link.orders[-1]
        assert isinstance(ping, Ping)
        with Registry(data_dir) as registry:
            registry.remove("tiny")
        assert rig.gateway.deployments.models(ANYBODY) == []
        rig.receive(link, Pong(ping.number, 10_000, 10_000, 0, 0, 0, {}, ()))

        with pytest.raises(UnknownModel):
            await stopping

    with_rig(data_dir, scene)


def test_a_worker_that_does_not_answer_is_shown_as_the_brain_sees_it(
    data_dir: DataDir, deployed: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hearth.control.observe.service_views.LOOK_S", 0.0)

    async def scene(rig: GatewayRig) -> None:
        rig.join()
        await rig.submit(ask(), ANYBODY)
        view = await rig.gateway.views.fresh_ps()
        assert [(one.model, one.state) for one in view.models] == [("tiny", "loading")]
        assert view.workers[0].pool is None
        assert view.workers[0].used_bytes == view.models[0].num_bytes > 0
        rig.gateway.end_all()

    with_rig(data_dir, scene)


def test_a_run_that_fails_ends_its_request_with_the_error_and_is_counted(
    data_dir: DataDir, deployed: Deployed
) -> None:
    async def scene(rig: GatewayRig) -> None:
        link = rig.join()
        broken, sound = await rig.submit(ask(), ANYBODY), await rig.submit(ask(), ANYBODY)
        loaded(rig, link)
        emit(rig, link, 5)
        run = rig.driver.requests.by_id[broken.request_id].run
        assert run is not None
        rig.receive(link, RunFailed(run, LogitsNotFinite.label, "the model computed NaN"))
        assert len(await broken.next()) == 1
        with pytest.raises(LogitsNotFinite, match="the model computed NaN"):
            await broken.next()
        emit(rig, link, 6, finished=True)
        assert [delta.token for delta in await sound.next()] == [5, 6]
        for outcome in ("logits_not_finite", "stop"):
            assert metric(rig, f'hearth_requests_total{{model="tiny",outcome="{outcome}"}}') == 1

    with_rig(data_dir, scene)


def start_orders(link: RecordingLink) -> list[StartRequest]:
    return [order for order in link.orders if isinstance(order, StartRequest)]


def test_a_request_for_an_adapter_goes_to_its_base_and_on_with_it_elsewhere(
    data_dir: DataDir, deployed: Deployed
) -> None:
    facts = AdapterFacts(4096, 64, "float32", 8, ("qkv",), deployed.facts.dimensions)
    with Registry(data_dir) as registry:
        registry.add(DeployedAdapter("shop", "tiny", "/lora", "/there", "/there", "ab" * 32, facts, 1.0))

    async def scene(rig: GatewayRig) -> None:
        link = rig.join()
        stream = await rig.submit(replace(ask(), model="shop"), ANYBODY)
        loaded(rig, link)
        (order,) = start_orders(link)
        assert stream.model == "shop"
        assert order.model == "tiny"
        assert order.adapter == AdapterOrder(AdapterId("ab" * 32), "shop", "/there")
        rungs = (RungBytes(Rung.HOST, 4096, 0.001),)
        rig.receive(link, AdapterLoaded(AdapterId("ab" * 32), (order.run,), 4096, rungs, 0.0, 0.002))
        emit(rig, link, 5)
        explained = rig.gateway.views.explain(stream.request_id, ANYBODY)
        assert explained is not None
        assert (explained.model, explained.base, explained.adapter_tier) == ("shop", "tiny", "host")
        assert metric(rig, "hearth_adapter_loaded_bytes_total") == 4096
        assert metric(rig, 'hearth_prompt_tokens_total{model="tiny"}') > 0, "no label per adapter"

        rig.receive(link, None)
        successor = rig.join(worker=WorkerId("gpu-2/w0"))
        loaded(rig, successor)
        (resumed,) = start_orders(successor)
        assert resumed.adapter == order.adapter
        assert resumed.output == (5,)
        (hosted,) = (order for order in successor.orders if isinstance(order, HostModel))
        assert hosted.where == f"hearth://{deployed.digest}"
        with pytest.raises(
            RequestError, match="`shop` is an adapter of `tiny` and is evicted before any model"
        ):
            await rig.gateway.unload("shop", free=False)

    with_rig(data_dir, scene)


def test_a_lost_worker_keeps_nobody_waiting(data_dir: DataDir, deployed: Deployed) -> None:
    async def scene(rig: GatewayRig) -> None:
        link = rig.join()
        looking = asyncio.create_task(rig.gateway.views.fresh_ps())
        await asyncio.sleep(0)
        rig.receive(link, None)
        assert (await asyncio.wait_for(looking, 60.0)).models == ()

    with_rig(data_dir, scene)


def test_the_brain_is_told_of_ends_when_the_tokens_of_the_step_are_sent(
    data_dir: DataDir, deployed: Deployed
) -> None:
    async def scene(rig: GatewayRig) -> None:
        link, loop, story = rig.join(), asyncio.get_running_loop(), list[str]()
        rig.driver.add_sink(lambda event, _: story.append(type(event).__name__))

        async def read(stream: AnswerStream) -> None:
            await stream.next()
            loop.call_soon(story.append, "sent")  # as a loop does that sends when all tasks had their turn

        streams = [await rig.submit(ask(), ANYBODY) for _ in range(3)]
        readers = [asyncio.create_task(read(stream)) for stream in streams]
        await asyncio.sleep(0)
        story.clear()
        emit(rig, link, 5, finished=True, is_sent=False)
        assert rig.driver.fleet.queues.num_running == 3
        await asyncio.gather(*readers)
        while rig.driver.requests.by_id:
            await asyncio.sleep(0)
        assert story == ["sent"] * 3 + ["RequestFinished"] * 3
        assert rig.driver.fleet.queues.num_running == 0

    with_rig(data_dir, scene)


@pytest.mark.parametrize(
    "next_up", ["lost", "cancelled", "asked", "shut down", "closed", "stepped", "answered"]
)
def test_whatever_happens_next_finds_the_ends_of_a_step_in_the_books(
    data_dir: DataDir, deployed: Deployed, next_up: str
) -> None:
    async def scene(rig: GatewayRig) -> None:
        link, story = rig.join(), list[str]()
        rig.driver.add_sink(lambda event, _: story.append(type(event).__name__))
        stream = await rig.submit(ask(), ANYBODY)
        asked = await rig.gateway.prepare(ask(), rig.gateway.admissions.admit(ANYBODY))
        story.clear()
        emit(rig, link, 5, finished=True, is_sent=False)
        match next_up:
            case "lost":
                rig.receive(link, None)
            case "cancelled":
                rig.driver.cancel(stream.request_id)
            case "asked":
                rig.gateway.start(asked)
            case "shut down":
                rig.gateway.end_all()
            case "closed":
                rig.driver.close()
            case "stepped":
                rig.receive(link, StepDone(TINY, [], [], {}))
            case "answered":
                rig.gateway.exchange_ended(ExchangeRecord())
        explained = rig.gateway.views.explain(stream.request_id, ANYBODY)
        assert explained is not None
        assert (explained.outcome, explained.num_resumes) == ("stop", 0)
        assert explained.total_s == explained.first_token_s, "it ended with its token, not with the books"
        assert stream.request_id not in rig.driver.requests.by_id
        followed = {"lost": ["WorkerLost"], "asked": ["RequestArrived"]}.get(next_up, [])
        assert story == ["RequestFinished", *followed]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert story == ["RequestFinished", *followed]
        rig.gateway.end_all()

    with_rig(data_dir, scene)


def test_a_driver_that_is_closed_does_not_wake_up_when_its_journal_is_closed_too(
    data_dir: DataDir, deployed: Deployed
) -> None:
    async def scene(rig: GatewayRig) -> None:
        faults: list[dict[str, object]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
        link = rig.join()
        stream = await rig.submit(replace(ask(), keep_alive_s=0.01), ANYBODY)
        loaded(rig, link)
        emit(rig, link, 5, finished=True)
        assert rig.gateway.views.explain(stream.request_id, ANYBODY) is not None
        rig.driver.close()
        rig.journal.close()
        await asyncio.sleep(0.05)
        assert faults == []

    with_rig(data_dir, scene)


def test_turns_of_a_model_are_told_to_the_brain_and_those_of_an_earlier_stay_are_not(
    data_dir: DataDir, deployed: Deployed
) -> None:
    async def scene(rig: GatewayRig) -> None:
        link = rig.join()
        await rig.submit(ask(), ANYBODY)
        hosting = host_orders(link)[-1].hosting
        (replica,) = rig.driver.fleet.replicas()
        assert replica.hold is Hold.PAUSED
        rig.receive(link, ModelTurn(TINY, hosting - 1))
        assert replica.hold is Hold.PAUSED, "that was another stay"
        rig.receive(link, ModelTurn(TINY, hosting))
        assert replica.hold is Hold.BUSY
        rig.receive(link, ModelTurn(TINY, hosting, TurnEnd.AHEAD, 1))
        assert replica.hold is Hold.PAUSED
        assert metric(rig, 'hearth_turns_total{model="tiny",why="ahead"}') == 1
        rig.gateway.end_all()

    with_rig(data_dir, scene, takes_turns=True)


def test_a_request_that_has_no_worker_yet_is_explained_while_it_waits_and_afterwards(
    data_dir: DataDir, deployed: Deployed
) -> None:
    async def scene(rig: GatewayRig) -> None:
        def queue_detail() -> str:
            explained = rig.gateway.views.explain(stream.request_id, ANYBODY)
            assert explained is not None
            (detail,) = [span.detail for span in explained.spans if span.what == "queue"]
            return detail

        stream = await rig.submit(ask(), ANYBODY)
        assert queue_detail() == "no worker is up"
        link = rig.join()
        loaded(rig, link)
        emit(rig, link, 6, finished=True)
        assert queue_detail() == "no worker is up"

    with_rig(data_dir, scene)


def test_a_paused_request_is_explained_and_goes_on(data_dir: DataDir, deployed: Deployed) -> None:
    async def scene(rig: GatewayRig) -> None:
        link = rig.join()
        stream = await rig.submit(replace(ask(), first_token_s=3600.0), ANYBODY)  # nothing is late here
        hosting = host_orders(link)[-1].hosting
        rig.receive(link, ModelTurn(TINY, hosting))
        emit(rig, link, 5)
        rig.receive(link, ModelTurn(TINY, hosting, TurnEnd.TIME, 1))
        rig.receive(link, ModelTurn(TINY, hosting))
        emit(rig, link, 6, finished=True)
        explained = rig.gateway.views.explain(stream.request_id, ANYBODY)
        assert explained is not None
        assert (explained.outcome, explained.num_pauses, explained.num_output_tokens) == ("stop", 1, 2)
        assert [span.detail for span in explained.spans if span.what == "paused"] == [
            "its time was over, and another model needed the room"
        ]
        assert metric(rig, "hearth_pauses_total") == metric(rig, "hearth_pause_seconds_count") == 1
        assert metric(rig, "hearth_tokens_on_time_total") == 2
        assert metric(rig, "hearth_requests_on_time_total") == 1

    with_rig(data_dir, scene, takes_turns=True)


def test_a_worker_is_told_the_pace_of_a_request_and_how_long_ago_it_came(
    data_dir: DataDir, deployed: Deployed
) -> None:
    async def scene(rig: GatewayRig) -> None:
        await rig.submit(replace(ask(), first_token_s=2.0), ANYBODY)
        await asyncio.sleep(0.01)
        link = rig.join()
        (start,) = [order for order in link.orders if isinstance(order, StartRequest)]
        assert start.pace == Pace(first_token_s=2.0, tokens_per_s=20.0, max_pause_s=1.5)
        assert start.age_s >= 0.01
        rig.gateway.end_all()

    with_rig(data_dir, scene)


@pytest.mark.parametrize(
    "bug",
    [
        pytest.param("driver._carry_out(SetTimer(0.0)); driver.fleet = None", id="in a timer"),
        pytest.param("task = asyncio.create_task(post_from_a_task(driver))", id="in a task"),
        pytest.param("asyncio.get_running_loop().call_soon(driver.post, JOINED)", id="in a callback"),
    ],
)
def test_a_bug_of_the_brain_ends_the_process_wherever_it_shows(tmp_path: Path, bug: str) -> None:
    ended = run_broken_driver(tmp_path / "journal", bug)
    assert ended.returncode == 1
    assert "service_broken part=driver" in ended.stderr


def test_kv_is_sent_before_its_run_is_cancelled_and_awaited_where_the_request_goes_on(
    data_dir: DataDir, deployed: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(rig: GatewayRig) -> None:
        link = rig.join()
        stream = await rig.submit(ask(), ANYBODY)
        loaded(rig, link)
        (began,) = (order for order in link.orders if isinstance(order, StartRequest))
        worker, pipeline, request_id = link.worker, ModelId("tiny~2"), stream.request_id
        assert worker is not None
        senders = (worker, WorkerId("w9"))
        decided: list[Action] = [
            MoveKv(request_id, pipeline, senders, worker, 1 << 25, 0.5, 2.0, 2.0, is_moved=True),
            CancelRun(request_id, worker),
            Dispatch(request_id, TINY, worker, Why.SWITCHED, 0.0, ()),
        ]
        with monkeypatch.context() as patch:
            patch.setattr("hearth.control.driver.step", lambda *_: decided)
            rig.driver.post(TimerFired(rig.driver.now_s))
        send, cancel, start = link.orders[-3:]
        assert send == SendKv(pipeline, began.run, worker)
        assert cancel == CancelRequest(began.run)
        assert isinstance(start, StartRequest)
        assert start.kv == KvMove(began.run, senders, 2.0)
        rig.receive(link, KvMoved(start.run, 32, 1 << 25, 0.5, is_on_node=True))
        assert metric(rig, "hearth_kv_moved_bytes_total") == 1 << 25
        assert rig.driver.fleet.estimates.kv_s(LOCAL, LOCAL, 1 << 25) == 0.5
        explained = rig.gateway.views.explain(request_id, ANYBODY)
        assert explained is not None
        told = {mark.what: mark.detail for mark in explained.marks}
        assert told["kv"].startswith(f"moved to {worker}: 33.554 MB from {worker}, w9 in 0.500 s")
        assert told["kv_moved"] == "32 tokens, 33.554 MB in 0.500 s"
        rig.gateway.end_all()

    with_rig(data_dir, scene)

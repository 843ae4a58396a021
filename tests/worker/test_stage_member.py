"""Workers that run a model together, each with its own loop, pool and memory."""

from __future__ import annotations

import gc
import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random

import msgspec
import pytest
import torch

from bench.host_pages import HostPages
from hearth.core.beacon import Beacon
from hearth.core.config import EngineConfig
from hearth.core.messages import HostingFailed, HostModel, ModelLoaded, Ping, Pong, StepDone
from hearth.core.types import Member, ModelId, NodeId, Pipeline, SamplingParams, WorkerId, node_of
from hearth.engine.runner import Runner
from hearth.engine.stage_messages import StageMoves
from hearth.memory.arena import ArenaPool
from hearth.memory.pool import EvictionTermsOf, Pool
from hearth.memory.vmm import MappedPool
from hearth.policy.turns.turn_policy import TurnRules
from hearth.store.format.manifest import read_manifest
from hearth.worker.model_marks import WorkerMarks
from hearth.worker.stage_connections import StageConnections, StageHello
from hearth.worker.stage_link import HiddenPlaces, StageOutlet
from hearth.worker.worker_loop import WorkerLoop
from tests.engine.harness import prompts_for
from tests.store.stored import PATIENCE_S, converted, tiers_at
from tests.store.transfer.test_leases import eventually
from tests.worker.harness import greedy, host_order, limits_of
from tests.worker.in_process import LoopGateway, working_in_process

CPU = torch.device("cpu")
CONFIG = EngineConfig(max_batch_tokens=32, max_seqs=8, max_step=-1, block_tokens=4)
NAME, OTHER = "llama-mha-tied", "qwen2"
CONTEXT = 64
NUM_BLOCKS = 2 * CONTEXT // CONFIG.block_tokens
BUDGET_BYTES = 16 << 20
PAGE_BYTES = 4096
PROMPTS = prompts_for(160, (3, 40, 7, 21, 1, 12))
_numbers = itertools.count(1)


def arena(eviction_terms: EvictionTermsOf) -> Pool:
    return ArenaPool(CPU, BUDGET_BYTES, eviction_terms)


def pages(eviction_terms: EvictionTermsOf) -> Pool:
    return MappedPool(HostPages(BUDGET_BYTES // PAGE_BYTES, PAGE_BYTES), eviction_terms)


class Workers:
    """Some workers that reach each other."""

    def __init__(
        self,
        names: Sequence[WorkerId],
        gateways: Sequence[LoopGateway],
        connections: dict[WorkerId, socket.socket],
        beacons: Sequence[Beacon],
    ) -> None:
        """`connections`: the last one to each worker, at the end that opened it."""
        self.names, self.gateways, self.connections = names, gateways, connections
        self.beacons = beacons

    def host(
        self,
        name: str,
        cuts: Sequence[int],
        hosted: str | None = None,
        num_blocks: int = NUM_BLOCKS,
        max_blocks: int = NUM_BLOCKS,
    ) -> Pipeline:
        """Host a model in stages that begin at 0 and `cuts`, the last one first.

        `hosted`: the name of the stages; None: that of the model. `num_blocks` are promised.
        """
        where = converted(name, chunk_bytes=PAGE_BYTES)
        ends = [0, *cuts, read_manifest(where).arch.num_layers]
        members = tuple(
            Member(worker, *layers)
            for worker, layers in zip(self.names, itertools.pairwise(ends), strict=False)
        )
        pipeline = Pipeline(f"{name}-{next(_numbers)}", members, num_blocks)
        for number in reversed(range(len(members))):
            order = order_of(name, pipeline, number, max_blocks)
            self.gateways[number].inbox.put(msgspec.structs.replace(order, model=ModelId(hosted or name)))
        return pipeline

    def loaded(self, number: int) -> ModelLoaded:
        gateway = self.gateways[number]
        return gateway.loads[-1] if gateway.loads else gateway.until(ModelLoaded)

    def ask(self, name: str, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[list[int]]:
        first = self.gateways[0]
        runs = [first.start(name, prompt, sampling) for prompt in prompts]
        return [answer.tokens for answer in first.until_ended(*runs)]


def order_of(name: str, pipeline: Pipeline, number: int, max_blocks: int = NUM_BLOCKS) -> HostModel:
    where = converted(name, chunk_bytes=PAGE_BYTES)
    member, manifest = pipeline.members[number], read_manifest(where)
    num_layers = member.end - member.begin
    block_bytes = 4 * 2 * CONFIG.block_tokens * num_layers * manifest.arch.dimensions.kv_size
    kv_bytes = (1 + pipeline.num_blocks) * block_bytes
    return host_order(
        name,
        where,
        limits=limits_of(CONFIG),
        max_context=CONTEXT,
        kv_floor_bytes=kv_bytes,
        max_kv_bytes=(1 + max_blocks) * block_bytes,
        pipeline=pipeline,
        member=number,
        own_bytes=(own_bytes := manifest.num_bytes + 2 * kv_bytes),
        standing_bytes=own_bytes,
    )


@contextmanager
def workers(
    root: Path,
    new_pool: Callable[[EvictionTermsOf], Pool] = arena,
    num_workers: int = 2,
    turns: TurnRules | None = None,
    nodes: Sequence[str] = (),
    opened: Callable[[WorkerId, socket.socket], socket.socket] = lambda worker, end: end,
) -> Iterator[Workers]:
    """`nodes`: of the workers; by default they are on the head's.

    `opened` returns the end to use of a connection to a worker.
    """
    reached: dict[WorkerId, StageConnections] = {}
    connections: dict[WorkerId, socket.socket] = {}

    def connect(own: WorkerId, worker: WorkerId) -> socket.socket:
        ours, theirs = socket.socketpair()
        connections[worker] = ours = opened(worker, ours)
        source = None if node_of(own) == node_of(worker) else node_of(own)
        threading.Thread(target=reached[worker].accept, args=(theirs, source), daemon=True).start()
        return ours

    for number in range(num_workers):
        worker = WorkerId(f"{nodes[number]}/w{number}" if nodes and nodes[number] else f"w{number}")
        reached[worker] = StageConnections(worker, partial(connect, worker))
    beacons = [Beacon() for _ in reached]
    with ExitStack() as stack:
        tiers = stack.enter_context(tiers_at(root))
        yield Workers(
            list(reached),
            [
                stack.enter_context(
                    working_in_process(
                        tiers,
                        new_pool,
                        config=CONFIG,
                        turns=turns,
                        connections=one,
                        marks=WorkerMarks(beacon),
                    )
                )
                for one, beacon in zip(reached.values(), beacons, strict=True)
            ],
            connections,
            beacons,
        )


def alone(root: Path, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[list[int]]:
    with workers(root, num_workers=1) as one:
        one.gateways[0].load(NAME, converted(NAME, chunk_bytes=PAGE_BYTES), max_context=CONTEXT)
        return one.ask(NAME, prompts, sampling)


@pytest.mark.parametrize("new_pool", [arena, pages])
@pytest.mark.parametrize("turns", [None, TurnRules()])
def test_members_say_together_what_one_worker_says(
    tmp_path: Path, new_pool: Callable[[EvictionTermsOf], Pool], turns: TurnRules | None
) -> None:
    with workers(tmp_path, new_pool, turns=turns) as both:
        both.host(NAME, [1])
        in_stages = [both.ask(NAME, PROMPTS, greedy(20)) for _ in range(2)]
    assert in_stages == [alone(tmp_path, PROMPTS, greedy(20))] * 2


def test_steps_that_wait_for_another_member_are_prepared_and_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, prepared = WorkerLoop._step, set[str]()

    def stepping(loop: WorkerLoop, *, is_prepared: bool = False) -> None:
        if is_prepared:
            prepared.add(threading.current_thread().name)
        step(loop, is_prepared=is_prepared)

    monkeypatch.setattr(WorkerLoop, "_step", stepping)
    with workers(tmp_path) as found:
        found.host(NAME, [1])
        found.loaded(0)
        found.ask(NAME, PROMPTS[:1], greedy(40))
    assert len(prepared) == 2, "on both members"


def test_tables_of_requests_are_those_of_the_last_member(tmp_path: Path) -> None:
    sampling = greedy(20, frequency_penalty=0.7, repetition_penalty=1.3, logit_bias={7: 2.0})
    with workers(tmp_path, num_workers=3) as three:
        three.host(NAME, [1, 2])
        in_stages = three.ask(NAME, PROMPTS, sampling)
    assert in_stages == alone(tmp_path, PROMPTS, sampling)


def test_a_member_steps_beside_other_models_of_its_worker(tmp_path: Path) -> None:
    with workers(tmp_path) as both:
        beside, where = both.gateways[1], converted(OTHER, chunk_bytes=PAGE_BYTES)
        beside.load(OTHER, where, max_context=CONTEXT)
        expected = [beside.ask(OTHER, prompt, greedy(20)).tokens for prompt in PROMPTS]
        both.host(NAME, [1])
        first = both.gateways[0]
        runs = [first.start(NAME, prompt, greedy(20)) for prompt in PROMPTS]
        answers = beside.until_ended(*(beside.start(OTHER, prompt, greedy(20)) for prompt in PROMPTS))
        in_stages = [answer.tokens for answer in first.until_ended(*runs)]
    assert [answer.tokens for answer in answers] == expected
    assert in_stages == alone(tmp_path, PROMPTS, greedy(20))


@pytest.mark.parametrize("lost", [0, 1])
def test_without_another_member_the_first_is_cut_off_and_comes_back(tmp_path: Path, lost: int) -> None:
    with workers(tmp_path) as both:
        both.host(NAME, [1])
        both.loaded(0), both.loaded(1)
        first, other = both.gateways[0], both.gateways[1 - lost]
        first.start(NAME, PROMPTS[0], greedy(40))
        both.gateways[lost].drop(NAME)
        if lost == 1:
            failed = other.until(HostingFailed)
            assert failed.is_cut_off, f"{failed}"
        else:
            other.drop(NAME)
        both.host(NAME, [1])
        assert both.ask(NAME, PROMPTS, greedy(20)) == alone(tmp_path, PROMPTS, greedy(20))


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_cut_connection_cuts_off_the_first_member(tmp_path: Path, number: int) -> None:
    """All workers live, so only the members can notice."""
    with workers(tmp_path, num_workers=3) as three:
        three.host(NAME, [1, 2])
        first = three.gateways[0]
        first.start(NAME, PROMPTS[0], greedy(60))
        first.until(StepDone)
        three.connections[WorkerId(f"w{number}")].shutdown(socket.SHUT_RDWR)
        assert first.until(HostingFailed).is_cut_off


def test_a_lost_pipeline_leaves_no_memory_behind(tmp_path: Path) -> None:
    """Without the garbage collector, which a busy worker does not run."""
    gc.collect()
    before = hidden_memories()  # of workers in other tests, which end with their pipelines
    gc.disable()
    try:
        with workers(tmp_path) as both:
            both.host(NAME, [1])
            first, last = both.gateways
            for prompt in PROMPTS:
                first.start(NAME, prompt[:3], greedy(60))
            first.until(StepDone)
            assert hidden_memories() - before, "both members map it"
            last.drop(NAME)
            assert first.until(HostingFailed).is_cut_off
            first.ping(), last.ping()
            assert eventually(lambda: hidden_memories() <= before, within_s=60.0), "it is held"
    finally:
        gc.enable()


def hidden_memories() -> set[int]:
    """Return the inodes of shared hidden states that this process maps."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            if "hearth-hidden" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(os.stat(f"/proc/self/fd/{name}").st_ino)
    return found


def test_the_first_member_tells_how_long_steps_take_in_each_stage(tmp_path: Path) -> None:
    with workers(tmp_path, num_workers=3) as three:
        three.host(NAME, [1, 2])
        three.ask(NAME, PROMPTS[:1], greedy(20))
        told = [use.pipeline for gateway in three.gateways for use in gateway.ping().models]
    assert told[1:] == [None, None]
    assert told[0] is not None
    assert told[0].num_flights in (3, 4)
    assert len(told[0].stage_s) == 3
    assert min(told[0].stage_s) > 0.0
    assert told[0].hops_s >= 0.0, "nothing is left for hops if stages took all the time"


class StuckEnd:
    """The end of a step on a device that hangs until it is released."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def query(self) -> bool:
        return self.released.is_set()

    def synchronize(self) -> None:
        assert self.released.wait(PATIENCE_S)


@pytest.mark.parametrize("num_tokens", [1, 20])
def test_a_later_member_whose_device_hangs_answers_no_more_and_the_first_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    """Its supervisor sees in whose step, also while no other step comes to wait behind it."""
    end = StuckEnd()
    with workers(tmp_path) as both:
        both.host(NAME, [1])
        both.loaded(0), both.loaded(1)
        first, last = both.gateways
        monkeypatch.setattr(Runner, "last_end", property(lambda runner: end))
        run = first.start(NAME, PROMPTS[0], greedy(num_tokens))
        assert eventually(lambda: both.beacons[1].read().runs == (run,), within_s=PATIENCE_S)
        assert both.beacons[1].read().model == NAME
        last.inbox.put(Ping(1))
        first.until(StepDone)
        first.ping()
        assert eventually(lambda: both.beacons[0].read().model is None), "it waits in no step"
        assert not [fact for fact in tuple(last.facts.queue) if isinstance(fact, Pong)]
        end.released.set()
        last.until(Pong)
        first.until_ended(run)
        last.ping()
        assert both.beacons[1].read().model is None


def test_members_that_come_and_go_at_random_say_what_one_worker_says(tmp_path: Path) -> None:
    """Of each pipeline a member is dropped in the middle of requests, and a foreign frame comes first."""
    random, expected = Random(7), alone(tmp_path, PROMPTS, greedy(20))
    with workers(tmp_path, num_workers=3) as three:
        for _ in range(4):
            cuts = random.choice(([1], [2], [1, 2]))
            three.host(NAME, cuts)
            first, used = three.gateways[0], three.gateways[: 1 + len(cuts)]
            for gateway in used:
                gateway.until(ModelLoaded)
            places = HiddenPlaces(torch.empty(1, 1, 1), is_shared=True)
            StageOutlet(three.connections[WorkerId("w1")], places, "p").send(StageMoves("another", ()))
            assert three.ask(NAME, PROMPTS, greedy(20)) == expected
            for prompt in PROMPTS[: random.randrange(3)]:
                first.start(NAME, prompt, greedy(60))
            for gateway in random.sample(used, len(used)):
                gateway.drop(NAME)
            for gateway in used:
                gateway.ping()
        assert three.gateways[1].ping().fallbacks["stage_frames_dropped"] == 4


def test_a_retired_pipeline_comes_back_with_its_bytes(tmp_path: Path) -> None:
    with workers(tmp_path, pages) as both:
        both.host(NAME, [1])
        before = both.ask(NAME, PROMPTS, greedy(20))
        for gateway in both.gateways:
            gateway.retire(NAME)
        both.host(NAME, [1])
        assert both.ask(NAME, PROMPTS, greedy(20)) == before
        assert both.gateways[0].until(ModelLoaded).reused_bytes if len(both.gateways[0].loads) < 2 else True


def test_a_retired_whole_model_does_not_come_back_as_a_stage_of_it(tmp_path: Path) -> None:
    prompts = PROMPTS[2:3]  # which the whole model has room for, though it has the KV bytes of a stage
    with workers(tmp_path, pages) as both:
        first, last = both.gateways
        members = (Member(WorkerId("w0"), 0, 1), Member(WorkerId("w1"), 1, 3))
        orders = [order_of(NAME, Pipeline("p", members, NUM_BLOCKS), number) for number in (0, 1)]
        first.inbox.put(msgspec.structs.replace(orders[0], hosting=0, pipeline=None))
        whole = both.ask(NAME, prompts, greedy(20))
        first.retire(NAME)
        first.inbox.put(orders[0])
        first.ping()
        assert [one.hosting for one in first.loads] == [0], "it has not reached the other member"
        last.inbox.put(orders[1])
        assert both.ask(NAME, prompts, greedy(20)) == whole


def test_a_member_that_waits_for_another_can_be_dropped(tmp_path: Path) -> None:
    with workers(tmp_path) as both:
        members = (Member(WorkerId("w0"), 0, 1), Member(WorkerId("w1"), 1, 3))
        first = both.gateways[0]
        first.inbox.put(order_of(NAME, Pipeline("p", members, NUM_BLOCKS), 0))
        first.ping()
        first.drop(NAME)
        both.host(NAME, [1])
        assert both.ask(NAME, PROMPTS[:1], greedy(4)) == alone(tmp_path, PROMPTS[:1], greedy(4))


def test_a_node_cannot_take_the_place_of_another() -> None:
    connections = StageConnections(WorkerId("w0"), lambda worker: pytest.fail(f"{worker}"))
    hello = StageHello("p", has_steps=True)
    content = msgspec.json.encode(hello)
    ends = {}
    for node in ("thief", "right"):
        ends[node], theirs = socket.socketpair()
        ends[node].sendall(len(content).to_bytes(4, "big") + content)
        connections.accept(theirs, NodeId(node))
    arrival = connections.claim(hello, WorkerId("right/w0"), lambda: True)
    assert arrival is not None
    arrival.connection.sendall(b"x")
    assert ends["right"].recv(1) == b"x"
    connections.forget("p")
    assert ends["thief"].recv(1) == b"", "closed unclaimed"
    for one in (arrival, *ends.values()):
        one.close()


def test_memory_that_came_with_half_a_hello_is_closed() -> None:
    connections = StageConnections(WorkerId("w0"), lambda worker: pytest.fail(f"{worker}"))
    ours, theirs = socket.socketpair()
    end, kept = os.pipe2(os.O_NONBLOCK)
    with ours:
        socket.send_fds(ours, [b"\0\0"], [kept])
    os.close(kept)
    connections.accept(theirs, None)
    assert os.read(end, 1) == b"", "nobody has the other end"
    os.close(end)

"""How fast is a model in two stages, each in a process of its own, over the whole model in one?

python -m bench.pipelines [--save] [--rounds N]

Every process has one core and one thread. Both stages hold the same random weights, connected by shared
memory; two steps are in flight. The whole model has the core of the first stage. They take turns, and the
medians of all rounds are reported. The bound of two stages is twice what one worker does with half of the
requests: each of two steps in flight has so many. `hop`: from the send of hidden states to their arrival in
the other process, half a round trip, over shared memory and over a socket. Last, a service starts a model of
80 layers that no worker can hold, and loses a member of it in a stream (`bench/staged_service.py`).
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from mmap import mmap
from statistics import median

import torch

from bench.random_engine import fill_random
from bench.report import Row, arguments, emit
from bench.shape import Shape
from bench.staged_service import starts_and_losses
from hearth.core.config import EngineConfig
from hearth.core.types import RequestId, SamplingParams, Stage
from hearth.engine.assemble import (
    Memory,
    ModelSpec,
    assemble,
    assemble_runner,
    block_bytes,
    own_limits,
    step_size,
    tables_bytes,
    workspace_bytes,
)
from hearth.engine.engine import Engine
from hearth.engine.pending_step import PendingCopy, StepResult
from hearth.engine.pipeline import BlockMap, LaterStage
from hearth.engine.stage_messages import StageResult, StageStep
from hearth.models.dtypes import DTYPES
from hearth.models.weights import Weights, bind, contiguous_places
from hearth.policy.batch.blocks import SINK_BLOCK, BlockBook
from hearth.policy.batch.plan import DecodeRows, StepPlan, TableWrites
from hearth.worker.stage_link import HiddenPlaces, StageInlet, StageLinks, StageOutlet, result_frame

CPU = torch.device("cpu")
CORES = sorted(os.sched_getaffinity(0))
NUM_FLIGHTS, NUM_PLACES, CUT = 2, 4, 8
#: Set when a result of the last stage has come.
ARRIVED = threading.Event()
ROUNDS = 5
HOP_ROWS, HOPS = (1, 64), 200
CONFIG = EngineConfig(max_batch_tokens=256, max_seqs=16, block_tokens=16, kv_bytes=256 << 20)
SHAPE = Shape(
    "16 layers of 768",
    "random",
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 4096,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    },
    "float32",
)


@dataclass(frozen=True, slots=True)
class Load:
    num_requests: int
    prompt_tokens: int
    new_tokens: int

    def __str__(self) -> str:
        what = "1 request" if self.num_requests == 1 else f"{self.num_requests} requests"
        return f"{what} of {self.prompt_tokens} + {self.new_tokens} tokens"


LOADS = (Load(1, 32, 64), Load(16, 32, 64), Load(1, 256, 16), Load(16, 128, 16))


def main() -> None:
    command = arguments(__doc__)
    command.add_argument("--rounds", type=int, default=ROUNDS)
    command.add_argument(
        "--stage", help="run the last stage over these descriptors (used by the benchmark itself)"
    )
    options = command.parse_args()
    torch.set_num_threads(1)
    if options.stage is not None:
        _serve(*map(int, options.stage.split(",")))
        return
    os.sched_setaffinity(0, {CORES[0]})
    rows: list[Row] = []
    rounds: dict[str, list[float]] = {}
    whole = assemble(*_part(None), CONFIG, CPU)
    with _two_stages(is_shared=True) as stages:
        for engine in (stages, whole):
            _tokens_per_s(engine, LOADS[0])  # the first steps touch memory for the first time
        for load in LOADS:
            half = replace(load, num_requests=-(-load.num_requests // 2))
            played = [
                (_tokens_per_s(stages, load), _tokens_per_s(whole, load), _tokens_per_s(whole, half))
                for _ in range(options.rounds)
            ]
            name, ratios = str(load), [in_stages / alone for in_stages, alone, _ in played]
            rounds[name] = ratios
            both, alone, alone_with_half = (median(values) for values in zip(*played, strict=True))
            bound = alone if load.num_requests == 1 else 2 * alone_with_half
            what = "the bound one worker" if load.num_requests == 1 else "the bound two steps of half of them"
            rows.append(Row(f"{name}: two stages, {what}", "tokens/s", both, bound))
            aim = "1.6" if load.num_requests == 16 else None
            rows.append(Row(f"{name}: two stages over one worker", "times", median(ratios), None, aim))
    for is_shared in (True, False):
        for num_rows in HOP_ROWS:
            name = f"hop of {num_rows} x 3 KiB, {'shared memory' if is_shared else 'socket'}"
            rounds[name] = _hops_us(num_rows, is_shared=is_shared)
            rows.append(Row(name, "us", median(rounds[name]), None))
    os.sched_setaffinity(0, CORES)
    more, played = starts_and_losses(options.rounds)
    rows += more
    rounds |= played
    emit("pipelines", {"rows": [asdict(row) for row in rows], "rounds": rounds}, save=options.save)


def _part(layers: range | None) -> tuple[ModelSpec, Weights]:
    arch, layout, dtype = SHAPE.arch, SHAPE.layout, DTYPES[SHAPE.dtype]
    base = torch.empty(layout.num_bytes, dtype=torch.uint8)
    places = contiguous_places(layout, base)
    fill_random(layout, places, seed=1)
    limits, stage = own_limits(CONFIG, arch, dtype, CPU), None if layers is None else Stage(layers)
    spec = ModelSpec(arch, dtype, arch.max_positions, limits, frozenset(), stage=stage)
    return spec, bind(arch, layout, places, spec.layers)


@contextmanager
def _two_stages(*, is_shared: bool) -> Iterator[Engine]:
    part = _part(range(CUT))
    with _last_stage(part[0].limits.max_batch_tokens, is_shared=is_shared) as (outlet, results):
        links = StageLinks("bench", range(NUM_FLIGHTS), outlet, results, ARRIVED.set)
        yield assemble(*part, CONFIG, CPU, later=links)
        links.close()


@contextmanager
def _last_stage(
    max_tokens: int, *, is_shared: bool, is_hop: bool = False
) -> Iterator[tuple[StageOutlet, socket.socket]]:
    """Start the last stage in a process of its own."""
    like = torch.empty(1, SHAPE.arch.hidden_size)
    fd = os.memfd_create("hidden")
    os.ftruncate(fd, HiddenPlaces.num_bytes(NUM_PLACES, max_tokens, like))
    (out, into), (results, back) = socket.socketpair(), socket.socketpair()
    passed = (fd, into.fileno(), back.fileno())
    numbers = ",".join(map(str, (*passed, int(is_shared), CORES[1 % len(CORES)], int(is_hop))))
    process = subprocess.Popen([sys.executable, "-m", "bench.pipelines", "--stage", numbers], pass_fds=passed)
    into.close()
    back.close()
    try:
        yield StageOutlet(out, _places(fd, like, is_shared=is_shared), "bench"), results
    finally:
        out.close()
        results.close()
        process.wait()
        os.close(fd)


def _places(fd: int, like: torch.Tensor, *, is_shared: bool) -> HiddenPlaces:
    memory = mmap(fd, 0) if is_shared else bytearray(os.fstat(fd).st_size)
    return HiddenPlaces.over(
        torch.frombuffer(memory, dtype=torch.uint8), NUM_PLACES, like, is_shared=is_shared
    )


def _serve(fd: int, inlet_fd: int, results_fd: int, is_shared: int, core: int, is_hop: int) -> None:
    os.sched_setaffinity(0, {core})
    spec, weights = _part(range(CUT, SHAPE.arch.num_layers))
    num_blocks = 1 + spec.limits.max_seqs * spec.limits.num_blocks(spec.max_context)
    sizes = (workspace_bytes(spec, CPU), tables_bytes(spec), num_blocks * block_bytes(spec))
    memory = Memory(*(torch.empty(size, dtype=torch.uint8) for size in sizes), SINK_BLOCK, num_blocks - 1)
    runner = assemble_runner(spec, weights, CONFIG, memory, step_size(spec.limits, CPU))
    runner.fill_tables()
    places = _places(fd, runner.layers.decoder.hidden(1), is_shared=bool(is_shared))
    inlet = StageInlet(socket.socket(fileno=inlet_fd), places, "bench")
    results = socket.socket(fileno=results_fd)
    book = BlockBook.fixed(len(runner.layers.kv), CONFIG.block_tokens)
    stage = LaterStage(runner, None, BlockMap(book))
    while (got := inlet.receive()) is not None:
        message, hidden = got
        if isinstance(message, StageStep) and hidden is None:  # announced
            if not is_hop:
                stage.prepare(message)
        elif isinstance(message, StageStep) and is_hop:
            results.sendall(
                result_frame(StageResult("bench", message.plan.step_id, StepResult([], None, [])))
            )
        elif isinstance(message, StageStep):
            if (pending := stage.take(message, hidden)) is not None:
                stage_s = stage.timed(message).stage_s
                results.sendall(
                    result_frame(StageResult("bench", message.plan.step_id, pending.wait(), stage_s))
                )
        else:
            stage.take(message, None)


def _tokens_per_s(engine: Engine, load: Load) -> float:
    chance = random.Random(time.time_ns())
    params = SamplingParams(temperature=0.0, max_tokens=load.new_tokens, ignore_eos=True)
    for number in range(load.num_requests):
        prompt = [chance.randrange(SHAPE.arch.vocab_size) for _ in range(load.prompt_tokens)]
        engine.add(engine.request(RequestId(f"r{number}"), prompt, params))
    began_s, num_tokens = time.perf_counter(), 0
    while engine.has_work:
        ARRIVED.clear()
        outcome = engine.step()
        num_tokens += len(outcome.outputs)
        if not outcome.has_run:
            ARRIVED.wait()
    assert num_tokens == load.num_requests * load.new_tokens, f"{num_tokens=}"
    return num_tokens / (time.perf_counter() - began_s)


def _hops_us(num_rows: int, *, is_shared: bool) -> list[float]:
    hidden, hops = torch.randn(num_rows, SHAPE.arch.hidden_size), list[float]()
    decode = DecodeRows([RequestId("r")] * num_rows, range(num_rows), [0] * num_rows)
    with _last_stage(num_rows, is_shared=is_shared, is_hop=True) as (outlet, results):
        links = StageLinks("bench", [0], outlet, results)
        for number in range(HOPS):
            plan = StepPlan(number, (), TableWrites(), decode, ())
            began_s = time.perf_counter()
            links.send(StageStep("bench", plan), PendingCopy(hidden, links.place(num_rows)))
            links.result(waits=True)
            hops.append((time.perf_counter() - began_s) * 1e6 / 2)
        links.close()
    return hops[HOPS // 10 :]


if __name__ == "__main__":
    main()

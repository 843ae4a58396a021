"""How fast is a model in two stages on one GPU, over the whole model on one worker?

python -m bench.pipelines_gpu [--save] [--place DIR] [--before DIR] [PART ...]

A service with one worker that holds a random Llama-2-7B, and one with two workers that hold it together, both
on one GPU. Two processes compute on one GPU at the same time only under MPS, so stages run with it, and again
without. They share the GPU's bandwidth, so one step is in flight and one worker is their bound. Then two are,
as on two GPUs: their bound is the time to read the weights once for each of them, and their KV. `--before`:
another checkout, whose one worker is measured as well, in turns with this one's.
`hop`: from hidden states on the device of one process to the same on that of the next, through device memory
that both map, and through host memory, as between two GPUs; the step was announced 2 ms before. Then a member
is killed in a stream (without MPS, whose clients may end with it), and a model of 80 layers starts in two.
The models need 22 GB in /dev/shm, the host tier takes as much again. What is measured is kept after each
part, and all parts together take some six minutes.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from mmap import mmap
from pathlib import Path
from statistics import median

import torch

from bench.llama7b import ARCH, CONFIG
from bench.load.raw_readers import to_device_bytes_per_s
from bench.random_model import write_random
from bench.report import Row, arguments, emit, keep, step, tell
from bench.service.client import Answer, Connection, ask, completion
from bench.service.process import ROOT, Service, deploy, serving
from bench.service.streams import Prompts, good, stream_all
from hearth.core.types import ModelId, RequestId
from hearth.engine.pending_step import PendingCopy, StepResult
from hearth.engine.stage_messages import StageResult, StageStep
from hearth.memory.shared_device_memory import DeviceMapping, create
from hearth.policy.batch.plan import DecodeRows, StepPlan, TableWrites
from hearth.system.spin import native_spin
from hearth.worker.stage_connections import SharedMemory
from hearth.worker.stage_link import HiddenPlaces, StageInlet, StageLinks, StageOutlet, send_result

CUDA = torch.device("cuda", 0)
GIB = 1 << 30
SEVEN, DEEP = ModelId("seven"), ModelId("deep")
#: 80 layers, 8 GB in bfloat16.
DEEP_CONFIG = {
    **CONFIG,
    "hidden_size": 2048,
    "intermediate_size": 5504,
    "num_hidden_layers": 80,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
#: By service: workers, and the memory of each. Two of the smaller ones hold the 7B (13.5 GB), one does not.
WHOLE, STAGES, DEEP_STAGES = (1, 40 * GIB), (2, 12 * GIB), (2, 7 * GIB)
NUM_FLIGHTS = 2
PROMPT_TOKENS, NEW_TOKENS = 64, 64
NUM_STREAMS, ROUNDS = 64, 3
#: Answers before those that are timed: the first ones take longer.
NUM_WARM = 5
KILL_TOKENS, BREAKS_AT = 200, 40
HOP_TOKENS, HOPS = (1, 64, 1024), 300
COMPUTED_CYCLES = 4_000_000  #: of the device, some 2 ms: from the announcement of a step to its hidden states
HOP_WAYS = ("device memory", "host memory")
#: What is measured of a service, by name.
Speeds = Mapping[str, float]
AIM_TOKEN_MS, AIMS_HOP_US = "0.4", {64: "60", 1024: "160"}


PARTS = ("mps", "two_flights", "without_mps", "losses", "hops", "deep")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--place", type=Path, default=Path("/dev/shm"), help="where the models are made")
    parser.add_argument("--before", type=Path, help="another checkout, whose one worker is measured as well")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; none: all of them")
    parser.add_argument(
        "--hops", action="store_true", help="measure hops alone (used by the benchmark itself)"
    )
    parser.add_argument("--inlet", help="the other end of hops (used by the benchmark itself)")
    options = parser.parse_args()
    if options.inlet is not None:
        fd, *others, is_on_device = map(int, options.inlet.split(","))
        _answer_hops(SharedMemory(fd, bool(is_on_device)), *others)
        return
    if options.hops:
        found = {way: {num: _hops_us(num, way) for num in HOP_TOKENS} for way in HOP_WAYS}
        print(json.dumps(found))
        return
    if unknown := set(options.parts).difference(PARTS):
        parser.error(f"unknown parts: {sorted(unknown)}, known: {', '.join(PARTS)}")
    place, report = Path(tempfile.mkdtemp(prefix="hearth-bench-", dir=options.place)), Report(options.save)
    try:
        _measure(place, options.parts or PARTS, options.before, report)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    emit("pipelines_gpu", report.content(), save=options.save)


@dataclass(frozen=True, slots=True)
class Report:
    """What was measured so far. Mutable; kept after each part, as the machine may be taken away."""

    is_saved: bool
    rows: list[Row] = field(default_factory=list)
    rounds: dict[str, object] = field(default_factory=dict)

    def content(self) -> dict[str, object]:
        return {"rows": [asdict(row) for row in self.rows], "rounds": self.rounds}

    def add(self, rows: Sequence[Row], **rounds: object) -> None:
        self.rows.extend(rows)
        self.rounds.update(rounds)
        for row in rows:
            tell(f"{row.measure}: {row.value:.4g} {row.unit}, bound {row.bound}, aim {row.aim}")
        if self.is_saved:
            keep("pipelines_gpu", self.content())


def _measure(place: Path, parts: Sequence[str], before: Path | None, report: Report) -> None:
    data_dir, models = place / "data", {SEVEN: CONFIG}
    if "deep" in parts:
        models[DEEP] = DEEP_CONFIG
    for seed, (model, config) in enumerate(models.items()):
        with step(f"writing {model}"):
            deploy(data_dir, write_random(place / model, config, "bfloat16", seed, CUDA), model)
    read_bytes_per_s, copied_bytes_per_s = _read_bytes_per_s(), to_device_bytes_per_s(4 * GIB, CUDA)
    torch.cuda.empty_cache()
    with _service(data_dir, WHOLE, {}) as service:
        whole = _speeds(service)
    report.add([], whole=whole, device_bytes_per_s=read_bytes_per_s)
    if before is not None:
        rows, rounds = _compared(data_dir, before, whole)
        report.add(rows, **rounds)
    if {"mps", "two_flights", "hops"}.intersection(parts):
        with _mps() as environment:
            if "mps" in parts:
                with _service(data_dir, STAGES, environment) as service:
                    staged = _speeds(service)
                report.add(_staged_rows("", staged, whole), staged=staged)
            if "two_flights" in parts:
                with (
                    _more_flights() as patched,
                    _service(data_dir, STAGES, {**environment, **patched}) as service,
                ):
                    crowded = _speeds(service)
                bound = _bound(place / SEVEN, read_bytes_per_s)
                what = f"{NUM_STREAMS} requests: two stages, the bound of {NUM_FLIGHTS} steps in flight"
                row = Row(what, "tokens/s", crowded["tokens_per_s"], bound, "0.9 of the bound")
                report.add([row], two_flights=crowded)
            if "hops" in parts:
                hops = _run_hops(environment)
                report.add(_hop_rows(hops), hops_us=hops)
    if {"without_mps", "losses"}.intersection(parts):
        with _service(data_dir, STAGES, {}) as service:
            unshared = _speeds(service)
            report.add(_staged_rows(", without MPS", unshared, whole), without_mps=unshared)
            if "losses" in parts:
                lost_s = [asyncio.run(_lose(service, number)) for number in range(2)]
                what = "a member is killed: to the next token"
                row = Row(what, "s", median(lost_s), unshared["start_s"] + 1.0, "its load time + 1 s")
                report.add([row], lost_s=lost_s)
    if "deep" in parts:
        with _service(data_dir, DEEP_STAGES, {}) as service:
            deep_s = [_start(service, DEEP) for _ in range(ROUNDS)]
        bound_s = (place / DEEP / "weights.bin").stat().st_size / copied_bytes_per_s
        what = "80 layers in 2 stages: start to first token, the bound the copy over one bus"
        report.add([Row(what, "s", median(deep_s[1:]), bound_s)], deep_s=deep_s)


def _staged_rows(name: str, staged: Speeds, whole: Speeds) -> list[Row]:
    more_ms = staged["token_ms"] - whole["token_ms"]
    per_s, bound = staged["tokens_per_s"], whole["tokens_per_s"]
    what = f"{NUM_STREAMS} requests{name}: two stages, the bound one worker"
    return [
        Row(
            f"1 request{name}: two stages, more per token than one worker", "ms", more_ms, None, AIM_TOKEN_MS
        ),
        Row(what, "tokens/s", per_s, bound, "0.95 of the bound"),
    ]


def _hop_rows(hops: Mapping[str, Mapping[int, Sequence[float]]]) -> list[Row]:
    return [
        Row(
            f"hop of {num_tokens} x 8 KiB through {way}, same GPU under MPS",
            "us",
            median(times_us),
            None,
            AIMS_HOP_US.get(num_tokens),
        )
        for way, by_tokens in hops.items()
        for num_tokens, times_us in by_tokens.items()
    ]


def _compared(data_dir: Path, before: Path, first: Speeds) -> tuple[list[Row], dict[str, object]]:
    """Measure one worker of another checkout, and this one's once more."""
    with _service(data_dir, WHOLE, {"PYTHONPATH": str(before.resolve() / "src")}) as service:
        earlier = _speeds(service)
    with _service(data_dir, WHOLE, {}) as service:
        again = _speeds(service)
    rows = [
        Row(f"{what}: one worker over one of another checkout", "times", value, None, "within 0.01 of 1")
        for what, value in (
            ("1 request", 2 * earlier["token_ms"] / (first["token_ms"] + again["token_ms"])),
            (
                f"{NUM_STREAMS} requests",
                (first["tokens_per_s"] + again["tokens_per_s"]) / 2 / earlier["tokens_per_s"],
            ),
        )
    ]
    return rows, {"whole_before": earlier, "whole_again": again}


@contextmanager
def _more_flights() -> Iterator[dict[str, str]]:
    """Yield the variables of processes whose pipelines have as many steps in flight as on several GPUs."""
    with tempfile.TemporaryDirectory(prefix="hearth-flights-") as folder:
        patch = (
            f"from hearth.policy.batch import flights\nflights.choose_flights = lambda *_: {NUM_FLIGHTS}\n"
        )
        Path(folder, "sitecustomize.py").write_text(patch)
        paths = (folder, str(ROOT / "src"), *filter(None, (os.environ.get("PYTHONPATH"),)))
        yield {"PYTHONPATH": os.pathsep.join(paths)}


def _bound(directory: Path, bytes_per_s: float) -> float:
    weights_bytes = (directory / "weights.bin").stat().st_size
    kv_bytes = NUM_STREAMS * (PROMPT_TOKENS + NEW_TOKENS // 2) * 2 * ARCH.num_layers * ARCH.hidden_size * 2
    return NUM_STREAMS / ((NUM_FLIGHTS * weights_bytes + kv_bytes) / bytes_per_s)


def _read_bytes_per_s() -> float:
    """Return how fast the device's memory copies, bytes read and written."""
    source = torch.empty(4 * GIB, dtype=torch.uint8, device=CUDA)
    target = torch.empty_like(source)
    times_ms = list[float]()
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times_ms.append(begin.elapsed_time(end))
    return 2 * source.nbytes / (median(times_ms) / 1e3)


@contextmanager
def _mps() -> Iterator[dict[str, str]]:
    """Run MPS; yield the variables of its clients."""
    with tempfile.TemporaryDirectory(prefix="hearth-mps-") as folder:
        client = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        environment = {**os.environ, **client}
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env=environment, check=True)
        try:
            yield client
        finally:
            command = ["nvidia-cuda-mps-control"]
            subprocess.run(command, env=environment, input=b"quit\n", check=False)


@contextmanager
def _service(data_dir: Path, workers: tuple[int, int], environment: Mapping[str, str]) -> Iterator[Service]:
    num_workers, worker_bytes = workers
    flags = ["--device", "cuda", "--workers", str(num_workers), "--memory", str(worker_bytes)]
    flags += ["--host-memory", str(24 * GIB)]
    with serving(data_dir, flags, num_workers=num_workers, environment=environment) as service:
        yield service


def _start(service: Service, model: ModelId) -> float:
    """Return how long the first token takes of a model that is not on the device."""
    service.wait_idle()
    service.client.unload(model, free=True)
    answer = good(asyncio.run(ask(service.port, completion(model, [5] * PROMPT_TOKENS, 1))))
    tell(f"{model}: first token after {answer.first_s:.3f} s")
    return answer.first_s


def _speeds(service: Service) -> Speeds:
    """Start the model from host memory, ask one request, then many, each once to warm up."""
    starts_s = [_start(service, SEVEN) for _ in range(2)]
    prompts = Prompts(ARCH.vocab_size, PROMPT_TOKENS)
    one = [_token_ms(service, prompts.take(1)[0]) for _ in range(NUM_WARM + ROUNDS)][NUM_WARM:]
    runs = [stream_all(service, SEVEN, prompts.take(NUM_STREAMS), NEW_TOKENS) for _ in range(ROUNDS + 1)][1:]
    found = {
        "start_s": starts_s[-1],
        "token_ms": median(one),
        "tokens_per_s": median(run.tokens_per_s for run in runs),
    }
    tell(f"{found}")
    return found


def _token_ms(service: Service, prompt: list[int]) -> float:
    answer = good(asyncio.run(ask(service.port, completion(SEVEN, prompt, 2 * NEW_TOKENS))))
    return 1e3 * (answer.events[-1].at_s - answer.events[0].at_s) / (2 * NEW_TOKENS - 1)


async def _lose(service: Service, round_: int) -> float:
    """Kill the first or the last member in a stream; return the seconds to its next token."""
    prompt = Prompts(ARCH.vocab_size, PROMPT_TOKENS).take(1)[0]
    undisturbed = good(await ask(service.port, completion(SEVEN, prompt, KILL_TOKENS)))
    connection = await Connection.open(service.port)
    asked = asyncio.create_task(connection.ask(completion(SEVEN, prompt, KILL_TOKENS)))
    while connection.num_reads < BREAKS_AT:
        await asyncio.sleep(0.002)
    seat, pids = f"w{round_ % 2}", service.pids()
    pid = next(pid for worker, pid in pids.items() if worker.partition(".")[0] == seat)
    lost_s = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    answer: Answer = good(await asked)
    connection.close()
    _, next_s = max((after.at_s - before.at_s, after.at_s) for before, after in pairwise(answer.events))
    tell(f"lost {seat}: {next_s - lost_s:.3f} s, the same text: {answer.text == undisturbed.text}")
    service.wait_ready(2)
    return next_s - lost_s


# Hops.


def _run_hops(environment: Mapping[str, str]) -> dict[str, dict[int, list[float]]]:
    command = [sys.executable, "-m", "bench.pipelines_gpu", "--hops"]
    done = subprocess.run(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=True
    )
    return {
        way: {int(num): times_us for num, times_us in found.items()}
        for way, found in json.loads(done.stdout).items()
    }


def _like() -> torch.Tensor:
    return torch.empty(1, ARCH.hidden_size, dtype=torch.bfloat16)


def _places(shared: SharedMemory, num_tokens: int) -> HiddenPlaces:
    """Map memory that both processes have; pin that of the host."""
    if shared.is_on_device:
        num_bytes = HiddenPlaces.num_bytes(NUM_FLIGHTS, num_tokens, _like())
        memory = DeviceMapping(CUDA, num_bytes, shared.descriptor).content
    else:
        memory = torch.frombuffer(mmap(shared.descriptor, 0), dtype=torch.uint8)
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        assert int(error) == 0, f"{error=}"
    return HiddenPlaces.over(memory, NUM_FLIGHTS, _like(), is_shared=True)


def _shared(num_tokens: int, way: str) -> SharedMemory:
    num_bytes = HiddenPlaces.num_bytes(NUM_FLIGHTS, num_tokens, _like())
    if way == "device memory":
        return SharedMemory(create(CUDA, num_bytes), is_on_device=True)
    shared = SharedMemory(os.memfd_create("hidden"), is_on_device=False)
    os.ftruncate(shared.descriptor, num_bytes)
    return shared


def _hops_us(num_tokens: int, way: str) -> list[float]:
    hidden = torch.randn(num_tokens, ARCH.hidden_size, device=CUDA).to(torch.bfloat16)
    shared, (out, into), (results, back) = _shared(num_tokens, way), socket.socketpair(), socket.socketpair()
    passed = (shared.descriptor, into.fileno(), back.fileno())
    numbers = ",".join(map(str, (*passed, num_tokens, int(shared.is_on_device))))
    command = [sys.executable, "-m", "bench.pipelines_gpu", "--inlet", numbers]
    with subprocess.Popen(command, pass_fds=passed) as process:
        into.close()
        back.close()
        decode = DecodeRows([RequestId("r")] * num_tokens, range(num_tokens), [0] * num_tokens)
        outlet = StageOutlet(out, _places(shared, num_tokens), "bench")
        links = StageLinks("bench", [0], outlet, results)
        hops_us = list[float]()
        for number in range(HOPS):
            step = StageStep("bench", StepPlan(number, (), TableWrites(), decode, ()))
            links.announce(step)
            torch.cuda._sleep(COMPUTED_CYCLES)  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            began_ns = time.perf_counter_ns()
            links.send(step, PendingCopy(hidden, links.place(num_tokens)))
            found = links.result(waits=True)
            assert found is not None, "it was waited for"
            hops_us.append((found.result.tokens[0] - began_ns) / 1e3)
        links.close()
        process.wait()
    return hops_us[HOPS // 10 :]


def _answer_hops(shared: SharedMemory, inlet_fd: int, results_fd: int, num_tokens: int) -> None:
    """Answer each step with the time at which its hidden states were on this device."""
    arrived = torch.empty(num_tokens, ARCH.hidden_size, dtype=torch.bfloat16, device=CUDA)
    inlet = StageInlet(socket.socket(fileno=inlet_fd), _places(shared, num_tokens), "bench", native_spin())
    results = socket.socket(fileno=results_fd)
    while (got := inlet.receive()) is not None:
        message, hidden = got
        assert isinstance(message, StageStep), f"{message}"
        if hidden is None:  # announced
            continue
        arrived.copy_(hidden, non_blocking=True)
        torch.cuda.synchronize()
        result = StepResult([time.perf_counter_ns()], None, [])
        send_result(results, StageResult("bench", message.plan.step_id, result))


if __name__ == "__main__":
    main()

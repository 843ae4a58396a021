"""Three random Llama-2-7B behind one endpoint, memory for two: starts, switches, a kill, loads beside.

python -m bench.service.gpu [--save] [--tiny] [--place DIR]

    switches    each model in turn, again and again: which rung it came from, load time and first token
                against the bytes over the device's copy rate
    kill        the worker dies in the middle of a stream: the pause, and whether the answer is the same
    beside      gaps between the tokens of running streams, undisturbed and while another model loads

`--tiny` does the same with small models on the CPU, to see that everything runs; its numbers mean nothing.
The models need 40 GB in /dev/shm, the host tier takes as much again.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
import time
from argparse import RawDescriptionHelpFormatter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from statistics import median

import msgspec
import torch

from bench.llama7b import CONFIG
from bench.load.raw_readers import to_device_bytes_per_s
from bench.random_model import write_random
from bench.report import arguments, emit, percentiles, tell
from bench.service.client import Answer, Connection, ask, completion, metrics_of, uncollected
from bench.service.gaps import Gap, Window, gaps, load_again_and_again
from bench.service.process import Service, deploy, serving
from bench.service.streams import Prompts, good
from hearth.cli.waterfall import waterfall
from hearth.control.datadir import DataDir
from hearth.control.deploy.registry import Registry
from hearth.control.observe.views import Explanation
from hearth.core.sizes import StepLimits
from hearth.policy.fleet.footprint import footprint
from hearth.store.format.manifest import CHUNK_BYTES

MODELS = ("m1", "m2", "m3")
LIMITS = StepLimits(max_batch_tokens=4096, max_seqs=256, block_tokens=16)
AIM_BESIDE = 1.1
WIDTH = 100  #: of waterfalls, in characters
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Scale:
    config: Mapping[str, object]
    dtype: str
    kind: str
    copied_bytes: int  #: to measure the rate to the device
    prompt_tokens: int = 512
    new_tokens: int = 32
    num_rounds: int = 4
    kill_tokens: int = 200
    gap_tokens: int = 300
    gap_rounds: int = 4
    streams: tuple[int, ...] = (1, 16)


SEVEN = Scale(CONFIG, "bfloat16", "cuda", 4 * GIB)
_SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}
TINY = Scale({**CONFIG, **_SMALL}, "float32", "cpu", GIB // 4, 64, 8, 3, 120, 80, 2, (1, 4))


@dataclass(frozen=True, slots=True)
class Part:
    rows: list[dict[str, object]]
    details: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Asked:
    """An answer, with what the service says of how it came about."""

    answer: Answer
    explained: Explanation

    def as_json(self) -> dict[str, object]:
        explanation = msgspec.to_builtins(self.explained)
        lines = list(waterfall(self.explained, WIDTH))
        return {"client_first_s": self.answer.first_s, "explanation": explanation, "waterfall": lines}


async def switches(service: Service, scale: Scale, bytes_per_s: float) -> Part:
    """Ask models in turn, so that the one that is asked for is always the one that had to go."""
    prompts = Prompts(vocab_size(scale), scale.prompt_tokens)
    rounds: list[list[Asked]] = []
    for number in range(scale.num_rounds):
        asked = [await one(service, model, prompts.take(1)[0], scale.new_tokens) for model in MODELS]
        rounds.append(asked)
        tell(f"switches: round {number}, first text after {[round(a.answer.first_s, 3) for a in asked]} s")
    first = rounds[0]
    later = [asked for each in rounds[1:] for asked in each if asked.explained.load_s is not None]
    num_bytes = median(sum(use.num_bytes for use in asked.explained.rungs) for asked in later)
    bound_s = num_bytes / bytes_per_s
    first_s = percentiles([asked.answer.first_s for asked in later])
    load_s = percentiles([asked.explained.load_s or 0.0 for asked in later])
    rows = [
        row("first start, from files in memory, to first text", "s", first[-1].answer.first_s, bound_s),
        row("switch, from the host tier, load", "s", load_s["p50"], bound_s),
        row(f"switch, to first text of {scale.prompt_tokens} tokens", "s", first_s["p50"], bound_s),
    ]
    details = {
        "bytes_per_s": bytes_per_s,
        "bound_s": bound_s,
        "load_s": load_s,
        "first_s": first_s,
        "num_loads": len(later),
        "rungs": sorted({str(use.rung) for asked in later for use in asked.explained.rungs}),
        "rounds": [[asked.as_json() for asked in each] for each in rounds],
    }
    return Part(rows, details)


async def kill(service: Service, scale: Scale, bytes_per_s: float, model: str = MODELS[0]) -> Part:
    """Ask the same question three times: to warm up, undisturbed, and with the worker killed."""
    question = completion(model, Prompts(vocab_size(scale), 64).take(1)[0], scale.kill_tokens)
    await ask(service.port, question)
    undisturbed = good(await ask(service.port, question))
    connection = await Connection.open(service.port)
    asked = asyncio.create_task(connection.ask(question))
    while connection.num_reads < scale.kill_tokens // 4:
        await asyncio.sleep(0.002)
        if asked.done():
            raise RuntimeError("the stream ended before its worker could be killed")
    worker = os.pidfd_open(service.client.ps().workers[0].pid)
    signal.pidfd_send_signal(worker, signal.SIGKILL)
    killed_s = time.perf_counter()
    gone_s = await _ended_s(worker)
    answer = good(await asked)
    connection.close()
    after_s = next(event.at_s for event in answer.events if event.at_s > killed_s + 0.05)
    explained = service.client.explain(answer.reply.request_id)
    same = takewhile(lambda both: both[0] == both[1], zip(answer.text, undisturbed.text, strict=False))
    details = {
        "is_equal": answer.text == undisturbed.text,
        "equal_characters": sum(1 for _ in same),
        "characters": len(undisturbed.text),
        "num_tokens": answer.num_tokens,
        "pause_s": after_s - killed_s,
        "teardown_s": gone_s - killed_s,
        "num_resumes": explained.num_resumes,
        **Asked(answer, explained).as_json(),
    }
    rows = [
        row("worker killed in mid-stream, pause", "s", after_s - killed_s, None),
        row("until its process has given all memory back", "s", gone_s - killed_s, None),
    ]
    return Part(rows, details)


async def _ended_s(process: int) -> float:
    """Return when the process of a descriptor has ended, which is closed."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(process, ended.set)
    await ended.wait()
    loop.remove_reader(process)
    os.close(process)
    return time.perf_counter()


async def beside(service: Service, scale: Scale, bytes_per_s: float) -> Part:
    """Stream from the first model while the second comes and goes."""
    parts = [await _beside(service, scale, num_streams) for num_streams in scale.streams]
    details = {f"streams_{n}": part.details for n, part in zip(scale.streams, parts, strict=True)}
    return Part([line for part in parts for line in part.rows], details)


async def _beside(service: Service, scale: Scale, num_streams: int) -> Part:
    def streams() -> Coroutine[None, None, list[Gap]]:
        return gaps(service, "m1", prompts.take(num_streams), scale.gap_tokens)

    prompts = Prompts(vocab_size(scale), 64)
    await streams()
    alone: list[Gap] = []
    loading: list[Gap] = []
    windows: list[Window] = []
    for _ in range(scale.gap_rounds):
        alone += await streams()
        running = asyncio.create_task(streams())
        windows += await load_again_and_again(service, "m2", running)
        loading += await running
    overlapping = [gap for gap in loading if any(window.meets(gap) for window in windows)]
    undisturbed_s = percentiles([gap.seconds for gap in alone])
    while_loading_s = percentiles([gap.seconds for gap in overlapping])
    ratio = while_loading_s["p99"] / undisturbed_s["p99"]
    tell(f"beside: {num_streams} streams, p99 while another loads {ratio:.3f} of undisturbed")
    details = {
        "undisturbed_s": undisturbed_s,
        "while_loading_s": while_loading_s,
        "with_the_other_model_s_first_token_s": percentiles([gap.seconds for gap in loading]),
        "num_loads": len(windows),
        "p50_ratio": while_loading_s["p50"] / undisturbed_s["p50"],
        "p99_ratio": ratio,
        "aim": AIM_BESIDE,
        "meets_aim": ratio <= AIM_BESIDE,
    }
    what = f"inter-token p99, {num_streams} streams"
    rows = [
        row(f"{what}, undisturbed", "ms", 1e3 * undisturbed_s["p99"], None),
        row(f"{what}, while another model loads", "ms", 1e3 * while_loading_s["p99"], None),
    ]
    return Part(rows, details)


PARTS = {"switches": switches, "kill": kill, "beside": beside}


# What parts share.


async def one(service: Service, model: str, prompt: list[int], num_tokens: int) -> Asked:
    answer = good(await ask(service.port, completion(model, prompt, num_tokens)))
    return Asked(answer, service.client.explain(answer.reply.request_id))


def vocab_size(scale: Scale) -> int:
    size = scale.config["vocab_size"]
    assert isinstance(size, int), f"{size=}"
    return size


def budget_bytes(data_dir: Path, kind: str) -> int:
    """Return a budget for two models with all KV they may have, or hardly less than a third would need."""
    with Registry(DataDir.open(data_dir)) as registry:
        (size, *_) = [footprint(deployed.facts, kind, LIMITS) for deployed in registry.all()]
    return min(2 * (size.fixed_bytes + size.max_kv_bytes), 3 * size.least_bytes - 1)


def flags(data_dir: Path, scale: Scale, model_bytes: int) -> list[str]:
    host_bytes = len(MODELS) * (model_bytes + CHUNK_BYTES) + GIB
    sizes = ["--memory", str(budget_bytes(data_dir, scale.kind)), "--host-memory", str(host_bytes)]
    limits = [("max_batch_tokens", LIMITS.max_batch_tokens), ("max_seqs", LIMITS.max_seqs)]
    settings = [part for key, value in limits for part in ("--set", f"engine.{key}={value}")]
    return ["--device", scale.kind, "--workers", "1", *sizes, *settings]


def row(measure: str, unit: str, value: float, bound: float | None) -> dict[str, object]:
    """Return a line of the table in the documents."""
    return {"measure": measure, "unit": unit, "value": value, "bound": bound, "peers": {}}


def measure(place: Path, scale: Scale, only: Sequence[str]) -> tuple[dict[str, Part], dict[str, float]]:
    data_dir = place / "data"
    for number, name in enumerate(MODELS):
        tell(f"model {name}")
        directory = write_random(place / name, scale.config, scale.dtype, number, torch.device(scale.kind))
        deploy(data_dir, directory, name)
    model_bytes = (place / MODELS[0] / "weights.bin").stat().st_size
    bytes_per_s = to_device_bytes_per_s(scale.copied_bytes, torch.device(scale.kind))
    if scale.kind == "cuda":
        torch.cuda.empty_cache()
    tell("the service")
    with serving(data_dir, flags(data_dir, scale, model_bytes)) as service:
        parts = {}
        for name in only:
            with uncollected(), asyncio.Runner() as runner:
                parts[name] = runner.run(PARTS[name](service, scale, bytes_per_s))
        with asyncio.Runner() as runner:
            metrics = runner.run(metrics_of(service.port))
    return parts, metrics


def main() -> None:
    parser = arguments(__doc__)
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU")
    parser.add_argument("--place", type=Path, default=Path("/dev/shm"), help="where the models are made")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART")
    options = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="hearth-bench-", dir=options.place))
    try:
        parts, metrics = measure(place, TINY if options.tiny else SEVEN, options.only)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    rows = [line for part in parts.values() for line in part.rows]
    results = {name: part.details for name, part in parts.items()}
    result = {"is_tiny": options.tiny, "rows": rows, "results": results, "metrics": metrics}
    emit("service_gpu", result, save=options.save)


if __name__ == "__main__":
    main()

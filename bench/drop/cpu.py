"""What do requests gain if two live workers give up layers for KV in a burst? On CPUs, which both share.

    python -m bench.drop.cpu [--streams 32] [--rounds 2] [--save]

Two workers hold a random model in float32 and KV for half of a burst of streams, which are asked for at once.
The next burst follows when both have all layers again.

- `ample memory`: the workers have room for all streams.
- `queueing`: `drop = "off"`: streams wait for KV, and are preempted if it runs out.
- `drop`: `drop = "auto"`.

All streams have to say the same in each arm. The workers share the cores: only ratios of the arms mean
something.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import uvloop

from bench.random_model import TINY, write_random
from bench.report import Row, arguments, emit, percentiles, step, tell
from bench.service.client import Answer, ask_all, completion, metrics_of, uncollected
from bench.service.process import Service, deploy, serving
from bench.service.streams import Prompts, good

#: 8 layers, 7 MB in float32, and 8 KiB of KV for a token.
MODEL: Mapping[str, object] = {
    **TINY,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
NAME, NUM_WORKERS = "model", 2
PROMPT_TOKENS, NEW_TOKENS = 48, 80
TIGHT_BYTES, AMPLE_BYTES = 20 << 20, 256 << 20
WHOLE_S = 120.0
MOVES, PREEMPTIONS = "hearth_drop_moves_total", "hearth_preemptions_total"
_LOOK_S = 0.1
AMPLE, QUEUEING, DROP = "ample memory", "queueing", "drop"
ARMS = {AMPLE: (AMPLE_BYTES, "off"), QUEUEING: (TIGHT_BYTES, "off"), DROP: (TIGHT_BYTES, "auto")}


@dataclass(frozen=True, slots=True)
class Burst:
    """The figures of one burst. Becomes JSON."""

    first_token_s: dict[str, float]
    token_s: dict[str, float]  #: mean between tokens of each stream
    seconds: float  #: to the last token
    num_moved: float  #: requests, because layers were given up
    num_preempted: float


def main() -> None:
    command = arguments(__doc__)
    command.add_argument("--streams", type=int, default=32)
    command.add_argument("--rounds", type=int, default=2)
    command.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    options = command.parse_args()
    prompts = Prompts(512, PROMPT_TOKENS).take(options.streams)
    bursts: dict[str, list[Burst]] = {}
    said: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory(prefix="hearth-bench-") as place:
        folder = Path(place)
        with step("writing a random model of 8 layers"):
            source = write_random(folder / NAME, MODEL, "float32", 1, torch.device("cpu"))
        for arm in options.arms:
            with _service(folder / arm.replace(" ", "_"), source, arm) as service:
                bursts[arm] = [_burst(service, prompts, arm, said) for _ in range(options.rounds)]
    texts = list(said.values())
    if any(one != texts[0] for one in texts):
        raise RuntimeError("the arms said different things")
    rows = list(_rows(bursts))
    runs = {arm: [asdict(one) for one in found] for arm, found in bursts.items()}
    emit("drop_cpu", {"rows": [asdict(row) for row in rows], "bursts": runs}, save=options.save)


@contextmanager
def _service(data_dir: Path, source: Path, arm: str) -> Iterator[Service]:
    memory_bytes, drop = ARMS[arm]
    deploy(data_dir, source, NAME)
    settings = data_dir / "hearth.toml"
    settings.write_text(
        "[engine]\nmax_seqs = 64\n"
        f'[models.{NAME}]\ncontext = 256\nmin_replicas = 2\nmax_replicas = 2\ndrop = "{drop}"\n'
    )
    flags = ["--config", str(settings), "--device", "cpu", "--workers", str(NUM_WORKERS)]
    flags += ["--memory", str(memory_bytes)]
    with serving(data_dir, flags, num_workers=NUM_WORKERS) as service:
        yield service


def _wait_whole(service: Service) -> None:
    """Wait until both workers have all layers."""
    deadline_s = time.monotonic() + WHOLE_S
    while True:
        hosted = [one for one in service.client.ps().models if one.is_hosted and one.layers is None]
        if len(hosted) == NUM_WORKERS and all(one.loaded_bytes == one.total_bytes for one in hosted):
            return
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"the workers have not got all layers after {WHOLE_S:.0f} s")
        time.sleep(_LOOK_S)


def _burst(service: Service, prompts: Sequence[list[int]], arm: str, said: dict[str, list[str]]) -> Burst:
    _wait_whole(service)
    with uncollected(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        before = runner.run(metrics_of(service.port))
        replies = runner.run(ask_all(service.port, [completion(NAME, one, NEW_TOKENS) for one in prompts]))
        after = runner.run(metrics_of(service.port))
    answers = [good(one) for one in replies]
    said.setdefault(arm, [one.text for one in answers])
    if said[arm] != [one.text for one in answers]:
        raise RuntimeError(f"{arm}: the burst said something else than the one before")
    num_moved, num_preempted = (_sum(after, name) - _sum(before, name) for name in (MOVES, PREEMPTIONS))
    found = Burst(
        first_token_s=percentiles([one.first_s for one in answers]),
        token_s=percentiles([_token_s(one) for one in answers]),
        seconds=max(one.events[-1].at_s - one.reply.asked_s for one in answers),
        num_moved=num_moved,
        num_preempted=num_preempted,
    )
    tell(
        f"{arm}: first token p50 {found.first_token_s['p50']:.2f} p99 {found.first_token_s['p99']:.2f} s, "
        f"between tokens p50 {1e3 * found.token_s['p50']:.0f} p99 {1e3 * found.token_s['p99']:.0f} ms, "
        f"all {found.seconds:.1f} s, {num_moved:.0f} moved, {num_preempted:.0f} preempted"
    )
    return found


def _sum(metrics: Mapping[str, float], name: str) -> float:
    return sum(value for sample, value in metrics.items() if sample.partition("{")[0] == name)


def _token_s(answer: Answer) -> float:
    num_tokens = answer.num_tokens or 0
    return (answer.events[-1].at_s - answer.events[0].at_s) / max(1, num_tokens - 1)


def _rows(bursts: Mapping[str, list[Burst]]) -> Iterator[Row]:
    measures: Sequence[tuple[str, str, Callable[[Burst], float]]] = (
        ("first token p50", "s", lambda one: one.first_token_s["p50"]),
        ("first token p99", "s", lambda one: one.first_token_s["p99"]),
        ("between tokens p50", "ms", lambda one: 1e3 * one.token_s["p50"]),
        ("between tokens p99", "ms", lambda one: 1e3 * one.token_s["p99"]),
        ("until all have ended", "s", lambda one: one.seconds),
    )
    for what, unit, value in measures:
        medians = {arm: median([value(one) for one in found]) for arm, found in bursts.items()}
        if DROP in medians and QUEUEING in medians:
            yield Row(what, unit, medians[DROP], medians.get(AMPLE), peers={QUEUEING: medians[QUEUEING]})


if __name__ == "__main__":
    main()

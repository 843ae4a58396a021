"""Which `max_step`? Simulated: how evenly tokens come while prompts of others arrive, and what that costs.

    python -m bench.max_step --lengths FILE [--spread-steps N] [--save]

FILE is a CSV of conversations, `input_tokens,output_tokens` (gzipped or not). The device is a 7B on the kept
profile of an H200, with all steps as graphs: the time that its host took to launch steps one kernel at a time
is left out. `gqa` is the same with a quarter of the KV. Lengths and arrivals are drawn from other parts of
the file than those by which the constants of `PromptAllowance` were chosen (rows before 26,000, shuffled).
"""

from __future__ import annotations

import csv
import gzip
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from random import Random

from bench.report import arguments, emit
from hearth.core.types import Pace, RequestId
from hearth.policy.batch import prompt_allowance
from hearth.policy.batch.batch_limits import BatchLimits
from hearth.policy.memory.kv_range import KvRange
from hearth.sim.profile import Profile, ShapeProfile
from hearth.sim.report import Percentiles
from hearth.sim.stepped_engine import SteppedEngine

MAX_STEPS_S = (0.04, 0.06, 0.1, math.inf)
LOADS = (0.5, 0.8, 0.95)  #: of saturation
FIRST_ROWS = (35_000, 45_000, 55_000)  #: of what each draw takes from the file
NUM_REQUESTS = 600
KV_BYTES = 97 << 30
BLOCK_TOKENS = 16
LIMITS = BatchLimits(max_batch_tokens=8192, max_seqs=1024, max_context=8192)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of a simulated user."""

    arrived_s: float
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Served:
    """Times that requests waited for their tokens, and that all of it took, in seconds."""

    first_s: list[float]
    next_s: list[float]
    took_s: float


def with_kv(shape: ShapeProfile, kv: float) -> ShapeProfile:
    """A model with so many times the KV."""
    times = shape.times.scaled(weights=1.0, kv=kv)
    return replace(shape, times=times, kv_bytes_per_token=int(kv * shape.kv_bytes_per_token))


def serve(shape: ShapeProfile, requests: Sequence[Asked], max_step_s: float) -> Served:
    """Serve requests, sorted by arrival, by an engine that has the device to itself."""
    block_bytes = shape.kv_bytes_per_token * BLOCK_TOKENS
    num_blocks = KV_BYTES // block_bytes
    kv = KvRange(block_bytes, 16 << 20, num_blocks)
    engine = SteppedEngine(shape, LIMITS, kv, BLOCK_TOKENS, num_blocks - 1, max_step_s)
    engine.kv.grow(num_blocks - 1, free_bytes=KV_BYTES)
    times_s: dict[RequestId, list[float]] = {}  # of the arrival, then of each token
    to_come, now_s, device_free_s = deque(requests), 0.0, 0.0
    while to_come or engine.has_work:
        if not engine.has_work:
            now_s = max(now_s, to_come[0].arrived_s)
        while to_come and to_come[0].arrived_s <= now_s:
            asked, request_id = to_come.popleft(), RequestId(str(len(to_come)))
            times_s[request_id] = [asked.arrived_s]
            num_prompt, num_output = asked.num_prompt_tokens, asked.num_output_tokens
            engine.add(request_id, num_prompt, num_output, 0, Pace(), asked.arrived_s, now_s)
        call = engine.launch(now_s, device_free_s)
        device_free_s = device_free_s if call.launched is None else call.launched.end_s
        if call.awaited is not None:
            now_s = max(now_s, call.awaited.end_s)
            for request_id in engine.take_in(call.awaited).request_ids:
                times_s[request_id].append(now_s)
    waits_s = [[after - before for before, after in pairwise(one)] for one in times_s.values()]
    return Served([one[0] for one in waits_s], [wait_s for one in waits_s for wait_s in one[1:]], now_s)


def percentiles(values: Sequence[float]) -> Percentiles:
    found = Percentiles.of(values)
    assert found is not None, "nobody waited"
    return found


def _read(path: Path) -> list[Asked]:
    """Return all conversations in an order drawn at random, clipped as bench/engine clips them."""
    packed = path.read_bytes()
    text = (gzip.decompress(packed) if path.suffix == ".gz" else packed).decode()
    rows = [
        (int(row["input_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(text.splitlines())
    ]
    Random(11).shuffle(rows)
    return [Asked(0.0, min(max(num_in, 4), 2000), min(max(num_out, 2), 900)) for num_in, num_out in rows]


def _arriving(asked: Sequence[Asked], per_s: float, seed: int) -> list[Asked]:
    rng, now_s, requests = Random(seed), 0.0, list[Asked]()
    for one in asked:
        now_s += rng.expovariate(per_s)
        requests.append(replace(one, arrived_s=now_s))
    return requests


def _row(shape: ShapeProfile, kind: str, requests: Sequence[Asked], max_step_s: float) -> dict[str, object]:
    served = serve(shape, requests, max_step_s)
    first, following = percentiles(served.first_s), percentiles(served.next_s)
    return {
        "kind": kind,
        "max_step_s": None if math.isinf(max_step_s) else max_step_s,
        "output_tokens_per_s": sum(one.num_output_tokens for one in requests) / served.took_s,
        "first_token_ms": {"p50": 1000 * first.p50, "p99": 1000 * first.p99},
        "next_token_ms": {"p50": 1000 * following.p50, "p99": 1000 * following.p99},
        "p99_by_p50": following.p99 / following.p50,
    }


def measure(shape: ShapeProfile, asked: Sequence[Asked]) -> list[Mapping[str, object]]:
    """Serve one draw: at once, and at random at parts of the rate that it was served at."""
    num_output = sum(one.num_output_tokens for one in asked)
    saturated_per_s = len(asked) / serve(shape, asked, math.inf).took_s
    rows = list[Mapping[str, object]]()
    for max_step_s in MAX_STEPS_S:
        rows.append({"load": "at once", **_row(shape, shape.name, asked, max_step_s)})
        for load in LOADS:
            requests = _arriving(asked, load * saturated_per_s, seed=num_output)
            rows.append({"load": load, **_row(shape, shape.name, requests, max_step_s)})
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--lengths", type=Path, required=True)
    parser.add_argument("--spread-steps", type=int, default=prompt_allowance.SPREAD_STEPS)
    options = parser.parse_args()
    prompt_allowance.SPREAD_STEPS = options.spread_steps
    asked, shape = _read(options.lengths), Profile.load("h200").shape("7B")
    shapes = [replace(shape, name="mha"), replace(with_kv(shape, 0.25), name="gqa")]
    rows = [
        {"first_row": first, **row}
        for one in shapes
        for first in FIRST_ROWS
        for row in measure(one, asked[first : first + NUM_REQUESTS])
    ]
    emit("max_step", {"spread_steps": options.spread_steps, "rows": rows}, save=options.save)


if __name__ == "__main__":
    main()

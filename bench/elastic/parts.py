"""The questions of `bench.elastic`, and the document that answers them. Decides no sizes.

shares       see elastic_shares
throughput   requests that arrive at once and all fit: while all of them decode, and prefill included
saturation   waves of more requests than KV can hold: all of it, for somebody's prompt is always computed
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from bench.elastic.contest import Contest, Measured, Rate, compared, of_all, of_decode, paired_ratio
from bench.elastic.load import Load
from bench.elastic.setting import Aim, Part, Scale, Surge
from bench.elastic.shares import shares
from bench.elastic.stage import Arm, blocks_for
from bench.report import environment, percentiles

AIM_THROUGHPUT, AIM_SATURATED = 0.99, 0.97
#: What the arms that elastic KV is held against are called in the documents.
PEERS = {Arm.FIXED: "the same KV, all given at the start", Arm.PLAIN: "the same KV in torch's memory"}

#: Saturation is last, for it takes memory away for good.
PARTS = ("shares", "throughput", "saturation")


def answers(
    contest: Contest, scale: Scale, device_bytes: int, parts: Sequence[str] = PARTS
) -> dict[str, object]:
    """Measure the parts and return the sections of the result."""
    by_name: Mapping[str, Callable[[], Part]] = {
        "shares": lambda: shares(contest, scale, device_bytes),
        "throughput": lambda: throughput(contest, scale),
        "saturation": lambda: saturation(contest, scale),
    }
    warm_up = Load.alike(scale.batches[-1].num_requests, scale.prompt_tokens, scale.new_tokens)
    contest.measure(Arm.ELASTIC, warm_up)  # kernels are compiled
    done = {name: by_name[name]() for name in PARTS if name in parts}
    body = contest.stage.body
    setting = {
        "scale": asdict(scale),
        "config": asdict(body.config),
        "budget_bytes": body.budget_bytes,
        "weights_bytes": body.layout.num_bytes,
        "workspace_bytes": body.workspace_bytes,
        "kv_blocks": body.kv_blocks,
        "block_bytes": body.block_bytes,
    }
    return {
        "setting": setting,
        "aims": [{**asdict(aim), "part": name} for name, part in done.items() for aim in part.aims],
        "rows": [{**row, "part": name} for name, part in done.items() for row in part.rows],
        "results": {
            name: {"environment": environment(), "scale": asdict(scale), **part.details}
            for name, part in done.items()
        },
    }


def merged(result: Mapping[str, object], earlier: Path) -> dict[str, object]:
    """Add the parts of an earlier result, if there is any, that were not measured now."""
    kept = json.loads(earlier.read_text(encoding="utf-8")) if earlier.is_file() else {}
    now: dict[str, Any] = dict(result)
    parts = {**kept.get("results", {}), **now["results"]}
    for key in ("aims", "rows"):
        others = [one for one in kept.get(key, []) if one["part"] not in now["results"]]
        now[key] = [one for name in PARTS for one in [*others, *now[key]] if one["part"] == name]
    return {**now, "results": {name: parts[name] for name in PARTS if name in parts}}


def throughput(contest: Contest, scale: Scale) -> Part:
    """Compare elastic with reserved KV, batch by batch, and the gaps between tokens at one of them."""
    aims, rows = [], []
    batches: dict[int, object] = {}
    for batch in scale.batches:
        size = batch.num_requests
        load = Load.alike(size, scale.prompt_tokens, scale.new_tokens)
        if not batches:
            for arm in scale.arms:  # engines are put together
                contest.measure(arm, load)
        results = contest.turns(scale.arms, load, batch.num_rounds)
        decode = of_decode(size)
        aims.append(_aim(f"decode throughput over that of fixed KV, batch {size}", results, decode))
        name = f"batch {size}, {scale.prompt_tokens} + {scale.new_tokens} tokens"
        rows += [_row(f"{name}: decode", results, decode), _row(f"{name}: with prefill", results, of_all)]
        gaps = {arm: _gaps(runs, size) for arm, runs in results.items()}
        if size == scale.gaps_batch:
            rows.append(_gaps_row(size, gaps))
        batches[size] = {**compared(results, {"decode": decode, "whole": of_all}), "gaps_ms": gaps}
    contest.stage.drop_plain()
    return Part(aims, rows, {"batches": batches})


def saturation(contest: Contest, scale: Scale) -> Part:
    """Compare the arms when both have the same KV, too little for the load."""
    kv_blocks = blocks_for(scale.num_fitting, scale.seq_tokens, contest.stage.body.config)
    contest.stage.limit_kv(kv_blocks)
    aims, rows, details = [], [], []
    for surge in scale.surges:
        results = contest.turns(
            (Arm.ELASTIC, Arm.FIXED),
            _waves(scale, surge),
            scale.num_surge_rounds,
            is_pressed=surge.is_pressed,
        )
        name = f"{surge.factor:g} times saturated" + (", memory full of weights" if surge.is_pressed else "")
        aim = _aim(f"throughput over that of fixed KV, {name}", results, of_all, AIM_SATURATED)
        if not surge.is_pressed:  # that others have to give way is no loss of ours: it is only reported
            aims.append(aim)
        rows.append(_row(name, results, of_all))
        details.append({"surge": asdict(surge), **compared(results, {"whole": of_all})})
    return Part(aims, rows, {"kv_blocks": kv_blocks, "surges": details})


def _waves(scale: Scale, surge: Surge) -> Load:
    return Load(
        waves=(round(surge.factor * scale.num_fitting),) * surge.num_waves,
        prompt_tokens=_around(scale.prompt_tokens),
        new_tokens=_around(scale.new_tokens),
        # Others come only when nobody computes, else their coming would be measured as well.
        left_share=0.0 if surge.is_pressed else 0.1,
    )


def _aim(
    name: str, results: Mapping[Arm, Sequence[Measured]], rate: Rate, least: float = AIM_THROUGHPUT
) -> Aim:
    ratio = paired_ratio(results, Arm.FIXED, rate)
    print(f"{name}: {ratio:.4f}", file=sys.stderr, flush=True)
    return Aim.least(name, ratio, least)


def _row(name: str, results: Mapping[Arm, Sequence[Measured]], rate: Rate) -> dict[str, object]:
    rates = {arm: median(rate(measured.run) for measured in runs) for arm, runs in results.items()}
    return _beside(name, "tokens/s", rates)


def _gaps_row(num_requests: int, gaps: Mapping[Arm, Mapping[str, float]]) -> dict[str, object]:
    worst = {arm: gap_ms["p99"] for arm, gap_ms in gaps.items()}
    return _beside(f"gap between tokens, 99th percentile, batch {num_requests}", "ms", worst)


def _beside(name: str, unit: str, values: Mapping[Arm, float]) -> dict[str, object]:
    peers = {PEERS[arm]: value for arm, value in values.items() if arm is not Arm.ELASTIC}
    return {"measure": name, "unit": unit, "value": values[Arm.ELASTIC], "peers": peers}


def _gaps(runs: Sequence[Measured], num_requests: int) -> dict[str, float]:
    return percentiles([gap for measured in runs for gap in measured.run.decode_gaps_ms(num_requests)])


def _around(num_tokens: int) -> range:
    """Return lengths from half to one and a half of a number of tokens."""
    return range(num_tokens // 2, num_tokens * 3 // 2 + 1)

"""The questions of `bench.reuse`, and the document that answers them. Parses no flags."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path

import torch

from bench.host_pages import HostPages
from bench.report import environment
from bench.reuse.curve import Curve, measure_curve, workloads
from bench.reuse.finetunes import finetunes
from bench.reuse.placing import placing
from bench.reuse.setting import Part, Setting
from bench.reuse.switch import switch
from hearth.memory.cuda_pages import CudaPages
from hearth.memory.pages import Pages

PARTS = ("workloads", "placing", "switch", "finetunes")


def measure(setting: Setting, names: Sequence[str]) -> dict[str, Part]:
    @cache
    def curve() -> Curve:
        return measure_curve(setting)  # two parts look at it

    parts: Mapping[str, Callable[[], Part]] = {
        "workloads": lambda: workloads(setting, curve()),
        "placing": lambda: placing(setting, curve()),
        "switch": lambda: switch(setting),
        "finetunes": lambda: finetunes(setting),
    }
    found: dict[str, Part] = {}
    for name in names:
        found[name] = parts[name]()
        # So that a run that is cut off has not been for nothing.
        print(json.dumps({name: asdict(found[name])}), file=sys.stderr, flush=True)
    return found


def document(parts: Mapping[str, Part], earlier: Path) -> dict[str, object]:
    """Return the result; parts that were not measured now are as in an earlier one, if there is any."""
    kept = json.loads(earlier.read_text(encoding="utf-8")) if earlier.is_file() else {}
    rows: dict[str, list[object]] = {name: [] for name in PARTS}
    aims: dict[str, list[object]] = {name: [] for name in PARTS}
    for by_part, key in ((rows, "rows"), (aims, "aims")):
        for one in kept.get(key, []):
            by_part[one["part"]].append(one)
    results: dict[str, object] = dict(kept.get("results", {}))
    for name, part in parts.items():
        rows[name] = [{**asdict(row), "part": name} for row in part.rows]
        aims[name] = [{**asdict(aim), "part": name} for aim in part.aims]
        results[name] = {"environment": environment(), **part.details}
    return {
        "rows": [row for name in PARTS for row in rows[name]],
        "aims": [aim for name in PARTS for aim in aims[name]],
        "results": {name: results[name] for name in PARTS if name in results},
    }


def describe(setting: Setting) -> dict[str, object]:
    """Return what a reader has to know of the setting."""
    scale = setting.scale
    return {
        "depth": scale.depth,
        "chunk_bytes": scale.chunk_bytes,
        "workspace_bytes": scale.workspace_bytes,
        "min_kv_bytes": scale.min_kv_bytes,
        "max_kv_bytes": scale.max_kv_bytes,
        "num_warm_runs": scale.num_warm_runs,
        "num_runs": scale.num_runs,
        "num_repeats": scale.num_repeats,
    }


def device_pages(budget_bytes: int, page_bytes: int) -> Pages:
    return CudaPages(torch.device("cuda", 0), budget_bytes, page_bytes)


def host_pages(budget_bytes: int, page_bytes: int) -> Pages:
    return HostPages(budget_bytes // page_bytes, page_bytes, num_spaces=64)

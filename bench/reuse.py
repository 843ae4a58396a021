"""What is a model worth that is still there in part? Switches between models on one device, with and without.

python -m bench.reuse [--save] [--part PART ...] [--tiny] [--device cpu]

    workloads   Tangram's L1-L4 with eight models, all 2.7 and 4.4 times the budget: load time with reuse,
                on mapped pages and on two arenas, over load time without, beside the bound
    placing     bytes moved to make place, mapped pages beside packing beside merging all; what mapping costs
    switch      first token of a 7B of which 100, 75, 50, 25 or 0% is still there, through a worker
    finetunes   the second of two models that share nine tenths of their chunks, beside a full copy

With `--save` parts that are not run stay in the result as they were; each says when and on what it was
measured. `--tiny` is to see that everything runs, and its numbers mean nothing: a few requests on a device,
and on a CPU small models as well. The models of `workloads` take 54 GB of host memory, and up to 60 GB of the
device, in three pools side by side; those of `switch` 27 GB in /dev/shm and as much again.
"""

from __future__ import annotations

import json
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path

import torch

from bench.report import HERE, arguments, emit, environment, peers
from bench.reuse_curve import Curve, measure_curve, workloads
from bench.reuse_finetunes import finetunes
from bench.reuse_placing import placing
from bench.reuse_setting import SHORT, TINY, NewPages, Part, Scale, Setting
from bench.reuse_switch import switch
from hearth.memory.cuda_pages import CudaPages
from hearth.memory.pages import Pages
from hearth.store.loader import Loader

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
    """The result. Parts that were not measured now are as they were in an earlier one, if there is any."""
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
    """What of the setting a reader has to know."""
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
    from tests.memory.host_pages import HostPages  # real pages on a CPU, which only tests want

    return HostPages(budget_bytes // page_bytes, page_bytes, num_spaces=64)


def main() -> None:
    parser = arguments(__doc__)
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="see only that everything runs")
    options = parser.parse_args()
    if options.device == "cpu" and not options.tiny:
        parser.error("a CPU has no memory for this: add --tiny")
    if options.tiny and options.save:
        parser.error("numbers of a tiny run mean nothing: leave out --save")
    is_cuda = options.device == "cuda"
    device = torch.device("cuda", 0) if is_cuda else torch.device("cpu")
    new_pages: NewPages = device_pages if is_cuda else host_pages
    scale = Scale() if not options.tiny else SHORT if is_cuda else TINY
    published = peers()["reuse"]["peers"]  # type: ignore[index] # JSON
    setting = Setting(scale, device, Loader(device), new_pages, published)
    parts = measure(setting, options.part)
    # Numbers of a tiny run mean nothing, so they never stand beside others.
    earlier = HERE / "results" / ("reuse.json" if options.save else "nothing")
    result = {"is_tiny": options.tiny, "setting": describe(setting), **document(parts, earlier)}
    emit("reuse", result, save=options.save)


if __name__ == "__main__":
    main()

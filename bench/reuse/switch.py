"""The first token on a switch to a model that is still there in part, through a worker's own step loop.

    retire it   --> others are hosted, which take so much of its tail --> they are retired
    host it again and ask at once: timed from the order to its first token

Four fillers of about a quarter of the model each leave 100, 75, 50, 25 or none of it. Their weights stay, so
taking them and whatever that costs is part of what is timed. How much was really missing the worker says
itself, and the bound is made of that.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.random_model import write_random
from bench.report import Row, percentiles, step
from bench.reuse.setting import Aim, Part, Setting
from bench.reuse.worker import WorkerClient, working
from hearth.core.messages import DropModel, HostModel, ModelLoaded, RetireModel, StepDone
from hearth.core.types import ModelId
from hearth.engine.assemble import ModelSpec, own_limits, workspace_bytes
from hearth.models.dtypes import DTYPES
from hearth.store.format.manifest import read_manifest

SLACK, SLACK_S = 1.15, 0.003
MODEL = ModelId("model")
#: Sinks of the fillers, and what rounding may cost.
SPARE_PAGES = 6


@dataclass(frozen=True, slots=True)
class Switch:
    first_token_s: float
    missing_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Measured:
    prefill_s: list[float]  #: of first tokens with all of the model there
    switches: Mapping[int, list[Switch]]  #: by the number of fillers


def switch(setting: Setting) -> Part:
    scale = setting.scale
    with tempfile.TemporaryDirectory(prefix="hearth-reuse-", dir=scale.place) as place:
        with step("switch: writing models"):
            orders = _orders(setting, Path(place))
        budget_bytes = _budget_bytes(setting, orders)
        with step("switch"), working(setting, Path(place), orders, budget_bytes) as worker:
            worker.segment.wait_pinned()
            bytes_per_s = setting.bytes_per_s(worker.segment)
            measured = _measure(setting, worker)
    return _part(setting, measured, bytes_per_s)


def _orders(setting: Setting, place: Path) -> dict[ModelId, HostModel]:
    """Return the orders to host the model and its fillers, in the order in which they are hosted."""
    scale = setting.scale
    depths = {MODEL: None, **{ModelId(f"filler-{n}"): depth for n, depth in enumerate(scale.filler_layers)}}
    orders = {}
    for seed, (model, num_layers) in enumerate(depths.items()):
        config = {**scale.whole_config, **({"num_hidden_layers": num_layers} if num_layers else {})}
        directory = write_random(place / model, config, scale.dtype, seed, setting.device)
        manifest = read_manifest(directory)
        orders[model] = HostModel(
            model=model,
            hosting=0,
            where=str(directory),
            digest=manifest.digest,
            weight=1.0,
            max_context=scale.max_context,
            limits=own_limits(scale.engine, manifest.arch, DTYPES[scale.dtype], setting.device),
            kv_floor_bytes=scale.max_kv_bytes if model == MODEL else 1,
            max_kv_bytes=scale.max_kv_bytes,
            eos_ids=(),
        )
    return orders


def _budget_bytes(setting: Setting, orders: Mapping[ModelId, HostModel]) -> int:
    """Return just what all fillers take, so that they leave nothing of the model, and it fits with its KV."""
    scale, page_bytes = setting.scale, setting.scale.page_bytes
    manifests = {model: read_manifest(Path(order.where)) for model, order in orders.items()}
    pages = {model: -(-manifest.num_bytes // page_bytes) for model, manifest in manifests.items()}
    fillers = sum(count for model, count in pages.items() if model != MODEL)
    kv_pages = -(-scale.max_kv_bytes // page_bytes)
    arch, dtype, limits = manifests[MODEL].arch, DTYPES[scale.dtype], orders[MODEL].limits
    spec = ModelSpec(arch, dtype, scale.max_context, limits, frozenset())
    shared_pages = -(-workspace_bytes(spec, setting.device) // page_bytes)
    num_pages = max(fillers, pages[MODEL] + kv_pages) + shared_pages + SPARE_PAGES
    return num_pages * page_bytes


def _measure(setting: Setting, worker: WorkerClient) -> Measured:
    """Switch again and again; the first runs warm up."""
    prompts = _prompts(setting)
    fillers = [model for model in worker.orders if model != MODEL]
    for model in fillers:  # so that host memory has all of them, and has had them once
        worker.load(model)
        worker.send(DropModel(model))
    worker.load(MODEL)
    prefill_s = []
    for _ in range(setting.scale.num_repeats + 2):
        began_s = time.perf_counter()
        prefill_s.append(worker.first_token(worker.ask(MODEL, next(prompts))) - began_s)
        worker.rest()
    worker.send(RetireModel(MODEL))
    switches: dict[int, list[Switch]] = {count: [] for count in range(len(fillers) + 1)}
    for _ in range(setting.scale.num_repeats + 1):
        for count, runs in switches.items():
            runs.append(_switch(worker, fillers[:count], next(prompts)))
    return Measured(prefill_s[2:], {count: runs[1:] for count, runs in switches.items()})


def _switch(worker: WorkerClient, fillers: Sequence[ModelId], prompt: Sequence[int]) -> Switch:
    for model in fillers:  # hosted ones lose nothing to those who come after, so only the model does
        worker.load(model)
    worker.send(*(RetireModel(model) for model in fillers))
    worker.rest()
    began_s = time.perf_counter()
    worker.host(MODEL)
    run = worker.ask(MODEL, prompt)
    loaded: ModelLoaded | None = None
    first_s: float | None = None
    while loaded is None or first_s is None:  # either may come first
        heard = worker.until(ModelLoaded, StepDone)
        if isinstance(heard.fact, ModelLoaded):
            loaded = heard.fact
        elif heard.has_token_of(run):
            first_s = heard.at_s
    worker.send(RetireModel(MODEL), *(DropModel(model) for model in fillers))
    worker.rest()
    manifest = read_manifest(Path(worker.orders[MODEL].where))
    tensor_bytes = sum(spec.nbytes for spec in manifest.tensors)
    return Switch(first_s - began_s, tensor_bytes - loaded.reused_bytes, tensor_bytes)


def _part(setting: Setting, measured: Measured, bytes_per_s: float) -> Part:
    prefill, switches = percentiles(measured.prefill_s), measured.switches
    rows, aims, shares = [], [], {}
    for count, runs in switches.items():
        share = 1 - count / (len(switches) - 1)
        times = percentiles([run.first_token_s for run in runs])
        missing_bytes = min(run.missing_bytes for run in runs)  # it should be the same in all of them
        bound_s = missing_bytes / bytes_per_s + prefill["p50"]
        name = f"first token on a switch, {share:.0%} of the model retained"
        rows.append(Row(name, "ms", 1e3 * times["p50"], 1e3 * bound_s, "at most 1.15 times the bound + 3 ms"))
        limit_s = SLACK * bound_s + SLACK_S
        aims.append(Aim(f"{name}, seconds", times["p50"], f"at most {limit_s:.4g}", times["p50"] <= limit_s))
        shares[f"{share:.0%}"] = {
            "first_token_s": times,
            "missing_bytes": missing_bytes,
            "most_missing_bytes": max(run.missing_bytes for run in runs),
            "retained_share": 1 - missing_bytes / runs[0].total_bytes,
            "bound_s": bound_s,
            "over_bound": times["p50"] / bound_s,
        }
    details = {
        "prompt_tokens": setting.scale.prompt_tokens,
        "prefill_s": prefill,
        "to_device_bytes_per_s": bytes_per_s,
        "retained": shares,
    }
    return Part(rows, aims, details)


def _prompts(setting: Setting) -> Iterator[list[int]]:
    """Yield prompts, never the same twice, so that no prefix is found."""
    vocab_size = setting.scale.whole_config["vocab_size"]
    assert isinstance(vocab_size, int)
    generator = torch.Generator().manual_seed(11)
    while True:
        yield torch.randint(0, vocab_size, (setting.scale.prompt_tokens,), generator=generator).tolist()

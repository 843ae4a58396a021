"""Compares ways to compute adapters beside the base: steps of eight layers. A laboratory."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import traceback

import torch

from bench.lora.random_adapters import AdapterSet
from bench.lora.steps import device_ms, new_engine, plans
from hearth import sizes
from hearth.cuda_driver import CudaDriver
from hearth.cuda_graphs import CudaGraphs
from hearth.kernels import adapter_rows
from hearth.kernels.lora_variant import WAY

BEGAN_S = time.perf_counter()
NUM_LAYERS, LIMIT_S = 8, 75.0
NUM_COMPILERS = 12
DEFAULT = dict(
    order="behind",
    early=False,
    overlaps_side=True,
    priority=0,
    shares=528,
    prefetch=0,
    prefetched=256,
    stages=0,
)
WAYS = {
    "now": {},
    "early": dict(early=True),
    "prefetch before": dict(early=True, prefetch=1),
    "prefetch at end": dict(early=True, prefetch=2),
    "prefetch at end, 1024": dict(early=True, prefetch=2, prefetched=1024),
    "first": dict(order="first"),
    "first early": dict(order="first", early=True),
    "shrink forked": dict(order="shrink", early=True),
    "shrink forked, plain": dict(order="shrink", overlaps_side=False, early=True),
    "both forked": dict(order="both", early=True),
    "both forked, plain": dict(order="both", overlaps_side=False, early=True),
    "both forked, high": dict(order="both", early=True, priority=-1),
    "both forked, 2 stages": dict(order="both", early=True, stages=2),
    "both forked, prefetch": dict(order="both", early=True, prefetch=2),
    "both forked, 264": dict(order="both", early=True, shares=264),
    "both forked, 132": dict(order="both", early=True, shares=132),
    "shrink forked, 264": dict(order="shrink", early=True, shares=264),
    "264": dict(early=True, shares=264),
}


def say(**found: object) -> None:
    print(json.dumps({"at_s": round(time.perf_counter() - BEGAN_S, 1), **found}), flush=True)


def set_way(way: dict[str, object]) -> int:
    chosen = {**DEFAULT, **way}
    shares = chosen.pop("shares")
    for name, value in chosen.items():
        setattr(WAY, name, value)
    return shares


def compile_ways(own: int) -> None:
    """Compile the kernels of some of the ways into Triton's cache."""
    from bench.llama7b import SHAPE
    from bench.lora.steps import CONFIG
    from hearth.engine.assemble import own_limits
    from hearth.engine.dry_run import KernelNeeds, dry_runner
    from hearth.engine.step_shape import StepShape
    from hearth.kernels.variants import TargetDriver

    TargetDriver(90).activate()
    limits = own_limits(CONFIG, SHAPE.arch, torch.bfloat16, torch.device("cpu"))
    needs = KernelNeeds.of(SHAPE.arch, "bfloat16", "none", limits, 132, 90)
    runner = dry_runner(needs)
    done = set()
    for index, way in enumerate([{}, *WAYS.values()]):
        text = repr({**way, "shares": 0, "priority": 0})
        if text not in done and len(done) % NUM_COMPILERS == own:
            set_way(way)
            for num_rows in (32, 64):
                runner.run_padding(StepShape.decode(num_rows, has_adapters=bool(index)))
        done.add(text)


def choose(engine, way: dict[str, object]) -> None:
    shares = set_way(way)
    sizes.adapter_shares.__defaults__ = (shares,)
    adapter_rows.cut_adapter_shares.__defaults__ = (shares,)
    sizes.PackedAdapters.of.cache_clear()
    engine.runner.allow_adapters().forget()
    engine.runner.graphs.forget()


def logits_of(engine, given, is_eager: bool) -> torch.Tensor:
    runner, (first, plan) = engine.runner, given
    runner.launch(first).wait()
    shape = runner.sizes.shape_of(plan)
    with torch.inference_mode():
        runner.launch(plan).wait()
        runner.allow_adapters().fill(plan, shape, runner._adapters)
        (runner._run_eagerly if is_eager else runner._run)(shape, plan)
        torch.cuda.synchronize()
        return runner.decoder.logits[: plan.num_rows].clone()


def edges_of(engine) -> dict[str, int]:
    driver = CudaGraphs(CudaDriver(0))
    found: dict[str, int] = {}
    for key, graph in engine.runner.graphs.captured.items():
        if not key.has_adapters:
            continue
        _, targets, data = driver.edges(graph.raw_cuda_graph())
        for one in data:
            name = f"type {one['type']} port {one['from_port']}"
            found[name] = found.get(name, 0) + 1
        found["joins"] = len(targets) - len(set(targets.tolist()))
    return found


def timeline(engine, given, name: str) -> None:
    """Say what runs when in the fourth layer or so."""
    runner, (first, plan) = engine.runner, given
    runner.launch(first).wait()
    runner.launch(plan).wait()
    shape = runner.sizes.shape_of(plan)
    with torch.inference_mode():
        runner._run(shape, plan)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(2):
                runner._run(shape, plan)
            torch.cuda.synchronize()
    path = "/tmp/lora_trace.json"
    profile.export_chrome_trace(path)
    events = [e for e in json.load(open(path))["traceEvents"] if e.get("cat") == "kernel"]
    events.sort(key=lambda e: e["ts"])
    norms = [i for i, e in enumerate(events) if "add_norm" in e["name"]]
    middle = norms[len(norms) // 2 // 2 * 2]
    begin = events[middle]["ts"]
    for e in events[middle : middle + 22]:
        args = e["args"]
        say(
            timeline=name,
            kernel=e["name"][:60],
            at_us=round(e["ts"] - begin, 1),
            us=round(e["dur"], 1),
            stream=args.get("stream"),
            grid=args.get("grid"),
            block=args.get("block"),
            registers=args.get("registers per thread"),
            shared=args.get("shared memory"),
        )


def guarded(what: str, work) -> object:
    try:
        return work()
    except Exception as error:
        say(failed=what, error=repr(error)[:400], where=traceback.format_exc()[-600:])
        return None


def main() -> None:
    compilers = [
        subprocess.Popen([sys.executable, "-m", "bench.lora.ways", str(own)]) for own in range(NUM_COMPILERS)
    ]
    engine = new_engine(NUM_LAYERS)
    say(engine="there")
    for one in compilers:
        one.wait(60)
    say(compiled=[one.returncode for one in compilers])
    bare = {batch: plans(batch, [], [None] * batch) for batch in (32, 64)}
    say(bare={batch: device_ms(engine, bare[batch]) for batch in (32, 64)})
    for ranks in ("mixed", "8"):
        adapters = AdapterSet.add_to(engine, ranks, 64)
        given = {batch: plans(batch, [], adapters.ids[:batch]) for batch in (32, 64)}
        expected = None
        bound = {b: 1e3 * sum(adapters.num_bytes[:b]) / 4.2e12 for b in (32, 64)}
        say(ranks=ranks, bound_ms=bound)
        for name, way in WAYS.items():
            if time.perf_counter() - BEGAN_S > LIMIT_S:
                continue

            def measure() -> None:
                nonlocal expected
                choose(engine, way)
                found = {}
                if ranks == "mixed":
                    eager, captured = (logits_of(engine, given[32], one) for one in (True, False))
                    expected = eager if expected is None else expected
                    scale = expected.float().std()
                    found["equals_eager"] = torch.equal(eager, captured)
                    found["off"] = ((captured - expected).abs().max() / scale).item()
                for batch in (32, 64):
                    own, none = device_ms(engine, given[batch]), device_ms(engine, bare[batch])
                    found[f"{batch}"] = {"over_ms": round(own - none, 4), "bare_ms": round(none, 4)}
                    if ranks == "mixed" and batch == 32:
                        floor = device_ms(engine, bare[batch], is_parked=True)
                        found["floor_ms"] = round(floor - none, 4)
                    engine.runner.allow_adapters().forget()
                say(way=name, ranks=ranks, **found)
                if ranks == "mixed" and name in ("now", "shrink forked", "both forked"):
                    guarded("edges", lambda: say(way=name, edges=edges_of(engine)))

            guarded(name, measure)
        for name in ("now", "shrink forked", "both forked") if ranks == "mixed" else ("both forked",):
            if time.perf_counter() - BEGAN_S < LIMIT_S + 10:

                def show() -> None:
                    choose(engine, WAYS[name])
                    timeline(engine, given[32], f"{name}, ranks {ranks}")

                guarded(f"timeline {name}", show)
        adapters.remove_from(engine)
    say(done=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        compile_ways(int(sys.argv[1]))
    else:
        main()

"""Is an engine faster by the best kernels of cuBLASLt? Traffic in one process, with and without them.

python -m bench.engine.product_trial [--seconds 55]
"""

from __future__ import annotations

import hearth  # noqa: F401 - before torch, so that threads wait as a worker's do

# isort: split

import json
import time
from argparse import ArgumentParser
from collections.abc import Callable
from statistics import median

import torch

import hearth.models.decoder as decoder
from bench.engine import first_token, step_budget
from bench.engine.decode_kernels import LLAMA_7B, LLAMA_8B, say
from bench.engine.lt_products import Algorithm, LtLibrary, LtProduct
from bench.engine.product_choices import Choice, Operands, _warm, choose, products_of
from bench.engine.rig import Rig, opened
from bench.engine.scale import GPU
from hearth.engine.capture_ahead import capture_sizes

PLAIN, PLAIN_ADD = decoder.linear, decoder.add_linear
SIZES = [256, 2048, 7168, 128, 64, 8192, 48, 480, 576, 512, 96, 80, 352, 208]
Table = dict[tuple[int, int, int, bool], Algorithm]


def chosen(library: LtLibrary, shape, sizes: list[int], until_s: float) -> Table:
    each = {name: Operands.of(n, k, 8192, adds=adds) for name, (n, k, adds) in products_of(shape).items()}
    _warm(each)
    table, ordered = Table(), sorted(sizes)
    for rows in sizes:
        if time.monotonic() > until_s:
            say(part="choices", shape=shape.name, rows=rows, skipped="no time left")
            continue
        at = ordered.index(rows)
        near = [one for one in ordered[max(0, at - 2) : at + 3] if one != rows]
        found: dict[str, Choice] = {}
        for name, (n, k, adds) in products_of(shape).items():
            try:
                found[name] = one = choose(library, each[name], rows, near)
            except Exception as error:
                say(part="choices", shape=shape.name, rows=rows, product=name, error=repr(error))
                continue
            if one.best_us < 0.99 * one.torch_us:
                table[n, k, rows, adds] = one.best
        say(
            part="choices", shape=shape.name, rows=rows, torch_us=sum(one.torch_us for one in found.values()),
            best_us=sum(min(one.best_us, one.torch_us) for one in found.values()),
            by_product={
                name: [round(one.torch_us, 1), round(one.first_us, 1), round(one.best_us, 1), one.num_tried,
                       one.proposed_at, round(one.error, 3)]
                for name, one in found.items()
            },
            kernels={name: library.described(one.best) for name, one in found.items()},
        )  # fmt: skip
    return table


def use(library: LtLibrary, table: Table) -> None:
    known: dict[tuple[int, int, int, bool], LtProduct] = {}

    def by_table(x, weight, out, adds: bool) -> bool:
        key = (*weight.shape, x.shape[0], adds)
        if (algorithm := table.get(key)) is None:
            return False
        if key not in known:
            known[key] = LtProduct(library, *weight.shape, x.shape[0], adds=adds)
        known[key].launcher(algorithm, weight, x, out)()
        return True

    def linear(x, weight, bias, *, out) -> None:
        if bias is not None or not by_table(x, weight, out, adds=False):
            PLAIN(x, weight, bias, out=out)

    def add_linear(x, weight, *, out) -> bool:
        return by_table(x, weight, out, adds=True) or PLAIN_ADD(x, weight, out=out)

    decoder.linear, decoder.add_linear = linear, add_linear


def do_not_use() -> None:
    decoder.linear, decoder.add_linear = PLAIN, PLAIN_ADD


def recaptured(rig: Rig) -> None:
    torch.cuda.synchronize()
    began_s = time.monotonic()
    rig.engine.runner.graphs.forget()
    capture_sizes(rig.engine.runner)
    say(part="trial", captured_s=time.monotonic() - began_s)


def measured(rig: Rig, which: str, names: list[str]) -> None:
    for name in names:
        one = rig.run(GPU.traffic[name])
        say(part="trial", which=which, work=name, seconds=one.seconds, tokens_per_s=one.tokens_per_s)
    for length in (128, 2048):
        times = rig.first_tokens_ms(length, 15)
        say(part="trial", which=which, prompt=length, ms=median(times), least=min(times))


def guarded(what: Callable[[], object]) -> None:
    try:
        what()
    except Exception as error:
        say(part="trial", error=repr(error)[:500])


def trace(rig: Rig) -> None:
    marks = first_token.watch(rig)
    for length in (128, 2048):
        runs = [first_token.ask(rig, marks, prompt) for prompt in rig.prompts.take(14, length)][2:]
        told = [
            {name: round(median(run[at][name] for run in runs), 3) for name in runs[0][at]} for at in (0, 1)
        ]
        print(
            json.dumps({"part": "first token", "prompt": length, "host": told[0], "device": told[1]}),
            flush=True,
        )


def budget(rig: Rig) -> None:
    """Where does the time of steps go, when the device has been busy for a while?"""
    runner = rig.engine.runner
    runner.kv.normal_()
    for case in step_budget.CASES[:2]:
        first, plan = case.plans()
        runner.launch(first).wait()
        began_s, num_steps = time.monotonic(), 60
        step_budget._run(runner, plan, num_steps)
        say(part="trial", case=case.name, step_ms=1e3 * (time.monotonic() - began_s) / num_steps)
        spans = step_budget.traced(lambda plan=plan: step_budget._run(runner, plan, 4))
        rows = plan.num_tokens + runner.num_padded_tokens(plan)
        step_budget.report(case.name, spans, 4, step_budget.allowed(case, rows))


def main() -> None:
    parser = ArgumentParser("python -m bench.engine.product_trial")
    parser.add_argument("--seconds", type=float, default=45.0)
    given = parser.parse_args()
    began_s = time.monotonic()
    library = LtLibrary()
    table = chosen(library, LLAMA_7B, SIZES, began_s + 11)
    torch.cuda.empty_cache()
    say(part="trial", table=len(table), at_s=time.monotonic() - began_s)
    with opened(GPU.shapes["7B"], GPU, torch.device("cuda", 0)) as rig:
        say(part="trial", opened_at_s=time.monotonic() - began_s)
        measured(rig, "warm up", [])
        measured(rig, "plain", ["even"])
        use(library, table)
        recaptured(rig)
        guarded(lambda: measured(rig, "table", ["even"]))
        do_not_use()
        recaptured(rig)
        measured(rig, "plain", ["even"])
        guarded(lambda: trace(rig))
        guarded(lambda: budget(rig))
        say(part="trial", at_s=time.monotonic() - began_s)
    torch.cuda.empty_cache()
    chosen(library, LLAMA_8B, SIZES[:8], began_s + given.seconds)
    say(part="trial", at_s=time.monotonic() - began_s)


if __name__ == "__main__":
    main()

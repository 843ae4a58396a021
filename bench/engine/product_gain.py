"""What does an engine gain by the kernels that are chosen for its products, and are these right?

    python -m bench.engine.product_gain [--only exact,gain,scratch] [--shape 7B]

exact     products by every kernel that may be chosen, beside torch's in single precision; each twice, the
          first of each size also by a graph: the bits must be the same
gain      traffic with torch's kernels, with chosen ones, and with torch's again, in one process
scratch   what kernels with scratch memory would give on top, which are never chosen

Random weights on a CUDA device. Prints a JSON line for each finding; a part that fails costs no other.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch

from bench.engine import lt_products, product_choices
from bench.engine.decode_kernels import LLAMA_7B, LLAMA_8B, run, say
from bench.engine.kernels import BF16
from bench.engine.lt_products import LtLibrary
from bench.engine.product_choices import ADDED, LIMITS
from bench.engine.product_sizes import Product, products_of
from bench.engine.rig import Rig, opened
from bench.engine.scale import GPU
from hearth.engine.capture_ahead import capture_sizes
from hearth.engine.product_choice import (
    NUM_FINAL_ROUNDS,
    AskedProduct,
    Way,
    candidates,
    choose,
    choose_all,
    cuda_times_us,
)
from hearth.engine.runner import Runner
from hearth.engine.step_shape import PaddedSizes
from hearth.kernels.cublas_lt import ChosenProducts, loaded_library, size_of
from hearth.kernels.product_table import ProductSize, ProductTable

SHAPES = {shape.name: shape for shape in (LLAMA_7B, LLAMA_8B)}
#: Rows of products that are checked: few, odd ones, and those of the largest steps.
EXACT_ROWS = (2, 8, 64, 77, 208, 256, 2048, 8192)
SCRATCH_ROWS = (64, 208, 256, 2048, 8192)
#: Work that should gain, and the rows that nearly all of its steps are padded to (`bench/engine/padding.py`).
WORKS = ("even", "long_prompts")
TUNED_ROWS = (8, 16, 24, 32, 48, 64, 80, 128, 144, 192, 256, 640, 2048, 6656, 7168, 8192)
PROMPTS, NUM_PROMPTS = (128, 2048), 12


def exact(name: str) -> None:
    """Compare all kernels with torch in float32, and their bits with those of a second run and a graph."""
    torch.mm(torch.ones(16, 16, **BF16), torch.ones(16, 16, **BF16))
    began_s = time.monotonic()
    library, num_kernels, num_wrong, worst = loaded_library(), 0, list[str](), 0.0
    say(part="exact", version=library.version, opened_ms=1e3 * (time.monotonic() - began_s))
    num_refused = 0
    products = {**products_of(SHAPES[name]), "head": (SHAPES[name].vocab, SHAPES[name].hidden)}
    for product, (n, k) in products.items():
        weight = torch.empty(n, k, **BF16).normal_(std=0.02)
        for rows in EXACT_ROWS:
            if product == "head" and rows > 1024:
                continue
            x, adds = torch.randn(rows, k, **BF16), product in ADDED
            begin = torch.randn(rows, n, **BF16) if adds else torch.zeros(rows, n, **BF16)
            expected = torch.mm(x.float(), weight.float().t()) + begin.float()
            size = size_of(x, weight, adds=adds)
            for number, word in enumerate(candidates(library, size)):
                launch, num_kernels = library.launcher(size, word), num_kernels + 1
                if launch(x, weight, begin.clone()):
                    num_refused += 1
                    continue
                num_runs = 2 if number else 3  # a capture takes torch long
                results = [_result(launch, x, weight, begin, is_captured=at == 2) for at in range(num_runs)]
                error = float((results[0].float() - expected).abs().max() / expected.abs().max())
                worst = max(worst, error)
                is_same = all(torch.equal(results[0], one) for one in results[1:])
                if error > 2.0**-7 or not is_same:
                    num_wrong.append(f"{product} {rows} #{number}: {error:.5f} same={is_same}")
            del expected
    say(part="exact", refused=num_refused, kernels=num_kernels, worst=worst, wrong=num_wrong[:20])


def _result(
    launch: Callable[..., int],
    x: torch.Tensor,
    weight: torch.Tensor,
    begin: torch.Tensor,
    *,
    is_captured: bool,
) -> torch.Tensor:
    out = begin.clone()
    if not is_captured:
        assert launch(x, weight, out) == 0
        return out
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert launch(x, weight, out) == 0
    graph.replay()
    return out


def gain(name: str) -> None:
    """Run the same work with torch's kernels, chosen ones, and torch's again."""
    with opened(GPU.shapes[name], GPU, torch.device("cuda", 0)) as rig:
        rig.run(GPU.traffic["even"])
        _ask(rig, "torch", WORKS)
        runner = rig.engine.runner
        chosen = tuned(runner)
        rig.engine.flush()
        rig.engine.use_products(chosen)
        capture_sizes(runner)
        _ask(rig, "chosen", WORKS)
        rig.engine.flush()
        runner.decoder.products = None
        if runner.graphs is not None:
            runner.graphs.forget()
        capture_sizes(runner)
        _ask(rig, "torch again", WORKS[:1])


def _ask(rig: Rig, which: str, works: Sequence[str]) -> None:
    for length in PROMPTS:
        times = rig.first_tokens_ms(length, NUM_PROMPTS)
        say(part="gain", which=which, prompt=length, ms=median(times), least=min(times))
    for work in works:
        found = rig.run(GPU.traffic[work])
        say(part="gain", which=which, work=work, seconds=found.seconds, tokens_per_s=found.tokens_per_s)


def tuned(runner: Runner) -> ChosenProducts:
    """Choose kernels for the rows that matter, by the code that a worker runs; tell each gain."""
    all_sizes, exact_us = runner.sizes, list[float]()
    runner.sizes = PaddedSizes(tuple(size for size in TUNED_ROWS if size <= 256), TUNED_ROWS, (1,))

    def times_us(ways: Sequence[Way], num_rounds: int) -> list[float]:
        found = cuda_times_us(ways, num_rounds)
        if num_rounds == NUM_FINAL_ROUNDS:
            exact_us[:] = found
        return found

    def told(asked: AskedProduct) -> bytes | None:
        exact_us.clear()
        began_s, library = time.monotonic(), loaded_library()
        proposed = candidates(library, asked.size)
        found = choose(asked, library, times_us)
        us = [round(one, 1) for one in exact_us]
        size, rank = asked.size, None if found is None else proposed.index(found)
        where = [size.rows, size.outputs, size.inputs, size.adds]
        seconds = round(time.monotonic() - began_s, 3)
        say(part="tuned", size=where, us=us, rank=rank, of=len(proposed), seconds=seconds)
        return found

    began_s, tuning, num_sizes = time.monotonic(), choose_all(runner, told), 0
    chosen: dict[ProductSize, bytes] = {}
    try:
        while True:
            next(tuning)
            num_sizes += 1
    except StopIteration as end:
        chosen = end.value
    runner.sizes, seconds = all_sizes, time.monotonic() - began_s
    say(part="tuned", sizes=num_sizes, chosen=len(chosen), seconds=seconds)
    table = ProductTable(torch.cuda.get_device_name(), loaded_library().version, chosen)
    return ChosenProducts(loaded_library(), table)


def scratch(name: str) -> None:
    """Choose among all kernels, and among those without scratch memory, by the same clock."""
    library, shape = LtLibrary(), SHAPES[name]
    each = {one: Product.of(n, k, LIMITS.max_batch_tokens) for one, (n, k) in products_of(shape).items()}
    for one in ADDED:
        each[one].x.mul_(1e-3)
    before = lt_products.WORKSPACE_BYTES
    for rows in SCRATCH_ROWS:
        us = {}
        for kind, most_bytes in (("any", before), ("without", 0)):
            lt_products.WORKSPACE_BYTES = most_bytes
            found = [
                product_choices.choose(library, product, rows, [], adds=one in ADDED)
                for one, product in each.items()
            ]
            us[kind] = [round(one.best_us, 1) for one in found]
            us["torch"] = [round(one.torch_us, 1) for one in found]
        say(part="scratch", rows=rows, us=us)
    lt_products.WORKSPACE_BYTES = before


PARTS = {part.__name__: part for part in (exact, gain, scratch)}


def main() -> None:
    parser = ArgumentParser("python -m bench.engine.product_gain")
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run")
    parser.add_argument("--shape", choices=SHAPES, default="7B")
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    for name in given.only.split(","):
        part = partial(PARTS[name], given.shape)
        part.__name__ = name  # type: ignore[attr-defined] # by which `run` tells of it
        run([part])


if __name__ == "__main__":
    main()

"""What does an engine gain by the kernels that are chosen for its products, and are these right?

    python -m bench.engine.product_gain [--only exact,steps,gain] [--shape 7B]

exact   products by every kernel that may be chosen, beside torch's in single precision; each twice, the first
        of each size also by a graph: the bits must be the same
steps   captured steps of few rows with torch's kernels, with those that are the fastest by themselves, and
        with what is left of these where steps have to be faster, in turns: milliseconds of each
gain    traffic with torch's kernels, with chosen ones, and with torch's again, in one process

Random weights on a CUDA device. Prints a JSON line for each finding; a part that fails costs no other.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch

from bench.engine.decode_kernels import LLAMA_7B, run, say
from bench.engine.decode_kernels import SHAPES as OTHERS
from bench.engine.kernels import BF16
from bench.engine.product_choices import ADDED
from bench.engine.product_sizes import products_of
from bench.engine.rig import Rig, opened
from bench.engine.scale import GPU
from hearth.engine.capture_ahead import capture_sizes
from hearth.engine.graph_capture import GraphCapture
from hearth.engine.graphs import Capturer
from hearth.engine.product_choice import ProductChoice, ProductChooser, StepGain, candidates, cuda_times_us
from hearth.engine.runner import Runner
from hearth.engine.step_shape import PaddedSizes, StepShape
from hearth.kernels.cublas_lt import ChosenProducts, ProductKernels, loaded_library, size_of
from hearth.kernels.product_table import ProductSize, ProductTable

SHAPES = {shape.name: shape for shape in (LLAMA_7B, *OTHERS) if shape.name in GPU.shapes}
#: Rows of products that are checked: few, odd ones, and those of the largest steps.
EXACT_ROWS = (2, 8, 64, 77, 208, 256, 2048, 8192)
#: Work that should gain, and the rows that nearly all of its steps are padded to (`bench/engine/padding.py`).
WORKS = ("even", "long_prompts")
TUNED_ROWS = (8, 16, 24, 32, 48, 64, 80, 128, 144, 192, 256, 640, 2048, 6656, 7168, 8192)
#: Of these, the most that a step without prompts has.
MAX_DECODE = 256
PROMPTS, NUM_PROMPTS = (128, 2048), 12
#: Rows of steps that are timed by themselves.
DECODE_STEPS, PROMPT_STEPS, NUM_STEP_ROUNDS = (16, 64, 192, 256), (128,), 15
FEW_ROWS = (16, 64, 128, 192, 256)


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


def steps(name: str) -> None:
    """Time captured steps with torch's kernels, those that are best alone, and those that are taken."""
    with opened(GPU.shapes[name], GPU, torch.device("cuda", 0)) as rig:
        runner = rig.engine.runner
        alone = chosen_of(tuned(runner, FEW_ROWS, None))
        taken = chosen_of(tuned(runner, FEW_ROWS, GraphCapture()))
        shapes = {f"decode {rows}": StepShape.decode(rows) for rows in DECODE_STEPS}
        shapes |= {f"prompt {rows}": StepShape(True, rows, 1) for rows in PROMPT_STEPS}
        for text, shape in shapes.items():
            say(part="steps", step=text, ms=_step_ms(runner, shape, (chosen_of({}), alone, taken)))


def _step_ms(runner: Runner, shape: StepShape, kernels: Sequence[ProductKernels]) -> list[float]:
    """Time steps of padding, which attend to nothing, in turns: the host is ahead of the device."""
    queue, capturer = runner.padded_layers(shape, len(runner.decoder.layers)), GraphCapture()
    graphs = [capturer.capture(partial(queue, one)) for one in kernels]
    ways = [[graph.replay] for graph in graphs]
    cuda_times_us(ways, 2)
    return [round(1e-3 * us, 4) for us in cuda_times_us(ways, NUM_STEP_ROUNDS)]


def gain(name: str) -> None:
    """Run the same work with torch's kernels, chosen ones, and torch's again."""
    with opened(GPU.shapes[name], GPU, torch.device("cuda", 0)) as rig:
        runner = rig.engine.runner
        rig.run(GPU.traffic["even"])
        _use(rig, chosen_of({}))
        _ask(rig, "torch", WORKS)
        _use(rig, chosen_of(tuned(runner, TUNED_ROWS, GraphCapture())))
        _ask(rig, "chosen", WORKS)
        _use(rig, chosen_of({}))
        _ask(rig, "torch again", WORKS[:1])


def _use(rig: Rig, products: ChosenProducts) -> None:
    rig.engine.flush()
    rig.engine.use_products(products)
    capture_sizes(rig.engine.runner)


def _ask(rig: Rig, which: str, works: Sequence[str]) -> None:
    for length in PROMPTS:
        times = rig.first_tokens_ms(length, NUM_PROMPTS)
        say(part="gain", which=which, prompt=length, ms=median(times), least=min(times))
    for work in works:
        found = rig.run(GPU.traffic[work])
        say(part="gain", which=which, work=work, seconds=found.seconds, tokens_per_s=found.tokens_per_s)


def tuned(runner: Runner, rows: Sequence[int], capturer: Capturer | None) -> dict[ProductSize, bytes]:
    """Choose kernels for the rows that matter, by the code that a worker runs; tell each choice."""
    all_sizes, began_s, num_sizes = runner.sizes, time.monotonic(), 0
    runner.sizes = PaddedSizes(tuple(size for size in rows if size <= MAX_DECODE), tuple(rows), (1,))

    def told(found: ProductChoice | StepGain) -> None:
        nonlocal num_sizes
        if isinstance(found, StepGain):
            us = [round(found.default_us, 1), round(found.chosen_us, 1)]
            sizes = [[size.outputs, size.inputs] for size in found.sizes]
            say(part="tuned", step=found.shape.num_rows, of=sizes, us=us, is_faster=found.is_faster)
            return
        num_sizes += 1
        size, words = found.size, list(found.shares)
        say(
            part="tuned",
            size=[size.rows, size.outputs, size.inputs, size.adds],
            default_us=found.default_us,
            rank=None if found.algorithm is None else words.index(found.algorithm),
            of=len(words),
            shares={words.index(word): round(share, 3) for word, share in found.final_shares.items()},
        )

    tuning = ProductChooser(runner, loaded_library(), cuda_times_us, capturer, told).choose_all()
    longest_s, chosen = 0.0, dict[ProductSize, bytes]()
    try:
        while True:
            piece_s = time.monotonic()
            next(tuning)
            longest_s = max(longest_s, time.monotonic() - piece_s)
    except StopIteration as end:
        chosen = end.value
    runner.sizes, seconds = all_sizes, time.monotonic() - began_s
    say(part="tuned", sizes=num_sizes, chosen=len(chosen), seconds=seconds, longest_piece_s=longest_s)
    return chosen


def chosen_of(algorithms: dict[ProductSize, bytes]) -> ChosenProducts:
    """Return products by some kernels, and by torch's where there is none."""
    table = ProductTable(torch.cuda.get_device_name(), loaded_library().version, algorithms)
    return ChosenProducts(loaded_library(), table)


PARTS = {part.__name__: part for part in (exact, steps, gain)}


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

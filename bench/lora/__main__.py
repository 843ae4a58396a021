"""What do adapters cost a step? A random Llama-2-7B, one adapter of all projections per request, on one GPU.

python -m bench.lora [--save] [--parts PART ...] [--layers N] [--quick]

    kernels     shrinking and expanding by projection, beside the bytes of factors and rows: of rows that have
                an adapter each, and of prompts
    steps       decode steps of 32 and 64 requests among 128 adapters, of mixed ranks and of one, over the
                bare model; its own steps while adapters are there; steps in which no row has one, which is
                the floor of the launches
    odd         steps of adapters of odd ranks, most of which change some projections alone
    prompts     steps with two prompts of 1024 tokens beside these requests, likewise
    eight_bit   steps over the model in int8 and fp8

Each answer is printed as a line of JSON as soon as it is there, and one that fails costs no other. `--quick`
has eight layers and few cases. Otherwise all parts are rehearsed with one layer before, side by side, so that
their kernels are compiled at the same time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import traceback
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import product

from bench.lora import kernels, rows, steps
from bench.lora.random_adapters import ODD
from bench.report import arguments, keep, step

PARTS = ("kernels", "steps", "odd", "prompts", "eight_bit")
#: The parts over the model as it is.
WHOLE = {"steps", "odd", "prompts"}
#: Sets of ranks.
NAMES = ("mixed", "8", "64")
#: Sets of ranks, and how many rows each adapter of a step with prompts has.
PROMPT_CASES: Sequence[tuple[str, Sequence[int]]] = [
    ("mixed", [1024] * 2 + [1] * 32),
    ("8", [1024]),
    ("16", [2048]),
    ("64", [2048]),
    ("mixed", [512] * 8),
]

Answer = dict[str, object]


def answers(given: Namespace) -> Iterator[Answer]:
    if "kernels" in given.parts:
        cases = [("mixed", 32)] if given.quick else list(product(NAMES, (32, 64)))
        for name, num_rows in cases:
            yield from _surviving(lambda name=name, rows=num_rows: kernels.measure(name, rows))
        for name, lengths in PROMPT_CASES[:1] if given.quick else PROMPT_CASES:
            yield from _surviving(lambda name=name, of=lengths: kernels.measure_prompts(name, of))
    names = NAMES[:2] if given.quick else NAMES
    if WHOLE & set(given.parts):
        yield from _surviving(lambda: _whole(given, names))
    if "eight_bit" in given.parts:
        for quant in ("int8", "fp8"):
            yield from _surviving(lambda quant=quant: _quantised(given, quant, names[:2]))


def _whole(given: Namespace, names: Sequence[str]) -> Iterator[Answer]:
    with step("engine"):
        engine = steps.new_engine(given.layers)
    if "steps" in given.parts:
        yield from _surviving(lambda: steps.measure(engine, names))
    if "odd" in given.parts:
        yield from _surviving(lambda: steps.measure(engine, [ODD]))
    if "prompts" in given.parts:
        yield from _surviving(lambda: steps.measure(engine, names[:1], num_prompts=2))


def _quantised(given: Namespace, quant: str, names: Sequence[str]) -> Iterator[Answer]:
    with step(f"engine in {quant}"):
        engine = steps.new_engine(given.layers, quant)
    for answer in steps.measure(engine, names):
        yield {**answer, "step": f"{answer['step']}, {quant}"}


def _rehearse(parts: Sequence[str]) -> None:
    """Have the kernels of all parts compiled, and kept where Triton finds them again."""
    command = [sys.executable, "-m", "bench.lora", "--quick", "--layers", "1", "--parts"]
    rehearsals = [subprocess.Popen([*command, part], stdout=subprocess.DEVNULL) for part in parts]
    for one in rehearsals:
        one.wait()  # of one that fails the part will tell


def _surviving(part: Callable[[], Iterator[Answer]]) -> Iterator[Answer]:
    try:
        yield from part()
    except Exception as error:
        traceback.print_exc()
        yield {"error": repr(error)}


def main() -> None:
    parser = arguments(__doc__)
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--layers", type=int, default=None, help="of the model; 32, or 8 of a quick run")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    given.layers = given.layers or (8 if given.quick else 32)
    if not given.quick:
        with step("rehearsals"):
            _rehearse(given.parts)
    found = []
    for answer in answers(given):
        found.append({name: round(x, 3) if isinstance(x, float) else x for name, x in answer.items()})
        print(json.dumps(found[-1]), flush=True)
    if given.save:
        lines = [asdict(row) for row in rows.of_steps(found)]
        keep("lora", {"layers": given.layers, "rows": lines, "answers": found})
    if any("error" in answer for answer in found):
        sys.exit(1)


if __name__ == "__main__":
    main()

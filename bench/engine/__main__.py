"""How close is the engine to the device's limits, and to its peers? Random models in bf16 on one GPU.

python -m bench.engine [--save] [--parts PART ...] [--shapes NAME ...] [--arms ARM ...] [--no-fill] [--tiny]

    engine      Llama-2-7B: requests of 128 + 128 tokens, a long prompt, engine start, where the time goes
    traffic     Llama-2-7B and Llama-3-8B (7B, 8B): 600 requests with ShareGPT lengths, long prompts, long
                answers, a shared prefix, all at once, and conversations that return, each the first time in a
                new process and again; one request, one prompt
    arrivals    the same shapes: Poisson arrivals at 50, 80 and 95% of the speed with which these 600 are
                served; long prompts beside requests that run
    shapes      other sizes beside their own bounds: 0.5B, 1B, 70B (4 layers), 256k (words), falcon (71 heads)
    eight_bit   Llama-3-8B in int8 and fp8 (8B-int8, 8B-fp8)
    four_bit    Llama-3-8B in bfloat16 and int4 (8B, 8B-int4)

Each answer is printed as a line of JSON as soon as it is there, and one that fails costs no other. With
`--save` each part has a result of its own, which is written anew with every answer; what is not asked stays
in it as it was. Before the traffic of a shape another process fills the cache of compiled kernels, unless
there is `--no-fill`.
"""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace, RawDescriptionHelpFormatter
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

from bench.engine import fixed
from bench.engine.finding import Finding, document, found_by
from bench.engine.process import PARTS, add_options, asked, scale_of
from bench.engine.scale import Scale
from bench.report import arguments, keep, result_path, step

#: Parts whose shapes have a process each, in which these are asked in this order: first passes come first.
IN_NEW_PROCESSES = ("traffic", "arrivals", "engine")


@dataclass(frozen=True, slots=True)
class Job:
    """The work of one process."""

    shapes: tuple[str, ...]
    parts: tuple[str, ...]


def jobs(scale: Scale, parts: list[str], shapes: list[str]) -> Iterator[Job]:
    """Yield the processes that answer what is asked for."""
    names = {
        part: [shape.name for shape in scale.shapes_by_part[part] if not shapes or shape.name in shapes]
        for part in parts
    }
    alone = [part for part in IN_NEW_PROCESSES if part in parts]
    for name in dict.fromkeys(name for part in alone for name in names[part]):
        yield Job((name,), tuple(part for part in alone if name in names[part]))
    for part in parts:
        if part not in IN_NEW_PROCESSES and names[part]:
            yield Job(tuple(names[part]), (part,))


def findings(given: Namespace, scale: Scale) -> Iterator[Finding]:
    has_start = "start" in (given.arms or ["start"]) and "7B" in (given.shapes or ["7B"])
    if "engine" in given.parts and has_start and torch.cuda.is_available() and not given.tiny:
        yield found_by("engine", "7B start", fixed.start)
    shared = [
        *(["--tiny"] if given.tiny else []),
        *(["--graphs", given.graphs] if given.graphs else []),
        *(["--arms", *given.arms] if given.arms else []),
    ]
    for job in jobs(scale, given.parts, given.shapes):
        told = ["--shapes", *job.shapes, *shared]
        if given.fill and "traffic" in job.parts:
            with step(f"filling the cache for {', '.join(job.shapes)}"):
                command = [sys.executable, "-m", "bench.engine.process", *told, "--fill"]
                subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
        yield from asked([*told, "--parts", *job.parts], job.parts[0], ", ".join(job.shapes))


def main() -> None:
    parser = arguments(__doc__)
    parser.formatter_class = RawDescriptionHelpFormatter
    add_options(parser)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--shapes", nargs="+", default=[], metavar="NAME", help="only these")
    parser.add_argument("--no-fill", dest="fill", action="store_false", help="take the cache as it is")
    given = parser.parse_args()
    scale = scale_of(is_tiny=given.tiny, graphs=given.graphs)
    unknown = [name for name in given.shapes if name not in scale.shapes]
    if unknown:
        parser.error(f"there is no shape `{unknown[0]}`; name some of: {', '.join(scale.shapes)}")
    if given.tiny and given.save:
        parser.error("numbers of a tiny run mean nothing: leave out --save")
    by_part: defaultdict[str, list[Finding]] = defaultdict(list)
    for finding in findings(given, scale):
        print(finding.brief, flush=True)
        by_part[finding.part].append(finding)
        if given.save:
            result = document(by_part[finding.part], result_path(finding.part))
            keep(finding.part, {"config": asdict(scale.engine), **result})
    if any(finding.error for found in by_part.values() for finding in found):
        sys.exit(1)


if __name__ == "__main__":
    main()

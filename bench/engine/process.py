"""A process that opens shapes one after the other, asks each some parts, and prints a line for each answer.

python -m bench.engine.process --shapes NAME ... --parts NAME ... [--arms NAME ...] [--fill] [...]

`python -m bench.engine` starts it, so that first passes are those of a new process, and that what breaks an
engine or the device costs no other answers.
"""

from __future__ import annotations

import hearth  # noqa: F401 - before torch, so that threads wait as a worker's do

# isort: split

import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from bench.engine import arrivals, fixed, shapes, traffic
from bench.engine.finding import Arm, Finding, Found, found_by
from bench.engine.rig import Rig, fill_cache, opened
from bench.engine.scale import GPU, TINY, Scale
from bench.report import tell
from bench.shape import Shape
from hearth.system.die_with_parent import die_with_parent

#: What may be asked of an open shape; how it is saved follows from the name.
PARTS: Mapping[str, Callable[[Rig], Mapping[str, Arm]]] = {
    "engine": fixed.arms,
    "traffic": traffic.arms,
    "arrivals": arrivals.arms,
    "shapes": shapes.arms,
    "eight_bit": shapes.arms,
    "four_bit": shapes.arms,
}


def findings(
    scale: Scale, device: torch.device, names: Sequence[str], parts: Sequence[str], arms: Collection[str] = ()
) -> Iterator[Finding]:
    """Open the named shapes, and ask each the named parts, or only some arms of these."""
    for name in names:
        try:
            yield from _of_one_shape(scale.shapes[name], scale, device, parts, arms)
        except Exception as error:
            yield _failed(parts[0], f"{name} opening", error)


def _of_one_shape(
    shape: Shape, scale: Scale, device: torch.device, parts: Sequence[str], arms: Collection[str]
) -> Iterator[Finding]:
    with opened(shape, scale, device) as rig:
        for part in parts:
            for arm, ask in PARTS[part](rig).items():
                if not arms or arm in arms:
                    yield found_by(part, f"{shape.name} {arm}", ask)


def _failed(part: str, name: str, error: Exception) -> Finding:
    def ask() -> Found:
        raise error

    return found_by(part, name, ask)


def fill(scale: Scale, device: torch.device, names: Sequence[str]) -> None:
    """Bring the kernels of shapes to the cache on disk."""
    for name in names:
        with opened(scale.shapes[name], scale, device) as rig:
            fill_cache(rig)


def asked(arguments: Sequence[str], part: str, name: str) -> Iterator[Finding]:
    """Start such a process and yield its findings as they come; one that dies is a finding too."""
    yield from relayed([sys.executable, "-m", "bench.engine.process", *arguments], part, name)


def relayed(command: Sequence[str], part: str, name: str) -> Iterator[Finding]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                finding = Finding.of_line(line)
            except (ValueError, TypeError):  # what a library prints is no answer
                tell(line.rstrip())
                continue
            yield finding
    if process.returncode:
        yield _failed(part, f"{name} process", RuntimeError(f"it ended with status {process.returncode}"))


def scale_of(*, is_tiny: bool, graphs: str | None) -> Scale:
    scale = TINY if is_tiny else GPU
    return scale if graphs is None else replace(scale, engine=replace(scale.engine, graphs=graphs))


def add_options(parser: ArgumentParser) -> None:
    """Add what both kinds of process are told."""
    parser.add_argument("--arms", nargs="+", default=[], metavar="ARM", help="only these questions")
    parser.add_argument("--graphs", choices=("lazy", "start", "off"), help="as in the configuration")
    parser.add_argument("--tiny", action="store_true", help="see only that everything runs, on any device")


def main() -> None:
    parser = ArgumentParser("python -m bench.engine.process")
    add_options(parser)
    parser.add_argument("--shapes", nargs="+", required=True)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[])
    parser.add_argument("--fill", action="store_true", help="only bring kernels to the cache")
    given = parser.parse_args()
    die_with_parent()
    scale = scale_of(is_tiny=given.tiny, graphs=given.graphs)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if given.fill:
        fill(scale, device, given.shapes)
        return
    for finding in findings(scale, device, given.shapes, given.parts, given.arms):
        print(finding.line, flush=True)


if __name__ == "__main__":
    main()

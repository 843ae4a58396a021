"""What does this machine take for steps, loads and switches? Writes the profile that simulations run on.

python -m bench.profile [--device cpu] [--out FILE | --save] [--shapes NAME ...] [--only PART ...] [--tiny]

Random models are made here: on a GPU with the shapes of Llama-3.2-1B, 3B and Llama-2-7B in bfloat16, on a CPU
with that of SmolLM2-135M in float32. They take 25 GB in /dev/shm and 26 GiB of pinned host memory on a GPU,
and 70 GiB of its own. The file is written anew after each part, so that a run which is cut off has not been
for nothing; it is a profile once all parts are there. `--save` writes it to where simulations find it.
"""

from __future__ import annotations

import hearth  # noqa: F401 - before torch, so that threads wait as a worker's do

# isort: split

import gc
import json
import shlex
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import msgspec
import torch
from msgspec.structs import replace as replace_struct

from bench.profile.behind import measure_behind_loads
from bench.profile.beside import measure_host_times
from bench.profile.moves import LoadLine, measure_disk, measure_mapping, measure_return, measure_worker
from bench.profile.requests import measure_request
from bench.profile.scale import CPU, GIB, GPU, TINY_CPU, TINY_GPU, Scale
from bench.profile.steps import measure_steps
from bench.report import HERE, environment, step, tell
from hearth.core.types import Rung
from hearth.sim.profile import Profile
from hearth.sim.step_times import StepTimes
from hearth.snapshot.cost_profile import VERSION, MeasuredShape, MeasuredSwitch, Origin, PartOrigin

KEPT = HERE.parent / "src" / "hearth" / "sim" / "profiles"
NUM_THREADS = 2  #: of a CPU
#: Steps that are measured again by themselves have at most so many rows that decode, and tokens of prompts or
#: of each row's context: larger ones take long.
MOST_ROWS, MOST_TOKENS = 64, 512
#: No object storage can be reached from where this runs: what a link of 10 Gbit/s delivers.
OBJECT_BYTES_PER_S = 1.25e9
OBJECT_REASON = "no object storage is reached by the benchmark: a link of 10 Gbit/s"


@dataclass(slots=True)
class Draft:
    """A profile in the making. Mutable; written part by part, to the file too."""

    path: Path
    parts: dict[str, object]
    later: PartOrigin | None = None  #: of what is added to a profile that was read; None: it is a new one

    def add(self, **parts: object) -> None:
        self.parts.update(parts)
        if self.later is not None:
            origin = msgspec.convert(self.parts["origin"], type=Origin)
            self.parts["origin"] = replace_struct(
                origin,
                assumed={name: why for name, why in origin.assumed.items() if name not in parts},
                later={**origin.later, **dict.fromkeys(parts, self.later)},
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = msgspec.json.format(msgspec.json.encode(self.parts), indent=1).decode()
        self.path.write_text(text + "\n", encoding="utf-8")
        tell(f"wrote {', '.join(parts)} to {self.path}")


def measure(scale: Scale, device: torch.device, draft: Draft) -> None:
    """Measure all parts, the cheapest first."""
    with step("mapping"):
        draft.add(mapping=measure_mapping(device))
    with step("disk"):
        rates = {Rung.DISK: measure_disk(scale, device), Rung.OBJECT: OBJECT_BYTES_PER_S}
        draft.add(bytes_per_s=rates)
    shapes: list[dict[str, object]] = []
    one_row_s: dict[str, float] = {}
    for shape in scale.shapes:
        with step(f"steps of {shape.name}"):
            times = measure_steps(shape, scale, device)
        _forget(device)
        one_row_s[shape.name] = StepTimes.fitted(times.steps).step_s(1, 1, scale.switch_prompt)
        shapes.append(
            {
                "name": shape.name,
                "model": shape.model,
                "dtype": shape.dtype,
                "weights_bytes": shape.weights_bytes,
                "kv_bytes_per_token": shape.kv_bytes_per_token,
                "steps": times.steps,
                **asdict(times.graphs),
            }
        )
        draft.add(shapes=shapes)
    moves = measure_worker(scale, device)
    tell(json.dumps({"switches": moves.details, "decode_s": moves.decode_s}))
    host_step_s = median(moves.decode_s[name] - one_row_s[name] for name in one_row_s)
    draft.add(
        bytes_per_s={Rung.HOST: moves.host_bytes_per_s, **rates},
        switch=moves.switch,
        assemble_s=moves.assemble_s,
        host_step_s=max(0.0, host_step_s),
    )


def add_host_times(scale: Scale, device: torch.device, draft: Draft) -> None:
    draft.add(**asdict(measure_host_times(scale, device)))


def add_requests(scale: Scale, device: torch.device, draft: Draft) -> None:
    known = {shape.name: StepTimes.fitted(shape.steps) for shape in _measured_shapes(draft)}
    draft.add(**asdict(measure_request(scale, device, known)))


def add_returns(scale: Scale, device: torch.device, draft: Draft) -> None:
    switch = msgspec.convert(draft.parts["switch"], type=MeasuredSwitch, from_attributes=True)
    rates = msgspec.convert(draft.parts["bytes_per_s"], type=dict[Rung, float])
    shapes = scale.shapes[:2]
    host_bytes = min(scale.host_bytes, GIB + sum(2 * shape.weights_bytes for shape in shapes))
    small = replace(scale, shapes=shapes, host_bytes=host_bytes)
    draft.add(return_s=measure_return(small, device, LoadLine(switch.give_way_s, rates[Rung.HOST])))


def add_steps_behind_loads(scale: Scale, device: torch.device, draft: Draft) -> None:
    """Measure first steps behind loads; a CPU runs all steps alike, so there is nothing to measure."""
    if device.type != "cuda":
        return
    found = measure_behind_loads(scale, device)
    known = _measured_shapes(draft)
    draft.add(
        shapes=[
            replace_struct(one, behind_load_s=found[one.name]) if one.name in found else one for one in known
        ]
    )


def measure_small_steps(scale: Scale, device: torch.device, draft: Draft) -> None:
    """Measure steps of few rows and tokens in place of those that a profile has, model by model."""
    few = replace(
        scale,
        prompts=tuple(tokens for tokens in scale.prompts if tokens <= MOST_TOKENS),
        batches=tuple(rows for rows in scale.batches if rows <= MOST_ROWS),
        contexts=tuple(context for context in scale.contexts if context <= MOST_TOKENS),
    )
    known = {shape.name: shape for shape in _measured_shapes(draft)}
    for shape in scale.shapes:
        with step(f"small steps of {shape.name}"):
            found = measure_steps(shape, few, device)
        _forget(device)
        most = max(one.num_tokens for one in found.steps)
        kept = [
            one
            for one in known[shape.name].steps
            if one.num_tokens > (MOST_ROWS if one.num_tokens == one.num_rows else most)
        ]
        known[shape.name] = replace_struct(
            known[shape.name], steps=[*kept, *found.steps], **asdict(found.graphs)
        )
        draft.add(shapes=list(known.values()))


#: Measured last, and each by itself.
LAST_PARTS = {
    "beside": add_host_times,
    "behind": add_steps_behind_loads,
    "returns": add_returns,
    "requests": add_requests,
}
#: Parts that can be measured again by themselves.
PARTS = {"steps": measure_small_steps, **LAST_PARTS}


def tell_errors(profile: Profile) -> None:
    """Tell how far the fitted times are from the measured ones."""
    for measured in profile.measured.shapes:
        times = profile.shapes[measured.name].times
        errors = {}
        for one in measured.steps:
            share = times.measured_s(one) / one.seconds
            errors[one.num_tokens, one.num_rows, one.context_tokens] = share - 1
        worst = max(errors, key=lambda key: abs(errors[key]))
        mean = sum(map(abs, errors.values())) / len(errors)
        tell(f"{measured.name}: the fit is off by {mean:.1%} in the mean, {errors[worst]:+.1%} at {worst}")


def origin(command: Sequence[str], *, is_tiny: bool) -> Origin:
    found: Mapping[str, object] = environment()
    versions = {name: _text(found[name]) for name in ("python", "torch", "triton")}
    return Origin(
        command=shlex.join(["python", "-m", "bench.profile", *command]),
        commit=_text(found["commit"]),
        date=str(found["date"]),
        device=str(found["device"]),
        num_cores=int(str(found["num_cores"])),
        versions=versions,
        is_tiny=is_tiny,
        assumed={"bytes_per_s.object": OBJECT_REASON},
    )


def read_draft(path: Path, kept: Path, found: Origin) -> Draft:
    """Return a profile to measure parts of anew: that of a file, or the kept one of this device.

    Raises:
        SystemExit: there is neither, or it is of another device.
    """
    source = path if path.is_file() else kept
    if not source.is_file():
        sys.exit(f"--only measures parts of a profile, and there is none: {path} nor {kept}; leave it out")
    parts = json.loads(source.read_text(encoding="utf-8"))
    if parts["origin"]["device"] != found.device:
        sys.exit(f"{source} was measured on {parts['origin']['device']}, this is {found.device}")
    return Draft(path, parts, PartOrigin(found.command, found.commit, found.date))


def main() -> None:
    options = _options().parse_args()
    is_cuda = options.device == "cuda"
    scale = (TINY_GPU if is_cuda else TINY_CPU) if options.tiny else GPU if is_cuda else CPU
    if options.shapes:
        known = {shape.name: shape for shape in scale.shapes}
        unknown = [name for name in options.shapes if name not in known]
        if unknown:
            sys.exit(f"bench.profile knows no shape {unknown[0]}; name some of: {', '.join(known)}")
        scale = replace(scale, shapes=tuple(known[name] for name in options.shapes))
    if options.tiny and options.save:
        sys.exit("numbers of a tiny run mean nothing: leave out --save")
    name = _name_of(torch.cuda.get_device_name()) if is_cuda else f"cpu{NUM_THREADS}"
    path = KEPT / f"{name}.json" if options.save else Path(options.out or f"build/profile/{name}.json")
    tell(f"writing to {path.resolve()}")
    device = torch.device("cuda", 0) if is_cuda else torch.device("cpu")
    if not is_cuda:
        torch.set_num_threads(NUM_THREADS)
    torch.ones(1, device=device)  # brings the device up
    # Where the file goes is nothing that a time depends on.
    command = ["--device", options.device, *(["--shapes", *options.shapes] if options.shapes else [])]
    if options.only:
        found = origin([*command, "--only", *options.only], is_tiny=options.tiny)
        draft = read_draft(path, KEPT / f"{name}.json", found)
    else:
        draft = Draft(path, {"version": VERSION, "origin": origin(command, is_tiny=options.tiny)})
        measure(scale, device, draft)
    for part in options.only or LAST_PARTS:
        with step(part):
            PARTS[part](scale, device, draft)
    tell_errors(Profile.load(path))
    print(json.dumps({name: part for name, part in json.loads(path.read_text()).items() if name != "shapes"}))


def _options() -> ArgumentParser:
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser = ArgumentParser(
        "python -m bench.profile", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default, help=f"here: {default}")
    parser.add_argument("--out", metavar="FILE", help="ends in .json; build/profile/NAME.json by default")
    parser.add_argument("--save", action="store_true", help="write it to where simulations find it by name")
    parser.add_argument("--shapes", nargs="+", metavar="NAME", help="only these models")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(PARTS),
        metavar="PART",
        help=f"beside the rest, from that file or the kept one: {', '.join(PARTS)}",
    )
    parser.add_argument("--tiny", action="store_true", help="see only that everything runs")
    return parser


def _measured_shapes(draft: Draft) -> list[MeasuredShape]:
    return msgspec.convert(draft.parts["shapes"], type=list[MeasuredShape], from_attributes=True)


def _name_of(device: str) -> str:
    """Return a device's name as one says it: `h200` for NVIDIA H200."""
    return device.lower().removeprefix("nvidia ").replace(" ", "_")


def _forget(device: torch.device) -> None:
    """Give the memory of an engine that is gone back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _text(value: object) -> str | None:
    return None if value is None else str(value)


if __name__ == "__main__":
    main()

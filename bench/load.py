"""How close is loading to the limits of the media, and to the peers? A random Llama-2-7B in bf16, 13.5 GB.

python -m bench.load [--save] [--only PART ...] [--quick] [--keep]

    convert       seconds and memory of the converter, from disk to disk
    host          host tier to device; what it costs to start the tier
    first_token   a cold model to its first token, from the host tier
    disk          disk, caches dropped, to device; against raw reads and peers on the same weights
    tmpfs         files in memory to device; against peers
    quantised     int8 and fp8: host tier to device, decode at batch 1

Hearth verifies every byte it reads, the peers verify none. Contestants take turns, each round begins with
another one. The models need 27 GB of disk and 41 GB of /dev/shm; they are removed at the end.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch

from bench.load_engine import first_token, quantised
from bench.load_models import Shelf, tensor_bytes
from bench.load_peers import PeerFailed, Started, started
from bench.load_setting import QUICK, Part, Row, Scale, Setting, step
from bench.raw_readers import Caches, fastest_readers
from bench.report import HERE, arguments, emit, peers, percentiles
from hearth.store.manifest import WEIGHTS, read_manifest

SHM = Path("/dev/shm")
NUM_RAW_READERS = 1  #: the fastest run beside the contestants
#: Who is so many times slower than Hearth in the first round is not asked again.
HOPELESS = 4.0


def convert(setting: Setting) -> Part:
    with step("convert: the checkpoint"):
        setting.shelf.checkpoint_on_disk(setting.device)
        os.sync()  # else the disk is still busy with it
    with step("convert"):
        conversion = setting.shelf.convert(setting.device)
    rows = [
        Row("convert, disk to disk", "s", conversion.seconds),
        Row("peak memory of the converter", "GB", conversion.peak_bytes / 1e9),
    ]
    return Part(rows, asdict(conversion))


def host(setting: Setting) -> Part:
    directory = setting.shelf.model(setting.device)
    bound_s = setting.bound_s(read_manifest(directory).num_bytes)
    host_bytes = setting.scale.host_bytes
    with step("host: pinning"):
        began_s = time.perf_counter()
        with setting.tiers(host_bytes):
            pin_s = time.perf_counter() - began_s
    with step("host"), setting.tiers(host_bytes, is_pinned=False) as tiers:
        first = setting.open_and_load(tiers, directory)
        tiers.segment.wait_pinned()
        times = percentiles(setting.reload_s(tiers, directory))
    rows = [
        Row("host tier to device", "s", times["p50"], bound_s, "at most 1.05 times the bound"),
        Row("start of the host tier: memory pinned", "GB/s", host_bytes / pin_s / 1e9),
        Row("first load, from tmpfs, while the tier is being pinned", "s", first.seconds),
    ]
    return Part(rows, {"seconds": times, "pin_s": pin_s, "first_load": asdict(first)})


def disk(setting: Setting) -> Part:
    checkpoint = setting.shelf.checkpoint_on_disk(setting.device)
    directory = setting.shelf.model_on_disk(setting.device)
    weights, target = directory / WEIGHTS, setting.buffer.memory(0, setting.scale.pinned_bytes)
    files = [weights, *checkpoint.glob("*.safetensors")]
    caches = Caches.of(*files, is_machine_ours=setting.scale.is_machine_ours)
    with step("disk: raw readers"):
        rates = fastest_readers(weights, target, setting.scale.survey_bytes, caches)
    num_bytes = weights.stat().st_size
    fastest = list(rates)[:NUM_RAW_READERS]
    raw = {str(reader): partial(reader.read_s, weights, target, num_bytes) for reader in fastest}
    with step("disk"):
        result = contest(setting, directory, checkpoint, raw, caches.drop)
    figures = result.peer_figures(setting, "disk")
    measured = [percentiles(times)["p50"] for name, times in result.times.items() if name != "Hearth"]
    seconds = percentiles(result.times["Hearth"])["p50"]
    aim = "at most 1.05 times the best of raw readers and peers"
    row = Row("disk, caches dropped, to device", "s", seconds, min(measured), aim, figures)
    details = {
        **result.details(),
        "raw_bytes_per_s": {str(reader): rate for reader, rate in rates.items()},
        "is_every_cache_dropped": caches.is_everything_dropped,
    }
    return Part([row], details)


def tmpfs(setting: Setting) -> Part:
    checkpoint, directory = setting.shelf.checkpoint(setting.device), setting.shelf.model(setting.device)
    with step("tmpfs"):
        result = contest(setting, directory, checkpoint, {}, lambda: None)
    seconds = percentiles(result.times["Hearth"])["p50"]
    bound_s = setting.bound_s(read_manifest(directory).num_bytes)
    figures = result.peer_figures(setting, "tmpfs")
    row = Row("tmpfs to device", "s", seconds, bound_s, "faster than every peer", figures)
    return Part([row], result.details())


@dataclass(frozen=True, slots=True)
class Contest:
    """Seconds of every run, by contestant, and what became of peers that did not run."""

    times: Mapping[str, list[float]]
    errors: Mapping[str, str]
    versions: Mapping[str, str] = field(default_factory=dict)

    def peer_figures(self, setting: Setting, medium: str) -> dict[str, float]:
        """Medians; of a peer that does not run here, what was measured on such a machine before."""
        figures = {
            f"{name} {version}": percentiles(self.times[name])["p50"]
            for name, version in self.versions.items()
            if name not in self.errors
        }
        for label, by_medium in setting.earlier.items():
            if any(label.startswith(f"{name} ") for name in self.errors):
                figures[f"{label} (measured before)"] = by_medium[medium]
        return figures

    def details(self) -> dict[str, object]:
        seconds = {name: percentiles(times) for name, times in self.times.items() if times}
        return {"seconds": seconds, "runs": self.times, "peers_not_run": self.errors}


def contest(
    setting: Setting,
    directory: Path,
    checkpoint: Path,
    others: Mapping[str, Callable[[], float]],
    prepare: Callable[[], None],
) -> Contest:
    """Hearth on its model, peers on the checkpoint and `others`, each in turn; a peer that fails is out."""
    num_bytes = tensor_bytes(setting.scale.config)
    entrants: dict[str, Callable[[], float]] = {
        "Hearth": partial(_hearth_s, setting, directory, prepare),
        **{name: partial(_prepared, prepare, run) for name, run in others.items()},
        **{
            name: partial(_prepared, prepare, partial(process.load_s, checkpoint, num_bytes))
            for name, process in setting.peers.processes.items()
        },
    }
    times: dict[str, list[float]] = {name: [] for name in entrants}
    errors = dict(setting.peers.errors)
    for name in turns(list(entrants), setting.scale.num_runs):
        slowest_s = HOPELESS * min(times["Hearth"], default=math.inf)
        if name in errors or (times[name] and min(times[name]) > slowest_s):
            continue
        try:
            times[name].append(entrants[name]())
        except PeerFailed as error:
            errors[name] = str(error)
    return Contest({n: t for n, t in times.items() if n not in errors}, errors, setting.peers.versions)


def turns(names: list[str], num_rounds: int) -> Iterator[str]:
    """Every round begins with another one and every second one goes backwards: neighbours change."""
    for start in range(num_rounds):
        order = names[::-1] if start % 2 else names
        at = order.index(names[start % len(names)])
        yield from order[at:] + order[:at]


def _prepared(prepare: Callable[[], None], run: Callable[[], float]) -> float:
    prepare()
    return run()


def _hearth_s(setting: Setting, directory: Path, prepare: Callable[[], None]) -> float:
    """Through a small host tier that holds nothing yet."""
    with setting.tiers(setting.scale.ring_bytes) as tiers:
        prepare()
        return setting.open_and_load(tiers, directory).seconds


PARTS: dict[str, Callable[[Setting], Part]] = {
    "convert": convert,
    "host": host,
    "first_token": first_token,
    "disk": disk,
    "tmpfs": tmpfs,
    "quantised": quantised,
}
WITH_PEERS = {"disk", "tmpfs"}


def measure(setting: Setting, names: list[str]) -> dict[str, object]:
    with step("rate to the device"):
        bytes_per_s = setting.bytes_per_s
    rows, details = [], {}
    for name in names:
        part = PARTS[name](setting)
        rows += [asdict(row) for row in part.rows]
        details[name] = part.details
        for row in part.rows:  # so that a run that is cut off has not been for nothing
            print(json.dumps(asdict(row)), file=sys.stderr, flush=True)
        print(json.dumps({name: part.details}), file=sys.stderr, flush=True)
    return {"to_device_bytes_per_s": bytes_per_s, "rows": rows, "results": details}


@contextmanager
def shelved(scale: Scale, options: Namespace) -> Iterator[Shelf]:
    """Room for the models. What is kept is found again by the next run."""
    disk, memory = HERE.parent / "build" / "bench-load", SHM / "hearth-bench-load"
    if options.quick:
        disk, memory = (Path(tempfile.mkdtemp(dir=place)) for place in (None, SHM))
    shelf = Shelf(disk, memory, scale.config, scale.chunk_bytes)
    try:
        if not options.quick:
            _check_room(shelf)
        yield shelf
    finally:
        if not options.keep:
            shelf.clear()


def _check_room(shelf: Shelf) -> None:
    for directory, need_bytes in ((shelf.disk, 28e9), (shelf.tmpfs, 42e9)):
        directory.mkdir(parents=True, exist_ok=True)
        used_bytes = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
        free_bytes = shutil.disk_usage(directory).free + used_bytes
        if free_bytes < need_bytes:
            sys.exit(
                f"bench.load needs {need_bytes / 1e9:.0f} GB in {directory}, free: {free_bytes / 1e9:.1f}"
            )


def parser(description: str | None) -> ArgumentParser:
    parser = arguments(description)
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that everything runs")
    parser.add_argument("--keep", action="store_true", help="leave the models for the next run")
    return parser


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART")
    options = command.parse_args()
    scale = QUICK if options.quick else Scale()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    figures = {} if options.quick else peers()["load"]["peers"]  # type: ignore[index] # JSON
    with_peers = started(str(device)) if WITH_PEERS & set(options.only) else nullcontext(Started({}, {}, {}))
    with shelved(scale, options) as shelf, with_peers as running:
        setting = Setting(scale, shelf, device, running, figures)
        result = measure(setting, options.only)
    emit("load", {"is_quick": options.quick, **result}, save=options.save)


if __name__ == "__main__":
    main()

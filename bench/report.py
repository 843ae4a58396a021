"""How every benchmark reports: one JSON document with where it ran. Measures nothing."""

from __future__ import annotations

import gzip
import json
import os
import platform
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

HERE = Path(__file__).parent
_PACKAGES = ("torch", "triton", "transformers")


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table; see scripts/tables."""

    measure: str
    unit: str
    value: float
    bound: float | None = None
    aim: str | None = None
    peers: Mapping[str, float] = field(default_factory=dict)
    is_comparable: bool = True


def arguments(description: str | None) -> ArgumentParser:
    """Return a parser with the flags that all benchmarks share."""
    spec = sys.modules["__main__"].__spec__
    prog = None if spec is None else f"python -m {spec.name.removesuffix('.__main__')}"
    parser = ArgumentParser(prog, description=description)
    parser.add_argument("--save", action="store_true", help="also write the result under bench/results")
    return parser


def keep_journal(journal: Path, kept: Path) -> None:
    """Compress a journal of the brain, for tests that replay it."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(gzip.compress(journal.read_bytes(), mtime=0))


def emit(name: str, result: Mapping[str, object], *, save: bool) -> None:
    """Print the result and where it was measured; with `save` write the same to bench/results/<name>.json."""
    print(json.dumps({"name": name, "environment": environment(), **result}, indent=2))
    if save:
        keep(name, result)


def keep(name: str, result: Mapping[str, object]) -> None:
    """Write the result and where it was measured to bench/results/<name>.json."""
    text = json.dumps({"name": name, "environment": environment(), **result}, indent=2)
    path = result_path(name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(text + "\n")


def result_path(name: str) -> Path:
    return HERE / "results" / f"{name}.json"


def environment() -> dict[str, object]:
    return {
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu_name(),
        "num_cores": os.cpu_count(),
        "python": platform.python_version(),
        **{package: _version(package) for package in _PACKAGES},
    }


def tell(text: str) -> None:
    """Tell people what goes on; standard output is the result's alone."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def step(name: str) -> Iterator[None]:
    """Tell people that a step begins, and how long it took."""
    tell(f"{name} ...")
    began_s = time.perf_counter()
    yield
    tell(f"{name}: {time.perf_counter() - began_s:.1f} s")


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return percentiles, each the smallest value that so many percent do not exceed, and the extremes."""
    ranked = sorted(values)
    at = {p: ranked[max(0, -(-p * len(ranked) // 100) - 1)] for p in (50, 90, 99)}
    return {**{f"p{p}": v for p, v in at.items()}, "min": ranked[0], "max": ranked[-1], "n": len(ranked)}


def peers() -> Mapping[str, object]:
    """Return what other systems reached, as measured on the same machines."""
    figures: Mapping[str, object] = json.loads((HERE / "peers.json").read_text())
    return figures


def _commit() -> str | None:
    """Return the sources' commit; without their history, or with an older one, from a note beside them.

    Results are no sources: a benchmark that has kept one has not changed what it measures next.
    """
    note = HERE.parent / ".carry" / "COMMIT"
    carried = note.read_text().strip() if note.exists() else None
    revision = _output_of("git", "rev-parse", "--short", "HEAD")
    is_unknown_here = carried is not None and _output_of("git", "cat-file", "-t", carried) is None
    if revision is None or is_unknown_here:
        return carried
    changed = _output_of("git", "status", "--porcelain", "--", ":/", ":(top,exclude)bench/results")
    return f"{revision}-dirty" if changed else revision


def _cpu_name() -> str:
    lines = (_output_of("lscpu") or "").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("Model name:")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _output_of(*command: str) -> str | None:
    """Return what a command prints; None if there is no such command here, or it fails."""
    try:
        done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()

"""The part `pinning`: what waits on a device while host memory is registered, and for how long at most.

python -m bench.coldstart.registering NUM_BYTES KIND      prints the waits of one process, as JSON

Another process makes the memory, as the keeper does, and this one pins it, as a worker does. Meanwhile a
thread does what the start of a model does: it creates pages and maps them, allocates by torch, copies from
pinned memory and launches, again and again; before that, the same with nothing beside it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass

import msgspec
import torch

from bench.coldstart.part import Part
from bench.coldstart.setting import Setting
from bench.report import Row, step
from bench.service.process import ROOT
from hearth.memory.cuda_pages import PAGE_BYTES, CudaPages
from hearth.store.format.manifest import CHUNK_BYTES
from hearth.store.tiers.segment import Segment

AIM_WAIT_MS = 50.0
ALONE_S = 0.5
ALLOCATED_BYTES = 64 << 20
_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Waits:
    """The longest time that each thing took, in ms, and how often it was done."""

    longest_ms: dict[str, float]
    num_rounds: int
    seconds: float  #: in which they were done


@dataclass(frozen=True, slots=True)
class Registered:
    """What one process has found."""

    num_bytes: int
    pinned_bytes: int  #: in the end
    alone: Waits
    beside: Waits  #: while host memory was registered


def pinning(setting: Setting) -> Part:
    """Have a process of its own pin as much host memory as a service has, and see what waits."""
    setting.stop()  # whose worker has the memory
    num_bytes = setting.scale.pinned_bytes
    command = [sys.executable, "-m", "bench.coldstart.registering", str(num_bytes), setting.scale.kind]
    with step(f"pinning of {num_bytes} bytes"):
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, timeout=_PATIENCE_S, check=False)
    if done.returncode:
        raise RuntimeError(f"the process that pins ended with {done.returncode}")
    found = msgspec.json.decode(done.stdout.splitlines()[-1], type=Registered)
    longest_ms = max(found.beside.longest_ms.values())
    alone_ms = max(found.alone.longest_ms.values())
    measure = "longest wait of an allocation, copy or launch while host memory is registered"
    row = Row(
        measure, "ms", longest_ms, alone_ms, f"at most {AIM_WAIT_MS:g} ms; the bound: with nothing beside"
    )
    is_pinned = found.pinned_bytes == found.num_bytes or setting.scale.kind != "cuda"
    problem = None if is_pinned else f"{found.pinned_bytes} of {found.num_bytes} bytes were pinned"
    return Part([row], {**asdict(found), "meets_aim": longest_ms <= AIM_WAIT_MS}, problem)


def main() -> None:
    num_bytes, kind = int(sys.argv[1]), sys.argv[2]
    fd = _made_by_another(num_bytes)
    with ExitStack() as undo:
        segment = undo.enter_context(closing(Segment(fd, num_bytes // CHUNK_BYTES, CHUNK_BYTES)))
        acts = _cuda_acts(undo) if kind == "cuda" else {"allocate": lambda: torch.zeros(1 << 16)}
        _repeat(acts, ALONE_S, lambda: False)  # the first of each loads what it needs
        alone = _repeat(acts, ALONE_S, lambda: False)
        segment.pin_in_background()
        beside = _repeat(acts, _PATIENCE_S / 2 if kind == "cuda" else ALONE_S, lambda: segment.is_all_pinned)
        found = Registered(segment.num_bytes, segment.pinned_bytes, alone, beside)
        print(json.dumps(asdict(found)), flush=True)


def _made_by_another(num_bytes: int) -> int:
    """Return a file of memory whose pages another process has made."""
    fd = os.memfd_create("hearth-bench", os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    if (child := os.fork()) == 0:
        segment = Segment(os.dup(fd), num_bytes // CHUNK_BYTES, CHUNK_BYTES, is_new=True)
        segment.touch_in_background()
        segment.wait_pinned()
        os._exit(0)
    os.waitpid(child, 0)
    return fd


def _repeat(acts: Mapping[str, Callable[[], object]], most_s: float, is_over: Callable[[], bool]) -> Waits:
    """Do one thing after the other until it is over, or for so long."""
    longest_s, num_rounds = defaultdict[str, float](float), 0
    began_s = time.perf_counter()
    while time.perf_counter() - began_s < most_s and not is_over():
        for name, act in acts.items():
            at_s = time.perf_counter()
            act()
            longest_s[name] = max(longest_s[name], time.perf_counter() - at_s)
        num_rounds += 1
    seconds = time.perf_counter() - began_s
    return Waits({name: 1e3 * one_s for name, one_s in longest_s.items()}, num_rounds, seconds)


def _cuda_acts(undo: ExitStack) -> dict[str, Callable[[], object]]:
    """Return what is done on a device, each until it is done there."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    pages = undo.enter_context(closing(CudaPages(device, PAGE_BYTES)))
    address = pages.reserve(None)
    undo.callback(pages.free, address)
    source = torch.empty(CHUNK_BYTES, dtype=torch.uint8).pin_memory()
    target = torch.empty(CHUNK_BYTES, dtype=torch.uint8, device=device)
    small = torch.zeros(16, device=device)

    def create() -> None:
        CudaPages(device, PAGE_BYTES).close()

    def map_page() -> None:
        pages.map(address, 0)
        pages.unmap(address)

    def allocate() -> None:
        torch.empty(ALLOCATED_BYTES, dtype=torch.uint8, device=device)
        torch.cuda.empty_cache()  # so that the next one asks the driver again

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    def launch() -> None:
        small.add_(1)
        torch.cuda.synchronize()

    return {"create": create, "map": map_page, "allocate": allocate, "copy": copy, "launch": launch}


if __name__ == "__main__":
    main()

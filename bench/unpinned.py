"""How fast do bytes get to a device from host memory that another process made, and nobody has pinned here?

python -m bench.unpinned [--save] [--bytes N] [--tiny]

    pinned        all of it was registered before: the bound
    pin           each region is registered, then copied from
    found, pin    the same, with pages that threads have looked for before, for as long as a worker ends
    staged        read into a few pinned slots by so many threads in such pieces, and copied from there
    ... busy      beside a thread that computes in the interpreter
    ... pinning   beside a thread that registers the other end of the memory

Every way has a process of its own, forked before anything has touched the device. `--tiny` copies little, and
to host memory; its numbers mean nothing.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from argparse import RawDescriptionHelpFormatter
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from queue import SimpleQueue

import torch

from bench.report import Row, arguments, emit, tell
from hearth.store.format.manifest import CHUNK_BYTES
from hearth.store.tiers.pinning import cuda_registration
from hearth.store.tiers.segment import Segment
from hearth.store.transfer import staging_buffers as staging_module
from hearth.store.transfer.copies import CopyStream
from hearth.store.transfer.staging_buffers import StagingBuffers
from hearth.system.cuda.batches import ByteCopy

NUM_BYTES = 13_476_831_232  #: of a Llama-2-7B
FOUND_S = 1.4
_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Way:
    """How bytes are brought to the device. Without threads, regions are pinned."""

    num_threads: int = 0
    num_slots: int = staging_module.NUM_SLOTS
    piece_bytes: int = staging_module.PIECE_BYTES
    is_busy: bool = False
    is_pinning: bool = False
    find_s: float = 0.0
    is_pinned_before: bool = False

    def __str__(self) -> str:
        beside = [name for name, is_so in (("busy", self.is_busy), ("pinning", self.is_pinning)) if is_so]
        if not self.num_threads:
            found = ["found"] if self.find_s else []
            return ", ".join([*found, "pinned" if self.is_pinned_before else "pin", *beside])
        pieces = f"{self.piece_bytes >> 10} KiB"
        return ", ".join([f"staged by {self.num_threads}", f"{self.num_slots} slots", pieces, *beside])


WAYS = [
    Way(is_pinned_before=True),
    Way(),
    Way(find_s=FOUND_S),
    *(Way(threads) for threads in (4, 8, 12, 14, 16)),
    *(Way(14, slots) for slots in (6, 8, 12, 16, 32)),
    *(Way(14, piece_bytes=size) for size in (256 << 10, 4 << 20)),
    Way(is_busy=True),
    Way(14, is_busy=True),
    Way(14, is_pinning=True),
]


def bring_s(way: Way, segment: Segment, num_chunks: int, device: torch.device) -> float:
    """Bring all chunks of a segment to the device, and return the seconds."""
    target = torch.empty(num_chunks * segment.cell_bytes, dtype=torch.uint8, device=device)
    target[:: 1 << 20] = 0
    copies = _Copies(target, segment.cell_bytes)
    with _beside(way, segment):
        if way.num_threads:
            seconds = _staged_s(way, segment, num_chunks, copies)
        else:
            seconds = _pinned_s(way, segment, num_chunks, copies)
    for chunk in {0, num_chunks // 2, num_chunks - 1}:
        begin = chunk * segment.cell_bytes
        there = bytes(target[begin : begin + segment.cell_bytes].cpu().numpy())
        assert there == bytes(segment.memory(chunk, segment.cell_bytes)), f"{chunk=} of {way}"
    return seconds


class _Copies:
    """Copies to a device, or to host memory where there is none."""

    def __init__(self, target: torch.Tensor, chunk_bytes: int) -> None:
        self._target, self._chunk_bytes = target, chunk_bytes
        self._stream = CopyStream(target.device) if target.is_cuda else None

    def copy(self, chunk: int, data: memoryview) -> torch.cuda.Event | None:
        begin = chunk * self._chunk_bytes
        target = self._target[begin : begin + len(data)]
        source = torch.frombuffer(data, dtype=torch.uint8)
        if self._stream is None:
            target.copy_(source)
            return None
        self._stream.queue(ByteCopy(target.data_ptr(), source.data_ptr(), len(data)))
        return self._stream.record()


def _pinned_s(way: Way, segment: Segment, num_chunks: int, copies: _Copies) -> float:
    if way.find_s:
        segment.touch_in_background()
        time.sleep(way.find_s)
    if way.is_pinned_before:
        segment.pin_in_background()
        segment.wait_pinned()
    register = cuda_registration()[0] if torch.cuda.is_available() else None
    began_s, event = time.perf_counter(), None
    for chunk in range(num_chunks):
        if register is not None and not way.is_pinned_before:
            code = register(segment.address + segment.offset(chunk), segment.cell_bytes)
            assert code == 0, f"{code=}"
        event = copies.copy(chunk, segment.memory(chunk, segment.cell_bytes))
    if event is not None:
        event.synchronize()
    return time.perf_counter() - began_s


def _staged_s(way: Way, segment: Segment, num_chunks: int, copies: _Copies) -> float:
    staging_module.MAX_THREADS, staging_module.SPARE_CORES = way.num_threads, -way.num_threads
    staging_module.PIECE_BYTES = way.piece_bytes
    with closing(StagingBuffers(segment.cell_bytes, way.num_slots)) as staging:
        staging.pin()
        time.sleep(0.3)  # until it is
        copied: SimpleQueue[tuple[int, torch.cuda.Event | None] | None] = SimpleQueue()

        def give_back() -> None:
            while (one := copied.get()) is not None:
                slot, event = one
                if event is not None:
                    event.synchronize()
                staging.give_back(slot)

        giver = threading.Thread(target=give_back)
        giver.start()
        began_s, ahead, asked = time.perf_counter(), deque[int](), 0
        for chunk in range(num_chunks):
            while asked < num_chunks:
                slot = staging.take(0.0 if ahead else _PATIENCE_S)
                if slot is None:
                    break
                staging.fill(slot, segment, asked, segment.cell_bytes)
                ahead.append(slot)
                asked += 1
            slot = ahead.popleft()
            copied.put((slot, copies.copy(chunk, staging.filled(slot, segment.cell_bytes))))
        copied.put(None)
        giver.join()
        return time.perf_counter() - began_s


@contextmanager
def _beside(way: Way, segment: Segment) -> Iterator[None]:
    is_over = threading.Event()

    def compute() -> None:
        number = 0
        while not is_over.is_set():
            number = sum(range(200)) + number % 7

    def pin() -> None:
        register = cuda_registration()[0] if torch.cuda.is_available() else lambda address, num_bytes: 0
        for cell in reversed(range(segment.num_cells)):
            if is_over.is_set():
                return
            register(segment.address + segment.offset(cell), segment.cell_bytes)

    works = [work for work, is_so in ((compute, way.is_busy), (pin, way.is_pinning)) if is_so]
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def in_own_process_s(way: Way, segment: Segment, num_chunks: int) -> float | str:
    """Return the seconds that a way takes in a new process, or why it has none."""
    told, teller = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            sys.setswitchinterval(0.0005)  # as workers have it
            device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
            if device.type == "cuda":
                torch.cuda.set_device(device)
            own = Segment(os.dup(segment.fd), segment.num_cells, segment.cell_bytes)
            os.write(teller, json.dumps(bring_s(way, own, num_chunks, device)).encode())
        except BaseException as error:  # whatever it is: this must not go on as a second parent
            traceback.print_exc()
            os.write(teller, json.dumps(repr(error)[:2000]).encode())
        finally:
            os._exit(0)
    os.close(teller)
    with open(told, "rb") as answer:
        found = json.loads(answer.read() or b'"it ended without an answer"')
    os.waitpid(pid, 0)
    return float(found) if isinstance(found, float) else str(found)


def main() -> None:
    parser = arguments(__doc__)
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument("--bytes", type=int, default=NUM_BYTES, help="that are brought to the device")
    parser.add_argument("--tiny", action="store_true", help="little memory")
    flags = parser.parse_args()
    chunk_bytes = 1 << 20 if flags.tiny else CHUNK_BYTES
    num_chunks = 64 if flags.tiny else -(-flags.bytes // chunk_bytes)
    torch.set_num_threads(1)  # a pool of threads would be broken in forked processes
    with closing(Segment.create(num_chunks, chunk_bytes)) as segment:
        _fill(segment)
        found: dict[str, float | str] = {}
        for way in WAYS:
            found[str(way)] = in_own_process_s(way, segment, num_chunks)
            seconds = found[str(way)]
            rate = f"{segment.num_bytes / seconds / 1e9:.1f} GB/s" if isinstance(seconds, float) else ""
            tell(f"{way}: {seconds} {rate}")
    bound_s = found[str(WAYS[0])]
    rows = [
        Row(name, "s", seconds, bound_s if isinstance(bound_s, float) else None)
        for name, seconds in found.items()
        if isinstance(seconds, float)
    ]
    result = {"num_bytes": num_chunks * chunk_bytes, "rows": [asdict(row) for row in rows], "seconds": found}
    emit("unpinned", result, save=flags.save)


def _fill(segment: Segment) -> None:
    """Make all pages, of random bytes that repeat."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(0, 256, (segment.cell_bytes,), dtype=torch.uint8, generator=generator)

    def fill(cell: int) -> None:
        memory = torch.frombuffer(segment.memory(cell, segment.cell_bytes), dtype=torch.uint8)
        memory.copy_(data)
        memory[:8] = torch.tensor(list(cell.to_bytes(8, "little")), dtype=torch.uint8)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(fill, range(segment.num_cells)))


if __name__ == "__main__":
    main()

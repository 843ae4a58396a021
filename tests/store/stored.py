"""Small stored models, and chunk readers whose strings a test holds. Asserts nothing."""

from __future__ import annotations

import atexit
import json
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from queue import SimpleQueue

from bench.bad_server import BadServer, serve
from hearth.core.config import StoreConfig
from hearth.core.errors import ChunkMissing, StoreError
from hearth.core.types import ChunkId, Rung
from hearth.models.families import arch_from_config
from hearth.models.layout import ByteRange, layout_of
from hearth.store.format.convert import convert
from hearth.store.format.manifest import MANIFEST, WEIGHTS, Manifest, chunk_of, digest_of, read_manifest
from hearth.store.tiers.chunk_prices import ChunkPrices
from hearth.store.tiers.model import StoredModel
from hearth.store.tiers.remote import Retry
from hearth.store.tiers.segment import Segment
from hearth.store.tiers.tiers import Tiers
from hearth.store.transfer.chunk_reader import ChunkReader
from hearth.store.transfer.fetch import Fetch, Fetcher
from hearth.store.transfer.record import Delivery
from tests.models.zoo import build

CHUNK_BYTES = 4096
#: How long a test waits for another thread before it says that none will come.
PATIENCE_S = 120.0
#: Asks again at once.
QUICK = Retry(num_tries=3, first_delay_s=0.01, max_delay_s=0.02)
TINY = {"num_hidden_layers": 2, "vocab_size": 10, "hidden_size": 8, "num_attention_heads": 2}
ARCH = arch_from_config({"model_type": "llama", **TINY, "intermediate_size": 8})
WEIGHTS_BYTES = layout_of(ARCH, "float32").num_bytes


def parts_of(seed: int, num_chunks: int) -> list[bytes]:
    source = random.Random(seed)
    return [source.randbytes(CHUNK_BYTES) for _ in range(num_chunks)]


def model_of(name: str, parts: Sequence[bytes]) -> StoredModel:
    """A model that is nowhere on disk: any chunks, a layer for each."""
    chunks = tuple(chunk_of(part) for part in parts)
    ends = [sum(len(part) for part in parts[: i + 1]) for i in range(len(parts))]
    layers = tuple(ByteRange(end - len(part), end) for part, end in zip(parts, ends, strict=True))
    manifest = Manifest.of(ARCH, "float32", "none", chunks, CHUNK_BYTES, {})
    return StoredModel(
        name, replace(manifest, num_bytes=ends[-1], tensors=(), layers=layers), Path("nowhere")
    )


def write_model(directory: Path, seed: int = 0) -> bytes:
    """A converted model of random bytes, which are returned."""
    data = random.Random(seed).randbytes(WEIGHTS_BYTES)
    parts = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
    chunks = tuple(chunk_of(part) for part in parts)
    directory.mkdir(parents=True)
    (directory / WEIGHTS).write_bytes(data)
    manifest = Manifest.of(ARCH, "float32", "none", chunks, CHUNK_BYTES, {})
    (directory / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    return data


def signed(raw: Mapping[str, object]) -> str:
    """Return a manifest with these fields and the digest that belongs to them."""
    rest = {key: value for key, value in raw.items() if key != "digest"}
    canonical = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return json.dumps({**rest, "digest": digest_of(canonical.encode())})


def files_of(directory: Path, prefix: str = "/tiny") -> dict[str, bytes]:
    """What a server of this directory holds, by path."""
    return {f"{prefix}/{path.name}": path.read_bytes() for path in directory.iterdir()}


@contextmanager
def serving(directory: Path) -> Iterator[BadServer]:
    """A server of the files as they are now, at /tiny."""
    with serve(files_of(directory)) as server:
        server.socket.listen(64)  # all readers knock at once
        yield server


def flip(path: Path, offset: int) -> None:
    """One bit of one byte, in place."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


@cache
def converted(name: str, dtype: str = "float32", quant: str = "none", chunk_bytes: int = 64 << 10) -> Path:
    """A model of the zoo in Hearth's format, made once per process. Do not change it."""
    directory = Path(tempfile.mkdtemp(prefix=f"hearth-stored-{name}-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    dest = directory / name
    convert(build(name).directory, dest, dtype=dtype, quant=quant, chunk_bytes=chunk_bytes)
    return dest


class Shelf(ChunkReader):
    """Delivers from memory. Mutable: readers append to what was asked, tests say what is broken."""

    def __init__(self, *contents: Sequence[bytes], rung: Rung = Rung.DISK) -> None:
        self.parts: dict[ChunkId, bytes] = {chunk_of(part).id: part for parts in contents for part in parts}
        self.rung = rung
        self.broken: set[str] = set()  #: names of models that have no place for anything
        self.asked: list[tuple[str, int]] = []
        self.kept: list[bytes] = []

    def deliver(
        self, model: StoredModel, index: int, buffer: memoryview, is_wanted: Callable[[], bool]
    ) -> Delivery:
        self.asked.append((model.name, index))
        if model.name in self.broken:
            raise ChunkMissing(f"chunk {index} of `{model.name}` is broken")
        buffer[:] = self.parts[model.manifest.chunk_ids[index]]
        return Delivery(self.rung, len(buffer), began_s=0.0, read_s=1.0, verify_s=0.5, num_failures=0)

    def keep(self, model: StoredModel, index: int, data: memoryview) -> None:
        self.kept.append(bytes(data))


@dataclass(frozen=True, slots=True)
class Ask:
    """A reader that waits for leave to deliver."""

    model: str
    index: int
    is_wanted: Callable[[], bool]
    _reply: Future[None] = field(default_factory=Future)

    @property
    def is_answered(self) -> bool:
        return self._reply.done()

    def allow(self) -> None:
        self._reply.set_result(None)

    def refuse(self, error: StoreError) -> None:
        self._reply.set_exception(error)

    def wait(self) -> None:
        self._reply.result()


class Gated(ChunkReader):
    """A chunk reader behind a gate: each delivery waits for the test's leave, until all are let through."""

    def __init__(self, behind: ChunkReader) -> None:
        self._behind = behind
        self._arrived: SimpleQueue[Ask] = SimpleQueue()
        self._asks: list[Ask] = []
        self._is_open = False
        #: Readers arrive while the test opens the gate.
        self._lock = threading.Lock()

    def next(self) -> Ask:
        return self._arrived.get(timeout=PATIENCE_S)

    def open(self) -> None:
        """Let all pass, those that wait and those that come."""
        with self._lock:
            self._is_open = True
            for ask in self._asks:
                if not ask.is_answered:
                    ask.allow()

    def deliver(
        self, model: StoredModel, index: int, buffer: memoryview, is_wanted: Callable[[], bool]
    ) -> Delivery:
        ask = Ask(model.name, index, is_wanted)
        with self._lock:
            self._asks.append(ask)
            if self._is_open:
                ask.allow()
        self._arrived.put(ask)
        ask.wait()
        return self._behind.deliver(model, index, buffer, is_wanted)

    def keep(self, model: StoredModel, index: int, data: memoryview) -> None:
        self._behind.keep(model, index, data)


@contextmanager
def fetching(chunk_reader: ChunkReader, num_cells: int, num_readers: int = 1) -> Iterator[Fetcher]:
    """A fetcher that is closed at the end, and whose books then must balance."""
    segment = Segment.create(num_cells, CHUNK_BYTES)
    fetcher = Fetcher(segment, chunk_reader, ChunkPrices(), num_readers)
    try:
        yield fetcher
    finally:
        if isinstance(chunk_reader, Gated):
            chunk_reader.open()
        fetcher.close()
        segment.close()
    fetcher.book.check()


@contextmanager
def tiers_at(root: Path, *, num_cells: int = 64, disk_bytes: int | None = None) -> Iterator[Tiers]:
    config = StoreConfig(path=str(root), host_bytes=16 << 20, disk_bytes=disk_bytes)
    tiers = Tiers(config, config.host_bytes // num_cells)
    try:
        yield tiers
    finally:
        tiers.close()


@contextmanager
def gated_tiers(root: Path) -> Iterator[GatedTiers]:
    """Tiers whose one reader waits at a gate."""
    with tiers_at(root) as tiers:
        tiers.fetcher.close()
        gate = Gated(ChunkReader(tiers.disk, tiers.prices.of_disk_chunk))
        tiers.fetcher = Fetcher(tiers.segment, gate, tiers.prices, num_readers=1)
        try:
            yield GatedTiers(tiers, gate)
        finally:
            gate.open()


@dataclass(frozen=True, slots=True)
class GatedTiers:
    tiers: Tiers
    gate: Gated


def consume(fetch: Fetch) -> bytes:
    """All that the load delivers, each chunk given back when it was copied."""
    data = bytearray()
    for chunk in fetch:
        data += chunk.data
        fetch.release(chunk)
    return bytes(data)


def until(is_so: Callable[[], object]) -> None:
    """Wait for what a reader does after its delivery, which nothing announces."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"a reader did not do what it should within {PATIENCE_S:g} s")
        time.sleep(0.0001)


def all_chunks(model: StoredModel) -> range:
    return range(len(model.manifest.chunks))


def resident_bytes(tiers: Tiers, model: StoredModel) -> dict[Rung, int]:
    """Return how much of a model lies in host memory and on disk; a chunk in both counts in both."""
    sizes = {chunk.id: chunk.num_bytes for chunk in model.manifest.chunks}
    on_disk = sum(size for chunk_id, size in sizes.items() if tiers.disk.holds(chunk_id))
    return {Rung.HOST: tiers.host_bytes(model), Rung.DISK: on_disk}


def stored_at(directory: Path) -> StoredModel:
    return StoredModel(directory.name, read_manifest(directory), directory)

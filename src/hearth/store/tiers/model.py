"""A model or an adapter, and the places that may deliver it. Opens nothing but its description."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hearth.core.model_files import MAX_JSON_BYTES
from hearth.core.types import Digest, Rung
from hearth.store.format.manifest import StoredManifest


@dataclass(frozen=True, slots=True)
class ChunkArrival:
    """The bytes of a chunk are in the buffer; whether they are the right ones, the caller decides."""

    digest: Digest  #: of the bytes that came
    hash_s: float
    rung: Rung = Rung.OBJECT
    source: str = ""  #: the node that sent them, or the object storage of another node's URL


class RemoteFiles(Protocol):
    """A model's files outside this machine: in object storage, or on other nodes. Many threads may read."""

    @property
    def url(self) -> str: ...

    @property
    def rung(self) -> Rung: ...

    def read_file(self, name: str, max_bytes: int = MAX_JSON_BYTES) -> bytes:
        """Raises ChunkMissing, BadCheckpoint for a file of more than `max_bytes`, and Unreachable."""

    def read_chunk(
        self,
        manifest: StoredManifest,
        index: int,
        buffer: memoryview,
        is_wanted: Callable[[], bool],
        *,
        is_host_only: bool = False,
    ) -> ChunkArrival:
        """Fill the buffer, from another machine's host memory alone if `is_host_only`.

        Raises ChunkMissing, Unreachable, and LoadCancelled if `is_wanted` turns false.
        """

    def is_faster(self, index: int, bytes_per_s: float) -> bool:
        """True if a chunk is known to come faster than this from another machine's host memory."""

    def report_corrupt(self, source: str) -> None:
        """Ask a source that sent wrong bytes no more for a while."""


@dataclass(frozen=True, slots=True)
class StoredModel:
    name: str
    manifest: StoredManifest
    directory: Path  #: holds its files, and weights.bin unless it is remote
    remote: RemoteFiles | None = None
    weight: float = 1.0  #: how much a second of its start matters against other models'

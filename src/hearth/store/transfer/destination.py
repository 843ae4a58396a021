"""Where the bytes of a transfer go: pieces of device memory, and their pages as they are mapped."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch

from hearth.core.errors import LoadCancelled
from hearth.models.layout import ByteRange
from hearth.store.format.manifest import StoredManifest
from hearth.store.transfer.fetch import HostChunk
from hearth.system.cuda.batches import ByteCopy
from hearth.system.standing_threads import StandingThreads

#: Bytes mapped at a time: few at first, because the first copies wait for them, then more and more.
FIRST_BYTES, MOST_BYTES = 16 << 20, 128 << 20


@dataclass(frozen=True, slots=True)
class LoadPiece:
    """A byte range of a stored model, and the memory of that length that it is copied to."""

    part: ByteRange
    address: int
    memory: object = None  #: keeps the memory alive

    @staticmethod
    def to(part: ByteRange, destination: torch.Tensor) -> LoadPiece:
        assert destination.dtype == torch.uint8, f"{destination.dtype=}"
        assert destination.numel() == part.end - part.begin, f"a piece of {part}: {destination.numel()=}"
        return LoadPiece(part, destination.data_ptr(), destination)


def whole(manifest: StoredManifest, base: torch.Tensor) -> list[LoadPiece]:
    return [LoadPiece.to(ByteRange(0, manifest.num_bytes), base)]


class Destination:
    """The places of a transfer's bytes. Mutable: chunks are asked for in order, by one thread."""

    def __init__(
        self, manifest: StoredManifest, pieces: Sequence[LoadPiece], mapping: PageMapping | None = None
    ) -> None:
        self.manifest = manifest
        self._pieces = pieces  #: kept: their memory is written as long as this lives
        self._mapping = mapping
        self._spans = _spans_of(pieces)
        self._first = 0  #: the first span that may have bytes of the chunks to come
        self.chunks = _chunks_of(
            self._spans, manifest.chunk_bytes
        )  #: that hold bytes of the pieces, in order

    @property
    def num_bytes(self) -> int:
        return sum(span.end - span.begin for span in self._spans)

    def copies_of(self, chunks: Sequence[HostChunk]) -> list[ByteCopy]:
        copies: list[ByteCopy] = []
        spans, num_spans, at = self._spans, len(self._spans), self._first
        for chunk in chunks:
            begin = chunk.index * self.manifest.chunk_bytes
            end = begin + len(chunk.data)
            address = ctypes.addressof(ctypes.c_char.from_buffer(chunk.data)) - begin
            while at < num_spans and spans[at].end <= begin:  # a model may have hundreds of spans
                at += 1
            self._first = at
            while at < num_spans and spans[at].begin < end:
                span = spans[at]
                low, high = max(span.begin, begin), min(span.end, end)
                if low < high:
                    copies.append(ByteCopy(span.address + low - span.begin, address + low, high - low))
                at += 1
            at = self._first
        return copies

    def take_mapped(self, chunks: Sequence[HostChunk]) -> Sequence[HostChunk]:
        """Wait until the pages of the first chunk are mapped; return it and those behind it that are ready.

        Raises as `PageMapping.wait_for`.
        """
        if (mapping := self._mapping) is None:
            return chunks
        range_of = self.manifest.chunk_range
        mapping.wait_for(range_of(chunks[0].index))
        return list(takewhile(lambda chunk: mapping.is_ready(range_of(chunk.index)), chunks))


@dataclass(slots=True)
class _Span:
    begin: int
    end: int
    address: int

    def touches(self, begin: int, address: int) -> bool:
        return begin == self.end and address - self.address == self.end - self.begin


def _spans_of(pieces: Sequence[LoadPiece]) -> list[_Span]:
    spans: list[_Span] = []
    for piece in sorted(pieces, key=lambda piece: piece.part.begin):
        part, address = piece.part, piece.address
        if spans and spans[-1].touches(part.begin, address):
            spans[-1].end = part.end
        else:
            spans.append(_Span(part.begin, part.end, address))
    return spans


def _chunks_of(spans: Sequence[_Span], chunk_bytes: int) -> list[int]:
    chunks: list[int] = []
    end = 0  #: all chunks of earlier spans lie before it
    for span in spans:
        end_of_span = (span.end - 1) // chunk_bytes + 1
        if span.begin < span.end and end_of_span > end:
            chunks += range(max(span.begin // chunk_bytes, end), end_of_span)
            end = end_of_span
    return chunks


class PageMapping:
    """Device pages being mapped ahead of the copies to them. Any thread may wait for a part.

    Mapping a page takes a good part of the time in which it is filled, so it has a thread of its own.
    """

    def __init__(
        self, prepare: Callable[[ByteRange], None], parts: Sequence[ByteRange], threads: StandingThreads
    ) -> None:
        """`parts` in the order in which they are filled; `prepare` maps one and is called by one thread."""
        self._prepare, self._parts = prepare, parts
        self._end = parts[-1].end
        self._done = parts[0].begin  #: all parts up to here are mapped
        self._error: Exception | None = None
        self._is_stopped = False
        self._progress = threading.Condition()  #: guards these three
        self._errand = threads.start(self._run)

    def wait_for(self, part: ByteRange) -> None:
        """Wait until these bytes are mapped. Raises DeviceError, and LoadCancelled once stopped."""
        wanted = min(part.end, self._end)
        with self._progress:
            while self._done < wanted and self._error is None:
                self._progress.wait()
            if self._done < wanted and self._error is not None:
                raise self._error

    def is_ready(self, part: ByteRange) -> bool:
        """True if `wait_for` would return at once."""
        return self._done >= min(part.end, self._end)

    @property
    def is_done(self) -> bool:
        return self._done >= self._end

    def wait(self) -> None:
        """Wait until all is mapped. Raises as `wait_for`."""
        self.wait_for(ByteRange(0, self._end))

    def stop(self) -> None:
        """Map no more, and wait for the mapping thread."""
        with self._progress:
            self._is_stopped = True
        self._errand.join()

    def _run(self) -> None:
        num_bytes = FIRST_BYTES
        try:
            for part in self._parts:
                begin = part.begin
                while begin < part.end:
                    end = min(part.end, begin + num_bytes)
                    self._prepare(ByteRange(begin, end))
                    self._advance(end)
                    begin, num_bytes = end, min(2 * num_bytes, MOST_BYTES)
        except Exception as error:  # the thread's top: waiting threads raise it
            with self._progress:
                self._error = error
                self._progress.notify_all()

    def _advance(self, end: int) -> None:
        with self._progress:
            self._done = end
            self._progress.notify_all()
            if self._is_stopped:
                raise LoadCancelled("the load was cancelled")

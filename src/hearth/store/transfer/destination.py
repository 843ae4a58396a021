"""Which bytes of a load's chunks go to which pieces of memory. Copies nothing."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hearth.models.layout import ByteRange
from hearth.store.format.manifest import StoredManifest
from hearth.store.transfer.fetch import HostChunk
from hearth.store.transfer.record import Tally
from hearth.system.cuda.batches import ByteCopy


@dataclass(frozen=True, slots=True)
class LoadPiece:
    """A byte range of a model, and the memory of that length that it is copied to."""

    part: ByteRange
    address: int
    memory: object = None  #: whatever keeps it

    @staticmethod
    def to(part: ByteRange, destination: torch.Tensor) -> LoadPiece:
        """Return the piece that goes to memory of uint8."""
        assert destination.dtype == torch.uint8, f"{destination.dtype=}"
        assert destination.numel() == part.end - part.begin, f"a piece of {part}: {destination.numel()=}"
        return LoadPiece(part, destination.data_ptr(), destination)


class PieceCopies:
    """The copies of one load, chunk by chunk in forward order. Mutable; one thread calls it."""

    def __init__(self, manifest: StoredManifest, pieces: Sequence[LoadPiece], tally: Tally) -> None:
        """`tally` counts all chunks and bytes that copies are made of."""
        self._manifest, self._tally = manifest, tally
        self._pieces = pieces  #: kept, for their memory is written as long as this lives
        self._spans = _spans_of(pieces)
        self._first = 0  #: the span that may have bytes of the chunks to come
        #: The chunks that hold bytes of the pieces, in forward order.
        self.chunks = sorted({index for span in self._spans for index in manifest.chunks_of(span.part)})

    def of(self, chunk: HostChunk) -> list[ByteCopy]:
        """Return what of a chunk goes where."""
        num_bytes = len(chunk.data)
        begin = chunk.index * self._manifest.chunk_bytes
        end = begin + num_bytes
        self._tally.took(chunk.delivery, num_bytes, is_shared=chunk.is_shared)
        address = ctypes.addressof(ctypes.c_char.from_buffer(chunk.data)) - begin
        copies: list[ByteCopy] = []
        spans, at = self._spans, self._first
        while at < len(spans) and spans[at].end <= begin:  # a model may have hundreds, here and there
            at += 1
        self._first = at  # nobody asks for earlier ones again
        while at < len(spans) and spans[at].begin < end:
            span = spans[at]
            low, high = max(span.begin, begin), min(span.end, end)
            if low < high:
                copies.append(ByteCopy(span.address + low - span.begin, address + low, high - low))
                self._tally.num_bytes += high - low
            at += 1
        return copies


@dataclass(slots=True)
class _Span:
    """A byte range of a model, and the address that it is copied to. Mutable; written by `_spans_of`."""

    begin: int
    end: int
    address: int

    @property
    def part(self) -> ByteRange:
        return ByteRange(self.begin, self.end)

    def touches(self, begin: int, address: int) -> bool:
        """True if bytes from `begin` on that go to an address follow it, here as there."""
        return begin == self.end and address - self.address == self.end - self.begin


def _spans_of(pieces: Sequence[LoadPiece]) -> list[_Span]:
    """Return where bytes go, in order. Pieces that lie one behind the other there as here are one span."""
    spans: list[_Span] = []
    for piece in sorted(pieces, key=lambda piece: piece.part.begin):
        part, address = piece.part, piece.address
        if spans and spans[-1].touches(part.begin, address):
            spans[-1].end = part.end
        else:
            spans.append(_Span(part.begin, part.end, address))
    return spans

"""Which bytes of a load's chunks go to which pieces of memory. Copies nothing."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from hearth.cuda_batches import ByteCopy
from hearth.models.layout import ByteRange
from hearth.store.fetch import HostChunk
from hearth.store.manifest import StoredManifest
from hearth.store.record import Tally


@dataclass(frozen=True, slots=True)
class LoadPiece:
    """A byte range of a model and the uint8 memory of that length that it is copied to."""

    part: ByteRange
    destination: torch.Tensor


class PieceCopies:
    """The copies of one load, chunk by chunk in forward order. Mutable; one thread calls it."""

    def __init__(self, manifest: StoredManifest, pieces: Sequence[LoadPiece], tally: Tally) -> None:
        """`tally` counts all chunks and bytes that copies are made of."""
        for piece in pieces:
            assert piece.destination.dtype == torch.uint8, f"{piece.destination.dtype=}"
            assert len(piece.destination) == piece.part.end - piece.part.begin, f"{piece.part=}"
        self._manifest, self._tally = manifest, tally
        self._pieces = sorted(pieces, key=lambda piece: piece.part.begin)
        self._first = 0  #: the piece that may have bytes of the chunks to come
        parts = (piece.part for piece in self._pieces)
        #: The chunks that hold bytes of the pieces, in forward order.
        self.chunks = sorted({index for part in parts for index in manifest.chunks_of(part)})

    def of(self, chunk: HostChunk) -> list[ByteCopy]:
        """Return what of a chunk goes where. Pieces that lie one behind the other, there as here, are one."""
        begin = self._manifest.chunk_range(chunk.index).begin
        end = begin + len(chunk.data)
        self._tally.took(chunk.delivery, len(chunk.data), is_shared=chunk.is_shared)
        address = ctypes.addressof(ctypes.c_char.from_buffer(chunk.data)) - begin
        copies: list[ByteCopy] = []
        for piece in self._pieces_before(begin, end):
            low, high = max(piece.part.begin, begin), min(piece.part.end, end)
            if low < high:
                self._tally.num_bytes += high - low
                destination = piece.destination.data_ptr() + low - piece.part.begin
                copy = ByteCopy(destination, address + low, high - low)
                if copies and copies[-1].touches(copy):
                    copy = copies.pop().with_next(copy)
                copies.append(copy)
        return copies

    def _pieces_before(self, begin: int, end: int) -> Iterator[LoadPiece]:
        """Yield the pieces that may have bytes from `begin` to `end`; nobody asks for earlier ones again.

        A model of which pages are missing here and there has hundreds of pieces.
        """
        while self._first < len(self._pieces) and self._pieces[self._first].part.end <= begin:
            self._first += 1
        for piece in islice(self._pieces, self._first, None):
            if piece.part.begin >= end:
                return
            yield piece

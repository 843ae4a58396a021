"""The header of a GGUF file: its metadata, and where each tensor lies. Reads no tensor and knows no key.

| magic, version, counts | fields: key, kind, value | tensors: name, shape, kind, offset | padding | bytes |

The file is untrusted, so no length in it is believed: it is compared with what is left of the
header before anything is made of it, and the header itself has a limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import prod
from operator import attrgetter
from struct import Struct

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from hearth.models.layout import Shape

MAGIC = b"GGUF"
VERSIONS = (2, 3)

#: Limits of a header, each several times what the largest models have.
MAX_HEADER_BYTES = 128 << 20
MAX_FIELDS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_ITEMS = 1 << 22  #: of all arrays: tokens, merges, scores and kinds of a vocabulary
MAX_DIMS = 4  #: llama.cpp has no more

ALIGNMENT_KEY, ALIGNMENT_BYTES = "general.alignment", 32

_UINT32, _UINT64 = Struct("<I"), Struct("<Q")
_SCALARS: dict[GGUFValueType, str] = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}


class MalformedGguf(Exception):
    """The bytes are no GGUF file, or contradict themselves; the message says how."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    name: str
    kind: GGMLQuantizationType
    shape: Shape  #: in torch's order
    begin: int  #: of its bytes in the file
    end: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    metadata: dict[str, object]
    tensors: tuple[TensorEntry, ...]


def read_header(data: npt.NDArray[np.uint8]) -> GgufHeader:
    cursor = _Cursor(data)
    if cursor.take(len(MAGIC), "the magic number") != MAGIC:
        raise MalformedGguf(f"it does not begin with {MAGIC.decode()}")
    version = cursor.uint32("the version")
    if version & 0xFFFF == 0:
        raise MalformedGguf("it is big-endian; supported: little-endian, so convert it again")
    if version not in VERSIONS:
        raise MalformedGguf(f"it has version {version}, supported: {', '.join(map(str, VERSIONS))}")
    num_tensors = cursor.count("tensors", MAX_TENSORS)
    num_fields = cursor.count("fields of metadata", MAX_FIELDS)
    metadata: dict[str, object] = {}
    for _ in range(num_fields):
        key = cursor.text("a key")
        if key in metadata:
            raise MalformedGguf(f"it has the key {key!r:.80} twice")
        metadata[key] = _read_value(cursor, key)
    drafts = [_read_draft(cursor) for _ in range(num_tensors)]
    alignment_bytes = _alignment_bytes(metadata)
    first = -(-cursor.offset // alignment_bytes) * alignment_bytes
    tensors = tuple(_placed(draft, first, len(data)) for draft in drafts)
    _check_apart(tensors)
    return GgufHeader(metadata, tensors)


class _Cursor:
    """A place in the header that moves as it is read. Mutable; only `read_header` has one."""

    def __init__(self, data: npt.NDArray[np.uint8]) -> None:
        self._head = data[:MAX_HEADER_BYTES].data
        self._file_bytes = len(data)
        self._num_items = 0
        self.offset = 0

    def take(self, num_bytes: int, what: str) -> memoryview:
        begin, self.offset = self.offset, self.offset + num_bytes
        if self.offset > len(self._head):
            raise self._beyond(what)
        return self._head[begin : self.offset]

    def uint32(self, what: str) -> int:
        (number,) = _UINT32.unpack(self.take(_UINT32.size, what))
        return int(number)

    def uint64(self, what: str) -> int:
        (number,) = _UINT64.unpack(self.take(_UINT64.size, what))
        return int(number)

    def count(self, what: str, limit: int) -> int:
        number = self.uint64(f"the number of {what}")
        if number > limit:
            raise MalformedGguf(f"it has too many {what}, limit: {limit}, given: {number}")
        return number

    def text(self, what: str) -> str:
        num_bytes = self.uint64(f"the length of {what}")
        try:
            return str(self.take(num_bytes, what), "utf-8")
        except UnicodeDecodeError as error:
            raise MalformedGguf(f"{what} is not UTF-8: {error}") from error

    def texts(self, number: int, what: str) -> list[str]:
        """Return texts that stand one after the other, each behind its length.

        A vocabulary has a million of them: `text` would take four times as long.
        """
        head, end, texts = self._head, len(self._head), []
        try:
            for _ in range(number):
                begin = self.offset + _UINT64.size
                self.offset = begin + (_UINT64.unpack_from(head, self.offset)[0] if begin <= end else 0)
                if self.offset > end:
                    raise self._beyond(what)
                texts.append(str(head[begin : self.offset], "utf-8"))
        except UnicodeDecodeError as error:
            raise MalformedGguf(f"item {len(texts)} of {what} is not UTF-8: {error}") from error
        return texts

    def scalars(self, kind: GGUFValueType, number: int, what: str) -> list[object]:
        dtype = np.dtype(_SCALARS[kind])
        values: list[object] = np.frombuffer(self.take(number * dtype.itemsize, what), dtype).tolist()
        return values

    def count_items(self, what: str) -> int:
        number = self.uint64(f"the length of {what}")
        self._num_items += number
        if self._num_items > MAX_ITEMS:
            raise MalformedGguf(
                f"its arrays have too many items, limit: {MAX_ITEMS}, with {what}: {self._num_items}"
            )
        return number

    def _beyond(self, what: str) -> MalformedGguf:
        if len(self._head) < self._file_bytes:
            return MalformedGguf(f"its header goes beyond the limit of {MAX_HEADER_BYTES} bytes, in {what}")
        return MalformedGguf(f"{what} goes to byte {self.offset}, but the file ends at {self._file_bytes}")


def _read_value(cursor: _Cursor, key: str) -> object:
    what = repr(key)[:80]
    kind = _value_kind(cursor, what)
    if kind == GGUFValueType.STRING:
        return cursor.text(what)
    if kind == GGUFValueType.ARRAY:
        item_kind = _value_kind(cursor, what)
        number = cursor.count_items(what)
        if item_kind == GGUFValueType.STRING:
            return cursor.texts(number, what)
        if item_kind == GGUFValueType.ARRAY:
            raise MalformedGguf(f"{what} is an array of arrays, which llama.cpp does not read either")
        return cursor.scalars(item_kind, number, what)
    (value,) = cursor.scalars(kind, 1, what)
    if kind == GGUFValueType.FLOAT32 and isinstance(value, float):
        return float(str(np.float32(value)))  # by its shortest decimals: 1e-05, not 9.999999747378752e-06
    return value


def _value_kind(cursor: _Cursor, what: str) -> GGUFValueType:
    number = cursor.uint32(f"the kind of {what}")
    try:
        return GGUFValueType(number)
    except ValueError:
        raise MalformedGguf(f"{what} is of an unknown kind: {number}") from None


@dataclass(frozen=True, slots=True)
class _Draft:
    name: str
    shape: Shape
    kind: int
    offset: int


def _read_draft(cursor: _Cursor) -> _Draft:
    name = cursor.text("a tensor's name")
    what = f"tensor {name!r:.80}"
    num_dims = cursor.uint32(f"the dimensions of {what}")
    if not 1 <= num_dims <= MAX_DIMS:
        raise MalformedGguf(f"{what} must have 1 to {MAX_DIMS} dimensions, given: {num_dims}")
    dims = [cursor.uint64(f"a dimension of {what}") for _ in range(num_dims)]
    kind = cursor.uint32(f"the kind of {what}")
    return _Draft(name, tuple(reversed(dims)), kind, cursor.uint64(f"the offset of {what}"))


def _alignment_bytes(metadata: dict[str, object]) -> int:
    given = metadata.get(ALIGNMENT_KEY, ALIGNMENT_BYTES)
    if not isinstance(given, int) or given < 1 or given & (given - 1):
        raise MalformedGguf(f"`{ALIGNMENT_KEY}` must be a power of two, given: {given!r:.80}")
    return given


def _placed(draft: _Draft, first: int, file_bytes: int) -> TensorEntry:
    what = f"tensor {draft.name!r:.80}"
    try:
        kind = GGMLQuantizationType(draft.kind)
    except ValueError:
        raise MalformedGguf(f"{what} is of an unknown kind: {draft.kind}") from None
    if 0 in draft.shape:
        raise MalformedGguf(f"{what} has shape {list(draft.shape)}; no dimension may be 0")
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    if draft.shape[-1] % block_size:
        raise MalformedGguf(
            f"{what} has rows of {draft.shape[-1]} values; {kind.name} has blocks of {block_size}"
        )
    begin = first + draft.offset
    end = begin + prod(draft.shape) // block_size * block_bytes
    if end > file_bytes:
        raise MalformedGguf(
            f"{what} has shape {list(draft.shape)} and goes to byte {end}, but the file ends at {file_bytes}"
        )
    return TensorEntry(draft.name, kind, draft.shape, begin, end)


def _check_apart(tensors: tuple[TensorEntry, ...]) -> None:
    names: set[str] = set()
    for entry in tensors:
        if entry.name in names:
            raise MalformedGguf(f"it has the tensor {entry.name!r:.80} twice")
        names.add(entry.name)
    for before, after in pairwise(sorted(tensors, key=attrgetter("begin"))):
        if after.begin < before.end:
            raise MalformedGguf(
                f"the tensors {before.name!r:.80} and {after.name!r:.80} overlap: the first goes to byte "
                f"{before.end}, the second begins at {after.begin}"
            )

"""Tensors of a file that PyTorch wrote, a pickle. Looks at it before torch does, and has no code of it run.

torch's own `weights_only` keeps code from running, but not a pickle of a few bytes from asking for terabytes,
as by `bytearray(2**40)`, nor a compressed archive from unfolding. A checkpoint needs neither: its archive is
not compressed, so that it can be mapped, and its pickle calls what rebuilds tensors and nothing else.
"""

from __future__ import annotations

import os
import pickle
import pickletools
import re
import struct
import warnings
import zipfile
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from operator import attrgetter
from pathlib import Path

import torch

from hearth.core.errors import BadCheckpoint
from hearth.core.model_files import brief

ZIP_MAGIC = b"PK\x03\x04"

#: The largest pickle, that of ten thousand tensors: objects take up to 60 times the memory of their pickle.
MAX_PICKLE_BYTES = 2 << 20
#: The most tuples in a pickle, five for each tensor: the hash of nested ones needs the stack of the process.
MAX_TUPLES = 1 << 15
MAX_ENTRIES = 1 << 14
#: What precedes an entry's name and bytes in an archive; it ends with the lengths of the name and of padding.
_ENTRY_HEAD = struct.Struct("<4s22xHH")
#: The pickles that a file of PyTorch before 1.6 begins with: magic, version, machine, tensors, keys.
_NUM_OLD_PICKLES = 5

#: All that the pickle of a checkpoint may name: a mapping, what rebuilds plain tensors, kinds of storages.
#: None of these storages can be called here, so that the bytes of a tensor are those of the file.
_HARMLESS = re.compile(
    r"collections OrderedDict"
    r"|torch\._utils _rebuild_(tensor|tensor_v2|parameter)"
    r"|torch\.nn\.parameter Parameter"
    r"|torch (Float|Half|BFloat16|Double|Long|Int|Short|Char|Byte|Bool)Storage"
)

_UNREADABLE = (
    pickle.UnpicklingError,
    struct.error,
    OSError,
    EOFError,
    RuntimeError,
    ValueError,
    LookupError,
    AttributeError,
    TypeError,
    AssertionError,
    ArithmeticError,
    MemoryError,
    zipfile.BadZipFile,
)


@dataclass(frozen=True, slots=True)
class TorchFile:
    """A file that was looked at, and its tensors: mapped, or in memory if PyTorch before 1.6 wrote it."""

    path: Path
    is_mapped: bool
    tensors: dict[str, torch.Tensor]

    def load(self, name: str) -> torch.Tensor:
        """Return a tensor, mapped anew where that is possible: what was read leaves memory with it."""
        return (_load(self.path, is_mapped=True) if self.is_mapped else self.tensors)[name]


def open_torch_file(path: Path) -> TorchFile:
    """Read which tensors a file holds. Raises BadCheckpoint, and OSError where the disk cannot be read."""
    with path.open("rb") as file:
        head = file.read(MAX_PICKLE_BYTES + 1)
    is_archive = head.startswith(ZIP_MAGIC)
    try:
        if is_archive:
            _check_pickles(path, BytesIO(_archived_pickle(path)), num_pickles=1)
        else:
            _check_pickles(path, BytesIO(head[:MAX_PICKLE_BYTES]), num_pickles=_NUM_OLD_PICKLES)
    except _UNREADABLE as error:
        raise _unreadable(path, error) from error
    tensors = _load(path, is_mapped=is_archive)
    for name, tensor in tensors.items():
        _check_tensor(path, name, tensor)
    return TorchFile(path, is_archive, tensors)


def _archived_pickle(path: Path) -> bytes:
    with zipfile.ZipFile(path) as archive:
        entries = sorted(archive.infolist(), key=attrgetter("header_offset"))
        if len(entries) > MAX_ENTRIES:
            raise _refused(path, f"it has too many entries, limit: {MAX_ENTRIES}, given: {len(entries)}")
        for entry in entries:
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
                raise _refused(
                    path,
                    f"its entry {entry.filename!r:.80} is compressed, from {entry.file_size} bytes to "
                    f"{entry.compress_size}, which torch never does",
                )
        for before, after in pairwise(entries):
            end = before.header_offset + _ENTRY_HEAD.size + len(before.filename) + before.file_size
            if end > after.header_offset:
                raise _refused(
                    path, f"its entries {before.filename!r:.80} and {after.filename!r:.80} overlap"
                )
    pickled = [entry for entry in entries if entry.filename.lower().endswith("/data.pkl")]
    if len(pickled) != 1:
        raise _refused(path, f"it must have one entry `data.pkl`, given: {len(pickled)}")
    num_bytes = pickled[0].file_size
    if num_bytes > MAX_PICKLE_BYTES:
        raise _refused(path, f"its pickle is too large, limit: {MAX_PICKLE_BYTES}, given: {num_bytes}")
    with path.open("rb") as file:  # and not by the archive: torch can leave out its checksums
        file.seek(pickled[0].header_offset)
        _, name_bytes, padding_bytes = _ENTRY_HEAD.unpack(file.read(_ENTRY_HEAD.size))
        file.seek(name_bytes + padding_bytes, os.SEEK_CUR)
        return file.read(num_bytes)


def _check_pickles(path: Path, content: BytesIO, num_pickles: int) -> None:
    """Refuse pickles that name more than a checkpoint needs. Nothing of them is carried out."""
    num_tuples = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of names with a backslash, which are refused
        for _ in range(num_pickles):
            for operation, argument, _ in pickletools.genops(content):
                if operation.name in ("GLOBAL", "INST") and not _HARMLESS.fullmatch(str(argument)):
                    raise _refused(
                        path,
                        "it holds more than tensors, which is not read because it could run code: "
                        f"{brief(argument)}",
                    )
                num_tuples += "TUPLE" in operation.name
                if num_tuples > MAX_TUPLES:
                    raise _refused(path, f"it has too many tuples, limit: {MAX_TUPLES}")


def _load(path: Path, *, is_mapped: bool) -> dict[str, torch.Tensor]:
    try:
        content = torch.load(path, weights_only=True, map_location="cpu", mmap=is_mapped)
    except _UNREADABLE as error:
        raise _unreadable(path, error) from error
    if not isinstance(content, dict) or not all(isinstance(item, torch.Tensor) for item in content.values()):
        raise _refused(path, "it is no mapping of names to tensors")
    return content


def _check_tensor(path: Path, name: object, tensor: torch.Tensor) -> None:
    """Refuse a tensor that has more bytes than are stored: a small file would become a huge model."""
    if not isinstance(name, str) or not name.isprintable():
        raise _refused(path, f"its tensors must have texts as names, given: {brief(name)}")
    is_plain = tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
    if not is_plain:
        raise _refused(path, f"its tensor `{name:.80}` is sparse, quantised or without values")
    stored_bytes = tensor.untyped_storage().nbytes()
    if tensor.nbytes > stored_bytes:
        raise _refused(
            path,
            f"its tensor `{name:.80}` has shape {list(tensor.shape)} and {tensor.nbytes} bytes, "
            f"stored are {stored_bytes}",
        )


def _refused(path: Path, reason: str) -> BadCheckpoint:
    return BadCheckpoint(
        f"`{path}` cannot be read: {reason}; save the model as safetensors where you trust it"
    )


def _unreadable(path: Path, error: Exception) -> BadCheckpoint:
    reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.200}"
    return BadCheckpoint(f"`{path}` is truncated or no file of PyTorch: {reason}; fetch it again")

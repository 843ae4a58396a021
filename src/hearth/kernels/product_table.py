"""Which kernel of the library is the best for a product of some size. Measures and computes nothing.

A table is written once and never changed, so an engine that has found one has the same as the next that does.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass
from functools import cached_property
from pathlib import Path

#: Of the format; a table of another one is not read.
_VERSION = 1
#: Bytes by which cuBLASLt names a kernel, to be used with the same version of the library only.
ALGORITHM_BYTES = 64

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, order=True)
class ProductSize:
    """The size of a product of `rows` rows of `inputs` numbers with a matrix [outputs, inputs]."""

    rows: int
    outputs: int
    inputs: int
    dtype: str  #: of all factors and of the result
    adds: bool  #: the product is added to what is there


@dataclass(frozen=True)
class ProductTable:
    """The kernels for the sizes of one model; for a size that is not in it the library's first is."""

    device: str  #: its name
    library: str  #: its version
    algorithms: Mapping[ProductSize, bytes]

    @cached_property
    def digest(self) -> str:
        """A name for the table, which no other one has."""
        return hashlib.blake2b(self._packed(), digest_size=16).hexdigest()

    def save(self, path: Path) -> None:
        """Write the table, of which others find all or nothing. One that is there already stays.

        Raises OSError.
        """
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            with temporary.open("xb") as file:
                file.write(self.digest.encode() + b"\n" + self._packed())
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileExistsError):  # another process was quicker
                os.link(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    @staticmethod
    def find(path: Path, device: str, library: str) -> ProductTable | None:
        """Return the table that is kept at a path; None: there is none for this device and library.

        One that is not as it was written is told of and removed.
        """
        try:
            digest, _, packed = path.read_bytes().partition(b"\n")
            table = ProductTable._unpacked(packed)
            if table.digest.encode() != digest:
                raise ValueError("it is not as it was written")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("product_table_broken path=%s reason=%r", path, error)
            with suppress(OSError):
                path.unlink()
            return None
        if (table.device, table.library) != (device, library):
            return None
        with suppress(OSError):  # what nobody uses is removed some day
            os.utime(path)
        return table

    def _packed(self) -> bytes:
        rows = [[*astuple(size), self.algorithms[size].hex()] for size in sorted(self.algorithms)]
        told = {"version": _VERSION, "device": self.device, "library": self.library, "algorithms": rows}
        return json.dumps(told, sort_keys=True).encode()

    @staticmethod
    def _unpacked(packed: bytes) -> ProductTable:
        """Raises ValueError, KeyError and TypeError: it is no table, or one of another format."""
        told = json.loads(packed)
        if told["version"] != _VERSION:
            raise ValueError(f"version {told['version']} of the format, known: {_VERSION}")
        algorithms = {ProductSize(*size): bytes.fromhex(word) for *size, word in told["algorithms"]}
        if any(len(algorithm) != ALGORITHM_BYTES for algorithm in algorithms.values()):
            raise ValueError(f"an algorithm has not {ALGORITHM_BYTES} bytes")
        return ProductTable(told["device"], told["library"], algorithms)

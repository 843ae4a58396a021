"""A Hugging Face directory as a source: its config, its tensors, its tokenizer's files. Converts nothing.

Weights are mapped, not read, and a tensor maps its file anew: what was read leaves memory with the tensor.
Only files that PyTorch wrote before 1.6 cannot be mapped: they are in memory while the source is open.
"""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from hearth.errors import BadCheckpoint, BadTokenizer
from hearth.models.families import read_arch
from hearth.models.layout import Shape
from hearth.models.pack import Checkpoint
from hearth.store.source import ModelSource

SAFETENSORS = "model.safetensors"
PICKLE = "pytorch_model.bin"

#: How a file begins that torch can map.
ZIP_MAGIC = b"PK\x03\x04"

#: safetensors' names of the dtypes that can be read, and torch's.
STORED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

#: What torch raises for a file that ends early or holds something else.
_UNREADABLE = (
    *(pickle.UnpicklingError, struct.error, OSError, EOFError, RuntimeError, ValueError),
    *(LookupError, AttributeError, TypeError, AssertionError),
)

#: Files that are taken over as they are; what else the tokenizer reads is `generation_config.json`.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@contextmanager
def open_directory(directory: Path) -> Iterator[ModelSource]:
    yield ModelSource(read_arch(directory), read_checkpoint(directory), lambda: _text_files(directory))


def read_checkpoint(directory: Path) -> Checkpoint:
    """Read the headers of safetensors files or, where there are none, of PyTorch's."""
    for whole, read_headers in ((SAFETENSORS, _safetensors), (PICKLE, _pickled)):
        index = directory / f"{whole}.index.json"
        if (directory / whole).is_file():
            return read_headers(directory / whole)
        if index.is_file():
            shards = [read_headers(path) for path in _shard_paths(index)]
            return {name: stored for shard in shards for name, stored in shard.items()}
    with _naming(directory):
        present = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    raise BadCheckpoint(
        f"neither {SAFETENSORS} nor {PICKLE}, nor an index of their parts, in `{directory}`, "
        f"which holds: {', '.join(present) or 'nothing'}; fetch the weights or save the model as safetensors"
    )


@dataclass(frozen=True, slots=True)
class _HfTensor:
    """A tensor in a safetensors or PyTorch file."""

    name: str
    path: Path
    dtype: str
    shape: Shape
    load: Callable[[Path, str], torch.Tensor]

    def read(self) -> torch.Tensor:
        return self.load(self.path, self.name)


def _safetensors(path: Path) -> dict[str, _HfTensor]:
    stored = {}
    with _open_safetensors(path) as file:
        for name in file.keys():  # type: ignore[no-untyped-call] # noqa: SIM118 - an untyped library's
            header = file.get_slice(name)  # type: ignore[no-untyped-call] # untyped library
            dtype, shape = header.get_dtype(), tuple(header.get_shape())
            stored[name] = _HfTensor(name, path, STORED.get(dtype, dtype), shape, _load_safetensors)
    return stored


def _load_safetensors(path: Path, name: str) -> torch.Tensor:
    with _open_safetensors(path) as file:
        tensor: torch.Tensor = file.get_tensor(name)  # type: ignore[no-untyped-call] # untyped library
    return tensor


@contextmanager
def _open_safetensors(path: Path) -> Iterator[safe_open]:
    try:
        with _naming(path), safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise BadCheckpoint(
            f"`{path}` is truncated or no safetensors file: {error}; fetch it again"
        ) from error


def _pickled(path: Path) -> dict[str, _HfTensor]:
    with _naming(path), path.open("rb") as file:
        can_map = file.read(len(ZIP_MAGIC)) == ZIP_MAGIC
    tensors = _open_pickled(path, can_map=can_map)
    load = _load_mapped if can_map else lambda path, name: tensors[name]
    stored = {}
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        stored[name] = _HfTensor(name, path, dtype, tuple(tensor.shape), load)
    return stored


def _load_mapped(path: Path, name: str) -> torch.Tensor:
    return _open_pickled(path, can_map=True)[name]


def _open_pickled(path: Path, *, can_map: bool) -> dict[str, torch.Tensor]:
    """Return a PyTorch file's tensors, mapped if they can be. No code in the file is run."""
    try:
        content = torch.load(path, weights_only=True, map_location="cpu", mmap=can_map)
    except _UNREADABLE as error:
        reason = str(error).partition("\n")[0]
        raise BadCheckpoint(
            f"`{path}` is truncated or holds more than tensors, which is not read because it could run code: "
            f"{reason}; fetch it again, or save the model as safetensors where you trust it"
        ) from error
    if not isinstance(content, dict) or not all(isinstance(item, torch.Tensor) for item in content.values()):
        raise BadCheckpoint(f"`{path}` is no mapping of names to tensors; save the model as safetensors")
    return content


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Say which file the system could not read."""
    try:
        yield
    except OSError as error:
        raise BadCheckpoint(
            f"`{path}` cannot be read: {error.strerror or error}; check the file and its permissions"
        ) from error


def _shard_paths(index: Path) -> list[Path]:
    paths = [index.parent / name for name in sorted(_shard_names(index))]
    for path in paths:
        if not path.is_file():
            raise BadCheckpoint(
                f"{index.name} names `{path.name}`, which is not in `{index.parent}`; fetch it"
            )
    return paths


def _shard_names(index: Path) -> set[str]:
    try:
        with _naming(index):
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = {str(name) for name in weight_map.values()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadCheckpoint(f"`{index}` has no readable `weight_map` of tensor to file: {error!r}") from error
    for name in names:
        if Path(name).name != name:
            raise BadCheckpoint(f"`{index}` names `{name}`, which is not a file beside it")
    return names


def _text_files(directory: Path) -> Mapping[str, bytes]:
    paths = [directory / name for name in TOKENIZER_FILES]
    files = {}
    for path in paths:
        if path.is_file():
            with _naming(path):
                files[path.name] = path.read_bytes()
    if generation := _generation_config(directory):
        files["generation_config.json"] = json.dumps(generation, indent=1).encode()
    return files


def _generation_config(directory: Path) -> dict[str, object]:
    """Read the generation config with the ids of config.json added, which a converted model lacks."""
    generation = _read_object(directory / "generation_config.json")
    config = _read_object(directory / "config.json")
    for key in ("bos_token_id", "eos_token_id"):
        given = [fields[key] for fields in (generation, config) if fields.get(key) is not None]
        ids = [item for value in given for item in (value if isinstance(value, list) else [value])]
        if ids:
            generation[key] = list(dict.fromkeys(ids))
    return generation


def _read_object(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        with _naming(path):
            content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not UTF-8, or not JSON
        raise BadTokenizer(f"`{path}` cannot be read: {error}; fetch it again") from error
    if not isinstance(content, dict):
        raise BadTokenizer(f"`{path}` must hold a JSON object, found: {content!r:.80}; fetch it again")
    return content

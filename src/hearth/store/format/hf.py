"""A Hugging Face directory as a source: its config, its tensors, its tokenizer's files. Converts nothing.

Weights are mapped, not read, except for files that PyTorch wrote before 1.6. They may be links to anywhere;
other files are the directory's own (`core/model_files.py`).
"""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from hearth.core.errors import BadCheckpoint, BadTokenizer
from hearth.core.model_files import (
    MAX_JSON_BYTES,
    MAX_TEMPLATE_BYTES,
    MAX_TOKENIZER_BYTES,
    brief,
    read_bytes,
    read_object,
)
from hearth.models.config_fields import Fields
from hearth.models.families import read_arch
from hearth.models.layout import Shape
from hearth.models.pack import Checkpoint
from hearth.models.quantized_tensors import with_quantized
from hearth.store.format.source import ModelSource
from hearth.store.format.torch_file import open_torch_file

SAFETENSORS = "model.safetensors"
PICKLE = "pytorch_model.bin"

#: torch's names of dtypes, by those of safetensors.
_DTYPES = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "I32": "int32",
    "I8": "int8",
    "U8": "uint8",
}

#: The largest header of a safetensors file, that of a hundred thousand tensors.
MAX_HEADER_BYTES = 16 << 20

#: Files that are taken over as they are, and their limits. The tokenizer also reads `generation_config.json`.
TOKENIZER_FILES = {
    "tokenizer.json": MAX_TOKENIZER_BYTES,
    "tokenizer_config.json": MAX_JSON_BYTES,
    "chat_template.jinja": MAX_TEMPLATE_BYTES,
}


@contextmanager
def open_directory(directory: Path) -> Iterator[ModelSource]:
    arch = read_arch(directory)
    config = directory / "config.json"
    fields = Fields(arch.family, read_object(config, BadCheckpoint), where=str(config))
    checkpoint = with_quantized(read_checkpoint(directory), fields, arch)
    yield ModelSource(arch, checkpoint, lambda: _text_files(directory))


def read_checkpoint(directory: Path, safetensors: str = SAFETENSORS, pickle: str = PICKLE) -> Checkpoint:
    """Read the headers of safetensors files or, where there are none, of PyTorch's. Both have such names."""
    for whole, read_headers in ((safetensors, _safetensors), (pickle, _pickled)):
        index = directory / f"{whole}.index.json"
        if _is_file(directory / whole):
            return read_headers(directory / whole)
        if _is_file(index):
            return _merged(index, [read_headers(path) for path in _shard_paths(index)])
    with _naming(directory):
        present = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    raise BadCheckpoint(
        f"neither {safetensors} nor {pickle}, nor an index of their parts, in `{directory}`, "
        f"which holds: {', '.join(present) or 'nothing'}; fetch the weights or save the model as safetensors"
    )


@dataclass(frozen=True, slots=True)
class _HfTensor:
    name: str
    path: Path
    dtype: str
    shape: Shape
    load: Callable[[str], torch.Tensor]

    def read(self) -> torch.Tensor:
        return self.load(self.name)


def _is_file(path: Path) -> bool:
    with _naming(path):
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            if not path.is_symlink():
                return False
            raise
    if not stat.S_ISREG(mode):
        raise BadCheckpoint(f"`{path}` is a directory, device or FIFO; put a file there")
    return True


def _merged(index: Path, shards: list[dict[str, _HfTensor]]) -> Checkpoint:
    merged: dict[str, _HfTensor] = {}
    for shard in shards:
        for name, stored in shard.items():
            if name in merged:
                raise BadCheckpoint(
                    f"`{index}` names `{merged[name].path.name}` and `{stored.path.name}`, which both hold "
                    f"`{name:.80}`; fetch them again"
                )
            merged[name] = stored
    return merged


def _safetensors(path: Path) -> dict[str, _HfTensor]:
    stored, load = {}, partial(_load_safetensors, path)
    _check_header(path)
    with _open_safetensors(path) as file:
        for name in file.keys():  # type: ignore[no-untyped-call] # noqa: SIM118 - an untyped library's
            header = file.get_slice(name)  # type: ignore[no-untyped-call] # untyped library
            dtype, shape = header.get_dtype(), tuple(header.get_shape())
            stored[name] = _HfTensor(name, path, _DTYPES.get(dtype, dtype), shape, load)
    return stored


def _check_header(path: Path) -> None:
    with _naming(path), path.open("rb") as file:
        length = file.read(8)
        left_bytes = path.stat().st_size - len(length)
    header_bytes = int.from_bytes(length, "little")
    if len(length) < 8 or header_bytes > left_bytes:
        raise BadCheckpoint(
            f"`{path}` is truncated or no safetensors file: its header has {header_bytes} bytes, the rest of "
            f"the file {left_bytes}; fetch it again"
        )
    if header_bytes > MAX_HEADER_BYTES:
        raise BadCheckpoint(
            f"`{path}` has a header that is too large, limit: {MAX_HEADER_BYTES} bytes, given: {header_bytes}"
        )


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
    with _naming(path):
        opened = open_torch_file(path)
    stored = {}
    for name, tensor in opened.tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        stored[name] = _HfTensor(name, path, dtype, tuple(tensor.shape), opened.load)
    return stored


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BadCheckpoint(
            f"`{path}` cannot be read: {error.strerror or error}; check the file and its permissions"
        ) from error


def _shard_paths(index: Path) -> list[Path]:
    paths = [index.parent / name for name in sorted(_shard_names(index))]
    for path in paths:
        if not _is_file(path):
            raise BadCheckpoint(
                f"{index.name} names `{path.name}`, which is not in `{index.parent}`; fetch it"
            )
    return paths


def _shard_names(index: Path) -> set[str]:
    weight_map = read_object(index, BadCheckpoint).get("weight_map")
    if not isinstance(weight_map, dict):
        raise BadCheckpoint(
            f"`{index}` has no readable `weight_map` of tensor to file, given: {brief(weight_map)}"
        )
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name or not name.isprintable():
            raise BadCheckpoint(f"`{index}` names {brief(name)}, which is not a file beside it")
    return set(weight_map.values())


def _text_files(directory: Path) -> Mapping[str, bytes]:
    files = {}
    for name, max_bytes in TOKENIZER_FILES.items():
        with suppress(FileNotFoundError):
            files[name] = read_bytes(directory / name, max_bytes, BadTokenizer)
    if generation := _generation_config(directory):
        files["generation_config.json"] = json.dumps(generation, indent=1).encode()
    return files


def _generation_config(directory: Path) -> dict[str, object]:
    """Read the generation config with the ids of config.json added, which a converted model lacks."""
    generation = _object_or_empty(directory / "generation_config.json")
    config = _object_or_empty(directory / "config.json")
    for key in ("bos_token_id", "eos_token_id"):
        given = [fields[key] for fields in (generation, config) if fields.get(key) is not None]
        ids = [item for value in given for item in (value if isinstance(value, list) else [value])]
        if not all(isinstance(item, int) for item in ids):
            raise BadTokenizer(
                f"`{key}` of `{directory}` must be an id or a list of ids, found: {brief(ids)}"
            )
        if ids:
            generation[key] = list(dict.fromkeys(ids))
    return generation


def _object_or_empty(path: Path) -> dict[str, object]:
    try:
        return read_object(path, BadTokenizer)
    except FileNotFoundError:
        return {}

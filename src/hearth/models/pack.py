"""Hugging Face safetensors in, canonical tensors out: fused, converted, one at a time. Writes no files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from hearth.errors import BadCheckpoint
from hearth.models.arch import Arch
from hearth.models.layout import DTYPES, Layout, Shape, TensorSpec
from hearth.models.names import Part, Source, head_copy, sources_of

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

#: safetensors' names of the dtypes that can be read
STORED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class PackedTensor:
    spec: TensorSpec
    tensor: torch.Tensor


def pack(directory: Path, arch: Arch, layout: Layout, out: torch.Tensor) -> None:
    """Write every canonical tensor to its place in `out`; the padding between them is left as it is."""
    assert out.dtype == torch.uint8, f"{out.dtype=}"
    assert out.shape == (layout.num_bytes,), f"{out.shape=} {layout.num_bytes=}"
    for packed in iter_tensors(directory, arch, layout):
        begin, nbytes = packed.spec.offset, packed.spec.nbytes
        out[begin : begin + nbytes].copy_(packed.tensor.view(torch.uint8).flatten())


def iter_tensors(directory: Path, arch: Arch, layout: Layout) -> Iterator[PackedTensor]:
    """The canonical tensors in the layout's order. All names and shapes are checked before the first."""
    with _open_checkpoint(directory) as checkpoint:
        shapes = {name: stored.shape for name, stored in checkpoint.items()}
        sources = sources_of(arch, layout, shapes)
        _check_head_copy(checkpoint, head_copy(arch, shapes), sources["embed.weight"].parts[0])
        for spec in layout.tensors:
            tensor = torch.empty(spec.shape, dtype=DTYPES[spec.dtype])
            _fill(tensor, arch, sources[spec.name], checkpoint)
            yield PackedTensor(spec, tensor)


def checkpoint_dtype(directory: Path) -> str:
    """The dtype in which most of the checkpoint's numbers are stored."""
    with _open_checkpoint(directory) as checkpoint:
        counts: Counter[str] = Counter()
        for stored in checkpoint.values():
            counts[stored.dtype] += prod(stored.shape)
    if not counts:
        raise BadCheckpoint(f"the checkpoint in `{directory}` holds no tensors")
    most = counts.most_common(1)[0][0]
    if most not in STORED:
        raise BadCheckpoint(
            f"the checkpoint in `{directory}` is stored as {most}; supported: {', '.join(STORED)}"
        )
    return STORED[most]


def _fill(tensor: torch.Tensor, arch: Arch, source: Source, checkpoint: Mapping[str, _Stored]) -> None:
    pieces = [checkpoint[part.name].read() for part in source.parts]
    if source.is_interleaved:
        (fused,) = pieces
        groups = fused.view(arch.num_kv_heads, -1, arch.head_dim, *fused.shape[1:])
        pieces = [groups[:, begin:end].flatten(0, 2) for begin, end in ((0, -2), (-2, -1), (-1, None))]
    begin = 0
    for piece in pieces:
        tensor[begin : begin + len(piece)].copy_(piece)
        begin += len(piece)


def _check_head_copy(checkpoint: Mapping[str, _Stored], head: str | None, embed: Part) -> None:
    if head is not None and not torch.equal(checkpoint[head].read(), checkpoint[embed.name].read()):
        raise BadCheckpoint(
            f"`{head}` differs from `{embed.name}`, but config.json ties them; "
            "set `tie_word_embeddings` to false in config.json"
        )


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in an open shard."""

    name: str
    path: Path
    shard: safe_open
    dtype: str
    shape: Shape

    def read(self) -> torch.Tensor:
        if self.dtype not in STORED:
            raise BadCheckpoint(f"`{self.name}` is stored as {self.dtype}; supported: {', '.join(STORED)}")
        with _naming(self.path):
            tensor: torch.Tensor = self.shard.get_tensor(self.name)  # type: ignore[no-untyped-call] # untyped library
        return tensor


@contextmanager
def _open_checkpoint(directory: Path) -> Iterator[Mapping[str, _Stored]]:
    with ExitStack() as stack:
        stored: dict[str, _Stored] = {}
        for path in _shard_paths(directory):
            with _naming(path):
                shard = stack.enter_context(safe_open(path, framework="pt"))
                for name in shard.keys():  # noqa: SIM118 - a shard is no mapping
                    header = shard.get_slice(name)
                    stored[name] = _Stored(name, path, shard, header.get_dtype(), tuple(header.get_shape()))
        yield stored


def _shard_paths(directory: Path) -> list[Path]:
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    if not (directory / INDEX).is_file():
        present = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
        raise BadCheckpoint(
            f"neither {SINGLE} nor {INDEX} in `{directory}`, which holds: {', '.join(present) or 'nothing'}; "
            "PyTorch's .bin files are not read, so save the model as safetensors"
        )
    paths = [directory / name for name in sorted(_shard_names(directory / INDEX))]
    for path in paths:
        if not path.is_file():
            raise BadCheckpoint(f"{INDEX} names `{path.name}`, which is not in `{directory}`; fetch it")
    return paths


def _shard_names(index: Path) -> set[str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = {str(name) for name in weight_map.values()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadCheckpoint(f"`{index}` has no readable `weight_map` of tensor to file: {error!r}") from error
    for name in names:
        if Path(name).name != name:
            raise BadCheckpoint(f"`{index}` names `{name}`, which is not a file beside it")
    return names


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Say which file safetensors could not read."""
    try:
        yield
    except SafetensorError as error:
        raise BadCheckpoint(
            f"`{path}` is truncated or no safetensors file: {error}; fetch it again"
        ) from error

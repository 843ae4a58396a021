"""Converts a model from any source to a directory that loads by copying. Decides no placement."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hearth.core.errors import BadCheckpoint, ModelError
from hearth.models.layout import layout_of
from hearth.models.pack import checkpoint_dtype, checkpoint_quant, iter_tensors
from hearth.store.format.file_stamp import stamp_of
from hearth.store.format.hf import open_directory
from hearth.store.format.local_hashes import write_hashes
from hearth.store.format.manifest import CHUNK_BYTES, MANIFEST, WEIGHTS, Manifest
from hearth.store.format.source import ModelSource
from hearth.store.format.writer import OnProgress, staged

GGUF_MAGIC = b"GGUF"


def convert(
    source: Path,
    dest: Path,
    *,
    dtype: str = "auto",
    quant: str = "auto",
    overwrite: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
    store: Path | None = None,
    on_progress: OnProgress | None = None,
) -> Manifest:
    """Write the model at `source` to `dest`, whole or not at all. An old one stays unless `overwrite`.

    Dtype `auto` keeps that of the source; values of a quantised GGUF file become bfloat16. Quant `auto` keeps
    weights quantised if the checkpoint gives them so; `none` dequantises them.
    `store`: the root of the disk tier that will read it, which then finds the chunks checked. Needs memory
    for about one fused tensor.
    """
    with open_source(source) as opened:
        arch, checkpoint = opened.arch, opened.checkpoint
        stored = checkpoint_dtype(checkpoint) if dtype == "auto" else dtype
        quant = checkpoint_quant(checkpoint, arch) if quant == "auto" else quant
        layout = layout_of(arch, stored, quant)
        files = opened.text_files()
        num_bytes = layout.num_bytes + sum(map(len, files.values()))
        tensors = iter_tensors(checkpoint, arch, layout)
        with staged(dest, num_bytes, overwrite=overwrite) as staging:
            written = staging.write_weights(tensors, layout.num_bytes, chunk_bytes, on_progress)
            for name, content in files.items():
                staging.write_file(name, content)
            manifest = Manifest.of(arch, stored, quant, written.chunks, chunk_bytes, files)
            staging.write_file(MANIFEST, manifest.to_json().encode())
    dest = dest.resolve()
    if store is not None and (stamp := stamp_of(dest / WEIGHTS)) is not None:
        write_hashes(store.resolve(), dest, manifest, stamp, written.xxh3)
    return manifest


@contextmanager
def open_source(path: Path) -> Iterator[ModelSource]:
    if (path / MANIFEST).is_file():
        raise BadCheckpoint(f"`{path}` is a Hearth model already; convert what it was made from")
    if path.is_dir():
        with open_directory(path) as source:
            yield source
    elif is_gguf(path):
        from hearth.store.format.gguf import open_gguf  # here, because it brings in a package that few need

        with open_gguf(path) as source:
            yield source
    else:
        raise ModelError(
            f"no model at `{path}`; give a Hugging Face directory, which holds `config.json`, or a GGUF file"
        )


def is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(GGUF_MAGIC)) == GGUF_MAGIC
    except OSError as error:
        raise BadCheckpoint(f"`{path}` cannot be read: {error.strerror}; check its permissions") from error

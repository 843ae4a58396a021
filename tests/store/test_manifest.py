from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from hearth.errors import BadCheckpoint
from hearth.models.families import read_arch
from hearth.models.layout import ByteRange, layout_of
from hearth.store.manifest import Chunk, Manifest, digest_of, parse_manifest, read_manifest
from tests.models.zoo import VARIANTS, build

CHUNK_BYTES = 1 << 16

#: A manifest as JSON gives it.
Raw: TypeAlias = "dict[str, object]"


def _manifest(name: str = "llama-gqa", dtype: str = "float32", quant: str = "none") -> Manifest:
    arch = read_arch(build(name).directory)
    full, rest = divmod(layout_of(arch, dtype, quant).num_bytes, CHUNK_BYTES)
    sizes = [CHUNK_BYTES] * full + [rest] * (rest > 0)
    chunks = tuple(Chunk(digest_of(bytes([at])), size) for at, size in enumerate(sizes))
    return Manifest.of(arch, dtype, quant, chunks, CHUNK_BYTES, {"tokenizer.json": b"{}"})


@pytest.mark.parametrize("quant", ["none", "int8", "fp8"])
@pytest.mark.parametrize("name", VARIANTS)
def test_what_is_written_is_read(name: str, quant: str) -> None:
    manifest = _manifest(name, "bfloat16", quant)

    read = parse_manifest(manifest.to_json(), "here")

    assert read == manifest
    assert read.digest == manifest.digest


def test_a_manifest_that_differs_in_one_hash_has_another_digest() -> None:
    manifest = _manifest()
    other = manifest.to_json().replace(manifest.chunks[1].digest, digest_of(b"other"))

    assert parse_manifest(other, "here").digest != manifest.digest


def test_layers_touch_and_chunks_cover_all() -> None:
    manifest = _manifest()

    ranges = [manifest.chunk_range(index) for index in range(len(manifest.chunks))]

    assert [layer.begin for layer in manifest.layers[1:]] == [layer.end for layer in manifest.layers[:-1]]
    assert ranges[0].begin == 0
    assert ranges[-1].end == manifest.num_bytes
    assert [part.begin for part in ranges[1:]] == [part.end for part in ranges[:-1]]


@pytest.mark.parametrize(
    ("wanted", "chunks"),
    [
        (ByteRange(0, 1), [0]),
        (ByteRange(0, CHUNK_BYTES), [0]),
        (ByteRange(CHUNK_BYTES - 1, CHUNK_BYTES + 1), [0, 1]),
        (ByteRange(CHUNK_BYTES, 3 * CHUNK_BYTES), [1, 2]),
    ],
)
def test_chunks_of_a_range_are_those_that_hold_it(wanted: ByteRange, chunks: list[int]) -> None:
    assert list(_manifest().chunks_of(wanted)) == chunks


def test_tensors_of_all_chunks_are_all_tensors() -> None:
    manifest = _manifest()

    named = [name for index in range(len(manifest.chunks)) for name in manifest.tensors_in(index)]

    assert list(dict.fromkeys(named)) == [spec.name for spec in manifest.tensors]


def test_a_directory_without_a_manifest_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"no manifest\.json .* `hearth convert SOURCE DEST`"):
        read_manifest(tmp_path)


def test_a_manifest_is_read_from_its_directory(tmp_path: Path) -> None:
    manifest = _manifest()
    (tmp_path / "manifest.json").write_text(manifest.to_json())

    assert read_manifest(tmp_path) == manifest


def _set(*path: str | int, to: object) -> Callable[[Raw], object]:
    """Replace what lies at the path."""

    def edit(raw: Raw) -> None:
        place: object = raw
        for key in path[:-1]:
            place = place[key]  # type: ignore[index] # JSON is not typed
        place[path[-1]] = to  # type: ignore[index] # JSON is not typed

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_set("version", to=2), r"has version 2, this Hearth reads version 1; convert the model again"),
        (_set("version", to="1"), r"has version '1'"),
        (_set("format", to="gguf"), r"does not describe a Hearth model"),
        (_set("colour", to="red"), r"unknown fields: colour"),
        (_set("arch", "colour", to="red"), r"here\.arch: .*unknown fields: colour"),
        (lambda raw: raw.pop("chunks"), r"missing fields: chunks"),
        (lambda raw: raw.pop("version"), r"has version None"),
        (_set("num_bytes", to="many"), r"here\.num_bytes: must be int, given: 'many'"),
        (_set("num_bytes", to=True), r"here\.num_bytes: must be int, given: True"),
        (_set("chunks", 0, "num_bytes", to=1.5), r"here\.chunks\[0\]\.num_bytes: must be int"),
        (_set("chunks", to={}), r"here\.chunks: must be a list"),
        (_set("arch", to=[]), r"here\.arch: must be an object"),
        (_set("arch", "norm", to="batch"), r"here\.arch\.norm: must be one of"),
        (_set("tensors", 0, "offset", to=64), r"`tensors` are not those of its `arch`"),
        (_set("tensors", 1, "dtype", to="float16"), r"`tensors` are not those of its `arch`"),
        (_set("arch", "num_layers", to=2), r"`tensors` are not those of its `arch`"),
        (_set("dtype", to="float16"), r"`tensors` are not those of its `arch`"),
        (_set("quant", to="int8"), r"`tensors` are not those of its `arch`"),
        (_set("num_bytes", to=4096), r"`tensors` are not those of its `arch`"),
        (_set("layers", 0, "end", to=4096), r"`layers` do not fit"),
        (_set("chunk_bytes", to=0), r"`chunk_bytes` must be a multiple of 4096, given: 0"),
        (_set("chunk_bytes", to=5000), r"`chunk_bytes` must be a multiple of 4096, given: 5000"),
        (_set("chunk_bytes", to=4096), r"`chunks` do not add up to"),
        (_set("chunks", 0, "num_bytes", to=4096), r"`chunks` do not add up to"),
        (lambda raw: raw.update(chunks=[]), r"`chunks` do not add up to"),
        (_set("files", 0, "name", to="../config.json"), r"`files` names `\.\./config\.json`"),
        (_set("files", 0, "name", to="weights.bin"), r"`files` names `weights\.bin`"),
    ],
)
def test_a_wrong_manifest_is_refused(edit: Callable[[Raw], object], message: str) -> None:
    raw = json.loads(_manifest().to_json())
    edit(raw)

    with pytest.raises(BadCheckpoint, match=message):
        parse_manifest(json.dumps(raw), "here")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"hearth-model"'])
def test_what_is_no_manifest_is_refused(text: str) -> None:
    with pytest.raises(BadCheckpoint, match=r"`here` (is not valid JSON|does not describe)"):
        parse_manifest(text, "here")


@pytest.mark.parametrize(("field", "value"), [("dtype", "int3"), ("quant", "int3")])
def test_an_unknown_dtype_or_quant_is_refused(field: str, value: str) -> None:
    raw = json.loads(_manifest().to_json()) | {field: value}

    with pytest.raises(BadCheckpoint, match=f"unknown {field}: `{value}`"):
        parse_manifest(json.dumps(raw), "here")

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import pytest

from hearth.core.errors import BadCheckpoint
from hearth.models.families import read_arch
from hearth.models.layout import ByteRange, layout_of
from hearth.store.format.manifest import (
    Chunk,
    Manifest,
    TextFile,
    damage_of,
    digest_of,
    parse_manifest,
    read_manifest,
)
from tests.models.zoo import VARIANTS, build
from tests.store.stored import signed

CHUNK_BYTES = 1 << 16

#: A manifest as JSON gives it.
Raw: TypeAlias = "dict[str, object]"


def _manifest(name: str = "llama-gqa", dtype: str = "float32", quant: str = "none") -> Manifest:
    arch = read_arch(build(name).directory)
    full, rest = divmod(layout_of(arch, dtype, quant).num_bytes, CHUNK_BYTES)
    sizes = [CHUNK_BYTES] * full + [rest] * (rest > 0)
    chunks = tuple(Chunk(digest_of(bytes([at])), size) for at, size in enumerate(sizes))
    return Manifest.of(arch, dtype, quant, chunks, CHUNK_BYTES, {"tokenizer.json": b"{}"})


@pytest.mark.parametrize("name", VARIANTS)
def test_what_is_written_is_read(name: str) -> None:
    for quant in ("none", "int8", "fp8"):
        manifest = _manifest(name, "bfloat16", quant)

        read = parse_manifest(manifest.to_json(), "here")

        assert read == manifest
        assert read.digest == manifest.digest


def test_a_manifest_that_differs_in_one_hash_has_another_digest() -> None:
    manifest = _manifest()
    chunks = (*manifest.chunks[:-1], replace(manifest.chunks[-1], digest=digest_of(b"other")))

    other = replace(manifest, chunks=chunks)

    assert other.digest != manifest.digest
    assert parse_manifest(other.to_json(), "here").digest == other.digest


def test_the_digest_in_the_file_is_the_identity_however_the_file_is_laid_out() -> None:
    manifest = _manifest()
    raw = json.loads(manifest.to_json())

    read = parse_manifest(json.dumps(raw, sort_keys=True), "here")

    assert raw["digest"] == read.digest == manifest.digest


def test_a_description_that_was_changed_is_refused() -> None:
    manifest = _manifest()
    changed = manifest.to_json().replace(manifest.chunks[1].digest, digest_of(b"other"))

    with pytest.raises(
        BadCheckpoint, match=r"`here` is damaged or was changed by hand: .*; convert the model again"
    ):
        parse_manifest(changed, "here")


def test_a_description_without_its_digest_is_refused() -> None:
    raw = json.loads(_manifest().to_json())
    del raw["digest"]

    with pytest.raises(BadCheckpoint, match=r"its `digest` is None"):
        parse_manifest(json.dumps(raw), "here")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"format": "hearth-model", "version": 2, "arch": ' + "[" * 100_000,
        '{"format": "hearth-model", "version": ' + "1" * 5000 + "}",
    ],
)
def test_hostile_json_is_refused(text: str) -> None:
    with pytest.raises(BadCheckpoint, match=r"`here` is not valid JSON"):
        parse_manifest(text, "here")


def test_what_became_of_a_file_is_told(tmp_path: Path) -> None:
    for name, content in {"whole": b"{}", "changed": b"[]"}.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "replaced").mkdir()
    files = [TextFile(name, digest_of(b"{}"), 2) for name in ("whole", "changed", "missing", "replaced")]

    damage = [damage_of(file, tmp_path) for file in files]

    assert damage == [
        None,
        f"its hash is {digest_of(b'[]')}, the manifest says {digest_of(b'{}')}",
        "cannot be read: No such file or directory",
        f"cannot be read: `{tmp_path / 'replaced'}` is a directory, device or FIFO; put a file there",
    ]


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
    with pytest.raises(BadCheckpoint, match=r"no manifest\.json .* `hearth convert`, `hearth deploy`"):
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


ROPE: Raw = {
    "theta": 1e4,
    "dim": 16,
    "linear_factor": 1.0,
    "llama3": None,
    "longrope": None,
    "magnitude": 1.0,
}
YARN: Raw = {
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "is_truncated": True,
    "original_max_positions": 64,
}
LONGROPE: Raw = {"short": [1.0] * 8, "long": [1.0] * 8, "original_max_positions": 64}


def _twice(raw: Raw) -> None:
    files = raw["files"]
    assert isinstance(files, list)
    raw["files"] = files * 2


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            _set("version", to=1),
            r"has format version 1, .* supports version 3 only; .*deploy the model again",
        ),
        (
            _set("version", to=4),
            r"has format version 4, .* supports version 3 only; .*deploy the model again",
        ),
        (_set("version", to="3"), r"has format version '3'"),
        (_set("format", to="gguf"), r"does not describe a Hearth model"),
        (_set("colour", to="red"), r"unknown fields: colour"),
        (_set("arch", "colour", to="red"), r"here\.arch: .*unknown fields: colour"),
        (lambda raw: raw.pop("chunks"), r"here: Object missing required field `chunks`"),
        (lambda raw: raw.pop("version"), r"has format version None"),
        (_set("num_bytes", to="many"), r"here\.num_bytes: Expected `int`, got `str`"),
        (_set("num_bytes", to=True), r"here\.num_bytes: Expected `int`, got `bool`"),
        (_set("chunks", 0, "num_bytes", to=1.5), r"here\.chunks\[0\]\.num_bytes: Expected `int`"),
        (_set("chunks", to={}), r"here\.chunks: Expected `array`"),
        (_set("arch", to=[]), r"here\.arch: Expected `object`"),
        (_set("arch", "norm", to="batch"), r"here\.arch\.norm: Invalid enum value 'batch'"),
        (_set("tensors", 0, "offset", to=64), r"`tensors` are not those of its `arch`"),
        (_set("tensors", 1, "dtype", to="float16"), r"`tensors` are not those of its `arch`"),
        (_set("arch", "num_layers", to=2), r"`arch\.windows` must be 2 numbers"),
        (_set("arch", "windows", 0, to=0), r"`arch\.windows` must be 3 numbers of at least 1 or null"),
        (
            _set("arch", "num_layers", to=10**9),
            r"`arch\.num_layers` must be at most 10000, given: 1000000000",
        ),
        (_set("arch", "num_layers", to=0), r"`arch\.num_layers` must be at least 1, given: 0"),
        (_set("arch", "head_dim", to=-16), r"`arch\.head_dim` must be at least 1, given: -16"),
        (_set("arch", "num_kv_heads", to=3), r"`arch\.num_heads` must be a multiple of its 3 `num_kv_heads`"),
        (_set("arch", "position_offset", to=-1), r"`arch\.position_offset` must be at least 0"),
        (_set("arch", "ropes", 0, "dim", to=7), r"`arch\.ropes` must share one even `dim` .* 16, given: 7"),
        (_set("arch", "layer_ropes", 1, to=1), r"`arch\.layer_ropes` must be 3 indices of `arch\.ropes`"),
        (_set("arch", "norm_eps", to=10**400), r"here\.arch\.norm_eps: Number out of range"),
        (
            _set("arch", "norm_eps", to=float("nan")),
            r"here\.arch\.norm_eps: unsupported value: nan",
        ),
        (_set("arch", "ropes", 0, "theta", to=float("inf")), r"ropes\[0\]\.theta: unsupported value: inf"),
        (_set("arch", "score_cap", to=0.0), r"here: `arch\.score_cap` must be a number from 1\.2e-38 to"),
        (_set("arch", "logit_cap", to=-30.0), r"`arch\.logit_cap` must be a number .* given: -30\.0"),
        (_set("arch", "ropes", 0, "linear_factor", to=0.0), r"`arch\.ropes\[0\]\.linear_factor` must be"),
        (
            _set("arch", "ropes", 0, "yarn", to={**YARN, "beta_fast": 0.0}),
            r"ropes\[0\]\.yarn\.beta_fast` must",
        ),
        (
            _set("arch", "ropes", 0, "yarn", to={**YARN, "original_max_positions": 0}),
            r"`original_max_positions` from 1 to 2147483647, given: 0",
        ),
        (
            _set("arch", "ropes", 0, to={**ROPE, "yarn": YARN, "theta": 1.0}),
            r"with `yarn` must have a `theta` above 1\.0, given: 1\.0",
        ),
        (
            _set("arch", "ropes", 0, "longrope", to={**LONGROPE, "long": [1.0] * 7}),
            r"must have 8 divisors in `short` and in `long` of `longrope`, given: 8 and 7",
        ),
        (
            _set("arch", "ropes", 0, "longrope", to={**LONGROPE, "short": [1.0] * 7 + [0.0]}),
            r"`arch\.ropes\[0\]\.longrope\.short\[7\]` must be a number",
        ),
        (_set("arch", "norm_eps", to=True), r"here\.arch\.norm_eps: Expected `float`, got `bool`"),
        (_set("arch", "vocab_size", to=10**9), r"`tensors` are not those of its `arch`"),
        (_set("arch", "max_positions", to=2**60), r"`arch\.max_positions` must be at most 2147483647"),
        (_set("chunk_bytes", to=2**40), r"`chunk_bytes` must be .* given: 1099511627776, and at most"),
        (
            _set("files", 0, "num_bytes", to=2**60),
            r"`tokenizer\.json` must have up to \d+ bytes, given: 1152",
        ),
        (_set("files", 0, "num_bytes", to=-1), r"`tokenizer\.json` must have up to \d+ bytes, given: -1"),
        (_set("files", 0, "name", to="x" * 10**6), r"files` names 'xxx"),
        (_set("dtype", to="float16"), r"`tensors` are not those of its `arch`"),
        (_set("quant", to="int8"), r"`tensors` are not those of its `arch`"),
        (_set("num_bytes", to=4096), r"`tensors` are not those of its `arch`"),
        (_set("layers", 0, "end", to=4096), r"`layers` do not fit"),
        (_set("chunk_bytes", to=0), r"`chunk_bytes` must be a multiple of 4096, given: 0"),
        (_set("chunk_bytes", to=5000), r"`chunk_bytes` must be a multiple of 4096, given: 5000"),
        (_set("chunk_bytes", to=4096), r"`chunks` do not add up to"),
        (_set("chunks", 0, "num_bytes", to=4096), r"`chunks` do not add up to"),
        (lambda raw: raw.update(chunks=[]), r"`chunks` do not add up to"),
        (
            _set("chunks", 1, "digest", to="../../etc/passwd"),
            r"a digest is 64 hexadecimal digits, given: '\.\.",
        ),
        (_set("chunks", 1, "digest", to="F" * 64), r"a digest is 64 hexadecimal digits"),
        (_set("files", 0, "digest", to=""), r"a digest is 64 hexadecimal digits, given: ''"),
        (_set("files", 0, "name", to="../config.json"), r"`files` names '\.\./config\.json'"),
        (_set("files", 0, "name", to="weights.bin"), r"`files` names 'weights\.bin'"),
        (_set("files", 0, "name", to=""), r"`files` names ''"),
        (_set("files", 0, "name", to=".."), r"`files` names '\.\.'"),
        (_set("files", 0, "name", to="a\0b"), r"`files` names 'a\\x00b'"),
        (_twice, r"`files` names 'tokenizer\.json', .* or twice"),
    ],
)
def test_a_wrong_manifest_is_refused(edit: Callable[[Raw], object], message: str) -> None:
    raw = json.loads(_manifest().to_json())
    edit(raw)

    with pytest.raises(BadCheckpoint, match=message):
        parse_manifest(signed(raw), "here")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"hearth-model"'])
def test_what_is_no_manifest_is_refused(text: str) -> None:
    with pytest.raises(BadCheckpoint, match=r"`here` (is not valid JSON|does not describe)"):
        parse_manifest(text, "here")


@pytest.mark.parametrize(("field", "value"), [("dtype", "int3"), ("quant", "int3")])
def test_an_unknown_dtype_or_quant_is_refused(field: str, value: str) -> None:
    raw = json.loads(_manifest().to_json()) | {field: value}

    with pytest.raises(BadCheckpoint, match=f"unknown {field}: `{value}`"):
        parse_manifest(signed(raw), "here")

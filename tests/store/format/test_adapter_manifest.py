"""The description of a stored adapter, and the store that moves its chunks as a model's."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from hearth.core.errors import BadCheckpoint
from hearth.models.families import read_arch
from hearth.store.format.adapter_manifest import AdapterManifest, read_adapter_manifest
from hearth.store.format.convert_adapter import AdapterBase, convert_adapter
from hearth.store.format.description import parse_description, read_description
from hearth.store.format.manifest import WEIGHTS, read_manifest
from hearth.store.format.peft import open_peft
from hearth.store.format.verify import BadChunk, verify
from hearth.store.transfer.destination import LoadPiece
from hearth.store.transfer.lease import Lease
from hearth.store.transfer.lease_client import LeaseClient
from hearth.store.transfer.lease_server import LeaseServer
from hearth.store.transfer.transfer import Loader
from tests.models.zoo import build
from tests.store.format.peft_files import write_peft
from tests.store.stored import converted, flip, serving, signed, tiers_at

Raw = dict[str, object]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    write_peft(root / "peft", rank=16)
    arch = read_arch(build("llama-gqa").directory)
    base = AdapterBase(arch, "bfloat16")
    convert_adapter(open_peft(root / "peft"), root / "made", base, chunk_bytes=64 << 10)
    return root / "made"


def test_a_description_is_read_as_it_was_written(adapter: Path) -> None:
    manifest = read_adapter_manifest(adapter)
    assert read_description(adapter) == manifest
    assert len(manifest.chunks) > 1
    assert manifest.num_bytes == (adapter / WEIGHTS).stat().st_size
    assert manifest.num_bytes % 4096 == 0
    assert manifest.layout.num_bytes <= manifest.num_bytes < manifest.layout.num_bytes + 4096
    assert manifest.tensors_in(0)[:2] == ["layers.0.qkv", "layers.0.o"]
    assert manifest.tensors_in(len(manifest.chunks) - 1)[-1] == "layers.2.down"


def test_adapters_that_are_made_alike_have_one_layout(adapter: Path) -> None:
    text = read_adapter_manifest(adapter).to_json()
    raw = json.loads(text)
    raw["chunks"][0]["digest"] = raw["chunks"][1]["digest"]
    other = parse_adapter(signed(raw))
    assert other.digest != parse_adapter(text).digest
    assert other.layout is parse_adapter(text).layout
    assert other.targets is parse_adapter(text).targets
    raw["dtype"] = "float16"  # as wide, and not the same
    assert parse_adapter(signed(raw)).layout.dtype == "float16"


def parse_adapter(text: str) -> AdapterManifest:
    manifest = parse_description(text, "here")
    assert isinstance(manifest, AdapterManifest)
    return manifest


def test_a_model_is_no_adapter_and_an_adapter_no_model(adapter: Path) -> None:
    with pytest.raises(BadCheckpoint, match="does not describe a Hearth model"):
        read_manifest(adapter)


def _target(raw: Raw) -> Raw:
    targets = raw["targets"]
    assert isinstance(targets, list)
    return targets[0]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda raw: raw.update(version=1), "format version 1, this Hearth supports version 2 only"),
        (lambda raw: raw.update(version=3), "format version 3, this Hearth supports version 2 only"),
        (lambda raw: raw.update(dtype="int8"), "`dtype` must be one of"),
        (lambda raw: raw.update(targets=[]), "`targets` must be some"),
        (lambda raw: raw["targets"].reverse(), "in forward order"),
        (lambda raw: raw["targets"].append(raw["targets"][-1]), "each once"),
        (lambda raw: _target(raw).update(layer=-1), "of none of 3 layers"),
        (lambda raw: _target(raw).update(num_inputs=1 << 60), "must have 64 inputs"),
        (lambda raw: _target(raw).update(slices=[]), "must have 1 to 3 slices"),
        (lambda raw: _target(raw)["slices"][0].update(size=1 << 60), "overlap, or end behind 128"),
        (lambda raw: _target(raw)["slices"][1].update(begin=0), "overlap"),
        (lambda raw: _target(raw)["slices"][0].update(rank=0), "ranks from 1 to 256, given: 0"),
        (lambda raw: _target(raw)["slices"][0].update(rank=257), "ranks from 1 to 256, given: 257"),
        (lambda raw: raw["dimensions"].update(num_layers=1 << 40), "`dimensions.num_layers` must be"),
        (lambda raw: raw.update(num_bytes=4096), "`targets` take"),
        (lambda raw: raw["chunks"].pop(), "`chunks` do not add up"),
        (lambda raw: raw.update(chunk_bytes=100), "`chunk_bytes` must be"),
        (lambda raw: raw.update(files=[{"name": "x", "digest": "y", "num_bytes": 1}]), "has no `files`"),
        (lambda raw: raw.update(family=3), "family: Expected `str`, got `int`"),
        (lambda raw: raw.update(other=3), "unknown fields: other"),
    ],
)
def test_a_description_that_contradicts_itself_is_refused(
    adapter: Path, spoil: Callable[[Raw], object], reason: str
) -> None:
    raw = json.loads(read_adapter_manifest(adapter).to_json())
    spoil(raw)
    with pytest.raises(BadCheckpoint, match=reason):
        parse_description(signed(raw), "here")


def test_a_description_that_was_changed_is_refused(adapter: Path) -> None:
    text = read_adapter_manifest(adapter).to_json().replace("bfloat16", "float16")
    with pytest.raises(BadCheckpoint, match="changed by hand"):
        parse_description(text, "here")


def test_damage_of_an_adapter_is_found(adapter: Path, tmp_path: Path) -> None:
    assert verify(adapter) == []
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in adapter.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    flip(copy / WEIGHTS, 70_000)
    (bad,) = verify(copy)
    assert isinstance(bad, BadChunk)
    assert bad.tensors == ("layers.2.qkv", "layers.2.o", "layers.2.up", "layers.2.down")


def _loaded(manifest: AdapterManifest, stream: Callable[..., object]) -> bytes:
    """Load every layer to a place of its own, as a worker does, and return them in order."""
    places = [torch.zeros(part.end - part.begin, dtype=torch.uint8) for _, part in manifest.layout.layers]
    pieces = [
        LoadPiece.to(part, place) for (_, part), place in zip(manifest.layout.layers, places, strict=True)
    ]
    Loader(torch.device("cpu")).load("adapter", manifest, pieces, stream).wait()
    return b"".join(place.numpy().tobytes() for place in places)


def test_an_adapter_is_brought_up_by_the_tiers_as_a_model_is(adapter: Path, tmp_path: Path) -> None:
    wanted = (adapter / WEIGHTS).read_bytes()
    with serving(adapter) as server, tiers_at(tmp_path) as tiers:
        url = f"{server.url}/tiny"
        for where in (str(adapter), url, tiers.resolve(url)):
            stored = tiers.open(where)
            manifest = stored.manifest
            assert isinstance(manifest, AdapterManifest)
            data = _loaded(manifest, lambda chunks, stored=stored: tiers.fetch(stored, chunks))
            assert data == wanted[: manifest.layout.num_bytes]


def test_an_adapter_is_leased_as_a_model_is(adapter: Path, tmp_path: Path) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="hearth-") as folder,  # a socket's name must be short
        tiers_at(tmp_path) as tiers,
        closing(LeaseServer(tiers, Path(folder) / "host.sock")),
        closing(LeaseClient(Path(folder) / "host.sock", is_pinned=False)) as lease_client,
    ):
        opened = lease_client.open_adapter(adapter)
        data = _loaded(opened.manifest, lambda chunks: Lease(lease_client, opened, chunks))
        assert data == (adapter / WEIGHTS).read_bytes()[: opened.manifest.layout.num_bytes]
        assert lease_client.open_adapter(adapter).is_in_host
        with pytest.raises(BadCheckpoint, match=r"is an adapter and no model; .*--base NAME"):
            lease_client.open(adapter)
        with pytest.raises(BadCheckpoint, match="is a model and no adapter"):
            lease_client.open_adapter(converted("llama-gqa"))

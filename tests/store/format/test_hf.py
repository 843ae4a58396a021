from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from hearth.core.errors import BadCheckpoint, BadTokenizer
from hearth.store.format.hf import open_directory, read_checkpoint
from hearth.text.tokenizer_settings import read_settings
from tests.models.zoo import build, save, tiny


def _tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: stored.read() for name, stored in read_checkpoint(directory).items()}


def _same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def _save_pickled(directory: Path, shards: list[dict[str, torch.Tensor]]) -> None:
    """As transformers did before safetensors."""
    shutil.copy(build("qwen2").directory / "config.json", directory)
    if len(shards) == 1:
        torch.save(shards[0], directory / "pytorch_model.bin")
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards):
        weight_map |= dict.fromkeys(shard, f"pytorch_model-{number}.bin")
        torch.save(shard, directory / f"pytorch_model-{number}.bin")
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_reads_names_shapes_and_numbers() -> None:
    model, directory = build("qwen2")

    checkpoint = read_checkpoint(directory)

    expected = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    assert {name: stored.shape for name, stored in checkpoint.items()} == {
        name: tuple(tensor.shape) for name, tensor in expected.items()
    }
    assert {stored.dtype for stored in checkpoint.values()} == {"float32"}
    assert _same({name: stored.read() for name, stored in checkpoint.items()}, expected)


def test_shards_give_the_same_tensors_as_one_file(tmp_path: Path) -> None:
    model, whole = build("qwen2")
    save(model, tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2

    tensors = _tensors(tmp_path)

    assert _same(tensors, _tensors(whole))


@pytest.mark.parametrize("num_shards", [1, 3])
def test_pickled_files_give_the_same_tensors(tmp_path: Path, num_shards: int) -> None:
    whole = _tensors(build("qwen2").directory)
    names = list(whole)
    _save_pickled(
        tmp_path, [{name: whole[name] for name in names[at::num_shards]} for at in range(num_shards)]
    )

    tensors = _tensors(tmp_path)

    assert _same(tensors, whole)


def test_files_of_an_old_pytorch_give_the_same_tensors(tmp_path: Path) -> None:
    whole = _tensors(build("qwen2").directory)
    torch.save(whole, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)

    tensors = _tensors(tmp_path)

    assert _same(tensors, whole)


@pytest.mark.parametrize("num_kept", [0, 4, 300, -1])
def test_truncated_file_of_an_old_pytorch_is_named(tmp_path: Path, num_kept: int) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.zeros(4096)}, path, _use_new_zipfile_serialization=False)
    path.write_bytes(path.read_bytes()[:num_kept])

    with pytest.raises(BadCheckpoint, match=r"pytorch_model\.bin` is truncated"):
        read_checkpoint(tmp_path)


def test_pickled_code_of_an_old_pytorch_is_refused_and_not_run(tmp_path: Path) -> None:
    torch.save({"a": Payload()}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)

    with pytest.raises(BadCheckpoint, match=r"pytorch_model\.bin` .* could run code: .* as safetensors"):
        read_checkpoint(tmp_path)


def _failing_open(*args: object, **options: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_file_that_the_disk_cannot_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).touch()
    monkeypatch.setattr("hearth.store.format.hf.safe_open", _failing_open)
    monkeypatch.setattr(Path, "open", _failing_open)

    with pytest.raises(BadCheckpoint, match=rf"{name}` cannot be read: Input/output error; check the file"):
        read_checkpoint(tmp_path)


def test_a_file_that_is_gone_when_its_tensor_is_read_is_named(tmp_path: Path) -> None:
    save(tiny("llama-gqa"), tmp_path)
    stored = read_checkpoint(tmp_path)["model.norm.weight"]
    (tmp_path / "model.safetensors").unlink()

    with pytest.raises(BadCheckpoint, match=r"model\.safetensors` cannot be read: No such file"):
        stored.read()


def test_pickled_dtypes_have_their_names(tmp_path: Path) -> None:
    _save_pickled(tmp_path, [{"a": torch.zeros(2, dtype=torch.bfloat16), "b": torch.zeros(2, 3).bool()}])

    checkpoint = read_checkpoint(tmp_path)

    assert {name: stored.dtype for name, stored in checkpoint.items()} == {"a": "bfloat16", "b": "bool"}


def test_safetensors_are_preferred_to_pickled_files(tmp_path: Path) -> None:
    save(tiny("llama-gqa"), tmp_path)
    (tmp_path / "pytorch_model.bin").touch()

    checkpoint = read_checkpoint(tmp_path)

    assert "model.embed_tokens.weight" in checkpoint


class Payload:
    """What runs code when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, ("raise SystemExit('code of a checkpoint was run')",))


def test_pickled_code_is_refused_and_not_run(tmp_path: Path) -> None:
    torch.save({"a": Payload()}, tmp_path / "pytorch_model.bin")

    with pytest.raises(BadCheckpoint, match=r"pytorch_model\.bin` .* could run code: .* as safetensors"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("num_kept", [0, 4, 2000, -1])
def test_truncated_pickled_file_is_named(tmp_path: Path, num_kept: int) -> None:
    _save_pickled(tmp_path, [{"a": torch.zeros(4096)}])
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:num_kept])

    with pytest.raises(BadCheckpoint, match=r"pytorch_model\.bin` is truncated"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("content", [[torch.zeros(2)], {"model": {"a": torch.zeros(2)}}])
def test_pickled_file_of_something_else_is_refused(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")

    with pytest.raises(BadCheckpoint, match="no mapping of names to tensors"):
        read_checkpoint(tmp_path)


def test_directory_without_weights_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "weights.h5").touch()

    with pytest.raises(BadCheckpoint, match=r"neither model\.safetensors nor .* holds: weights\.h5; fetch"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("num_kept", [0, 4, 2000, -1])
def test_truncated_file_is_named(tmp_path: Path, num_kept: int) -> None:
    whole = (build("llama-gqa").directory / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:num_kept])

    with pytest.raises(BadCheckpoint, match=r"model\.safetensors` is truncated or no safetensors file"):
        read_checkpoint(tmp_path)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    save(build("qwen2").model, tmp_path, max_shard_size="50KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()

    with pytest.raises(BadCheckpoint, match=f"names `{shard.name}`, which is not in"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", r"index\.json` is not valid JSON"),
        ("[" * 100_000, r"index\.json` is not valid JSON: it is nested deeper than 64 levels"),
        (json.dumps({}), "no readable `weight_map`"),
        (json.dumps({"weight_map": ["model.safetensors"]}), "no readable `weight_map`"),
        (json.dumps({"weight_map": {"a": "../a.safetensors"}}), "not a file beside it"),
        (json.dumps({"weight_map": {"a": "../../etc/passwd"}}), "not a file beside it"),
        (json.dumps({"weight_map": {"a": "/etc/passwd"}}), "names '/etc/passwd', which is not a file beside"),
        (json.dumps({"weight_map": {"a": "a\0b"}}), "not a file beside it"),
        (json.dumps({"weight_map": {"a": "\ud800"}}), "not a file beside it"),
        (json.dumps({"weight_map": {"a": ["a"]}}), "not a file beside it"),
        (json.dumps({"weight_map": {"a": ".."}}), "is a directory, device or FIFO"),
        (json.dumps({"weight_map": {"a": ""}}), "is a directory, device or FIFO"),
    ],
)
def test_broken_index_is_a_bad_checkpoint(tmp_path: Path, name: str, index: str, message: str) -> None:
    (tmp_path / name).write_text(index)

    with pytest.raises(BadCheckpoint, match=message):
        read_checkpoint(tmp_path)


def _with_ids(directory: Path, generation: object, **config: object) -> Path:
    """A directory whose two files name ids; None: there is no generation_config.json."""
    whole = json.loads((build("qwen2").directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(whole | config))
    (directory / "model.safetensors").symlink_to(build("qwen2").directory / "model.safetensors")
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


@pytest.mark.parametrize(
    ("generation", "config_ids", "eos_ids"),
    [
        ({"eos_token_id": [5, 6], "bos_token_id": 1}, 7, {5, 6, 7}),
        ({"eos_token_id": 5, "bos_token_id": 1}, [5, 8], {5, 8}),
        ({"temperature": 0.5, "bos_token_id": 1}, None, set()),
        (None, 2, {2}),
    ],
)
def test_ids_of_both_files_survive_without_config_json(
    tmp_path: Path, generation: object, config_ids: object, eos_ids: set[int]
) -> None:
    directory = _with_ids(tmp_path, generation, eos_token_id=config_ids, bos_token_id=1)
    converted = tmp_path / "converted"
    converted.mkdir()

    with open_directory(directory) as source:
        for name, content in source.text_files().items():
            (converted / name).write_bytes(content)

    ours, theirs = read_settings(converted), read_settings(directory)
    assert set(ours.eos_ids) == set(theirs.eos_ids) == eos_ids


def test_other_generation_settings_are_kept(tmp_path: Path) -> None:
    directory = _with_ids(tmp_path, {"temperature": 0.5}, eos_token_id=3, bos_token_id=None)

    with open_directory(directory) as source:
        content = json.loads(source.text_files()["generation_config.json"])

    assert content == {"temperature": 0.5, "eos_token_id": [3]}


def test_tokenizer_files_are_taken_as_they_are(tmp_path: Path) -> None:
    directory = _with_ids(tmp_path, None, eos_token_id=None, bos_token_id=None)
    files = {
        "tokenizer.json": b'{"a": 1}',
        "tokenizer_config.json": b"{ }",
        "chat_template.jinja": b"\xc3\xa9",
    }
    for name, content in files.items():
        (directory / name).write_bytes(content)

    with open_directory(directory) as source:
        taken = source.text_files()

    assert taken == files


@pytest.mark.parametrize("content", ["{", "[]"])
def test_broken_generation_config_is_named(tmp_path: Path, content: str) -> None:
    directory = _with_ids(tmp_path, {})
    (directory / "generation_config.json").write_text(content)

    with (
        open_directory(directory) as source,
        pytest.raises(BadTokenizer, match=r"generation_config\.json` .*fetch it again"),
    ):
        source.text_files()

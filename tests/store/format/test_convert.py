from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from hearth.core.errors import BadCheckpoint, DeviceError, ModelError, StoreError
from hearth.models.families import read_arch
from hearth.models.layout import layout_of
from hearth.store.format.convert import convert, open_source
from hearth.store.format.manifest import MANIFEST, WEIGHTS, read_manifest
from hearth.store.format.verify import verify
from hearth.store.format.writer import Progress
from tests.models.zoo import VARIANTS, build, pack_directory, save, tiny
from tests.store.format.gguf_files import (
    byte_level_metadata,
    model_metadata,
    model_tensors,
    write,
    write_model,
)

CHUNK_BYTES = 1 << 16

#: More than a conversion of the smallest model makes.
MAX_CALLS = 40


def _packed(directory: Path, dtype: str = "float32", quant: str = "none") -> bytes:
    arch = read_arch(directory)
    layout = layout_of(arch, dtype, quant)
    out = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    pack_directory(directory, arch, layout, out)
    return out.numpy().tobytes()


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("name", VARIANTS)
def test_converted_bytes_are_the_packed_ones(tmp_path: Path, name: str) -> None:
    directory = build(name).directory

    manifest = convert(directory, tmp_path / "m")

    assert (tmp_path / "m" / WEIGHTS).read_bytes() == _packed(directory)
    assert read_manifest(tmp_path / "m") == manifest
    assert (manifest.arch, manifest.dtype, manifest.quant) == (read_arch(directory), "float32", "none")
    assert verify(tmp_path / "m") == []


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("quant", ["none", "int8", "fp8"])
def test_dtype_and_quant_are_followed(tmp_path: Path, dtype: str, quant: str) -> None:
    directory = build("qwen3-bias").directory

    manifest = convert(directory, tmp_path / "m", dtype=dtype, quant=quant, chunk_bytes=CHUNK_BYTES)

    assert (tmp_path / "m" / WEIGHTS).read_bytes() == _packed(directory, dtype, quant)
    assert (manifest.dtype, manifest.quant, manifest.chunk_bytes) == (dtype, quant, CHUNK_BYTES)
    assert verify(tmp_path / "m") == []


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_auto_keeps_the_dtype_of_the_checkpoint(tmp_path: Path, dtype: str) -> None:
    save(tiny("opt-pre").to(getattr(torch, dtype)), tmp_path / "source")

    manifest = convert(tmp_path / "source", tmp_path / "m")

    assert manifest.dtype == dtype


def test_shards_and_pickled_files_convert_to_the_same_bytes(tmp_path: Path) -> None:
    model, whole = build("qwen2")
    save(model, tmp_path / "shards", max_shard_size="50KB")
    (tmp_path / "pickled").mkdir()
    for name in ("config.json", "generation_config.json"):
        shutil.copy(whole / name, tmp_path / "pickled")
    torch.save(model.state_dict(), tmp_path / "pickled" / "pytorch_model.bin")

    manifests = [
        convert(source, tmp_path / f"m-{source.name}")
        for source in (whole, tmp_path / "shards", tmp_path / "pickled")
    ]

    assert len({manifest.digest for manifest in manifests}) == 1
    assert (tmp_path / "m-pickled" / WEIGHTS).read_bytes() == _packed(whole)


@pytest.mark.parametrize("name", ["llama-gqa", "qwen2", "qwen3"])
def test_a_gguf_file_converts_to_the_same_weights(tmp_path: Path, name: str) -> None:
    model, directory = build(name)
    path = write_model(tmp_path / "model.gguf", model, changes=byte_level_metadata(["a b c"] * 9, "gpt-2"))

    manifest = convert(path, tmp_path / "m")

    assert (tmp_path / "m" / WEIGHTS).read_bytes() == _packed(directory)
    assert manifest.arch == read_arch(directory)
    assert "tokenizer.json" in _names(tmp_path / "m")


def test_tokenizer_files_come_along(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(build("llama-gqa").directory, source)
    (source / "tokenizer.json").write_text('{"model": {}}')
    (source / "README.md").write_text("not needed")

    convert(source, tmp_path / "m")

    assert _names(tmp_path / "m") == ["generation_config.json", MANIFEST, "tokenizer.json", WEIGHTS]
    assert (tmp_path / "m" / "tokenizer.json").read_text() == '{"model": {}}'


def test_progress_counts_from_nothing_to_the_end(tmp_path: Path) -> None:
    seen: list[Progress] = []

    manifest = convert(
        build("llama-gqa").directory, tmp_path / "m", chunk_bytes=CHUNK_BYTES, on_progress=seen.append
    )

    ends = [manifest.chunk_range(index).end for index in range(len(manifest.chunks))]
    assert [progress.done_bytes for progress in seen] == [0, *ends]
    assert {progress.total_bytes for progress in seen} == {manifest.num_bytes}


def test_an_existing_model_is_replaced_only_with_overwrite(tmp_path: Path) -> None:
    convert(build("llama-gqa").directory, tmp_path / "m")

    with pytest.raises(StoreError, match="holds a model already"):
        convert(build("qwen2").directory, tmp_path / "m")
    convert(build("qwen2").directory, tmp_path / "m", overwrite=True)

    assert read_manifest(tmp_path / "m").arch.family == "qwen2"


def test_a_broken_checkpoint_leaves_nothing(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = tmp_path / "source"
    shutil.copytree(build("llama-gqa").directory, source)
    tensors = load_file(source / "model.safetensors")
    del tensors["model.layers.2.mlp.down_proj.weight"]
    save_file(tensors, source / "model.safetensors")

    with pytest.raises(BadCheckpoint, match=r"no `model\.layers\.2\.mlp\.down_proj\.weight`"):
        convert(source, tmp_path / "m")

    assert _names(tmp_path) == ["source"]


@pytest.mark.parametrize(("dtype", "quant"), [("int3", "none"), ("auto", "int3")])
def test_an_unknown_dtype_or_quant_is_refused(tmp_path: Path, dtype: str, quant: str) -> None:
    with pytest.raises(DeviceError, match=r"unknown (dtype|quant): `int3`"):
        convert(build("llama-gqa").directory, tmp_path / "m", dtype=dtype, quant=quant)


def test_a_converted_model_is_no_source(tmp_path: Path) -> None:
    convert(build("llama-gqa").directory, tmp_path / "m")

    with pytest.raises(BadCheckpoint, match="is a Hearth model already"):
        convert(tmp_path / "m", tmp_path / "again")


@pytest.mark.parametrize("name", ["nowhere", "notes.txt", "empty.gguf"])
def test_what_is_no_model_is_refused_with_what_can_be_given(tmp_path: Path, name: str) -> None:
    (tmp_path / "notes.txt").write_text("a text")
    (tmp_path / "empty.gguf").touch()

    with pytest.raises(ModelError, match=r"give a Hugging Face directory, .* or a GGUF file"):
        open_source(tmp_path / name).__enter__()


def test_a_gguf_file_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(b"GGUF and nothing more")

    with pytest.raises(BadCheckpoint, match="GGUF"):
        open_source(tmp_path / "model").__enter__()


#: Converts in children that kill themselves before their first, second, ... call that changes the disk, until
#: one gets through, which writes down its calls. A root has a directory per moment, in which `m` appears.
#: One named `renamed` is a system that cannot exchange two directories at once.
KILLED = """
import json, os, signal, sys
from pathlib import Path
from hearth.store.format import writer
from hearth.store.format.convert import convert

def kill_before(wanted, root):
    made = []
    def counted(name, call):
        def run(*args, **options):
            if len(made) == wanted:
                os.kill(os.getpid(), signal.SIGKILL)
            made.append(name)
            return call(*args, **options)
        return run
    for name in ("write", "fsync", "rename", "unlink", "rmdir"):
        setattr(os, name, counted(name, getattr(os, name)))
    if root.name == "renamed":
        writer._exchange = lambda directory, dest: False
    else:
        writer._exchange = counted("exchange", writer._exchange)
    convert(Path(sys.argv[1]), root / str(wanted) / "m", overwrite=True, chunk_bytes=65536)
    (root / "calls.json").write_text(json.dumps(made))
    os._exit(0)

for root in map(Path, sys.argv[2:]):
    code, moment = -signal.SIGKILL, 0
    while code == -signal.SIGKILL:
        if (child := os.fork()) == 0:
            kill_before(moment, root)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        moment += 1
    if code:
        sys.exit(code)
"""


@dataclass(frozen=True, slots=True)
class Killed:
    dests: list[Path]  #: where the model was to appear, one for each moment
    calls: list[str]  #: what a conversion that nobody kills does to the disk


def _killed(root: Path) -> Killed:
    calls = json.loads((root / "calls.json").read_text())
    return Killed([root / str(moment) / "m" for moment in range(len(calls))], calls)


def _python(code: str, *args: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds `fresh`, where there was no model before, and two where there was one in float16."""
    source, root = build("llama-gqa").directory, tmp_path_factory.mktemp("killed")
    (root / "fresh").mkdir()
    convert(source, root / "old", dtype="float16")
    for moment in range(MAX_CALLS):
        for name in ("replaced", "renamed"):
            shutil.copytree(root / "old", root / name / str(moment) / "m")
    _python(KILLED, str(source), *(str(root / name) for name in ("fresh", "replaced", "renamed")))
    return root


@pytest.mark.e2e
def test_killed_at_any_point_a_conversion_leaves_no_half_model(killed: Path) -> None:
    fresh = _killed(killed / "fresh")

    appeared = [dest.exists() for dest in fresh.dests]

    rename = fresh.calls.index("rename")
    assert fresh.calls[:rename].count("write") > 8
    assert appeared == [moment > rename for moment in range(len(fresh.dests))]
    assert all(verify(dest) == [] for dest in fresh.dests[rename + 1 :])
    # The three calls before the rename write and sync the manifest and sync the directory.
    unfinished = [dest.with_name(".m.converting") for dest in fresh.dests[: rename - 3]]
    assert not any((directory / MANIFEST).exists() for directory in unfinished)


@pytest.mark.e2e
def test_a_conversion_that_was_killed_is_finished_by_the_next(killed: Path, tmp_path: Path) -> None:
    source = build("llama-gqa").directory
    alone = convert(source, tmp_path / "m", chunk_bytes=CHUNK_BYTES)

    for dest in _killed(killed / "fresh").dests:
        manifest = convert(source, dest, chunk_bytes=CHUNK_BYTES, overwrite=True)

        assert manifest.digest == alone.digest, dest
        assert _names(dest.parent) == ["m"], dest
        assert _names(dest) == _names(tmp_path / "m"), dest
        assert (dest / WEIGHTS).read_bytes() == (tmp_path / "m" / WEIGHTS).read_bytes(), dest


@pytest.mark.e2e
def test_killed_at_any_point_a_replacement_keeps_the_old_model_or_has_the_new(killed: Path) -> None:
    replaced = _killed(killed / "replaced")

    dtypes = [read_manifest(dest).dtype for dest in replaced.dests]

    exchange = replaced.calls.index("exchange")
    assert (replaced.calls.count("exchange"), replaced.calls.count("rename")) == (1, 0)
    assert len(replaced.calls) < MAX_CALLS
    assert dtypes == ["float16" if moment <= exchange else "float32" for moment in range(len(dtypes))]
    assert all(verify(dest) == [] for dest in replaced.dests)


@pytest.mark.e2e
def test_where_directories_cannot_be_exchanged_the_model_is_away_only_between_two_renames(
    killed: Path,
) -> None:
    renamed = _killed(killed / "renamed")

    away = [moment for moment, dest in enumerate(renamed.dests) if not dest.exists()]

    first, second = (at for at, call in enumerate(renamed.calls) if call == "rename")
    assert (away, second) == ([second], first + 1)
    assert len(renamed.calls) < MAX_CALLS


@pytest.mark.e2e
@pytest.mark.parametrize("root", ["replaced", "renamed"])
def test_what_a_killed_replacement_left_is_put_in_order_by_the_next(killed: Path, root: str) -> None:
    source = build("llama-gqa").directory

    for dest in _killed(killed / root).dests:
        with pytest.raises(StoreError, match="holds a model already"):
            convert(source, dest)  # whatever it was asked for

        assert read_manifest(dest).dtype in ("float16", "float32"), dest
        assert verify(dest) == [], dest
        assert _names(dest) == ["generation_config.json", MANIFEST, WEIGHTS], dest
        assert _names(dest.parent) == ["m"], dest


def test_a_source_inside_the_destination_is_not_deleted(tmp_path: Path) -> None:
    convert(build("llama-gqa").directory, tmp_path / "m")
    shutil.copytree(build("qwen2").directory, tmp_path / "m" / "source")

    with pytest.raises(StoreError, match="holds more than a model, so it stays: source;"):
        convert(tmp_path / "m" / "source", tmp_path / "m", overwrite=True)

    assert read_manifest(tmp_path / "m").arch.family == "llama"
    assert _names(tmp_path / "m" / "source") == _names(build("qwen2").directory)


#: Prints by how many bytes the converter's memory grew.
MEASURED = """
import re, sys
from pathlib import Path
import torch
from hearth.store.format.convert import convert

def peak_bytes():
    # Not ru_maxrss: a new process inherits its parent's.
    return int(re.search(r"VmHWM:\\s+([0-9]+) kB", Path("/proc/self/status").read_text())[1]) * 1024

torch.set_num_threads(1)
torch.zeros(8).bfloat16()
before = peak_bytes()
for quant in ("none", "int8"):
    convert(Path(sys.argv[1]), Path(sys.argv[2]) / quant, dtype="bfloat16", quant=quant)
print(peak_bytes() - before)
"""


def _save_large(directory: Path) -> int:
    """40 tensors of 8 MB and a few small ones; returns their bytes."""
    from safetensors.torch import save_file

    hidden, intermediate, layers = 1024, 2048, 8
    config = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 64,
        "tie_word_embeddings": True,
    }
    shapes = {"model.embed_tokens.weight": (64, hidden), "model.norm.weight": (hidden,)}
    for layer in range(layers):
        name = f"model.layers.{layer}"
        shapes |= {
            f"{name}.{norm}.weight": (hidden,) for norm in ("input_layernorm", "post_attention_layernorm")
        }
        shapes |= {
            f"{name}.self_attn.q_proj.weight": (2048, hidden),
            f"{name}.self_attn.k_proj.weight": (1024, hidden),
            f"{name}.self_attn.v_proj.weight": (1024, hidden),
            f"{name}.self_attn.o_proj.weight": (hidden, 2048),
            f"{name}.mlp.gate_proj.weight": (intermediate, hidden),
            f"{name}.mlp.up_proj.weight": (intermediate, hidden),
            f"{name}.mlp.down_proj.weight": (hidden, intermediate),
        }
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.e2e
def test_converting_needs_far_less_memory_than_the_model(tmp_path: Path) -> None:
    num_bytes = _save_large(tmp_path / "source")
    assert num_bytes > 300_000_000

    grown_bytes = int(_python(MEASURED, str(tmp_path / "source"), str(tmp_path)))

    assert grown_bytes < num_bytes / 4


@pytest.mark.e2e
def test_converting_a_gguf_file_needs_little_more_memory_than_its_largest_tensor(tmp_path: Path) -> None:
    path, rows = tmp_path / "model.gguf", 1 << 15
    model = tiny("llama-gqa", hidden_size=512, intermediate_size=512, num_hidden_layers=1)
    tensors, words = model_tensors(model), byte_level_metadata(["a b c"] * 9, "gpt-2")
    metadata = {**model_metadata(model.config, "llama"), **words, "llama.vocab_size": rows}
    largest = ("token_embd.weight", "output.weight")
    tensors |= dict.fromkeys(largest, np.zeros((rows, 512 // 32 * 34), np.uint8))
    write(path, metadata, tensors, kinds=dict.fromkeys(largest, GGMLQuantizationType.Q8_0))

    grown_bytes = int(_python(MEASURED, str(path), str(tmp_path)))

    # About 2.5: one in float32 as it is read, one in bfloat16 as it is written, two that are mapped.
    # Dequantised at once they take 4.3.
    assert grown_bytes < 3.2 * rows * 512 * torch.float32.itemsize

"""The models that `bench.load` loads: a random checkpoint, what is converted from it, and copies of that.

python -m bench.load.models SOURCE DEST QUANT CHUNK_BYTES     convert, and say what that took

A model that is there already is used again. Times nothing but conversions.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from hearth.store.format.convert import convert
from hearth.store.format.manifest import MANIFEST, WEIGHTS, Chunk, Manifest, chunk_of, read_manifest

ROOT = Path(__file__).resolve().parents[2]
NUM_SHARDS = 3
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Conversion:
    """Time and memory of a conversion: the peak, and `import_bytes` before the first tensor."""

    seconds: float
    num_bytes: int
    peak_bytes: int
    import_bytes: int


@dataclass(frozen=True, slots=True)
class Shelf:
    """Two directories, one on the disk and one in memory, and the models in them."""

    disk: Path
    tmpfs: Path
    config: Mapping[str, object]  #: of the model, as in its config.json
    chunk_bytes: int

    def checkpoint(self, device: torch.device) -> Path:
        """Return a checkpoint of random safetensors in memory."""
        directory = self.tmpfs / "checkpoint"
        if not (directory / INDEX).exists():
            write_checkpoint(directory, self.config, device)
        return directory

    def checkpoint_on_disk(self, device: torch.device) -> Path:
        return _copied(self.checkpoint(device), self.disk / "checkpoint", last=INDEX)

    def convert(self, device: torch.device) -> Conversion:
        """Convert from the disk to the disk, whether or not it has been done before."""
        return convert_apart(self.checkpoint_on_disk(device), self.disk / "model", "none", self.chunk_bytes)

    def model_on_disk(self, device: torch.device) -> Path:
        directory = self.disk / "model"
        if not (directory / MANIFEST).exists():
            self.convert(device)
        return directory

    def model(self, device: torch.device) -> Path:
        """Return the converted model in memory."""
        return _copied(self.model_on_disk(device), self.tmpfs / "model", last=MANIFEST)

    def quantised(self, device: torch.device, quants: tuple[str, ...]) -> dict[str, Path]:
        """Return quantised models in memory, converted side by side."""
        source = self.checkpoint(device)
        paths = {quant: self.tmpfs / quant for quant in quants}
        missing = [quant for quant, path in paths.items() if not (path / MANIFEST).exists()]
        with ThreadPoolExecutor(len(quants)) as pool:
            list(pool.map(lambda q: convert_apart(source, paths[q], q, self.chunk_bytes), missing))
        return paths

    def recut(self, device: torch.device, chunk_bytes: int) -> Path:
        """Return the model in memory once more, in chunks of another size; the weights are the same file."""
        return recut(self.model(device), self.tmpfs / f"chunks-{chunk_bytes}", chunk_bytes)

    def clear(self) -> None:
        for directory in (self.disk, self.tmpfs):
            shutil.rmtree(directory, ignore_errors=True)


def write_checkpoint(directory: Path, config: Mapping[str, object], device: torch.device) -> None:
    """Write a random model in Hugging Face's format and names, a few files of about the same size."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    shapes = list(tensor_shapes(config).items())
    generator = torch.Generator(device).manual_seed(3)
    per_shard = -(-len(shapes) // NUM_SHARDS)
    shard_by_name: dict[str, str] = {}
    for number in range(NUM_SHARDS):
        file_name = f"model-{number + 1:05}-of-{NUM_SHARDS:05}.safetensors"
        tensors = {}
        for name, shape in shapes[number * per_shard : (number + 1) * per_shard]:
            tensor = torch.empty(shape, dtype=torch.bfloat16, device=device)
            tensors[name] = tensor.normal_(1.0 if "norm" in name else 0.0, 0.02, generator=generator).cpu()
            shard_by_name[name] = file_name
        save_file(tensors, directory / file_name, metadata={"format": "pt"})
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": shard_by_name}))


def tensor_shapes(config: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a Llama whose keys and values have as many heads as its queries."""
    sizes = {key: value for key, value in config.items() if isinstance(value, int)}
    hidden, inner, vocab = sizes["hidden_size"], sizes["intermediate_size"], sizes["vocab_size"]
    of_layer = {
        "input_layernorm": (hidden,),
        **{f"self_attn.{part}_proj": (hidden, hidden) for part in "qkvo"},
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    layers = {
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(sizes["num_hidden_layers"])
        for name, shape in of_layer.items()
    }
    embed, head = {"model.embed_tokens.weight": (vocab, hidden)}, {"lm_head.weight": (vocab, hidden)}
    return {**embed, **layers, "model.norm.weight": (hidden,), **head}


def tensor_bytes(config: Mapping[str, object]) -> int:
    """Return the bytes of all tensors of the checkpoint."""
    return sum(torch.Size(shape).numel() * 2 for shape in tensor_shapes(config).values())


def convert_apart(source: Path, dest: Path, quant: str, chunk_bytes: int) -> Conversion:
    """Convert in a process of its own, so that its memory can be told from ours."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.load.models", str(source), str(dest), quant, str(chunk_bytes)],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return Conversion(**json.loads(done.stdout))


def recut(model: Path, dest: Path, chunk_bytes: int) -> Path:
    if (dest / MANIFEST).exists():
        return dest
    dest.mkdir(parents=True, exist_ok=True)
    (dest / WEIGHTS).unlink(missing_ok=True)
    os.link(model / WEIGHTS, dest / WEIGHTS)
    old = read_manifest(model)
    files = {file.name: (model / file.name).read_bytes() for file in old.files}
    for name, content in files.items():
        (dest / name).write_bytes(content)
    chunks = hashed(dest / WEIGHTS, chunk_bytes)
    manifest = Manifest.of(old.arch, old.dtype, old.quant, chunks, chunk_bytes, files)
    (dest / MANIFEST).write_text(manifest.to_json())
    return dest


def hashed(path: Path, chunk_bytes: int) -> tuple[Chunk, ...]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        view = memoryview(mapped)

        def chunk_at(begin: int) -> Chunk:
            with view[begin : begin + chunk_bytes] as data:
                return chunk_of(data)

        with view, ThreadPoolExecutor(os.cpu_count()) as pool:
            return tuple(pool.map(chunk_at, range(0, len(view), chunk_bytes)))


def _copied(source: Path, dest: Path, last: str) -> Path:
    """Copy a directory, whose file `last` tells that it is whole, unless it is there already."""
    if not (dest / last).exists():
        dest.mkdir(parents=True, exist_ok=True)
        for path in sorted(source.iterdir(), key=lambda path: path.name == last):
            shutil.copyfile(path, dest / path.name)
    return dest


def main() -> None:
    source, dest, quant, chunk_bytes = sys.argv[1:]
    import_bytes = _memory_bytes("VmRSS")
    began_s = time.perf_counter()
    manifest = convert(Path(source), Path(dest), quant=quant, chunk_bytes=int(chunk_bytes), overwrite=True)
    seconds = time.perf_counter() - began_s
    # Not getrusage: what it calls the maximum begins with the process that started this one.
    conversion = Conversion(seconds, manifest.num_bytes, _memory_bytes("VmHWM"), import_bytes)
    print(json.dumps(asdict(conversion)))


def _memory_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (value,) = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return int(value) << 10


if __name__ == "__main__":
    main()

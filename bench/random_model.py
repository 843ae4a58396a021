"""Random models in Hearth's format, with tokenizers all of whose words are readable. Measures nothing."""

from __future__ import annotations

import errno
import json
import mmap
import shutil
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from hearth.models.families import arch_from_config
from hearth.models.layout import TensorSpec, layout_of
from hearth.store.format.manifest import CHUNK_BYTES, MANIFEST, WEIGHTS, Chunk, Manifest, chunk_of

#: Costs almost nothing to compute, so that what is left is the service.
TINY: Mapping[str, object] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}

#: Threads that write a model. More make no pages faster.
_MAX_WRITERS = 8
SPACES = ("\u0120", "\u010a")  #: space and line feed in byte-level spelling


def write_random(
    directory: Path,
    config: Mapping[str, object],
    dtype: str,
    seed: int,
    device: torch.device,
    chat_template: str | None = None,
) -> Path:
    """Write a converted model, the same for one seed and device; one that is there is kept.

    With a chat template its words include white space alone, of which chats and calls of tools are full.
    """
    if (directory / MANIFEST).exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    arch = arch_from_config(dict(config))
    layout = layout_of(arch, dtype)
    base = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for spec in layout.tensors:
        _fill(base, spec, generator)
    chunks = _write_weights(directory / WEIGHTS, base)
    files = {"tokenizer.json": tokenizer_json(arch.vocab_size).encode()}
    if chat_template is not None:
        files["tokenizer.json"] = tokenizer_json(arch.vocab_size, SPACES).encode()
        files["chat_template.jinja"] = chat_template.encode()
    for name, content in files.items():
        (directory / name).write_bytes(content)
    manifest = Manifest.of(arch, dtype, "none", chunks, CHUNK_BYTES, files)
    (directory / MANIFEST).write_text(manifest.to_json())
    return directory


def _write_weights(path: Path, base: torch.Tensor) -> tuple[Chunk, ...]:
    """Copy and hash on many cores, into pages of the file: writes to one file would wait for each other.

    Raises:
        OSError: there is no room. Pages that cannot be had would end the process later.
    """
    num_bytes = len(base)
    if (free_bytes := shutil.disk_usage(path.parent).free) < num_bytes:
        raise OSError(errno.ENOSPC, f"a model of {num_bytes} bytes, free are {free_bytes}", str(path))
    with path.open("w+b") as file:
        file.truncate(num_bytes)
        mapped = mmap.mmap(file.fileno(), num_bytes)
    pages, threads = torch.frombuffer(mapped, dtype=torch.uint8), threading.local()

    def write(at: int) -> Chunk:
        part = base[at : at + CHUNK_BYTES]
        if part.is_cuda:
            # The driver fills memory that is not pinned for one thread at a time, and so makes its pages.
            if not hasattr(threads, "pinned"):
                threads.pinned = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
            part = threads.pinned[: len(part)].copy_(part)
        return chunk_of(pages[at : at + CHUNK_BYTES].copy_(part).numpy().data)

    with ThreadPoolExecutor(_MAX_WRITERS) as pool:
        return tuple(pool.map(write, range(0, num_bytes, CHUNK_BYTES)))


def _fill(base: torch.Tensor, spec: TensorSpec, generator: torch.Generator) -> None:
    tensor = base[spec.offset : spec.offset + spec.nbytes].view(getattr(torch, spec.dtype))
    if "norm" in spec.name:
        tensor.fill_(1.0)
    else:
        # A tiny one would else say the same word for ever, and a wrong answer could pass for a right one.
        tensor.normal_(std=0.02 if base.nbytes > 1 << 30 else 0.5, generator=generator)


@cache
def tokenizer_json(vocab_size: int, spaces: tuple[str, ...] = ()) -> str:
    """Return a byte-level tokenizer; each token adds whole characters, so each is an event of a stream."""
    # Byte-level spelling leaves printable characters as they are.
    printable = [*(chr(code) for code in range(33, 127)), *spaces]
    words = [f"\u0120w{number}" for number in range(vocab_size - len(printable))]
    backend = Backend(models.BPE(vocab={token: at for at, token in enumerate(printable + words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    text: str = json.dumps(json.loads(backend.to_str()))
    return text

"""Eight random models in pinned host memory, for `bench.reuse`. Their shapes are real, their depth is cut.

They are drawn by Tangram's size mix until the largest fits into the smallest budget, which few draws do: the
one above 14B is then among the smallest of its class, and most of those below are among the larger ones. A
model here is a manifest and its chunks: no files, no tokenizer, nobody computes with it. Times nothing.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hearth.core.errors import LoadCancelled
from hearth.core.sizes import block_buffer
from hearth.core.types import ModelId
from hearth.memory.pool import Shape
from hearth.models.arch import Arch
from hearth.models.families import arch_from_config
from hearth.models.layout import ByteRange, layout_of
from hearth.store.format.manifest import Chunk, Manifest, chunk_of
from hearth.store.tiers.segment import Segment
from hearth.store.transfer.fetch import HostChunk

MAX_DRAWS = 10_000
BLOCK_TOKENS = 16
ITEM_BYTES = 2  #: of bfloat16, in which all of them are


@dataclass(frozen=True, slots=True)
class Kind:
    """A published architecture, by the numbers that its size depends on."""

    name: str
    model_type: str
    hidden: int
    inner: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab: int
    is_tied: bool

    def arch(self, depth: float) -> Arch:
        """Return the architecture with that share of its layers, at least one."""
        is_opt = self.model_type == "opt"
        return arch_from_config(
            {
                "model_type": self.model_type,
                "hidden_size": self.hidden,
                "ffn_dim" if is_opt else "intermediate_size": self.inner,
                "word_embed_proj_dim" if is_opt else "num_key_value_heads": (
                    self.hidden if is_opt else self.num_kv_heads
                ),
                "num_hidden_layers": max(1, round(self.num_layers * depth)),
                "num_attention_heads": self.num_heads,
                "vocab_size": self.vocab,
                "max_position_embeddings": 2048,
                "tie_word_embeddings": self.is_tied,
            }
        )


#: Tangram's size mix: how many of eight models have how many parameters (30%, 60% and 10% of them).
SMALL = (
    Kind("Llama-3.2-1B", "llama", 2048, 8192, 16, 32, 8, 128256, True),
    Kind("OPT-1.3B", "opt", 2048, 8192, 24, 32, 32, 50272, True),
    Kind("Qwen2.5-1.5B", "qwen2", 1536, 8960, 28, 12, 2, 151936, True),
    Kind("OPT-2.7B", "opt", 2560, 10240, 32, 32, 32, 50272, True),
    Kind("Qwen2.5-3B", "qwen2", 2048, 11008, 36, 16, 2, 151936, True),
    Kind("Llama-3.2-3B", "llama", 3072, 8192, 28, 24, 8, 128256, True),
)
MIDDLE = (
    Kind("Qwen3-4B", "qwen3", 2560, 9728, 36, 32, 8, 151936, True),
    Kind("Yi-6B", "llama", 4096, 11008, 32, 32, 4, 64000, False),
    Kind("OPT-6.7B", "opt", 4096, 16384, 32, 32, 32, 50272, True),
    Kind("Llama-2-7B", "llama", 4096, 11008, 32, 32, 32, 32000, False),
    Kind("Mistral-7B", "mistral", 4096, 14336, 32, 32, 8, 32000, False),
    Kind("Qwen2.5-7B", "qwen2", 3584, 18944, 28, 28, 4, 152064, False),
    Kind("Llama-3.1-8B", "llama", 4096, 14336, 32, 32, 8, 128256, False),
    Kind("Yi-9B", "llama", 4096, 11008, 48, 32, 4, 64000, False),
    Kind("Llama-2-13B", "llama", 5120, 13824, 40, 40, 40, 32000, False),
    Kind("OPT-13B", "opt", 5120, 20480, 40, 40, 40, 50272, True),
)
LARGE = (
    Kind("Qwen2.5-14B", "qwen2", 5120, 13824, 48, 40, 8, 152064, False),
    Kind("Qwen3-14B", "qwen3", 5120, 17408, 40, 40, 8, 151936, False),
    Kind("OPT-30B", "opt", 7168, 28672, 48, 56, 56, 50272, True),
)
MIX = ((SMALL, 2), (MIDDLE, 5), (LARGE, 1))
#: For tests: the same three kinds of models, so small that their bytes are made in no time.
TINY_MIX = (
    (tuple(Kind(f"small-{n}", "llama", 32 + 16 * n, 96, 4, 4, 2, 128, True) for n in range(2)), 2),
    (tuple(Kind(f"middle-{n}", "qwen2", 80 + 8 * n, 192, 6, 4, 2, 128, True) for n in range(5)), 5),
    ((Kind("large", "opt", 104, 272, 4, 4, 4, 128, True),), 1),
)


def drawn(
    mix: Sequence[tuple[Sequence[Kind], int]],
    depth: float,
    is_fitting: Callable[[list[int]], bool],
    seed: int,
) -> list[Kind]:
    """Draw models at random, in any order, again and again until their sizes in bytes are `is_fitting`."""
    draw = random.Random(seed)
    all_kinds = [kind for choice, _ in mix for kind in choice]
    sizes = {kind: layout_of(kind.arch(depth), "bfloat16").num_bytes for kind in all_kinds}
    for _ in range(MAX_DRAWS):
        kinds = [kind for choice, count in mix for kind in draw.sample(choice, count)]
        draw.shuffle(kinds)
        if is_fitting([sizes[kind] for kind in kinds]):
            return kinds
    raise ValueError(
        f"no draw of models fits, depth: {depth:g}, draws: {MAX_DRAWS}; raise the smallest budget"
    )


@dataclass(frozen=True, slots=True)
class LibraryModel:
    """A model whose chunks lie in host memory."""

    id: ModelId
    manifest: Manifest
    cells: tuple[int, ...]  #: of its chunks
    shape: Shape

    @property
    def block_bytes(self) -> int:
        return self.shape.block_bytes


@dataclass(frozen=True, slots=True)
class Stored:
    """Bytes of a model in host memory."""

    begin: int  #: in the model
    data: torch.Tensor


class Library:
    """Models in one pinned segment. Mutable while models are added; then any thread reads."""

    def __init__(
        self, segment: Segment, device: torch.device, workspace_bytes: int, max_kv_bytes: int
    ) -> None:
        self.segment = segment
        self.models: list[LibraryModel] = []
        self._device, self._workspace_bytes, self._max_kv_bytes = device, workspace_bytes, max_kv_bytes
        self._num_used = 0
        self._generator = torch.Generator(device).manual_seed(7)

    def add(self, name: str, arch: Arch) -> LibraryModel:
        """Add a new model of random bytes."""
        num_bytes, chunk_bytes = layout_of(arch, "bfloat16").num_bytes, self.segment.cell_bytes
        sizes = [min(chunk_bytes, num_bytes - at) for at in range(0, num_bytes, chunk_bytes)]
        return self._enter(name, arch, self._filled(sizes))

    def add_changed(self, name: str, base: LibraryModel, changed: Sequence[int]) -> LibraryModel:
        """Add a model that shares all chunks with another but these."""
        fresh = self._filled([base.manifest.chunks[index].num_bytes for index in changed])
        cells = list(base.cells)
        for index, cell in zip(changed, fresh, strict=True):
            cells[index] = cell
        return self._enter(name, base.manifest.arch, cells)

    def stream(
        self, model: LibraryModel, chunks: Sequence[int], prepare: Callable[[ByteRange], None]
    ) -> HostStream:
        return HostStream(self.segment, model, chunks, prepare)

    def bytes_of(self, model: LibraryModel, part: ByteRange) -> Iterator[Stored]:
        """Yield the bytes of a part of a model, chunk by chunk."""
        for index in model.manifest.chunks_of(part):
            whole = model.manifest.chunk_range(index)
            low, high = max(part.begin, whole.begin), min(part.end, whole.end)
            data = cell_tensor(self.segment, model.cells[index], whole.end - whole.begin)
            yield Stored(low, data[low - whole.begin : high - whole.begin])

    def _filled(self, sizes: Sequence[int]) -> list[int]:
        """Fill new cells with random bytes; they are made on the device, because that is faster."""
        cells = [self._num_used + at for at in range(len(sizes))]
        self._num_used += len(sizes)
        assert self._num_used <= self.segment.num_cells, f"{self._num_used=} {self.segment.num_cells=}"
        noise = torch.empty(self.segment.cell_bytes // 8, dtype=torch.int64, device=self._device)
        for cell, size in zip(cells, sizes, strict=True):
            noise.random_(generator=self._generator)
            cell_tensor(self.segment, cell, size).copy_(noise.view(torch.uint8)[:size])
        return cells

    def _enter(self, name: str, arch: Arch, cells: Sequence[int]) -> LibraryModel:
        layout, chunk_bytes = layout_of(arch, "bfloat16"), self.segment.cell_bytes
        sizes = [min(chunk_bytes, layout.num_bytes - at) for at in range(0, layout.num_bytes, chunk_bytes)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            chunks = tuple(pool.map(self._chunk, cells, sizes))
        manifest = Manifest.of(arch, "bfloat16", "none", chunks, chunk_bytes, files={})
        dimensions = arch.dimensions
        block_bytes = block_buffer(dimensions, dimensions.layers, "bfloat16", BLOCK_TOKENS).num_bytes
        shape = Shape(
            digest=manifest.digest,
            stored=layout,
            served=layout,
            chunk_bytes=chunk_bytes,
            chunks=manifest.chunk_ids,
            workspace_bytes=self._workspace_bytes,
            tables_bytes=0,  # no engine is put together
            block_bytes=block_bytes,
            max_blocks=2 + self._max_kv_bytes // block_bytes,  # with the sink, and what rounding up adds
        )
        model = LibraryModel(ModelId(name), manifest, tuple(cells), shape)
        self.models.append(model)
        return model

    def _chunk(self, cell: int, size: int) -> Chunk:
        with self.segment.memory(cell, size) as data:
            return chunk_of(data)


class HostStream:
    """A `ChunkSource` over host memory that holds everything. One thread iterates."""

    def __init__(
        self,
        segment: Segment,
        model: LibraryModel,
        chunks: Sequence[int],
        prepare: Callable[[ByteRange], None],
    ) -> None:
        self._segment, self._model, self._chunks, self._prepare = segment, model, chunks, prepare
        self._is_cancelled = False

    @property
    def release_batch(self) -> int:
        """See `ChunkSource`. Nobody waits for what is given back."""
        return 1

    def batches(self, most: int) -> Generator[list[HostChunk]]:
        """Yield each chunk as soon as its place is prepared."""
        for index in self._chunks:
            if self._is_cancelled:
                raise LoadCancelled(f"the load of `{self._model.id}` was called off")
            part, cell = self._model.manifest.chunk_range(index), self._model.cells[index]
            self._prepare(part)
            yield [HostChunk(index, self._segment.memory(cell, part.end - part.begin), cell, None)]

    def release(self, *chunks: HostChunk) -> None:
        pass

    def cancel(self) -> None:
        self._is_cancelled = True


def cell_tensor(segment: Segment, cell: int, num_bytes: int) -> torch.Tensor:
    """View the first bytes of a cell as a tensor."""
    return torch.frombuffer(segment.memory(cell, num_bytes), dtype=torch.uint8)


@contextmanager
def library(
    num_bytes: Sequence[int], chunk_bytes: int, device: torch.device, workspace_bytes: int, max_kv_bytes: int
) -> Iterator[Library]:
    """Open pinned memory for models of these sizes."""
    num_cells = sum(-(-size // chunk_bytes) for size in num_bytes)
    segment = Segment.create(num_cells, chunk_bytes)
    try:
        segment.pin_in_background()
        segment.wait_pinned()
        assert segment.pinned_bytes == segment.num_bytes or device.type == "cpu", "memory cannot be pinned"
        yield Library(segment, device, workspace_bytes, max_kv_bytes)
    finally:
        segment.close()

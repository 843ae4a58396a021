"""Makes an engine in this process from a path: finds what is there and brings its weights to the device.

    a converted model, or its URL   loaded chunk by chunk; the engine runs behind it, layer by layer
    a Hugging Face directory, GGUF  read and packed tensor by tensor; the engine starts when that is done

Answers no requests: that is `llm.py`.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from hearth.core.config import EngineConfig, ServiceConfig, StoreConfig
from hearth.core.errors import DeviceError, HearthError, ModelError
from hearth.engine.assemble import ModelSpec, allocate, assemble, own_limits
from hearth.engine.dry_run import KernelNeeds
from hearth.engine.engine import Engine
from hearth.engine.graph_capture import CaptureAhead
from hearth.engine.kernel_warmup import KernelWarmup
from hearth.kernels import packed_products
from hearth.kernels.compilations import COMPILATIONS
from hearth.kernels.jit import HAS_TRITON
from hearth.kernels.kernel_cache import KernelCache
from hearth.models.arch import Arch
from hearth.models.buffers import name_of
from hearth.models.dtypes import DTYPES
from hearth.models.layout import Layout, layout_of
from hearth.models.pack import checkpoint_dtype, checkpoint_quant, pack
from hearth.models.weights import bind, contiguous_places
from hearth.store.format.convert import open_source
from hearth.store.format.convert_adapter import AdapterBase
from hearth.store.format.manifest import MANIFEST, Manifest, of_model
from hearth.store.format.read_adapter import AdapterBytes, read_adapter
from hearth.store.format.source import ModelSource
from hearth.store.format.widen_dtype import served_layout, stored_part, widen
from hearth.store.tiers.tiers import Tiers
from hearth.store.transfer.destination import whole
from hearth.store.transfer.record import LoadRecord
from hearth.store.transfer.transfer import Loader, Transfer, TransferGate
from hearth.system.cpus import log_if_threads_spin, num_usable_cores
from hearth.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelOptions:
    device: str = "auto"
    dtype: str = "auto"
    max_context: int | None = None  #: None: the context that the model was made for
    skip_tokenizer: bool = False
    engine: EngineConfig = field(default_factory=EngineConfig)


class OpenedModel(Protocol):
    tokenizer: Tokenizer | None
    spec: ModelSpec

    def build(self) -> Engine:
        """Build the engine, on the thread that will own it."""

    def wait(self) -> LoadRecord | None:
        """Wait until all weights are on the device; return None if they were not loaded by chunks."""

    def close(self) -> None:
        """End a load that is still under way. Closing again is harmless."""


def open_model(path: str | Path, options: ModelOptions, store: StoreConfig | Tiers) -> OpenedModel:
    """Tiers that are given stay open; those of a StoreConfig are closed once the model is loaded."""
    device = _device(options.device)
    if device.type == "cpu":
        log_if_threads_spin()
        _keep_to_usable_cores()
    if "://" in str(path) or (Path(path) / MANIFEST).is_file():
        return _ConvertedModel(path, options, store, device)
    return _PackedModel(Path(path), options, _kernels_path(store), device)


def find_model(model: str | Path, revision: str | None = None) -> str | Path:
    """Return where a model is: `model` is a path, a URL, a deployed name or an id on the Hub, in this order.

    A model of the Hub that is not deployed is downloaded into the cache that Hugging Face's libraries share.
    """
    from hearth.control.deploy.sources import hub_path, hub_source

    text = str(model)
    if isinstance(model, Path) or "://" in text or text.startswith((".", "/")) or Path(text).exists():
        return model
    source = hub_source(text, revision)
    if (deployed := _deployed(text, None if source is None else source.text)) is not None:
        return deployed
    return model if source is None else hub_path(source)


def _deployed(name: str, source: str | None) -> str | None:
    """Return where a model of the data directory is that has this name or was deployed from this source."""
    from hearth.control.datadir import DataDir
    from hearth.control.deploy.names import Names
    from hearth.control.deploy.registry import Registry

    data_dir = DataDir(Path(os.environ.get("HEARTH_DATA_DIR") or ServiceConfig().data_dir).expanduser())
    if not data_dir.has_registry:
        return None
    with Registry(data_dir) as registry:
        models = registry.all()
    for one in models:
        if one.name == name or one.source == source:
            return one.where
    if source is None:
        raise Names(models, {}).unknown(name)
    return None


def read_adapters(opened: OpenedModel, paths: Mapping[str, str | Path]) -> dict[str, AdapterBytes]:
    """Read adapters by the names that requests will have. Raises ModelError."""
    base = AdapterBase(opened.spec.arch, name_of(opened.spec.dtype))
    return {name: read_adapter(Path(path), base) for name, path in paths.items()}


def add_adapters(engine: Engine, adapters: Iterable[AdapterBytes]) -> None:
    """Call on the thread that owns the engine. Adapters stay as long as it does. Raises DeviceError."""
    device = engine.runner.layers.kv.device
    for one in {one.adapter: one for one in adapters}.values():
        content = allocate(len(one.content), device, "an adapter", "name fewer of them, or lower `kv_bytes`")
        content.copy_(torch.frombuffer(bytearray(one.content), dtype=torch.uint8))
        pieces = [content[part.begin : part.end] for _, part in one.layout.layers]
        engine.add_adapter(one.adapter, one.layout, pieces)


def _keep_to_usable_cores() -> None:
    """Lower torch's threads to the cores that this process may use: torch does not ask the cgroup."""
    if torch.get_num_threads() > (num_cores := num_usable_cores()):
        torch.set_num_threads(num_cores)


class _PackedModel:
    def __init__(self, path: Path, options: ModelOptions, kernels: Path, device: torch.device) -> None:
        self._path, self._config, self._kernels, self._device = path, options.engine, kernels, device
        self._text_files = tempfile.TemporaryDirectory(prefix="hearth-text-")  #: guides read the tokenizer
        try:
            with open_source(path) as source:
                text_path = Path(self._text_files.name)
                self.tokenizer = None if options.skip_tokenizer else _tokenizer_of(source, text_path)
                dtype = _packed_dtype(options.dtype, source, device)
                self._quant = checkpoint_quant(source.checkpoint, source.arch)
                self._layout = layout_of(source.arch, dtype, self._quant)
                self.spec = _spec_of(source.arch, dtype, options, device, self.tokenizer, text_path)
        except BaseException:
            self.close()
            raise

    def build(self) -> Engine:
        spec, layout = self.spec, self._layout
        kernels = _OfflineKernels(spec, self._quant, self._kernels, self._device)
        base = _allocate_weights(layout, self._device)
        with open_source(self._path) as source:
            pack(source.checkpoint, spec.arch, layout, base)
        weights = bind(spec.arch, layout, contiguous_places(layout, base))
        kernels.wait()
        return assemble(spec, weights, self._config, self._device)

    def wait(self) -> None:
        """Return at once: the model was packed while it was built."""

    def close(self) -> None:
        self._text_files.cleanup()


class _ConvertedModel:
    """A converted model. Mutable: `build` starts its load."""

    def __init__(
        self, path: str | Path, options: ModelOptions, store: StoreConfig | Tiers, device: torch.device
    ) -> None:
        self._config, self._kernels, self._device = options.engine, _kernels_path(store), device
        self._owns_tiers = isinstance(store, StoreConfig)
        if isinstance(store, StoreConfig):
            is_cuda = device.type == "cuda"
            store = Tiers(store, is_pinned=is_cuda, keeps_chunks=is_cuda)
        self._tiers = store
        self._load: Transfer | None = None
        self._has_ended = threading.Event()  #: of the load
        self._captures: CaptureAhead | None = None
        try:
            self._model = self._tiers.open(path)
            manifest = self._manifest = of_model(self._model.manifest, str(path))
            self.tokenizer = None if options.skip_tokenizer else Tokenizer.load(self._model.directory)
            self._dtype = _stored_dtype(options.dtype, manifest, device)
            self.spec = _spec_of(
                manifest.arch, self._dtype, options, device, self.tokenizer, self._model.directory
            )
        except BaseException:
            self.close()
            raise

    def build(self) -> Engine:
        manifest, spec = self._manifest, self.spec
        layout = served_layout(manifest, self._dtype)
        kernels = _OfflineKernels(spec, manifest.quant, self._kernels, self._device)
        base = _allocate_weights(layout, self._device)
        weights = bind(spec.arch, layout, contiguous_places(layout, base))
        if self._config.graphs == "start":
            kernels.wait()
        engine = assemble(spec, weights, self._config, self._device)
        # Only now: whatever else goes to the device would have to queue behind the weights.
        load = self._start(stored_part(base, manifest))
        if self._dtype == manifest.dtype:
            engine.runner.layers.follow(TransferGate(load, manifest))
        else:
            load.wait()
            widen(base, manifest, layout)
        kernels.wait()
        if engine.runner.layers.graphs is not None and self._config.graphs == "lazy":
            self._captures = CaptureAhead(engine.runner.layers, lambda: not self._has_ended.is_set())
        return engine

    def _start(self, base: torch.Tensor) -> Transfer:
        model = self._model
        self._load = Loader(self._device).load(
            model.name,
            model.manifest,
            whole(model.manifest, base),
            lambda chunks: self._tiers.fetch(model, chunks),
            on_end=self._ended,
        )
        return self._load

    def wait(self) -> LoadRecord | None:
        return None if self._load is None else self._load.wait()

    def close(self) -> None:
        if self._load is not None:
            self._load.cancel()
        if self._captures is not None:
            self._captures.stop()
        self._close_tiers()

    def _ended(self, outcome: LoadRecord | HearthError) -> None:
        self._has_ended.set()
        if isinstance(outcome, LoadRecord):
            self._tiers.loaded(outcome)
            self._close_tiers()

    def _close_tiers(self) -> None:
        if self._owns_tiers:
            self._owns_tiers = False
            self._tiers.close()


def _kernels_path(store: StoreConfig | Tiers) -> Path:
    return (Path(store.path).expanduser() if isinstance(store, StoreConfig) else store.disk.root) / "kernels"


class _OfflineKernels:
    def __init__(self, spec: ModelSpec, quant: str, path: Path, device: torch.device) -> None:
        """Have the model's kernels loaded, or start to compile those that are missing."""
        self._compiling: threading.Thread | None = None
        if device.type == "cpu" and quant != "none":
            packed_products.prepare()
        if device.type != "cuda" or not HAS_TRITON:
            return
        COMPILATIONS.watch()
        warmup = KernelWarmup(KernelCache.open(path))
        needs = KernelNeeds.on(device, spec.arch, name_of(spec.dtype), quant, spec.limits)
        if not warmup.load(needs):
            self._compiling = threading.Thread(
                target=lambda: warmup.compile(needs), name="hearth-kernels", daemon=True
            )
            self._compiling.start()

    def wait(self) -> None:
        if self._compiling is not None:
            self._compiling.join()


def _tokenizer_of(source: ModelSource, directory: Path) -> Tokenizer:
    for name, content in source.text_files().items():
        (directory / name).write_bytes(content)
    return Tokenizer.load(directory)


def _allocate_weights(layout: Layout, device: torch.device) -> torch.Tensor:
    return allocate(layout.num_bytes, device, "weights", "use a smaller model or a narrower dtype")


def _spec_of(
    arch: Arch,
    dtype: str,
    options: ModelOptions,
    device: torch.device,
    tokenizer: Tokenizer | None,
    text_path: Path,
) -> ModelSpec:
    return ModelSpec(
        arch=arch,
        dtype=DTYPES[dtype],
        max_context=_context(options.max_context, arch.max_positions),
        limits=own_limits(options.engine, arch, DTYPES[dtype], device),
        eos_ids=frozenset() if tokenizer is None else tokenizer.eos_ids,
        tokenizer_json=None if tokenizer is None else text_path / "tokenizer.json",
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise DeviceError(f"unknown device: `{name}`; supported: auto, cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise DeviceError("device `cuda` was asked for, but torch sees no CUDA device; use `cpu` or `auto`")
    return torch.device(name)


def _packed_dtype(wanted: str, source: ModelSource, device: torch.device) -> str:
    """Return the dtype to pack to; `auto`: float32 on a CPU, else the checkpoint's, bfloat16 for float32."""
    if wanted != "auto":
        return wanted
    if device.type == "cpu":
        return "float32"
    stored = checkpoint_dtype(source.checkpoint)
    return "bfloat16" if stored == "float32" else stored


def _stored_dtype(wanted: str, manifest: Manifest, device: torch.device) -> str:
    """Return the dtype to serve in; `auto`: as it was converted, but on a CPU float32, the fastest there."""
    supported = {manifest.dtype, "float32"} if device.type == "cpu" else {manifest.dtype}
    if wanted == "auto":
        return "float32" if device.type == "cpu" else manifest.dtype
    if wanted not in supported:
        raise ModelError(
            f"the model was converted to {manifest.dtype}, given: dtype `{wanted}`; "
            f"convert its source again with `--dtype {wanted}`, or leave the dtype out"
        )
    return wanted


def _context(wanted: int | None, most: int) -> int:
    if wanted is None:
        return most
    if not 1 < wanted <= most:
        raise ModelError(
            f"`max_model_len` must be from 2 to what the model was made for, {most}; given: {wanted}"
        )
    return wanted

"""The process that deploys one model or adapter: from source to converted, with its facts. Registers nothing.

It ends and cleans up when its standard input closes. A model is put in place as a whole
(`store/format/writer.py`), so killing the process leaves no partial one.
"""

from __future__ import annotations

import _thread
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from hearth.control.datadir import DataDir
from hearth.control.deploy.adapter_base import adapter_facts_of, check_fit, find_base
from hearth.control.deploy.deploy import DeployOrder, Task
from hearth.control.deploy.deployed import Deployed, DeployedAdapter
from hearth.control.deploy.names import check_name, file_name
from hearth.control.deploy.registry import Registry, name_taken
from hearth.control.deploy.sources import (
    ADAPTER_CONFIG,
    HubSource,
    PathSource,
    UrlSource,
    default_name,
    downloaded,
    parse_source,
)
from hearth.core.config import StoreConfig, wrong_label
from hearth.core.errors import BadCheckpoint, ChunkMissing, HearthError, RequestError, SourceMissing
from hearth.core.sizes import computed_dtype
from hearth.policy.fleet.footprint import Facts
from hearth.policy.fleet.profile import PartBytes
from hearth.store.format.adapter_manifest import AdapterManifest
from hearth.store.format.description import read_description
from hearth.store.format.manifest import WEIGHTS, Manifest, StoredManifest, of_model
from hearth.store.format.verify import BadFile, verify
from hearth.store.tiers.tiers import Tiers
from hearth.store.tiers.upstream import Upstream, write_upstream
from hearth.text.tokenizer import Tokenizer

_REPORT_EVERY_S = 0.1
#: Time to clean up after the order was cancelled.
_CLEARING_S = 20.0
#: The longest reason that is reported, in characters: the parent reads lines of up to 64 KiB.
_MAX_REASON = 4000
#: Host memory to fetch a description with. No weights go through it.
_HOST_BYTES = 16 << 20

OnProgress = Callable[[str, int, int], None]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Placed:
    where: str
    directory: Path
    manifest: StoredManifest
    is_new: bool = False  #: made for this order
    base: Deployed | None = None  #: that it was converted for, if it is an adapter
    commit: str | None = None  #: of the repository that it was downloaded from
    tokenizer: Tokenizer | None = None  #: of its source, held so that what it shares is not read again


def carry_out(order: DeployOrder, data_dir: DataDir, on_progress: OnProgress) -> Deployed | DeployedAdapter:
    """Raises HearthError; nothing has changed then."""
    source = parse_source(order.source)
    name = check_name(default_name(source) if order.name is None else order.name)
    _refuse_taken(name, order.overwrite, data_dir)
    if (wrong := wrong_label(order.labels)) is not None:
        raise RequestError(f"a label is KEY=VALUE without spaces, like `zone=a`, given: {wrong!r:.80}")
    if order.base is not None:
        order = replace(order, is_adapter=True)
        find_base(order, None, data_dir)  # before the work, too
    match source:
        case UrlSource(url):
            placed = _fetch(url, data_dir, on_progress)
        case PathSource(path) if (path / "manifest.json").is_file():
            placed = _in_place(path, data_dir, on_progress)
        case PathSource(path):
            placed = _convert(path, name, order, data_dir, on_progress)
        case HubSource():
            with downloaded(
                source,
                data_dir.downloads_path,
                lambda done, total: on_progress("downloading", done, total),
                is_adapter=order.is_adapter,
            ) as download:
                placed = _convert(download.path, name, order, data_dir, on_progress)
                placed = replace(placed, commit=download.commit)
    with ExitStack() as undo:
        if placed.is_new:
            undo.callback(shutil.rmtree, placed.directory, ignore_errors=True)
        deployed = _described(name, source.text, placed, order, data_dir)
        if placed.commit is not None:
            write_upstream(placed.directory, Upstream(placed.commit))
        undo.pop_all()
    return deployed


def _described(
    name: str, source: str, placed: _Placed, order: DeployOrder, data_dir: DataDir
) -> Deployed | DeployedAdapter:
    manifest = placed.manifest
    where, directory, now_s = placed.where, str(placed.directory), time.time()
    if isinstance(manifest, AdapterManifest):
        base = find_base(order, None, data_dir) if placed.base is None else placed.base
        if order.labels:
            raise RequestError(f"an adapter runs where its base does: set the labels of `{base.name}`")
        check_fit(manifest, base, order.kind, where)
        facts = adapter_facts_of(manifest)
        return DeployedAdapter(name, base.name, source, where, directory, manifest.digest, facts, now_s)
    if order.is_adapter:
        raise RequestError(f"`{source}` is a model and no adapter; deploy it without a base")
    tokenizer = Tokenizer.load(placed.directory)
    tokenizer.check()
    facts_of_model = facts_of(of_model(manifest, where), tokenizer)
    return Deployed(name, source, where, directory, manifest.digest, facts_of_model, now_s, order.labels)


def facts_of(manifest: Manifest, tokenizer: Tokenizer) -> Facts:
    arch = manifest.arch
    # A description of the same model in float32 knows how many bytes that takes.
    wide = Manifest.of(arch, "float32", manifest.quant, (), manifest.chunk_bytes, {})
    return Facts(
        num_bytes=manifest.num_bytes,
        wide_bytes=wide.num_bytes,
        dtype=manifest.dtype,
        quant=manifest.quant,
        num_parameters=manifest.num_parameters,
        largest_bytes=max(spec.nbytes for spec in manifest.tensors),
        dimensions=arch.dimensions,
        max_positions=arch.max_positions,
        eos_ids=tuple(sorted(tokenizer.eos_ids)),
        has_chat_template=tokenizer.has_chat_template,
        family=arch.family,
        parts=_parts_of(manifest),
        wide_parts=_parts_of(wide),
        is_text_part=arch.is_text_part,
    )


def _parts_of(manifest: Manifest) -> PartBytes | None:
    arch, layout, num_layers = manifest.arch, manifest.layout, manifest.arch.num_layers
    if num_layers == 1:
        return None
    sizes = [part.end - part.begin for part in manifest.layers]
    first, last = layout.only(arch, range(1)), layout.only(arch, range(num_layers - 1, num_layers))
    # Layers of a quantised model may differ: any range of them must fit.
    return PartBytes(max(sizes), first.own_bytes - sizes[0], last.own_bytes - sizes[-1])


def _refuse_taken(name: str, overwrite: bool, data_dir: DataDir) -> None:
    """Refuse a taken name before the work; registering checks again."""
    with Registry(data_dir) as registry:
        if not overwrite and registry.has_name(name):
            raise name_taken(name)


def _fetch(url: str, data_dir: DataDir, on_progress: OnProgress) -> _Placed:
    on_progress("fetching", 0, 0)
    tiers = Tiers(StoreConfig(path=str(data_dir.path), host_bytes=_HOST_BYTES), is_pinned=False)
    try:
        where = tiers.resolve(url)
        model = tiers.open(where)
    except ChunkMissing as error:
        reason = str(error).rpartition(";")[0]
        raise SourceMissing(
            f"`{url}` holds no converted model: {reason}; upload what `hearth convert` has written, or name "
            "a model of the Hugging Face Hub as hf:ORG/NAME"
        ) from error
    finally:
        tiers.close()
    return _Placed(where, model.directory, model.manifest)


def _in_place(directory: Path, data_dir: DataDir, on_progress: OnProgress) -> _Placed:
    """Verify all bytes of a converted model: file and manifest have the same origin."""
    manifest = read_description(directory)
    weights = directory / WEIGHTS
    num_bytes = weights.stat().st_size if weights.is_file() else 0
    if num_bytes != manifest.num_bytes:
        raise BadCheckpoint(
            f"`{weights}` has {num_bytes} bytes, its manifest says {manifest.num_bytes}; convert or copy the "
            "model again"
        )
    bad = verify(
        directory,
        lambda progress: on_progress("verifying", progress.done_bytes, progress.total_bytes),
        manifest,
        data_dir.path,
    )
    if bad:
        first = bad[0]
        what = f"`{first.name}`" if isinstance(first, BadFile) else f"chunk {first.index} of its weights"
        raise BadCheckpoint(
            f"`{directory}` is not what its manifest says: {what} is bad: {first.reason}, {len(bad)} in all; "
            "convert or copy the model again"
        )
    return _Placed(str(directory), directory, manifest)


def _convert(
    path: Path, name: str, order: DeployOrder, data_dir: DataDir, on_progress: OnProgress
) -> _Placed:
    is_adapter = (path / ADAPTER_CONFIG).is_file()
    if order.is_adapter and not is_adapter:
        raise SourceMissing(
            f"no {ADAPTER_CONFIG} in `{path}`; an adapter is a directory that PEFT's `save_pretrained` wrote"
        )
    if order.is_adapter or (is_adapter and not (path / "config.json").is_file()):
        return _convert_adapter(path, name, order, data_dir, on_progress)
    from hearth.store.format.convert import (
        convert,  # loads torch, which takes seconds and not every order needs
    )

    tokenizer = _checked_tokenizer(path)
    place = data_dir.models_path / f"{file_name(name)}-{secrets.token_hex(4)}"
    manifest = convert(
        path,
        place,
        dtype="float32" if order.dtype == "auto" and order.kind == "cpu" else order.dtype,
        quant=order.quant,
        store=data_dir.path,
        on_progress=lambda progress: on_progress("converting", progress.done_bytes, progress.total_bytes),
    )
    return _Placed(str(place), place, manifest, is_new=True, tokenizer=tokenizer)


def _convert_adapter(
    path: Path, name: str, order: DeployOrder, data_dir: DataDir, on_progress: OnProgress
) -> _Placed:
    from hearth.store.format.convert_adapter import convert_adapter, read_base  # loads torch, as above
    from hearth.store.format.peft import open_peft

    adapter = open_peft(path)
    base = find_base(order, adapter.base_name, data_dir)
    place = data_dir.models_path / f"{file_name(name)}-{secrets.token_hex(4)}"
    manifest = convert_adapter(
        adapter,
        place,
        replace(read_base(Path(base.directory)), dtype=computed_dtype(base.facts.dtype, order.kind)),
        store=data_dir.path,
        on_progress=lambda progress: on_progress("converting", progress.done_bytes, progress.total_bytes),
    )
    return _Placed(str(place), place, manifest, is_new=True, base=base)


def _checked_tokenizer(path: Path) -> Tokenizer:
    from hearth.store.format.convert import open_source  # loads torch, as above

    with open_source(path) as source, tempfile.TemporaryDirectory() as texts:
        if not path.is_dir():
            for name, content in source.text_files().items():
                (Path(texts) / name).write_bytes(content)
        tokenizer = Tokenizer.load(path if path.is_dir() else Path(texts))
        tokenizer.check()
        return tokenizer


class _Reporter:
    """Writes events to standard output. Mutable; also called by downloading threads."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)  # whatever else is printed must not stand between the lines
        self._reported_s = -_REPORT_EVERY_S
        self._phase = ""
        self._lock = threading.Lock()

    def progress(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        with self._lock:
            now_s = time.monotonic()
            is_news = phase != self._phase or done_bytes == total_bytes > 0
            if is_news or now_s - self._reported_s >= _REPORT_EVERY_S:
                self._reported_s, self._phase = now_s, phase
                self.write(event="progress", phase=phase, done_bytes=done_bytes, total_bytes=total_bytes)

    def write(self, **fields: object) -> None:
        with suppress(BrokenPipeError):  # the parent died; standard input ends too, which ends this process
            self._file.write(msgspec.json.encode(fields) + b"\n")


def _end_with_input() -> None:
    while os.read(0, 4096):  # past Python's own buffer, whose lock must be free when the process ends
        pass
    _thread.interrupt_main()
    time.sleep(_CLEARING_S)
    os._exit(1)  # it waits for something that no interrupt reaches, and the next conversion clears up


def _interrupt(*_: object) -> None:
    """Raise KeyboardInterrupt once: a second one would interrupt the cleanup."""
    _ignore_interrupts()
    raise KeyboardInterrupt


def _ignore_interrupts() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _printable(reason: str) -> str:
    cut = reason if len(reason) <= _MAX_REASON else f"{reason[:_MAX_REASON]} ..."
    return cut.encode(errors="backslashreplace").decode()


def _work(task: Task, reporter: _Reporter) -> int:
    try:
        deployed = carry_out(task.order, DataDir.open(task.data_dir), reporter.progress)
    except KeyboardInterrupt:
        return 1
    except HearthError as error:
        _ignore_interrupts()  # the parent closes the input as soon as it has read this
        reporter.write(event="error", label=error.label, reason=_printable(str(error)))
        return 1
    except Exception as error:  # the one broad handler of this process
        log.exception("deploy_failed source=%s", task.order.source)
        reason = f"deploying `{task.order.source}` failed: {error!r:.{_MAX_REASON}}; see the log"
        reporter.write(event="error", label=HearthError.label, reason=_printable(reason))
        return 1
    if isinstance(deployed, Deployed):
        reporter.write(event="done", deployed=deployed)
    else:
        reporter.write(event="done", adapter=deployed)
    return 0


def main() -> int:
    logging.basicConfig(level="WARNING", format="%(asctime)s %(levelname)s %(name)s %(message)s")
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=Task)
    reporter = _Reporter()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    threading.Thread(target=_end_with_input, daemon=True).start()
    try:
        return _work(task, reporter)
    finally:
        _ignore_interrupts()  # the parent may close the input as soon as it has the result


if __name__ == "__main__":
    sys.exit(main())

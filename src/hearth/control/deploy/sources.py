"""The sources that a model can be deployed from, as users write them, and downloads. Converts nothing.

hf:ORG/NAME, hf:ORG/NAME@REVISION      a repository on the Hub, downloaded: a model, or a LoRA adapter; as
                                       hf.co/ORG/NAME, too, and as ORG/NAME, unless that path exists
hf:ORG/NAME:Q4_K_M                     a GGUF file of a repository, by how it is quantised or by its name
s3://BUCKET/PREFIX, https://HOST/PATH  a converted model or adapter in object storage, read from there; behind
                                       it @DIGEST may name the version that must be there
anything else                          a path on this machine
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hearth.core.errors import ModelError, RequestError, SourceMissing, StoreFull, Unreachable
from hearth.node.process_log import is_open_as
from hearth.store.tiers.upstream import parse_address

#: Is called with the bytes that are done, and of how many.
OnBytes = Callable[[int, int], None]

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.ASCII | re.IGNORECASE)
#: What the Hub is called before ORG/NAME: here, by Ollama, and in a browser.
_HUB_PREFIX = re.compile(r"hf:|(?:https://)?(?:hf\.co|huggingface\.co)/", re.ASCII | re.IGNORECASE)
_HUB = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(?::(?P<file>[\w.-]+))?(?:@(?P<revision>[\w./-]+))?", re.ASCII)
#: The GGUF file that is taken where several are there and none is named, as by llama.cpp and Ollama.
_USUAL_GGUF = "Q4_K_M"
#: What makes a directory or a repository an adapter, unless it is a model, too.
ADAPTER_CONFIG = "adapter_config.json"
#: The files that a model consists of besides its weights.
_TEXT_SUFFIXES = (".json", ".jinja", ".txt", ".model")


@dataclass(frozen=True, slots=True)
class HubSource:
    repo_id: str
    revision: str | None
    file: str | None = None  #: a GGUF file: its name, or the end of that without the suffix

    @property
    def text(self) -> str:
        file = f":{self.file}" if self.file else ""
        return f"hf:{self.repo_id}{file}" + (f"@{self.revision}" if self.revision else "")


@dataclass(frozen=True, slots=True)
class UrlSource:
    url: str

    @property
    def text(self) -> str:
        return self.url


@dataclass(frozen=True, slots=True)
class PathSource:
    path: Path

    @property
    def text(self) -> str:
        return str(self.path)


Source = HubSource | UrlSource | PathSource


def parse_source(text: str) -> Source:
    source = hub_source(text)
    if _HUB_PREFIX.match(text):
        if source is None:
            raise RequestError(
                "a model of the Hugging Face Hub is hf:ORG/NAME, hf:ORG/NAME:FILE of a GGUF repository, or "
                f"hf:ORG/NAME@REVISION, given: {text!r:.99}"
            )
        return source
    if scheme := _SCHEME.match(text):
        return _parse_url(scheme[1].lower(), text[scheme.end() :].rstrip("/"))
    path = Path(text).expanduser()
    if source is None or text.startswith(".") or text.endswith(".gguf") or path.exists():
        return PathSource(path.absolute())
    return source


def hub_source(text: str, revision: str | None = None) -> HubSource | None:
    """Return the repository that [hf:]ORG/NAME[:FILE][@REVISION] means; None: it is none."""
    prefix = _HUB_PREFIX.match(text)
    match = _HUB.fullmatch(text, prefix.end() if prefix else 0)
    if match is None or ".." in text:
        return None
    return HubSource(match["id"], revision or match["revision"], match["file"])


def _parse_url(scheme: str, rest: str) -> UrlSource:
    """Return the source that a URL means. No message repeats a refused URL: it may hold a password."""
    if scheme not in ("s3", "http", "https"):
        raise RequestError(f"a model's URL begins with s3://, http:// or https://, given: {scheme!r:.40}")
    if "@" in rest.partition("/")[0] or "?" in rest or "#" in rest:
        raise RequestError(
            "a model's URL has no user, password, query or fragment, for it is kept and shown; credentials "
            "come from the environment: AWS_ACCESS_KEY_ID and its like"
        )
    if not rest or rest.startswith("/") or not rest.isprintable() or " " in rest:
        raise RequestError("a model's URL names a host or bucket, and has no spaces or control characters")
    return UrlSource(f"{scheme}://{rest}")


def default_name(source: Source) -> str:
    match source:
        case HubSource(repo_id, _, file):
            last = repo_id.rpartition("/")[2]
            last = f"{re.sub('-gguf$', '', last, flags=re.IGNORECASE)}-{file}" if file else last
        case UrlSource(url):
            last = parse_address(url).url.rpartition("/")[2]
        case PathSource(path):
            last = path.name
    text = re.sub(r"[^a-z0-9._-]+", "-", last.lower().removesuffix(".gguf"))
    text = re.sub(r"\.{2,}", ".", text).lstrip("._-")[:64].rstrip("._-")
    if not text:
        raise RequestError(f"no name can be derived from `{last}`; give one with `--name`")
    return text


@dataclass(frozen=True, slots=True)
class Download:
    path: Path  #: a directory, or a GGUF file
    commit: str  #: the version of the repository that it is


@contextmanager
def downloaded(
    source: HubSource, root: Path, on_bytes: OnBytes, *, is_adapter: bool = False
) -> Iterator[Download]:
    """Yield a repository's model, downloaded below `root` until the context ends.

    `is_adapter`: download the adapter, even if there is a model beside it.

    If the context fails, the download stays, and the next one of the same source continues it. A second
    download of the same source waits for the first.

    Raises:
        ModelError: there is no such model, or access is restricted.
        Unreachable: the Hub does not answer.
        StoreFull: it does not fit.
    """
    where = root / source.text.removeprefix("hf:").replace("/", "--")
    with _locked(where.with_name(f".{where.name}.lock")):
        yield _download(source, where, on_bytes, is_adapter)
        shutil.rmtree(where, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not is_open_as(path, lock):
                continue  # its last holder has removed it
            try:
                yield
            finally:
                path.unlink()
            return
        finally:
            os.close(lock)


def _download(source: HubSource, where: Path, on_bytes: OnBytes, is_adapter: bool) -> Download:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        found = snapshot_download(source.repo_id, revision=source.revision, local_dir=where, dry_run=True)
        sizes = {file.filename: file.file_size or 0 for file in found}
        wanted = _wanted(source, sizes, is_adapter)
        missing_bytes = sum(sizes[file.filename] for file in found if file.will_download)
        total_bytes = sum(sizes[name] for name in wanted)
        _check_room(where.parent, min(missing_bytes, total_bytes), source)
        _remove_others(where, wanted)
        on_bytes(0, total_bytes)
        snapshot_download(
            source.repo_id,
            revision=found[0].commit_hash,  # what was looked at, whatever is pushed meanwhile
            local_dir=where,
            allow_patterns=wanted,
            tqdm_class=_bar_class(on_bytes, total_bytes),
        )
    except (OSError, HFValidationError) as error:  # all others of the library are OSErrors
        raise _translated(source, error) from error
    is_gguf = len(wanted) == 1 and wanted[0].endswith(".gguf")
    return Download(where / wanted[0] if is_gguf else where, str(found[0].commit_hash))


def hub_path(source: HubSource) -> Path:
    """Return a model's directory, or its GGUF file, in the cache that Hugging Face's libraries share.

    What is missing is downloaded. Without a network, what is cached is returned.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    texts = [f"*{suffix}" for suffix in _TEXT_SUFFIXES]
    try:
        if (file := source.file) is not None:
            patterns = [f"*{name}*" for name in {file, file.lower(), file.upper()}]
            found = snapshot_download(source.repo_id, revision=source.revision, allow_patterns=patterns)
            return Path(found) / _gguf_file(source, [path.name for path in Path(found).iterdir()])
        for weights in ("*.safetensors", "*.bin"):
            found = snapshot_download(
                source.repo_id,
                revision=source.revision,
                allow_patterns=[*texts, weights],
                ignore_patterns=["*/*"],  # subfolders hold other programs' formats
            )
            if any(Path(found).glob(weights)):
                break
    except (OSError, HFValidationError) as error:  # all others of the library are OSErrors
        raise _translated(source, error) from error
    return Path(found)


def _remove_others(where: Path, wanted: Collection[str]) -> None:
    """Remove files that the repository no longer has: two versions must not be mixed."""
    for path in where.iterdir() if where.is_dir() else ():
        if path.is_file() and path.name not in wanted:
            path.unlink()


def _wanted(source: HubSource, names: Iterable[str], is_adapter: bool) -> list[str]:
    """Return the files to download, from the top level only: subfolders hold other programs' formats."""
    top = [name for name in names if "/" not in name]
    if ADAPTER_CONFIG in top and (is_adapter or "config.json" not in top):
        return [ADAPTER_CONFIG, *(name for name in top if name.startswith("adapter_model."))]
    has_gguf = any(name.endswith(".gguf") for name in top)
    if source.file is not None or (has_gguf and "config.json" not in top):
        return [_gguf_file(source, top)]
    weights = [name for name in top if name.endswith(".safetensors")]
    weights = weights or [name for name in top if name.endswith(".bin")]
    if "config.json" not in top or not weights:
        remedy = f"deploy a GGUF file of it: {source.text}:FILE" if has_gguf else "name another"
        raise ModelError(
            f"`{source.text}` is not a model that can be converted: it needs `config.json` and weights as "
            f"safetensors or PyTorch files, found: {', '.join(top[:12]) or 'nothing'}; {remedy}"
        )
    return [name for name in top if name.endswith(_TEXT_SUFFIXES)] + weights


def _gguf_file(source: HubSource, names: Iterable[str]) -> str:
    """Return the file that the source names, or the usual one if it names none."""
    # A projector of images is no model; of a file in parts, none is one.
    found = [name for name in names if re.fullmatch(r"(?!mmproj)(?!.*-of-\d+\.gguf).*\.gguf", name)]
    stems = {name: name.removesuffix(".gguf").lower() for name in found}
    wanted = (source.file or _USUAL_GGUF).removesuffix(".gguf").lower()
    fitting = [name for name in found if re.fullmatch(rf"(.*[-._])?{re.escape(wanted)}", stems[name])]
    if source.file is None and len(found) == 1:
        fitting = found
    if len(fitting) == 1:
        return fitting[0]
    raise ModelError(
        f"`{source.text}` must mean one GGUF file of the repository, found: "
        f"{', '.join(sorted(fitting or found)[:30]) or 'none in one part'}; name one as "
        f"hf:{source.repo_id}:{_USUAL_GGUF}"
    )


def _check_room(root: Path, num_bytes: int, source: HubSource) -> None:
    free_bytes = shutil.disk_usage(root).free
    if num_bytes > free_bytes:
        raise StoreFull(
            f"no room for `{source.text}` in `{root}`; needed: {num_bytes} bytes, and about as many to "
            f"convert it, free: {free_bytes} bytes; make room or choose another data directory"
        )


def _translated(source: HubSource, error: Exception) -> Exception:
    from huggingface_hub import errors

    cause = error.__cause__ if isinstance(error, errors.DryRunError) and error.__cause__ else error
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull(f"no room left while `{source.text}` was downloaded; make room, and deploy it again")
    match cause:
        case errors.GatedRepoError():
            reason = "its owners grant access first; ask for it on huggingface.co and set HF_TOKEN"
        case errors.RevisionNotFoundError():
            reason = f"it has no revision `{source.revision}`; name another, or none for the newest"
        case errors.RepositoryNotFoundError():
            return SourceMissing(
                f"`{source.text}` cannot be downloaded: there is no such model; check the spelling, and "
                "for a private one set HF_TOKEN"
            )
        case errors.HFValidationError():
            reason = f"its name cannot be one: {cause}"
        case _:
            reason = str(cause).partition("\n")[0][:200] or type(cause).__name__
            return Unreachable(
                f"the Hugging Face Hub cannot be reached for `{source.text}`: {reason}; check the network "
                "and HF_ENDPOINT, or download the model elsewhere and deploy its directory"
            )
    return ModelError(f"`{source.text}` cannot be downloaded: {reason}")


def _bar_class(on_bytes: OnBytes, total_bytes: int) -> type:
    from tqdm.auto import tqdm  # type: ignore[import-untyped] # comes with the library

    done_bytes = 0

    class Bar(tqdm):  # type: ignore[misc] # untyped library
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **{**options, "file": io.StringIO(), "mininterval": 3600.0})

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal done_bytes
            is_shown: bool | None = super().update(n)
            if self.unit == "B" and self.n > done_bytes:  # of two that count bytes, the one that is ahead
                done_bytes = min(int(self.n), total_bytes)
                on_bytes(done_bytes, total_bytes)
            return is_shown

    return Bar

"""Versions of what models are deployed from: which one is deployed, which one is there now. Reads no weights.

A URL of object storage and a repository of the Hugging Face Hub may hold something else tomorrow. A version
is named by the digest of its manifest at a URL, by its commit in a repository. A version at a URL has an
address, `URL@DIGEST`. Deployed models are loaded from such an address, and their description is kept on disk,
so that a new upload changes nothing for them until they are deployed again.

    upstream.json    beside a model's manifest: the version that was deployed, and another that was seen since
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from blake3 import blake3

from hearth.core.errors import ChunkMissing, StoreError, Unreachable

if TYPE_CHECKING:  # loads torch, which the gateway does without
    from hearth.store.tiers.model import RemoteFiles

UPSTREAM = "upstream.json"
#: The address of a model on other nodes is this and its digest.
PEERS = "hearth://"
#: How long a look at the Hub may take; at object storage it is `remote.BRIEF`.
HUB_S = 3.0

_VERSION_ADDRESS = re.compile(r"(?P<url>.+)@(?P<version>[0-9a-f]{32,64})", re.ASCII)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RemoteAddress:
    url: str
    version: str | None = None  #: digest of the manifest; None: whatever is there now

    def __str__(self) -> str:
        if self.version is None or self.url.startswith(PEERS):
            return self.url
        return f"{self.url}@{self.version}"


def parse_address(text: str) -> RemoteAddress:
    text = text.rstrip("/")
    if text.startswith(PEERS):
        return RemoteAddress(text, text.removeprefix(PEERS))
    found = _VERSION_ADDRESS.fullmatch(text)
    return RemoteAddress(text) if found is None else RemoteAddress(found["url"].rstrip("/"), found["version"])


def description_directory(root: Path, address: RemoteAddress) -> Path:
    name = address.url.rpartition("/")[2]
    return root / "models" / f"{name}-{blake3(str(address).encode()).hexdigest()[:8]}"


@dataclass(frozen=True, slots=True)
class Change:
    version: str
    noticed_at_s: float  #: since the epoch


@dataclass(frozen=True, slots=True)
class Upstream:
    """The version of a deployed model, and whether another one has been seen since. Becomes JSON."""

    version: str
    change: Change | None = None


def read_upstream(directory: Path) -> Upstream | None:
    """Return what is noted beside a model; None where it came from no upstream, or the note is unreadable."""
    try:
        return msgspec.json.decode((directory / UPSTREAM).read_bytes(), type=Upstream)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        log.warning("upstream_unreadable directory=%s reason=%s", directory, error)
        return None


def write_upstream(directory: Path, upstream: Upstream) -> None:
    """Written at once or not at all. Raises StoreError."""
    temporary = directory.with_name(
        f".{directory.name}.{secrets.token_hex(8)}"
    )  # beside the model, which holds its own files only
    try:
        temporary.write_bytes(msgspec.json.encode(upstream))
        temporary.rename(directory / UPSTREAM)
    except OSError as error:
        raise StoreError(f"cannot write `{directory / UPSTREAM}`: {error}; check its disk") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def note_version(directory: Path, version: str) -> Upstream | None:
    """Note the version that upstream has now, and return what is known then; None as in `read_upstream`.

    A change that is known keeps the time at which it was noticed first.
    """
    known = read_upstream(directory)
    if known is None or version == (known.change.version if known.change else known.version):
        return known
    is_back = version == known.version
    now = replace(known, change=None if is_back else Change(version, time.time()))
    if not is_back:
        log.warning(
            "upstream_changed model=%s deployed=%s upstream=%s", directory.name, known.version, version
        )
    try:
        write_upstream(directory, now)
    except StoreError as error:  # the model may be gone, or its disk full: the next check tries again
        log.warning("upstream_not_noted directory=%s reason=%s", directory, error)
    return now


def version_now(source: str) -> str:
    """`source` is a URL or `hf:ORG/NAME[:FILE][@REVISION]`. Raises HearthError, within seconds."""
    if source.startswith("hf:"):
        return _commit_of(source)
    from hearth.store.tiers.remote import BRIEF, RemoteModel

    return version_at(RemoteModel(parse_address(source).url, BRIEF))


def version_at(remote: RemoteFiles) -> str:
    """Return the digest of the manifest that a URL has now. Raises HearthError."""
    from hearth.store.format.description import parse_description
    from hearth.store.format.manifest import MANIFEST

    text = remote.read_file(MANIFEST).decode(errors="replace")
    return parse_description(text, f"{remote.url}/{MANIFEST}").digest


def _commit_of(source: str) -> str:
    import huggingface_hub
    from huggingface_hub.errors import (  # type: ignore[attr-defined] # HTTPError is of the client that it uses
        HFValidationError,
        HTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repo_id, _, revision = source.removeprefix("hf:").partition("@")
    try:
        found = huggingface_hub.model_info(
            repo_id.partition(":")[0], revision=revision or None, timeout=HUB_S
        )
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise ChunkMissing(
            f"`{source}` is not on the Hugging Face Hub any more, or only for others"
        ) from error
    except (OSError, HTTPError, HFValidationError) as error:
        reason = str(error).partition("\n")[0][:200] or type(error).__name__
        raise Unreachable(f"the Hugging Face Hub gave no usable answer for `{source}`: {reason}") from error
    if found.sha is None:
        raise Unreachable(f"the Hugging Face Hub names no commit of `{source}`")
    return found.sha

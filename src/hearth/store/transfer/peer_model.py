"""A model on other nodes, as a store that lacks chunks of it sees it: which nodes have which chunks.

Asks the agent of this node who has what, and the head for a URL in object storage, which the head itself
reads with its credentials. Which of them sends a chunk, `peers.py` decides.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from hearth.core.errors import ChunkCorrupt, ChunkMissing, ConfigError, StoreError, Unreachable
from hearth.core.model_files import MAX_JSON_BYTES
from hearth.core.node_messages import PlannedFetch
from hearth.core.types import Digest, NodeId, Rung
from hearth.store.format.description import parse_description
from hearth.store.format.manifest import MANIFEST, WEIGHTS, StoredManifest, digest_of
from hearth.store.tiers.model import ChunkArrival
from hearth.store.tiers.remote import RemoteModel, Retry
from hearth.store.transfer.fetch_plan import FetchPlan

if TYPE_CHECKING:
    from hearth.store.transfer.peers import Peers

#: For so long it is believed that a node has a chunk in host memory, when the own disk has it as well.
FRESH_S = 10.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Holder:
    node: NodeId
    host: int  #: bit i is chunk i
    disk: int


class PeerModel:
    """A model on other nodes: `RemoteFiles`. Many threads may read."""

    def __init__(self, peers: Peers, digest: Digest, origin: RemoteModel | None = None) -> None:
        """`origin`: the object storage of the model, on the head; None: the head is asked for all else."""
        self.digest, self.origin = digest, origin
        self.url = f"hearth://{digest}" if origin is None else origin.url
        self.rung = Rung.PEER if origin is None else origin.rung
        self._peers = peers
        self._holders: tuple[_Holder, ...] = ()  #: replaced as a whole
        self._file_digests: Mapping[str, Digest] = {}  #: replaced as a whole
        self._looked_s = -math.inf
        self._told_plan: tuple[PlannedFetch, ...] = ()
        self.plan = FetchPlan()  #: that the load under way follows; replaced as a whole
        self._is_followed = False
        self._store = origin  #: else read by a presigned URL; None: there is none, or not yet
        #: Before this the head is not asked for a URL.
        self._next_sign_s = -math.inf if origin is None else math.inf
        self._looking = threading.Lock()  #: one thread asks agent or head, the others wait for its answer

    def holders(self, index: int | None = None, *, is_host_only: bool = False) -> list[NodeId]:
        """Return the nodes that have a chunk, or any, those first that have it in host memory."""
        if index is None:
            return [holder.node for holder in self._holders]
        in_host = [holder.node for holder in self._holders if holder.host >> index & 1]
        on_disk = [holder.node for holder in self._holders if holder.disk >> index & 1]
        return in_host if is_host_only else list(dict.fromkeys((*in_host, *on_disk)))

    def look_for_sources(self, failures: list[StoreError] | None = None) -> None:
        """Ask which nodes have what, if the answer is too old. A failure changes nothing."""
        with self._looking:
            if time.monotonic() - self._looked_s < self._peers.patience.sources_s:
                return
            try:
                told = self._peers.agent.sources(self.digest)
                self._holders = tuple(
                    _Holder(given.node, _mask(given.held.host), _mask(given.held.disk))
                    for given in told.sources
                )
                self._told_plan = told.plan
            except (Unreachable, ValueError) as error:
                log.warning("sources_unknown model=%s reason=%s", self.digest, error)
                if failures is not None and isinstance(error, StoreError):
                    failures.append(error)
            self._looked_s = time.monotonic()

    def begin_plan(self, missing: Sequence[int]) -> list[int]:
        """Follow the plan of the head, if there is one, for chunks that are missing; return them in order.

        `end_plan` has to follow, unless nothing is returned. Until then no other load follows a plan.
        """
        if not missing:
            return []
        self.look_for_sources()
        with self._looking:
            if self._is_followed:
                return []
            self.plan = FetchPlan(self._told_plan, missing)
            self._is_followed = bool(self.plan.order)
            return self.plan.order

    def end_plan(self) -> None:
        with self._looking:
            self._told_plan, self.plan, self._is_followed = (), FetchPlan(), False

    @property
    def store(self) -> NodeId | None:
        """The name of the object storage that has all chunks, as a source beside nodes."""
        store = self._store
        return None if store is None else store_name(store.url)

    def look_for_store(self) -> None:
        """Ask the head for a URL in object storage, until there is one."""
        with self._looking:
            if time.monotonic() > self._next_sign_s:
                self._sign()

    def _sign(self) -> None:
        try:
            url, _, signature = self._peers.read_url(self.digest).partition("?")
            retry = Retry(num_tries=1, stall_s=self._peers.patience.stall_s)
            self._store = RemoteModel(url.removesuffix(f"/{WEIGHTS}"), retry, signature)
            self._next_sign_s = math.inf
        except (ChunkMissing, ConfigError, Unreachable) as error:
            log.info("store_not_direct model=%s reason=%s", self.digest, error)
            self._store, self._next_sign_s = None, time.monotonic() + self._peers.patience.store_s

    def read_from_store(
        self, manifest: StoredManifest, index: int, buffer: memoryview, is_wanted: Callable[[], bool]
    ) -> ChunkArrival:
        """Read a chunk from object storage. Where the URL has expired, ask for another once."""
        store = self._store
        try:
            return _read_stored(store, manifest, index, buffer, is_wanted)
        except Unreachable:
            if store is None or store is self.origin or not store.was_refused:
                raise
        with self._looking:
            if self._store is store:
                self._sign()
        return _read_stored(self._store, manifest, index, buffer, is_wanted)

    def expire_sources(self) -> None:
        self._looked_s = -math.inf

    def read_file(self, name: str, max_bytes: int = MAX_JSON_BYTES) -> bytes:
        if self.origin is not None:
            return self.origin.read_file(name, max_bytes)
        self.look_for_sources()
        return self._peers.read_file(self, name, max_bytes)

    def check_file(self, name: str, content: bytes) -> None:
        """Compare a manifest with the model's digest, and other files with theirs, once it is known."""
        if name == MANIFEST:
            manifest = parse_description(content.decode(errors="replace"), f"{self.url}/{name}")
            if manifest.digest != self.digest:
                raise ChunkCorrupt(f"it sent the manifest of {manifest.digest} for {self.url}")
            self._file_digests = {file.name: file.digest for file in manifest.files}
        elif (wanted := self._file_digests.get(name)) and (found := digest_of(content)) != wanted:
            raise ChunkCorrupt(f"`{name}` of {self.url} hashes to {found}, its manifest says {wanted}")

    def read_chunk(
        self,
        manifest: StoredManifest,
        index: int,
        buffer: memoryview,
        is_wanted: Callable[[], bool],
        *,
        is_host_only: bool = False,
    ) -> ChunkArrival:
        return self._peers.read_chunk(self, manifest, index, buffer, is_wanted, is_host_only=is_host_only)

    def prepare(self, bytes_per_s: float) -> None:
        """Look for sources before a load, if any node has been faster than this."""
        if any(link.bytes_per_s > bytes_per_s for link in self._peers.links()):
            self.look_for_sources()

    def is_faster(self, index: int, bytes_per_s: float) -> bool:
        if time.monotonic() - self._looked_s > FRESH_S:
            return False
        return any(
            holder.host >> index & 1 and self._peers.is_faster(holder.node, bytes_per_s)
            for holder in self._holders
        )

    def report_corrupt(self, source: str) -> None:
        if self.origin is not None and source == self.store:  # it may be the only one
            return
        self._peers.suspend(
            NodeId(source), self._peers.patience.distrusted_s, f"it sent wrong bytes of {self.url}"
        )
        self.expire_sources()


def store_name(url: str) -> NodeId:
    """Return the name of an object storage among nodes: no node's name has a slash."""
    parts = urlsplit(url)
    return NodeId(f"{parts.scheme}://{parts.netloc}/")


def _read_stored(
    store: RemoteModel | None,
    manifest: StoredManifest,
    index: int,
    buffer: memoryview,
    is_wanted: Callable[[], bool],
) -> ChunkArrival:
    if store is None:
        raise Unreachable("the head gives out no URL any more")
    arrival = store.read_chunk(manifest, index, buffer, is_wanted)
    return replace(arrival, source=store_name(store.url))


def _mask(held: bytes) -> int:
    return int.from_bytes(held, "little")

"""One model in object storage, read in ranges, with retries. Neither verifies bytes nor keeps them."""

from __future__ import annotations

import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError, NotSupportedError, PermissionDeniedError, UnauthenticatedError
from obstore.store import HTTPStore, S3Store

from hearth.core.errors import BadCheckpoint, ChunkMissing, ConfigError, LoadCancelled, Unreachable
from hearth.core.model_files import MAX_JSON_BYTES
from hearth.core.types import Rung
from hearth.models.layout import ByteRange
from hearth.store.format.manifest import CHUNK_BYTES, WEIGHTS, StoredManifest, digest_of
from hearth.store.tiers.credentials import find_s3_access
from hearth.store.tiers.model import ChunkArrival

if TYPE_CHECKING:  # the client library offers these to the type checker only
    from obstore import GetOptions
    from obstore.store import ClientConfig, RetryConfig, S3Config

log = logging.getLogger(__name__)

#: Refusals by the server that are about the moment, not about the request
PASSING = (408, 425, 429)
RANGE_NOT_SATISFIABLE = 416
MIN_LIMITED_BYTES = 1 << 20
#: The client library's own retries: none, or they would multiply with ours.
NO_RETRY: RetryConfig = {"max_retries": 0}


@dataclass(frozen=True, slots=True)
class Retry:
    """How long and how often a server is asked for one read, which ends within twice `limit_s`."""

    num_tries: int = 4
    first_delay_s: float = 0.1
    max_delay_s: float = 5.0
    stall_s: float = 10.0  #: longest silence: connecting, before the answer, between two pieces of its body
    #: A server that sends less is of no use. Each of many readers at once has a share of what there is.
    min_bytes_per_s: float = 64 << 10

    def limit_s(self, num_bytes: int) -> float:
        return self.stall_s + num_bytes / self.min_bytes_per_s

    def delays_s(self) -> Iterator[float]:
        """Yield the pause before each further try: twice as long each time, less a random part."""
        for retry in range(self.num_tries - 1):
            longest_s = min(self.first_delay_s * 2**retry, self.max_delay_s)
            yield random.uniform(longest_s / 2, longest_s)


PATIENT = Retry()
#: For a check that a user waits for, and that nothing depends on.
BRIEF = Retry(num_tries=1, stall_s=2.0, min_bytes_per_s=MAX_JSON_BYTES)


@dataclass(slots=True)
class Counters:
    num_requests: int = 0
    num_retries: int = 0
    num_bytes: int = 0  #: bytes of answers that were usable


def _always() -> bool:
    return True


class RemoteModel:
    """A model's files below `s3://bucket/prefix` or `http(s)://host/prefix`. Many threads may read."""

    rung = Rung.OBJECT

    def __init__(self, url: str, retry: Retry = PATIENT, signature: str = "") -> None:
        """`signature`: the query of a presigned URL, which no message shows."""
        self.url = url.rstrip("/")
        self.was_refused = False  #: the credentials or the signature, by the server
        self._signature = signature
        self.counters = Counters()
        self._retry = retry
        #: By the bytes of a request, rounded up: the client library knows one limit of time per client.
        self._endpoints: dict[int, _Endpoint] = {}
        self._endpoint(CHUNK_BYTES)  # so that a URL that is no use is told of at once
        # The one lock: threads that read chunks of the same model add to the same three numbers.
        self._counting = threading.Lock()

    def read_file(self, name: str, max_bytes: int = MAX_JSON_BYTES) -> bytes:
        """Raises ChunkMissing, BadCheckpoint for a file of more than `max_bytes`, and Unreachable."""
        return self._read(name, None, max_bytes=max_bytes).to_bytes()

    def signed_url(self, valid_s: float) -> str:
        """Return a URL at which weights.bin can be read without credentials. Raises Unreachable."""
        endpoint = self._endpoint(CHUNK_BYTES)
        if isinstance(endpoint.store, HTTPStore):
            return f"{self.url}/{WEIGHTS}"
        if not endpoint.can_sign:
            raise Unreachable(f"no URL of `{self.url}` can be signed: it is read by {endpoint.asker}")
        try:
            return obstore.sign(endpoint.store, "GET", WEIGHTS, timedelta(seconds=valid_s))
        except BaseError as error:
            raise Unreachable(f"no URL of `{self.url}` can be signed: {_reason(error)}") from error

    def read_into(self, offset: int, buffer: memoryview, is_wanted: Callable[[], bool] = _always) -> None:
        """Fill the buffer from weights.bin; it is untouched until all bytes are here.

        Raises ChunkMissing if the file is too short, Unreachable if no server answers, and LoadCancelled
        instead of another try if `is_wanted` is false.
        """
        if buffer.nbytes:
            part = ByteRange(offset, offset + buffer.nbytes)
            buffer[:] = memoryview(self._read(WEIGHTS, part, is_wanted))

    def read_chunk(
        self,
        manifest: StoredManifest,
        index: int,
        buffer: memoryview,
        is_wanted: Callable[[], bool],
        *,
        is_host_only: bool = False,
    ) -> ChunkArrival:
        assert not is_host_only, "object storage has no host memory"
        self.read_into(manifest.chunk_range(index).begin, buffer, is_wanted)
        began_s = time.perf_counter()
        return ChunkArrival(digest_of(buffer), time.perf_counter() - began_s)

    def is_faster(self, index: int, bytes_per_s: float) -> bool:
        return False

    def report_corrupt(self, source: str) -> None:
        """There is no other source."""

    def _read(
        self,
        name: str,
        part: ByteRange | None,
        is_wanted: Callable[[], bool] = _always,
        max_bytes: int | None = None,
    ) -> obstore.Bytes:
        delays_s = self._retry.delays_s()
        num_tries, began_s = 0, time.monotonic()
        num_bytes = part.end - part.begin if part is not None else max_bytes or MAX_JSON_BYTES
        endpoint = self._endpoint(num_bytes)
        while True:
            num_tries += 1
            try:
                return self._request(endpoint, name, part, max_bytes)
            except _Passing as error:
                delay_s, took_s = next(delays_s, None), time.monotonic() - began_s
                if delay_s is None or took_s >= endpoint.limit_s:
                    raise Unreachable(
                        f"`{self.url}/{name}` gave no usable answer, tries: {num_tries}, the last: {error}; "
                        f"it took {took_s:.3g} s, limit: {endpoint.limit_s:.3g} s for {num_bytes} bytes; "
                        "check that the server is up and can be reached from here"
                    ) from error
                self._count(num_retries=1)
                log.warning(
                    "object_retry url=%s/%s try=%d delay_s=%.2f reason=%s",
                    self.url,
                    name,
                    num_tries,
                    delay_s,
                    error,
                )
            time.sleep(delay_s)
            if not is_wanted():
                raise LoadCancelled(f"`{self.url}/{name}` is not needed any more, tries: {num_tries}")

    def _endpoint(self, num_bytes: int) -> _Endpoint:
        size_bytes = max(MIN_LIMITED_BYTES, 1 << (num_bytes - 1).bit_length())
        known = self._endpoints.get(size_bytes)  # made twice at the same moment it does no harm
        if known is None:
            known = _open(self.url, self._retry, size_bytes, self._signature)
            self._endpoints[size_bytes] = known
        return known

    def _request(
        self, endpoint: _Endpoint, name: str, part: ByteRange | None, max_bytes: int | None
    ) -> obstore.Bytes:
        """Send one request. Raises _Passing if another try may succeed."""
        url = f"{self.url}/{name}"
        options: GetOptions = {"range": (part.begin, part.end)} if part else {}
        self._count(num_requests=1)
        try:
            answer = obstore.get(endpoint.store, name, options=options)
            size_bytes = answer.meta["size"]
            if part and size_bytes < part.end:
                raise _ends_early(url, part, f"it holds {size_bytes} bytes")
            if max_bytes is not None and size_bytes > max_bytes:
                raise BadCheckpoint(f"`{url}` is too large, limit: {max_bytes} bytes, given: {size_bytes}")
            data = answer.bytes()
        except (BaseError, FileNotFoundError) as error:
            self.was_refused |= isinstance(error, PermissionDeniedError | UnauthenticatedError)
            raise _translate(error, url, part, endpoint) from error
        if part and len(data) != part.end - part.begin:
            raise _Passing(f"{len(data)} bytes came, wanted: {part.end - part.begin}")
        self._count(num_bytes=len(data))
        return data

    def _count(self, *, num_requests: int = 0, num_retries: int = 0, num_bytes: int = 0) -> None:
        with self._counting:
            self.counters.num_requests += num_requests
            self.counters.num_retries += num_retries
            self.counters.num_bytes += num_bytes


class _Passing(Exception):
    """A failure that may pass: no connection, no answer, a server error, a body cut short."""


def _translate(error: Exception, url: str, part: ByteRange | None, endpoint: _Endpoint) -> Exception:
    reason = _reason(error)
    status = _status(error)
    if isinstance(error, FileNotFoundError):
        return ChunkMissing(f"`{url}` does not exist: {reason}; check the URL, or upload the model again")
    if isinstance(error, PermissionDeniedError | UnauthenticatedError):
        return Unreachable(
            f"`{url}` is refused: {reason}; refused was {endpoint.asker}; check it, and what it may read"
        )
    if isinstance(error, NotSupportedError):
        return Unreachable(
            f"`{url}` came whole where a range was asked for; use a server that answers range requests"
        )
    if status == RANGE_NOT_SATISFIABLE and part:
        return _ends_early(url, part, reason)
    if status is not None and status < 500 and status not in PASSING:
        return Unreachable(f"`{url}` is refused: {reason}; check the URL, the region and the endpoint")
    return _Passing(reason)


def _ends_early(url: str, part: ByteRange, reason: str) -> ChunkMissing:
    return ChunkMissing(
        f"`{url}` ends too early, wanted: bytes {part.begin} to {part.end}: {reason}; upload the model again"
    )


def _status(error: Exception) -> int | None:
    found = re.search(r"status code: (\d{3})", str(error))
    return int(found[1]) if found else None


def _reason(error: Exception) -> str:
    """Return what matters of the client library's report, which is long and repeats the server's page."""
    text = str(error)
    if status := re.search(r"status code: (\d{3}[^:\n]*)", text):
        code = re.search(r"<Code>(\w+)</Code>", text)  # what S3 says beyond the status
        return f"{status[1]} {code[1]}" if code else status[1]
    summary = re.sub(r"\?\S+", "", text.partition("\n")[0].rpartition(" - ")[2])[:200]  # no signature
    kind = re.search(r"HttpError \{\s+kind: (\w+)", text)
    return f"{summary} ({kind[1]})" if kind else summary


@dataclass(frozen=True, slots=True)
class _Endpoint:
    store: HTTPStore | S3Store
    asker: str  #: for messages: the credentials that the server may refuse
    limit_s: float  #: for one request
    can_sign: bool = False


def _open(url: str, retry: Retry, num_bytes: int, signature: str) -> _Endpoint:
    """Make a client for requests of at most so many bytes. Raises ConfigError for URL or credentials."""
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("s3", "http", "https") or not parts.netloc:
            raise ConfigError(
                f"a remote model is `s3://bucket/prefix` or `http(s)://host/prefix`, given: `{url}`; "
                "for other stores that speak S3, set AWS_ENDPOINT_URL"
            )
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise ConfigError(
                f"a model's URL must hold no password, query or fragment, that of `{parts.hostname}` does; "
                "URLs appear in logs, so put credentials into the environment"
            )
        limit_s = retry.limit_s(num_bytes)
        is_s3 = parts.scheme == "s3"
        return _open_s3(url, retry, limit_s) if is_s3 else _open_http(url, retry, limit_s, signature)
    except (BaseError, ValueError) as error:
        raise ConfigError(f"`{url}` cannot be used as the URL of a model: {_reason(error)}") from error


def _open_http(url: str, retry: Retry, limit_s: float, signature: str) -> _Endpoint:
    options = _client_options(retry, url, limit_s)
    if signature:
        url, asker = f"{url}?{signature}", "a presigned URL, which may have expired"
    else:
        asker = "a request without credentials, which is all that Hearth sends to plain HTTP servers"
    return _Endpoint(HTTPStore(url, client_options=options, retry_config=NO_RETRY), asker, limit_s)


def _open_s3(url: str, retry: Retry, limit_s: float) -> _Endpoint:
    access = find_s3_access(os.environ)
    signer = access.signer
    config: S3Config = {"skip_signature": signer.is_anonymous}
    if signer.keys:
        config["access_key_id"] = signer.keys.access_key_id
        config["secret_access_key"] = signer.keys.secret_access_key
        if signer.keys.session_token:
            config["session_token"] = signer.keys.session_token
    if access.region:
        config["region"] = access.region
    if access.endpoint:
        config["endpoint"] = access.endpoint
    if signer.is_anonymous:
        log.info("object_unsigned url=%s reason=%s", url, signer.who)
    client_options = _client_options(retry, access.endpoint or url, limit_s)
    store = S3Store.from_url(url, config=config, client_options=client_options, retry_config=NO_RETRY)
    return _Endpoint(store, signer.who, limit_s, can_sign=not signer.is_anonymous)


def _client_options(retry: Retry, server: str, limit_s: float) -> ClientConfig:
    return {
        "allow_http": server.startswith("http://"),
        "connect_timeout": timedelta(seconds=retry.stall_s),
        "read_timeout": timedelta(seconds=retry.stall_s),
        "timeout": timedelta(seconds=limit_s),
    }

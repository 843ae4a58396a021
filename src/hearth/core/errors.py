"""The exceptions of Hearth.

    HearthError
    ├── ConfigError           a configuration file or flag is wrong
    ├── DataDirError          the data directory cannot be used: newer, locked, unreadable
    ├── DeviceError           the device, or its memory or a dtype on it, is not available
    │   └── OutOfDeviceMemory the device has no free memory now
    ├── EngineFailed          the engine broke or was closed while the request was live
    ├── JoinRefused           the cluster does not admit the node, or is another one than expected
    ├── LogitsNotFinite       the model computed NaN or infinity where a token was to be sampled
    ├── ModelError            a model directory cannot be served
    │   ├── UnsupportedModel  its architecture is not supported
    │   ├── BadCheckpoint     its weights are missing, misshapen or unreadable
    │   │   └── SourceMissing nothing exists where it is to be deployed from
    │   └── BadTokenizer      its tokenizer or chat template is missing or broken
    ├── RequestError          one request is wrong; others are not affected
    │   ├── BadPrompt         empty, or a token outside the vocabulary
    │   ├── PromptTooLong     does not fit the context or the KV memory
    │   ├── BadSampling       a sampling value out of range or in contradiction
    │   ├── BadGuide          a schema or grammar that cannot be enforced
    │   ├── GuideStuck        a schema or grammar that no continuation of the output satisfies
    │   ├── UnknownModel      no model has that name
    │   ├── UnknownRequest    no request has that id, or it was forgotten
    │   ├── UnknownResponse   no response has that id, or it has expired
    │   ├── UnknownKey        no API key has that name
    │   ├── NameTaken         the name is in use, or is being deployed
    │   ├── HasAdapters       adapters depend on the model
    │   ├── Unauthorized      the API key is missing or wrong
    │   ├── Forbidden         the API key lacks the permission
    │   └── RateLimited       the API key is over its limit; retry after `retry_s`
    ├── ServiceError          the service cannot take or finish the request now
    │   ├── Overloaded        the queue is full; retry after `retry_s`
    │   ├── NoCapacity        the model is larger than the memory of any worker
    │   ├── ShuttingDown      the service takes no new requests
    │   ├── WorkersLost       workers kept dying while they ran the request
    │   ├── NoWorkers         no worker starts; the message has the last one's reason
    │   └── Unreached         no service runs on the data directory or at the URL
    ├── SnapshotError         a snapshot cannot be written or used; the model starts without it
    │   ├── GraphUnreadable   a CUDA graph cannot be stored in a snapshot, or is damaged there
    │   ├── KernelsMissing    a snapshot's graph runs kernels that this process does not have
    │   ├── SnapshotTruncated the file has another size than was written
    │   ├── SnapshotCorrupt   its checksum does not match
    │   ├── SnapshotFatal     a process died while it restored the snapshot
    │   ├── SnapshotForeign   it was made for another model, machine, software or format
    │   └── SnapshotUnauthenticated  it was not written by this installation
    └── StoreError            a tier of the store cannot read or write
        ├── KeeperGone        the process that leases host memory has ended
        ├── ModelNotOpen      the keeper was restarted, or told to forget the model
        ├── ChunkCorrupt      the checksum of a chunk does not match
        ├── ChunkMissing      a file or object ends early, is gone, or cannot be read
        ├── Unreachable       object storage failed, retries included, or another machine does not answer
        ├── UpstreamChanged   a URL holds another version than the one deployed, which is not all cached
        ├── StoreFull         a quota or the disk has no room for what must be written
        └── LoadCancelled     the load was cancelled

A message states what is wrong, the limit, the value given and what to do.
"""

from __future__ import annotations

from collections.abc import Callable


class HearthError(Exception):
    """`http_status` and `label` appear in the API and in metrics."""

    http_status = 500
    label = "internal"
    #: seconds until a retry makes sense; None: unknown, or never
    retry_s: float | None = None


class ConfigError(HearthError):
    label = "config"


class DataDirError(HearthError):
    http_status, label = 503, "data_dir"


class DeviceError(HearthError):
    http_status, label = 503, "device"


class OutOfDeviceMemory(DeviceError):
    label = "device_memory"


class StageLost(DeviceError):
    """A member of a pipeline cannot go on without another one."""

    label = "stage_lost"


class EngineFailed(HearthError):
    label = "engine_failed"


class JoinRefused(HearthError):
    http_status, label = 403, "join_refused"


class LogitsNotFinite(HearthError):
    label = "logits_not_finite"


class ModelError(HearthError):
    http_status, label = 422, "model"


class UnsupportedModel(ModelError):
    label = "unsupported_model"


class BadCheckpoint(ModelError):
    label = "bad_checkpoint"


class SourceMissing(BadCheckpoint):
    label = "source_missing"


class BadTokenizer(ModelError):
    label = "bad_tokenizer"


class RequestError(HearthError):
    http_status, label = 400, "bad_request"


class BadPrompt(RequestError):
    label = "bad_prompt"


class PromptTooLong(RequestError):
    label = "prompt_too_long"


class BadSampling(RequestError):
    label = "bad_sampling"


class BadGuide(RequestError):
    label = "bad_guide"


class GuideStuck(RequestError):
    label = "guide_stuck"


class UnknownModel(RequestError):
    http_status, label = 404, "model_not_found"


class UnknownRequest(RequestError):
    http_status, label = 404, "request_not_found"


class UnknownResponse(RequestError):
    http_status, label = 404, "response_not_found"


class UnknownKey(RequestError):
    http_status, label = 404, "key_not_found"


class NameTaken(RequestError):
    http_status, label = 409, "name_taken"


class HasAdapters(RequestError):
    http_status, label = 409, "has_adapters"


class Unauthorized(RequestError):
    http_status, label = 401, "unauthorized"


class Forbidden(RequestError):
    http_status, label = 403, "forbidden"


class RateLimited(RequestError):
    http_status, label = 429, "rate_limit_exceeded"

    def __init__(self, message: str, what: str, retry_s: float | None) -> None:
        """`what` is limited: requests or tokens; `retry_s` None: a retry would not help."""
        super().__init__(message)
        self.what, self.retry_s = what, retry_s


class ServiceError(HearthError):
    http_status, label = 503, "service"


class Overloaded(ServiceError):
    http_status, label = 429, "overloaded"

    def __init__(self, message: str, retry_s: float) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class NoCapacity(ServiceError):
    label = "no_capacity"


class ShuttingDown(ServiceError):
    label = "shutting_down"


class WorkersLost(ServiceError):
    label = "workers_lost"


class NoWorkers(ServiceError):
    label = "no_workers"


class Unreached(ServiceError):
    label = "unreached"


class SnapshotError(HearthError):
    http_status, label = 503, "snapshot"


class GraphUnreadable(SnapshotError):
    label = "graph_unreadable"


class KernelsMissing(SnapshotError):
    label = "kernels_missing"


class SnapshotTruncated(SnapshotError):
    label = "snapshot_truncated"


class SnapshotCorrupt(SnapshotError):
    label = "snapshot_corrupt"


class SnapshotFatal(SnapshotError):
    label = "snapshot_fatal"


class SnapshotForeign(SnapshotError):
    label = "snapshot_foreign"


class SnapshotUnauthenticated(SnapshotError):
    label = "snapshot_unauthenticated"


class StoreError(HearthError):
    http_status, label = 503, "store"


class ChunkCorrupt(StoreError):
    label = "chunk_corrupt"


class ChunkMissing(StoreError):
    label = "chunk_missing"


class Unreachable(StoreError):
    label = "unreachable"


class UpstreamChanged(StoreError):
    label = "upstream_changed"


class KeeperGone(StoreError):
    label = "lender_gone"


class ModelNotOpen(StoreError):
    label = "model_not_open"


class StoreFull(StoreError):
    http_status, label = 507, "store_full"


class LoadCancelled(StoreError):
    label = "load_cancelled"


def error_of(label: str, message: str) -> HearthError:
    return _by_label().get(label, HearthError)(message)


def _by_label() -> dict[str, Callable[[str], HearthError]]:
    kinds: list[type[HearthError]] = [HearthError]
    for kind in kinds:  # grows as it goes, down the whole tree
        kinds += kind.__subclasses__()
    return {kind.label: kind for kind in kinds if kind not in (Overloaded, RateLimited)}

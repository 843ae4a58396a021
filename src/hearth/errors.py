"""Every exception that Hearth raises on purpose. No logic, no formatting.

    HearthError
    ├── ConfigError           a configuration file or flag is wrong
    ├── DeviceError           the device, its memory or a dtype on it cannot be had
    ├── EngineFailed          the engine broke or was closed while the request was live
    ├── ModelError            a model directory cannot be served
    │   ├── UnsupportedModel  the decoder has no way to represent it
    │   ├── BadCheckpoint     its weights are missing, misshapen or unreadable
    │   └── BadTokenizer      its tokenizer or chat template is missing or broken
    ├── RequestError          one request is wrong; others are not affected
    │   ├── BadPrompt         empty, or a token outside the vocabulary
    │   ├── PromptTooLong     does not fit the context or the KV memory
    │   └── BadSampling       a sampling value out of range or in contradiction
    └── StoreError            a rung of the store cannot deliver or take what it should
        ├── ChunkCorrupt      bytes were read, but they are not those that were stored
        ├── ChunkMissing      a file or object ends early, is gone, or cannot be read
        ├── Unreachable       object storage gave no usable answer, retries included
        ├── StoreFull         a quota or the disk has no room for what must be written
        └── LoadCancelled     whoever asked for the load has called it off

A message states what is wrong, the limit, the value given and what to do.
"""


class HearthError(Exception):
    """Root of the tree. `http_status` and `label` are what the API and the metrics show."""

    http_status = 500
    label = "internal"


class ConfigError(HearthError):
    label = "config"


class DeviceError(HearthError):
    http_status, label = 503, "device"


class EngineFailed(HearthError):
    label = "engine_failed"


class ModelError(HearthError):
    http_status, label = 422, "model"


class UnsupportedModel(ModelError):
    label = "unsupported_model"


class BadCheckpoint(ModelError):
    label = "bad_checkpoint"


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


class StoreError(HearthError):
    http_status, label = 503, "store"


class ChunkCorrupt(StoreError):
    label = "chunk_corrupt"


class ChunkMissing(StoreError):
    label = "chunk_missing"


class Unreachable(StoreError):
    label = "unreachable"


class StoreFull(StoreError):
    http_status, label = 507, "store_full"


class LoadCancelled(StoreError):
    label = "load_cancelled"

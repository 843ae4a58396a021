"""Configuration: a TOML file and flags become small frozen sections, checked once.

The annotation of a key is its type and its limits. A key named `..._bytes` also takes sizes like "8GiB", one
annotated with `_Duration` also texts like "5m". `scripts/reference` turns the `#:` comments into
docs/configuration.md.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from fractions import Fraction
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from hearth.core.errors import ConfigError
from hearth.core.log_format import LogFormat
from hearth.core.sizes import WantedLimits

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    low: float
    high: float = math.inf

    def text(self, unit: Callable[[float], str]) -> str:
        return f"at least {unit(self.low)}" + (
            "" if math.isinf(self.high) else f" and at most {unit(self.high)}"
        )


@dataclass(frozen=True, slots=True)
class _Duration:
    low_s: float = 0.0


_Wait = Annotated[float, Limits(0.0, 86400.0)]
#: Limits of `first_token_target` and `pace`, in settings and in requests.
TARGET_LIMITS, PACE_LIMITS = Limits(0.01, 3600.0), Limits(0.0, 1000.0)
_PAUSE_LIMITS = Limits(0.1, 3600.0)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How models run on a device."""

    #: maximum tokens per step; None: derived from device, model and memory
    max_batch_tokens: Annotated[int | None, Limits(1)] = None
    #: maximum sequences of a model that run concurrently; None: derived from device, model and memory
    max_seqs: Annotated[int | None, Limits(1)] = None
    #: target for the longest step when prompts join running requests; infinite: no target
    max_step: Annotated[float, _Duration(low_s=0.001)] = 0.1
    block_tokens: Annotated[int, Limits(1, 1024)] = 16  #: tokens per KV block
    kv_bytes: Annotated[int | None, Limits(1)] = (
        None  #: KV cache memory; None: derived from the device's memory
    )
    memory_fraction: Annotated[float, Limits(0.05, 1.0)] = 0.9  #: fraction of the device's memory to use
    graphs: Literal["lazy", "start", "off"] = "lazy"  #: when to capture CUDA graphs

    def __post_init__(self) -> None:
        _check_section(self, "engine")

    def plain(self) -> dict[str, int | float | str | None]:
        """Return the fields for JSON, which lacks infinity: -1 stands for it, as in `load`."""
        return asdict(self) | {"max_step": -1 if math.isinf(self.max_step) else self.max_step}

    @property
    def wanted_limits(self) -> WantedLimits:
        return WantedLimits(self.max_batch_tokens, self.max_seqs, self.block_tokens)


#: The part of `store.host_bytes` that a CPU uses, as buffers to read the disk at full speed.
#: `service.memory_bytes` holds its models.
CPU_HOST_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Where models are kept on disk and in host memory."""

    path: str = "~/.cache/hearth"  #: directory for models and for chunks from object storage
    disk_bytes: Annotated[int | None, Limits(0)] = None  #: disk quota; None: no quota
    #: host memory that caches models for GPUs; a CPU uses up to 128 MiB of it as buffers
    host_bytes: Annotated[int, Limits(16 << 20)] = 1 << 30
    #: disk quota for snapshots in the data directory; 0: no snapshots
    snapshot_bytes: Annotated[int, Limits(0)] = 1 << 30

    def __post_init__(self) -> None:
        _check_section(self, "store")

    @property
    def unused_host_bytes(self) -> int:
        """Host memory set beyond the default that a CPU would not use."""
        is_default = self.host_bytes == StoreConfig().host_bytes
        return 0 if is_default else max(0, self.host_bytes - CPU_HOST_BYTES)


@dataclass(frozen=True, slots=True)
class LogConfig:
    """The log of the service, on standard error and in logs/service.log."""

    level: Literal["debug", "info", "warning", "error"] = "info"  #: minimum level to log
    format: LogFormat = "text"  #: json: an object per line

    def __post_init__(self) -> None:
        _check_section(self, "log")


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """The service of `hearth serve`: address, workers, latency targets and limits."""

    data_dir: str = "~/.hearth"  #: directory for registry, models, chunks and logs
    host: str = "127.0.0.1"  #: address to listen on; addresses beyond localhost require API keys
    port: Annotated[int, Limits(0, 65535)] = 8000  #: port to listen on; 0: any free port
    #: worker processes; None: one per GPU, or one on the CPU; 0: none, on the head of a cluster
    workers: Annotated[int | None, Limits(0, 1024)] = None
    device: Literal["auto", "cuda", "cpu"] = "auto"  #: auto: GPUs if there are any
    #: device memory per worker for models; None: derived from the device
    memory_bytes: Annotated[int | None, Limits(1 << 20)] = None
    #: idle time after which a model may be evicted; infinite: never
    keep_alive: Annotated[float, _Duration()] = 300.0
    max_queue: Annotated[int, Limits(1)] = 512  #: maximum queued requests
    api_keys_file: str | None = None  #: file of API keys; None: keys.json in the data directory
    drain_s: _Wait = 30.0  #: seconds that running requests have to finish when the service stops
    heartbeat_s: Annotated[float, Limits(0.01, 3600.0)] = 1.0  #: seconds between heartbeats of a worker
    #: heartbeats missed or without progress after which a worker is replaced; slow models get more
    max_missed: Annotated[int, Limits(1)] = 30
    start_s: _Wait = 180.0  #: seconds that a worker has to start before it is replaced
    max_body_bytes: Annotated[int, Limits(1024)] = 16 << 20  #: maximum size of a request body
    #: memory for responses stored by `store: true` of `/v1/responses`; 0: none are stored
    response_store_bytes: Annotated[int, Limits(0)] = 64 << 20
    template_s: _Wait = 2.0  #: time limit for rendering a chat template, in seconds
    #: seconds between keep-alive comments in a stream that waits
    stream_heartbeat_s: Annotated[float, Limits(0.1, 3600.0)] = 5.0
    turns: bool = True  #: busy models that do not fit in memory together take turns on the device
    #: target for the time to first token, in seconds
    first_token_target: Annotated[float, TARGET_LIMITS] = 0.5
    #: target for tokens per second after the first; 0: not interactive, lower priority
    pace: Annotated[float, PACE_LIMITS] = 10.0
    #: longest pause between two tokens in seconds, even when a request is ahead of its pace
    max_pause: Annotated[float, _PAUSE_LIMITS] = 1.5
    #: seconds after which a request that waits for memory drains busy models, if models cannot take turns
    patience_s: _Wait = 2.0
    #: requests of a model go to as few replicas as meet `first_token_target`, and it gets another one when
    #: first tokens would be late, not only when all slots are in use: less GPU time, slower tokens
    pack_replicas: bool = False
    #: while several workers load a model at once, they run it in stages if that begins by so many seconds
    #: earlier than on the first of them alone; None: requests wait for that
    staged_start_gain: Annotated[float | None, Limits(0.0, 86400.0)] = None
    #: load models ahead of the requests that forecasts expect; advise: only show what "on" would do
    prewarm: Literal["off", "advise", "on"] = "off"
    journal_bytes: Annotated[int, Limits(0)] = 256 << 20  #: disk quota for the journal of events
    #: CORS origins that may send requests, like "https://chat.example"; "*": any, if API keys are required
    allowed_origins: tuple[str, ...] = ()
    #: seconds after which an idle connection is closed; a proxy in front should close its connections sooner
    #: (nginx: 60, others up to 600), or it sends requests into connections that are closing
    idle_connection_s: Annotated[int, Limits(1, 86400)] = 120
    #: format of logs/access.log in the data directory, one line per HTTP request
    access_log: Literal["text", "json", "off"] = "text"
    #: price of a device per hour, in any currency, for cost metrics per model; None: no cost metrics
    device_hour_price: Annotated[float | None, Limits(0.0)] = None

    def __post_init__(self) -> None:
        _check_section(self, "service")
        object.__setattr__(self, "allowed_origins", tuple(map(_origin, self.allowed_origins)))


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Several machines behind one service, once `hearth cluster init` or `hearth join` has set them up."""

    listen: str = "0.0.0.0:7610"  #: address for the other machines, which authenticate by certificates
    #: address at which other machines reach this one; None: that of the route to the head
    address: str | None = None
    name: str | None = None  #: name of this machine in the cluster; None: its host name
    labels: tuple[str, ...] = ()  #: labels of this machine, like "zone=a"
    encrypt_weights: bool = True  #: encrypt weights between machines; the head's setting applies to all
    #: most bytes of weights per second that this machine sends to others; None: what the link takes
    max_send_bytes: Annotated[int | None, Limits(8 << 20)] = None
    keep_host_s: _Wait = 600.0  #: seconds that a machine without a head keeps models in host memory
    #: "ray" or "ray:HOST:PORT": run a node on every Ray node that has GPUs; None: nodes run `hearth join`
    manager: str | None = None
    #: with Ray: also run a node where there is no GPU and at least this many CPUs; 0: only with GPUs
    ray_cpus: Annotated[int, Limits(0)] = 0
    node_data_dir: str = "~/.hearth-node"  #: with Ray: data directory of each node
    ray_without_auth: bool = False  #: use a Ray cluster that runs the code of anyone who reaches it
    #: with Ray: nodes to keep when idle, others come and go with the load; None: use all that Ray has
    min_nodes: Annotated[int | None, Limits(0)] = None
    #: with `min_nodes`: seconds that a request waits for memory, a slot or a turn before a machine is added
    scale_out_after_s: Annotated[float, Limits(0.1, 86400.0)] = 5.0
    #: with `min_nodes`: seconds without requests and loads after which Ray gets a machine back
    scale_in_after_s: Annotated[float, Limits(0.1, 86400.0)] = 300.0

    def __post_init__(self) -> None:
        _check_section(self, "cluster")
        if self.manager is not None and self.manager.partition(":")[0] != "ray":
            raise ConfigError(
                f"`cluster.manager` is `ray` or `ray:HOST:PORT`, the address of a Ray cluster, given: "
                f"{self.manager!r:.80}"
            )
        for key, address in (("listen", self.listen), ("address", self.address)):
            try:
                parse_address(address or self.listen)
            except ConfigError as error:
                raise ConfigError(f"`cluster.{key}`: {error}") from None
        if (wrong := wrong_label(self.labels)) is not None:
            raise ConfigError(f'`cluster.labels` takes labels like "zone=a", given: {wrong!r:.80}')

    @property
    def values_by_label(self) -> dict[str, str]:
        return {key: value for key, _, value in (label.partition("=") for label in self.labels)}


def wrong_label(labels: Iterable[str]) -> str | None:
    """Return the first that is not KEY=VALUE without spaces; None: there is none."""
    return next((label for label in labels if not re.fullmatch(r"[^\s=]+=\S+", label)), None)


CLUSTER_PORT = 7610


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of "HOST:PORT", "HOST" or "[IPV6]:PORT". Raises ConfigError."""
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([\w.-]+))(?::(\d{1,5}))?", text.strip(), re.ASCII)
    port = CLUSTER_PORT if match is None or match[3] is None else int(match[3])
    if match is None or port > 65535:
        raise ConfigError(f"an address is HOST:PORT, like 10.0.0.1:{CLUSTER_PORT}, given: {text!r:.80}")
    return match[1] or match[2], port


def address_of(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The settings of one deployed model, in a table of its own: [models.NAME]."""

    #: what to deploy under this name when the service starts, unless it is deployed from there already:
    #: "hf:ORG/NAME", a path or a URL; None: the model is deployed by `hearth deploy`
    source: str | None = None
    aliases: tuple[str, ...] = ()  #: other names of the model
    #: context length in tokens, prompt and answer together; None: the model's own
    context: Annotated[int | None, Limits(2)] = None
    keep_alive: Annotated[float | None, _Duration()] = None  #: overrides `service.keep_alive`
    pinned: bool = False  #: load the model when the service starts and never evict it
    latency_weight: Annotated[float, Limits(0.001, 1000.0)] = 1.0  #: weight of this model's cold starts
    first_token_target: Annotated[float | None, TARGET_LIMITS] = (
        None  #: overrides `service.first_token_target`
    )
    pace: Annotated[float | None, PACE_LIMITS] = None  #: overrides `service.pace`
    max_pause: Annotated[float | None, _PAUSE_LIMITS] = None  #: overrides `service.max_pause`
    #: device memory reserved wherever the model is loaded, KV cache included; None: what it needs to run
    memory_floor_bytes: Annotated[int | None, Limits(1)] = None
    #: maximum device memory of the model, KV cache included; None: no limit
    memory_ceiling_bytes: Annotated[int | None, Limits(1)] = None
    #: replicas to keep loaded, each on its own worker and spread over machines; `pinned` is 1
    min_replicas: Annotated[int, Limits(0)] = 0
    max_replicas: Annotated[int | None, Limits(1)] = None  #: maximum replicas under load; None: no limit
    #: auto: replicas that run out of KV memory together give up layers for it, run the model in stages and
    #: load the layers again when the demand is over; off: requests wait or are preempted
    drop: Literal["auto", "off"] = "off"
    labels: tuple[str, ...] = ()  #: run the model only on machines with all these `cluster.labels`

    def __post_init__(self) -> None:
        _check_section(self, "models.NAME")
        if (wrong := wrong_label(self.labels)) is not None:
            raise ConfigError(f'`models.NAME.labels` takes labels like "zone=a", given: {wrong!r:.80}')
        floor, ceiling = self.memory_floor_bytes, self.memory_ceiling_bytes
        if floor is not None and ceiling is not None and floor > ceiling:
            raise ConfigError(
                f"`memory_floor_bytes` must not exceed `memory_ceiling_bytes`: {floor} > {ceiling}; "
                "lower the one or raise the other"
            )
        least, most = self.min_replicas, self.max_replicas
        if most is not None and least > most:
            raise ConfigError(
                f"`min_replicas` must not exceed `max_replicas`: {least} > {most}; "
                "lower the one or raise the other"
            )


@dataclass(frozen=True, slots=True)
class HearthConfig:
    engine: EngineConfig = field(default_factory=EngineConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    log: LogConfig = field(default_factory=LogConfig)
    service: ServiceConfig = field(default_factory=ServiceConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    models: Mapping[str, ModelConfig] = field(default_factory=dict)  #: by name


Section = EngineConfig | StoreConfig | LogConfig | ServiceConfig | ClusterConfig | ModelConfig


def load(path: Path | None = None, overrides: Mapping[str, object] | None = None) -> HearthConfig:
    """Read `path` (None: all defaults) and apply `overrides`, which win.

    Overrides look like {"engine.max_seqs": 8} or {"models.NAME.pinned": True}; NAME may contain dots.
    Raises ConfigError.
    """
    raw = _read(path) if path is not None else {}
    for dotted, value in (overrides or {}).items():
        section, _, key = dotted.partition(".")
        table = raw.setdefault(section, {})
        if section == "models":
            name, _, key = key.rpartition(".")
            table = _table(name, table.setdefault(name, {}))
        table[key] = value
    section_types = _hints_of(HearthConfig)
    _refuse_unknown(raw, section_types, "section")
    models = {name: _model(name, table) for name, table in raw.pop("models", {}).items()}
    sections = {name: _section(section_types[name], name, values) for name, values in raw.items()}
    return HearthConfig(**sections, models=models)


def setting_keys() -> list[str]:
    kinds = _hints_of(HearthConfig)
    return [f"{name}.{key}" for name in kinds if name != "models" for key in _hints_of(kinds[name])]


def keys_in(path: Path) -> list[str]:
    """Return the keys that a file sets, like "service.port" and "models.NAME.pinned". Raises ConfigError."""
    raw = _read(path)
    models = raw.pop("models", {})
    tables = {name: table for name, table in models.items() if isinstance(table, dict)}
    return [f"{name}.{key}" for name, table in raw.items() for key in table] + [
        f"models.{name}.{key}" for name, table in tables.items() for key in table
    ]


def from_text(key: str, text: str) -> object:
    """Convert text to a value for `load`, which refuses what is wrong. Commas separate items of a list."""
    section, _, name = key.partition(".")
    hint = _hints_of(_hints_of(HearthConfig)[section])[name]
    types = get_args(hint) or (hint,)
    if get_origin(hint) is tuple:
        return [item.strip() for item in text.split(",") if item.strip()]
    if bool in types:
        return _BOOLEANS.get(text.strip().lower(), text)
    if not key.endswith("_bytes"):
        for kind in (kind for kind in (int, float) if kind in types):
            try:
                return kind(text)
            except ValueError:
                continue
    return text


_BOOLEANS = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(
    ("false", "no", "off", "0"), False
)


def to_toml(config: HearthConfig, origins: Mapping[str, str] | None = None) -> str:
    """Return `config` as a file that `load` reads back; None, which TOML lacks, becomes a comment.

    `origins` maps keys like "service.port" to where they come from; each is noted behind its setting.
    """
    sections = {title: (title, section) for title, section in _sections(config).items()}
    tables = {f"models.{name}": (f"models.{_quoted(name)}", model) for name, model in config.models.items()}
    lines: list[str] = []
    for name, (title, section) in [*sections.items(), *tables.items()]:
        lines += ["", f"[{title}]"]
        for key, value in _plain(section).items():
            origin = (origins or {}).get(f"{name}.{key}")
            lines.append(
                (f"# {key} is not set" if value is None else f"{key} = {_quoted(value)}")
                + ("" if origin is None else f"  # {origin}")
            )
    return "\n".join(lines[1:]) + "\n"


def plain(config: HearthConfig) -> dict[str, object]:
    """Return a configuration for JSON, which lacks infinity: -1 stands for it, as in `load`."""
    models = {name: _plain(model) for name, model in config.models.items()}
    return {title: _plain(section) for title, section in _sections(config).items()} | {"models": models}


def _sections(config: HearthConfig) -> dict[str, Section]:
    return {
        "engine": config.engine,
        "store": config.store,
        "log": config.log,
        "service": config.service,
        "cluster": config.cluster,
    }


def _plain(section: Section) -> dict[str, object]:
    return {key: -1 if value == math.inf else value for key, value in asdict(section).items()}


def _quoted(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


UNITS = {"B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_BYTES_BY_UNIT = {"": 1} | {unit.lower(): num_bytes for unit, num_bytes in UNITS.items()}


def parse_bytes(size: str | int) -> int:
    """Return the bytes of 512, "512", "512 MB" (10**6 each) or "1.5GiB" (2**30 each), in any case."""
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", size.lower(), re.ASCII)
    if match is None or match[2] not in _BYTES_BY_UNIT:
        raise ConfigError(f'a size is a number and one of {", ".join(UNITS)}, like "8GiB", given: {size!r}')
    return int(Fraction(match[1]) * _BYTES_BY_UNIT[match[2]])


SECONDS_BY_UNIT = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = r"\d+(?:\.\d+)?"
_PART = rf"({_NUMBER})\s*({'|'.join(SECONDS_BY_UNIT)})\s*"
#: Longer durations are infinite.
_FOR_EVER_S = 1e12


def parse_duration(value: object) -> float:
    """Return the seconds of 300, 2.5, "300", "5m", "1h30m" or "500ms"; negative durations are infinite."""
    seconds = _seconds(value)
    if seconds is None:
        raise ConfigError(
            f"a duration is a number of seconds, or numbers with units ({', '.join(SECONDS_BY_UNIT)}), like "
            f"300, '5m' or '1h30m'; -1 means forever; given: {value!r:.80}"
        )
    return seconds


def _seconds(value: object) -> float | None:
    if isinstance(value, str):
        text = value.strip().lower()
        size = text.removeprefix("-")
        if re.fullmatch(_NUMBER, size, re.ASCII):
            value = float(text)
        elif re.fullmatch(f"(?:{_PART})+", size, re.ASCII):
            parts = re.findall(_PART, size, re.ASCII)
            seconds = sum(float(number) * SECONDS_BY_UNIT[unit] for number, unit in parts)
            value = seconds if size == text else -seconds
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        return None
    return float(value) if 0 <= value <= _FOR_EVER_S else math.inf


def _read(path: Path) -> dict[str, dict[str, object]]:
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file `{path}`: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"`{path}` is not valid TOML: {error}") from error
    for name, value in raw.items():
        if not isinstance(value, dict):
            raise ConfigError(f"`{name}` is outside any section in `{path}`; move it into one, like [engine]")
    return raw


def _refuse_unknown(given: Iterable[str], valid: Iterable[str], what: str) -> None:
    valid = list(valid)
    for name in given:
        if name not in valid:
            nearest = get_close_matches(name, valid, n=1)
            hint = f"did you mean `{nearest[0]}`?" if nearest else f"valid: {', '.join(valid)}"
            raise ConfigError(f"unknown configuration {what} `{name}`; {hint}")


def _hints_of(kind: type, *, include_extras: bool = False) -> dict[str, Any]:
    return _cached_hints_of(kind, include_extras)  # mypy takes no type variable for hashable


@cache
def _cached_hints_of(kind: type, include_extras: bool) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=include_extras)


def _section(kind: type[T], name: str, values: Mapping[str, object]) -> T:
    # `__post_init__` checks too, but does not know the full names of keys for its messages.
    hints = _hints_of(kind, include_extras=True)
    _refuse_unknown([f"{name}.{key}" for key in values], [f"{name}.{key}" for key in hints], "key")
    checked = {key: _checked(f"{name}.{key}", hints[key], value) for key, value in values.items()}
    return kind(**checked)


def _model(name: str, table: object) -> ModelConfig:
    values = _table(name, table)
    for key, value in values.items():
        if isinstance(value, dict):  # [models.qwen2.5] is table `5` of table `qwen2`
            raise ConfigError(
                f"[models.{name}.{key}] is a nested table; a name with dots needs quotes: "
                f'[models."{name}.{key}"]'
            )
    return _section(ModelConfig, f"models.{name}", values)


def _table(name: str, value: object) -> dict[str, object]:
    if not name or not isinstance(value, dict):
        raise ConfigError(
            f"`models` needs one table per model, like [models.NAME] or --set models.NAME.pinned=true; "
            f"given: {name!r} with {value!r:.80}"
        )
    return value


def _check_section(section: object, name: str) -> None:
    for key, hint in _hints_of(type(section), include_extras=True).items():
        object.__setattr__(section, key, _checked(f"{name}.{key}", hint, getattr(section, key)))


def _checked(key: str, hint: object, value: object) -> object:
    """Return a value of the type of `hint`: sizes become ints, ints become floats. Raises ConfigError."""
    note = None
    if get_origin(hint) is Annotated:
        hint, note = get_args(hint)
    choices = get_args(hint)  # of a Literal: values; of a union: types
    if isinstance(note, _Duration):
        return None if value is None and NoneType in choices else _duration(key, value, note.low_s)
    if get_origin(hint) is tuple:
        return _texts(key, value)
    if get_origin(hint) is Literal:
        if value not in choices:
            raise ConfigError(f"`{key}` must be one of {', '.join(map(repr, choices))}, given: {value!r}")
        return value
    types = choices or (hint,)
    if int in types and key.endswith("_bytes") and isinstance(value, str):
        value = _size(key, value)
    if float in types and type(value) is int:
        value = float(value)
    if type(value) not in types:  # not isinstance: True is no number here
        names = " or ".join(t.__name__ for t in types if isinstance(t, type) and t is not NoneType)
        raise ConfigError(f"`{key}` must be of type {names}, given: {value!r} of type {type(value).__name__}")
    if value == "":
        raise ConfigError(f"`{key}` must not be empty; set a value or remove the key")
    if isinstance(note, Limits) and isinstance(value, int | float) and not note.low <= value <= note.high:
        limits = note.text(_bytes_text if key.endswith("_bytes") else "{:g}".format)
        raise ConfigError(f"`{key}` must be {limits}, given: {value}")
    return value


def _bytes_text(num_bytes: float) -> str:
    units = {unit: size for unit, size in UNITS.items() if size <= num_bytes and not num_bytes % size}
    unit = max(units, key=units.__getitem__, default="B")
    return f"{num_bytes / UNITS[unit]:.0f}{unit}"


def _size(key: str, size: str) -> int:
    try:
        return parse_bytes(size)
    except ConfigError as error:
        raise ConfigError(f"`{key}`: {error}") from None


def _duration(key: str, value: object, low_s: float) -> float:
    try:
        seconds = parse_duration(value)
    except ConfigError as error:
        raise ConfigError(f"`{key}`: {error}") from None
    if seconds < low_s:
        raise ConfigError(f"`{key}` must be at least {low_s:g} s, given: {value!r}; -1 means forever")
    return seconds


_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


def _origin(text: str) -> str:
    if text == "*":
        return text
    origin = text.lower().removesuffix("/")
    match = re.fullmatch(r"([a-z][a-z0-9+.-]*)://[a-z0-9._:\[\]-]+", origin)
    if match is None:
        raise ConfigError(
            '`service.allowed_origins` takes origins without a path, like "https://chat.example" or '
            f'"http://localhost:3000", or "*" for any, given: {text!r:.80}'
        )
    return origin.removesuffix(_DEFAULT_PORTS.get(match[1], ""))


def _texts(key: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) and text for text in value):
        raise ConfigError(f'`{key}` must be a list of strings, like ["a", "b"], given: {value!r:.80}')
    return tuple(value)

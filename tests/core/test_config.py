from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.core.config import (
    SECONDS_BY_UNIT,
    UNITS,
    ClusterConfig,
    EngineConfig,
    HearthConfig,
    LogConfig,
    ModelConfig,
    ServiceConfig,
    StoreConfig,
    load,
    parse_address,
    parse_bytes,
    parse_duration,
    plain,
    to_toml,
)
from hearth.core.errors import ConfigError


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write_toml(text: str) -> Path:
        path = tmp_path / "hearth.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_toml


def test_no_file_gives_the_defaults() -> None:
    assert load(None, {}) == HearthConfig(EngineConfig(), StoreConfig(), LogConfig())


def test_the_file_replaces_only_the_keys_it_names(write: Callable[[str], Path]) -> None:
    config = load(write('[engine]\nmax_seqs = 8\n[log]\nlevel = "debug"\n'), {})
    assert config == HearthConfig(EngineConfig(max_seqs=8), log=LogConfig(level="debug"))


def test_overrides_beat_the_file(write: Callable[[str], Path]) -> None:
    config = load(write("[engine]\nmax_seqs = 8\nblock_tokens = 32\n"), {"engine.max_seqs": 4})
    assert config.engine == EngineConfig(max_seqs=4, block_tokens=32)


def test_sizes_are_read_where_the_key_says_bytes(write: Callable[[str], Path]) -> None:
    assert load(write('[engine]\nkv_bytes = "2 GiB"\n'), {}).engine.kv_bytes == 2 << 30


def test_a_whole_number_serves_as_a_fraction(write: Callable[[str], Path]) -> None:
    fraction = load(write("[engine]\nmemory_fraction = 1\n"), {}).engine.memory_fraction
    assert (fraction, type(fraction)) == (1.0, float)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[engin]\n", "unknown configuration section `engin`; did you mean `engine`?"),
        (
            "[zzz]\n",
            "unknown configuration section `zzz`; valid: engine, store, log, service, cluster, models",
        ),
        (
            "[engine]\nmax_seq = 1\n",
            "unknown configuration key `engine.max_seq`; did you mean `engine.max_seqs`?",
        ),
        ("max_seqs = 1\n", "`max_seqs` is outside any section"),
        ('[engine]\nmax_seqs = "8"\n', "`engine.max_seqs` must be of type int, given: '8' of type str"),
        ("[engine]\nmax_seqs = true\n", "`engine.max_seqs` must be of type int, given: True of type bool"),
        ("[engine]\nmax_seqs = 8.0\n", "`engine.max_seqs` must be of type int, given: 8.0 of type float"),
        ("[engine]\ngraphs = true\n", "`engine.graphs` must be one of 'lazy', 'start', 'off', given: True"),
        (
            "[engine]\nmax_step = 0\n",
            "`engine.max_step` must be at least 0.001 s, given: 0; -1 means forever",
        ),
        ('[engine]\nmax_step = "soon"\n', "`engine.max_step`: a duration is a number of seconds, or"),
        ("[engine]\nmax_seqs = 0\n", "`engine.max_seqs` must be at least 1, given: 0"),
        ("[engine]\nkv_bytes = -1\n", "`engine.kv_bytes` must be at least 1B, given: -1"),
        ("[store]\nhost_bytes = 1000\n", "`store.host_bytes` must be at least 16MiB, given: 1000"),
        ("[store]\ndisk_bytes = -1\n", "`store.disk_bytes` must be at least 0B, given: -1"),
        ("[engine]\nmemory_fraction = 1.5\n", "must be at least 0.05 and at most 1, given: 1.5"),
        ("[engine]\nmemory_fraction = nan\n", "must be at least 0.05 and at most 1, given: nan"),
        ('[engine]\nkv_bytes = "8 GiBs"\n', "`engine.kv_bytes`: a size is a number and one of B, KB, KiB"),
        (
            '[log]\nlevel = "loud"\n',
            "`log.level` must be one of 'debug', 'info', 'warning', 'error', given: 'loud'",
        ),
        ("[engine\n", "is not valid TOML"),
        ("[service]\nports = 1\n", "unknown configuration key `service.ports`; did you mean `service.port`?"),
        ("[service]\nport = 65536\n", "`service.port` must be at least 0 and at most 65535, given: 65536"),
        (
            "[service]\nkeep_alive = true\n",
            "`service.keep_alive`: a duration is a number of seconds, or numbers with units (ms, s",
        ),
        ("[service]\ndrain_s = inf\n", "`service.drain_s` must be at least 0 and at most 86400, given: inf"),
        ("[service]\npace = 1001\n", "`service.pace` must be at least 0 and at most 1000, given: 1001"),
        ("[service]\nfirst_token_target = 0\n", "must be at least 0.01 and at most 3600, given: 0"),
        *[
            (
                f'[service]\nallowed_origins = ["{origin}"]\n',
                f"or \"*\" for any, given: '{origin}'",
            )
            for origin in ("chat.example", "null", "https://*.example", "https://a.example/chat", "file://")
        ],
        ('[service]\nallowed_origins = "*"\n', "`service.allowed_origins` must be a list of strings"),
        ('[service]\nhost = ""\n', "`service.host` must not be empty; set a value or remove the key"),
        ("[service]\nidle_connection_s = 0\n", "must be at least 1 and at most 86400, given: 0"),
        (
            '[cluster]\nlisten = "here:99999"\n',
            "`cluster.listen`: an address is HOST:PORT, like 10.0.0.1:7610, given: 'here:99999'",
        ),
        (
            '[cluster]\naddress = "::1"\n',
            "`cluster.address`: an address is HOST:PORT, like 10.0.0.1:7610, given: '::1'",
        ),
        ('[cluster]\nlabels = ["zone"]\n', "`cluster.labels` takes labels like \"zone=a\", given: 'zone'"),
        ("[service]\nturns = 1\n", "`service.turns` must be of type bool, given: 1 of type int"),
        ("[models.x]\nmax_pause = 0.01\n", "`models.x.max_pause` must be at least 0.1 and at most 3600"),
        ("[models]\nx = 1\n", "`models` needs one table per model, like [models.NAME]"),
        (
            "[models.x]\nkeep_live = 1\n",
            "unknown configuration key `models.x.keep_live`; did you mean `models.x.keep_alive`?",
        ),
        ("[models.x]\ncontext = 1\n", "`models.x.context` must be at least 2, given: 1"),
        ('[models.x]\naliases = "y"\n', "`models.x.aliases` must be a list of strings"),
        ('[models.x]\naliases = [""]\n', "`models.x.aliases` must be a list of strings"),
        ("[models.x]\nlatency_weight = 0\n", "`models.x.latency_weight` must be at least 0.001"),
        ("[models.qwen2.5]\npinned = true\n", 'a name with dots needs quotes: [models."qwen2.5"]'),
        (
            "[models.x]\nmemory_floor_bytes = 2\nmemory_ceiling_bytes = 1\n",
            "`memory_floor_bytes` must not exceed `memory_ceiling_bytes`: 2 > 1",
        ),
        (
            "[models.x]\nmin_replicas = 3\nmax_replicas = 2\n",
            "`min_replicas` must not exceed `max_replicas`: 3 > 2",
        ),
        (
            '[models.x]\nlabels = ["zone = a"]\n',
            "`models.NAME.labels` takes labels like \"zone=a\", given: 'zone = a'",
        ),
    ],
)
def test_a_wrong_file_is_refused_with_key_limit_and_value(
    write: Callable[[str], Path], text: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(text), {})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("given", "origin"),
    [
        ("*", "*"),
        ("https://Chat.Example/", "https://chat.example"),
        ("https://chat.example:443", "https://chat.example"),
        ("http://localhost:8080", "http://localhost:8080"),
        ("http://[::1]:80", "http://[::1]"),
        ("chrome-extension://abcdef", "chrome-extension://abcdef"),
    ],
)
def test_an_origin_is_spelled_as_browsers_do(given: str, origin: str) -> None:
    assert ServiceConfig(allowed_origins=(given,)).allowed_origins == (origin,)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.1:8610", ("10.0.0.1", 8610)),
        ("gpu-1.example", ("gpu-1.example", 7610)),
        ("[fe80::1]:1", ("fe80::1", 1)),
        (" [::1] ", ("::1", 7610)),
    ],
)
def test_an_address_is_a_host_and_a_port(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


def test_labels_have_values() -> None:
    assert ClusterConfig(labels=("zone=a", "rack=3=b")).values_by_label == {"zone": "a", "rack": "3=b"}


def test_a_connection_stays_open_for_longer_than_proxies_keep_theirs() -> None:
    assert ServiceConfig().idle_connection_s > 75


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere.toml`: No such file"):
        load(tmp_path / "nowhere.toml", {})


def test_an_unknown_override_is_refused_like_a_key_of_the_file() -> None:
    with pytest.raises(ConfigError, match=r"did you mean `engine\.block_tokens`"):
        load(None, {"engine.block_token": 16})


def test_sections_made_in_python_are_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"`engine.max_batch_tokens` must be at least 1, given: 0"):
        EngineConfig(max_batch_tokens=0)


def test_models_have_a_table_each_and_flags_reach_them_by_name(write: Callable[[str], Path]) -> None:
    path = write('[models."qwen2.5"]\naliases = ["q", "gpt-4"]\nkeep_alive = "1h30m"\n')
    config = load(path, {"models.qwen2.5.pinned": True, "models.tiny.memory_ceiling_bytes": "1GiB"})
    assert config.models == {
        "qwen2.5": ModelConfig(aliases=("q", "gpt-4"), keep_alive=5400.0, pinned=True),
        "tiny": ModelConfig(memory_ceiling_bytes=1 << 30),
    }


@pytest.mark.parametrize("key", ["models.pinned", "models."])
def test_a_flag_for_models_that_names_none_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=r"one table per model, like \[models.NAME\]"):
        load(None, {key: True})


@pytest.mark.parametrize("max_step", [0.05, math.inf])
def test_a_worker_is_told_the_engine_s_section_in_json(max_step: float) -> None:
    config = EngineConfig(max_step=max_step)
    assert EngineConfig(**json.loads(json.dumps(config.plain(), allow_nan=False))) == config


def test_plain_configuration_says_for_ever_in_a_number() -> None:
    config = HearthConfig(service=ServiceConfig(keep_alive=math.inf), models={"x": ModelConfig()})
    sections = json.loads(json.dumps(plain(config), allow_nan=False))
    assert sections["service"]["keep_alive"] == -1
    assert sections["models"]["x"]["keep_alive"] is None
    assert list(sections) == ["engine", "store", "log", "service", "cluster", "models"]


@given(
    st.builds(
        EngineConfig,
        max_seqs=st.integers(1, 10**6),
        max_step=st.just(math.inf) | st.floats(0.001, 1e9),
        kv_bytes=st.none() | st.integers(1, 2**50),
        memory_fraction=st.floats(0.05, 1.0),
        graphs=st.sampled_from(["lazy", "start", "off"]),
    ),
    st.sampled_from([LogConfig(level="debug"), LogConfig(level="error")]),
    st.builds(
        ServiceConfig,
        port=st.integers(0, 65535),
        workers=st.none() | st.integers(1, 9),
        keep_alive=st.just(math.inf) | st.floats(0, 1e9),
        api_keys_file=st.none() | st.just('C:\\keys "1".json'),
    ),
    st.dictionaries(
        st.text("aZ0._- é/", min_size=1),
        st.builds(
            ModelConfig,
            aliases=st.lists(st.text("aé/.", min_size=1)).map(tuple),
            keep_alive=st.none() | st.just(math.inf) | st.floats(0, 1e9),
            latency_weight=st.floats(0.001, 1000.0),
            memory_floor_bytes=st.none() | st.integers(1, 2**40),
        ),
        max_size=3,
    ),
)
def test_printed_configuration_reads_back_as_itself(
    tmp_path_factory: pytest.TempPathFactory,
    engine: EngineConfig,
    log: LogConfig,
    service: ServiceConfig,
    models: dict[str, ModelConfig],
) -> None:
    config = HearthConfig(engine, log=log, service=service, models=models)
    path = tmp_path_factory.mktemp("config") / "hearth.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    assert load(path, {}) == config


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("8GiB", 8 << 30),
        ("512 MB", 512_000_000),
        ("1.5 kib", 1536),
        (" 2TB ", 2 * 10**12),
    ],
)
def test_a_size_is_a_number_and_a_unit(size: str | int, num_bytes: int) -> None:
    assert parse_bytes(size) == num_bytes


@given(st.integers(0, 2**60), st.sampled_from(sorted(UNITS)))
def test_whole_sizes_are_exact_in_every_unit(count: int, unit: str) -> None:
    assert parse_bytes(f"{count}{unit}") == count * UNITS[unit]


@pytest.mark.parametrize("size", ["", "GiB", "8 G", "-1GiB", "1e9", "8 GiB each", "1.GiB"])
def test_what_is_no_size_is_refused(size: str) -> None:
    with pytest.raises(ConfigError, match='like "8GiB", given: '):
        parse_bytes(size)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (300, 300.0),
        (2.5, 2.5),
        (0, 0.0),
        ("0", 0.0),
        ("300", 300.0),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("1h 30m", 5400.0),
        (" 90S ", 90.0),
        ("500ms", 0.5),
        ("1.5h", 5400.0),
        ("2d", 172800.0),
        (-1, math.inf),
        (-0.5, math.inf),
        ("-1", math.inf),
        ("-1m", math.inf),
        (math.inf, math.inf),
        (10**400, math.inf),
    ],
)
def test_a_duration_is_seconds_or_numbers_with_units(value: object, seconds: float) -> None:
    assert parse_duration(value) == seconds


@given(st.integers(0, 10**6), st.sampled_from(sorted(SECONDS_BY_UNIT)))
def test_whole_durations_are_right_in_every_unit(count: int, unit: str) -> None:
    assert parse_duration(f"{count}{unit}") == count * SECONDS_BY_UNIT[unit]


@pytest.mark.parametrize(
    "value",
    ["", "m", "5 minutes", "1e9", "5m-", "--1", "-", "5m3", True, None, [5], {}, math.nan, "nan", "inf"],
)
def test_what_is_no_duration_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"like 300, '5m' or '1h30m'; -1 means forever; given: "):
        parse_duration(value)


def test_a_section_can_be_changed_and_is_checked_again() -> None:
    service = replace(ServiceConfig(keep_alive=math.inf), port=0)
    assert (service.keep_alive, service.port) == (math.inf, 0)

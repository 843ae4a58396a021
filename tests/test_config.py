from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.config import (
    UNITS,
    EngineConfig,
    HearthConfig,
    LogConfig,
    StoreConfig,
    load,
    parse_bytes,
    to_toml,
)
from hearth.errors import ConfigError


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
        ("[zzz]\n", "unknown configuration section `zzz`; valid: engine, store, log"),
        (
            "[engine]\nmax_seq = 1\n",
            "unknown configuration key `engine.max_seq`; did you mean `engine.max_seqs`?",
        ),
        ("max_seqs = 1\n", "`max_seqs` stands outside any section"),
        ('[engine]\nmax_seqs = "8"\n', "`engine.max_seqs` must be of type int, given: '8' of type str"),
        ("[engine]\nmax_seqs = true\n", "`engine.max_seqs` must be of type int, given: True of type bool"),
        ("[engine]\nmax_seqs = 8.0\n", "`engine.max_seqs` must be of type int, given: 8.0 of type float"),
        ("[engine]\ngraphs = true\n", "`engine.graphs` must be one of 'lazy', 'start', 'off', given: True"),
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
    ],
)
def test_a_wrong_file_is_refused_with_key_limit_and_value(
    write: Callable[[str], Path], text: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(text), {})
    assert message in str(caught.value)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere.toml`: No such file"):
        load(tmp_path / "nowhere.toml", {})


def test_an_unknown_override_is_refused_like_a_key_of_the_file() -> None:
    with pytest.raises(ConfigError, match=r"did you mean `engine\.block_tokens`"):
        load(None, {"engine.block_token": 16})


def test_sections_made_in_python_are_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"`engine.max_batch_tokens` must be at least 1, given: 0"):
        EngineConfig(max_batch_tokens=0)


@given(
    st.builds(
        EngineConfig,
        max_seqs=st.integers(1, 10**6),
        kv_bytes=st.none() | st.integers(1, 2**50),
        memory_fraction=st.floats(0.05, 1.0),
        graphs=st.sampled_from(["lazy", "start", "off"]),
    ),
    st.sampled_from([LogConfig(level="debug"), LogConfig(level="error")]),
)
def test_printed_configuration_reads_back_as_itself(
    tmp_path_factory: pytest.TempPathFactory, engine: EngineConfig, log: LogConfig
) -> None:
    path = tmp_path_factory.mktemp("config") / "hearth.toml"
    path.write_text(to_toml(HearthConfig(engine, log=log)), encoding="utf-8")
    assert load(path, {}) == HearthConfig(engine, log=log)


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

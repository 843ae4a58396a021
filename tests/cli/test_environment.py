"""Settings in environment variables: each setting has one, values are checked, their origin is shown."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.cli.console import format_origins, resolved
from hearth.cli.environment import EnvironmentSettings, read_environment, variable_of
from hearth.core.config import HearthConfig, Limits, ModelConfig, load, setting_keys
from hearth.core.errors import ConfigError
from tests.cli.shell import Hearth

DEFAULTS = HearthConfig()
SECTIONS = {
    field.name: type(getattr(DEFAULTS, field.name))
    for field in fields(HearthConfig)
    if field.name != "models"
}


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in map(variable_of, setting_keys()):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.delenv("HEARTH_DATA_DIR", raising=False)


def annotations() -> Iterator[tuple[str, object]]:
    for name, section in SECTIONS.items():
        for key, hint in get_type_hints(section, include_extras=True).items():
            yield f"{name}.{key}", hint


HINTS = dict(annotations())


def spellings(key: str) -> st.SearchStrategy[str]:
    """Texts that the setting takes, drawn by what its annotation says."""
    hint, note = HINTS[key], None
    if get_origin(hint) is Annotated:
        hint, note = get_args(hint)
    types = get_args(hint) or (hint,)
    if key in ("cluster.listen", "cluster.address"):
        return st.sampled_from(["10.0.0.1:7610", "gpu-1", "[::1]:0"])
    if key == "cluster.manager":
        return st.sampled_from(["ray", "ray:10.0.0.1:6379"])
    if key == "cluster.labels":
        return st.lists(st.sampled_from(["zone=a", "rack=3"])).map(",".join)
    if get_origin(hint) is tuple:
        return st.lists(st.sampled_from(["https://a.example", "http://b.example:3000"])).map(",".join)
    if get_origin(hint) is Literal:
        return st.sampled_from(types)
    if bool in types:
        return st.sampled_from(["true", "False", "1", "0", "on", "no"])
    if str in types:
        return st.sampled_from(["123", "true", "/var/lib/x", "0.0.0.0", "~/y"])
    if not isinstance(note, Limits):
        return st.sampled_from(["5m", "-1", "30", "1h30m", "2.5"])
    high = min(note.high, 2.0**40)
    if key.endswith("_bytes"):
        return st.sampled_from(["8GiB", "17179869184", "512 MiB"])
    if int in types:
        return st.integers(math.ceil(note.low), int(high)).map(str)
    return st.floats(note.low, high).map(repr)


def section_value(config: HearthConfig, key: str) -> object:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def test_every_setting_of_every_section_has_a_variable_of_its_own() -> None:
    assert {"engine", "store", "log", "service"} <= SECTIONS.keys()
    assert setting_keys() == list(HINTS)
    assert len(set(map(variable_of, setting_keys()))) == len(HINTS)
    assert variable_of("service.idle_connection_s") == "HEARTH_SERVICE_IDLE_CONNECTION_S"


@hypothesis.settings(max_examples=8)
@given(st.data())
@pytest.mark.parametrize("key", HINTS)
def test_a_variable_sets_what_the_same_text_sets_in_the_file(key: str, data: st.DataObject) -> None:
    text = data.draw(spellings(key))
    settings = read_environment({variable_of(key): text})
    config = load(None, settings.values)
    if not text:
        assert settings == EnvironmentSettings({}, {}, ())
        return
    value = section_value(config, key)
    assert settings.variables == {key: variable_of(key)}
    assert config == load(None, {key: value if value != math.inf else -1})
    if isinstance(value, bool):
        assert value == (text.lower() in ("true", "1", "on"))
    elif isinstance(value, tuple):
        assert list(value) == text.split(",")
    elif isinstance(value, str):
        assert value == text
    else:
        assert value == section_value(load(None, {key: toml_value(text)}), key)


def toml_value(text: str) -> object:
    """A number, or a text as the file would have it in quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


@given(st.text(alphabet=st.characters(codec="ascii"), max_size=12), st.sampled_from(sorted(HINTS)))
def test_any_text_is_taken_or_refused_by_the_name_of_the_variable(text: str, key: str) -> None:
    said = complaint({variable_of(key): text})
    if said is not None:
        assert said.startswith(f"environment variable `{variable_of(key)}`: `{key}`")
        assert "given" in said


def complaint(environment: dict[str, str]) -> str | None:
    try:
        read_environment(environment)
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("HEARTH_SERVICE_PORT", "65536", "`service.port` must be at least 0 and at most 65535, given: 65536"),
        ("HEARTH_SERVICE_PORT", "web", "`service.port` must be of type int, given: 'web' of type str"),
        ("HEARTH_SERVICE_TURNS", "maybe", "`service.turns` must be of type bool, given: 'maybe' of type str"),
        (
            "HEARTH_LOG_LEVEL",
            "loud",
            "`log.level` must be one of 'debug', 'info', 'warning', 'error', given: 'loud'",
        ),
        ("HEARTH_STORE_HOST_BYTES", "1", "`store.host_bytes` must be at least 16MiB, given: 1"),
        (
            "HEARTH_SERVICE_ALLOWED_ORIGINS",
            "https://a.example, b.example",
            '`service.allowed_origins` takes origins without a path, like "https://chat.example" or '
            '"http://localhost:3000", or "*" for any, given: \'b.example\'',
        ),
    ],
)
def test_a_wrong_value_is_refused_with_variable_limit_and_value(
    variable: str, text: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_environment({variable: text})
    assert str(caught.value) == f"environment variable `{variable}`: {message}"


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("HEARTH_SERVICE_PORTS", "did you mean `HEARTH_SERVICE_PORT`?"),
        ("HEARTH_ENGINE_MAX_SEQ", "did you mean `HEARTH_ENGINE_MAX_SEQS`?"),
        ("HEARTH_LOG_XYZZY_PLUGH_FROTZ_GNUSTO", "`hearth config` lists the settings"),
    ],
)
def test_a_variable_named_like_a_section_that_sets_nothing_is_refused(variable: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"unknown environment variable `{variable}`; {hint}")):
        read_environment({variable: "1"})


def test_another_variable_of_the_prefix_is_told_of_and_stops_nothing() -> None:
    settings = read_environment({"HEARTH_DATADIR": "/x", "HEARTHSTONE": "1", "HEARTH_LOG_LEVEL": "debug"})
    assert settings.values == {"log.level": "debug"}
    assert settings.notes == ("unknown environment variable HEARTH_DATADIR; did you mean `HEARTH_DATA_DIR`?",)


def test_the_other_variables_of_hearth_are_no_strangers() -> None:
    given = {"HEARTH_CONFIG": "hearth.toml", "HEARTH_API_KEY": "hearth-x"}
    assert read_environment(given) == EnvironmentSettings({}, {}, ())


def test_the_short_name_of_the_data_directory_counts_first() -> None:
    settings = read_environment({"HEARTH_DATA_DIR": "/short", "HEARTH_SERVICE_DATA_DIR": "/long"})
    assert settings.values == {"service.data_dir": "/short"}
    assert settings.variables == {"service.data_dir": "HEARTH_DATA_DIR"}


def test_models_are_set_by_one_variable_as_names_hold_what_variables_cannot() -> None:
    tables = {"qwen2.5": {"pinned": True, "keep_alive": "30m"}, "org/x:1b": {"memory_ceiling_bytes": "1GiB"}}
    settings = read_environment({"HEARTH_MODELS": json.dumps(tables)})
    assert load(None, settings.values).models == {
        "qwen2.5": ModelConfig(pinned=True, keep_alive=1800.0),
        "org/x:1b": ModelConfig(memory_ceiling_bytes=1 << 30),
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pinned", "must be a JSON object of settings by model, like {"),
        ('{"x": true}', "must be a JSON object of settings by model, like {"),
        (
            '{"x": {"pined": true}}',
            "unknown configuration key `models.x.pined`; did you mean `models.x.pinned`?",
        ),
        ('{"x": {"context": 1}}', "`models.x.context` must be at least 2, given: 1"),
    ],
)
def test_wrong_settings_of_models_are_refused_by_the_variable(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match="environment variable `HEARTH_MODELS`.*" + re.escape(message)):
        read_environment({"HEARTH_MODELS": text})


def service_links(service: str, host: str, port: int) -> dict[str, str]:
    """The variables that Kubernetes gives pods for a Service with one port called http."""
    url = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    return {
        f"{service}_SERVICE_HOST": host,
        f"{service}_SERVICE_PORT": str(port),
        f"{service}_SERVICE_PORT_HTTP": str(port),
        f"{service}_PORT": url,
        f"{service}_PORT_{port}_TCP": url,
        f"{service}_PORT_{port}_TCP_PROTO": "tcp",
        f"{service}_PORT_{port}_TCP_PORT": str(port),
        f"{service}_PORT_{port}_TCP_ADDR": host,
    }


@pytest.mark.parametrize("host", ["10.96.14.2", "fd00::7"])
def test_the_address_of_a_kubernetes_service_called_hearth_is_no_setting(host: str) -> None:
    settings = read_environment(service_links("HEARTH", host, 80) | {"HEARTH_LOG_LEVEL": "debug"})
    assert settings.values == {"log.level": "debug"}
    assert [note.partition(":")[0] for note in settings.notes] == [
        "environment variable HEARTH_SERVICE_HOST is ignored",
        "environment variable HEARTH_SERVICE_PORT is ignored",
    ]


def test_what_a_pod_sets_itself_counts_beside_the_address_of_a_service() -> None:
    links = service_links("HEARTH", "10.96.14.2", 80)
    assert read_environment(links | {"HEARTH_SERVICE_PORT": "9000"}).values == {"service.port": 9000}
    assert read_environment(links | {"HEARTH_SERVICE_HOST": "0.0.0.0"}).values == {"service.host": "0.0.0.0"}


@pytest.mark.parametrize("service", ["HEARTH_GPU", "HEARTH_SERVICE", "HEARTH_ENGINE_A"])
def test_addresses_of_services_with_longer_names_are_passed_over(service: str) -> None:
    assert read_environment(service_links(service, "10.96.14.2", 80)).values == {}


def test_a_flag_beats_the_environment_and_that_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "hearth.toml"
    path.write_text(
        "[service]\nport = 1\nmax_queue = 2\npace = 3\ndrain_s = 4\n"
        "[models.tiny]\npinned = true\ncontext = 8\n"
    )
    for variable, text in (
        ("HEARTH_SERVICE_PORT", "11"),
        ("HEARTH_SERVICE_MAX_QUEUE", "12"),
        ("HEARTH_SERVICE_PACE", "13"),
        ("HEARTH_MODELS", '{"tiny": {"context": 16}}'),
    ):
        monkeypatch.setenv(variable, text)

    found = resolved(
        path, ["service.max_queue=22", "service.port=21"], {"service.port": 31, "service.host": None}
    )

    service = found.config.service
    assert (service.port, service.max_queue, service.pace, service.drain_s) == (31, 22, 13.0, 4.0)
    assert found.config.models == {"tiny": ModelConfig(pinned=True, context=16)}
    assert found.origins == {
        "service.port": "a flag",
        "service.max_queue": "--set",
        "service.pace": "HEARTH_SERVICE_PACE",
        "service.drain_s": str(path),
        "models.tiny.pinned": str(path),
        "models.tiny.context": "HEARTH_MODELS",
    }


def test_config_and_doctor_show_where_settings_come_from(
    hearth: Hearth, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "hearth.toml"
    path.write_text("[engine]\nmax_seqs = 8\n[models.'qwen2.5']\npinned = true\n")
    monkeypatch.setenv("HEARTH_CONFIG", str(path))
    monkeypatch.setenv("HEARTH_SERVICE_PORT", "9001")
    monkeypatch.setenv("HEARTH_STRANGE", "1")

    shown = hearth("config", "--set", "log.level=debug")

    assert shown.code == 0
    lines = shown.out.splitlines()
    assert f"max_seqs = 8  # {path}" in lines
    assert "port = 9001  # HEARTH_SERVICE_PORT" in lines
    assert 'level = "debug"  # --set' in lines
    assert f'data_dir = "{data_dir}"  # HEARTH_DATA_DIR' in lines
    assert lines[lines.index('[models."qwen2.5"]') + 5] == f"pinned = true  # {path}"
    assert 'host = "127.0.0.1"' in lines
    assert "unknown environment variable HEARTH_STRANGE" in " ".join(shown.err.split())
    saved = tmp_path / "saved.toml"
    saved.write_text(shown.out)
    assert load(saved).service.port == 9001

    report = json.loads(hearth("doctor", "--json").out)

    assert report["settings"]["service.port"] == "HEARTH_SERVICE_PORT"
    assert any("HEARTH_STRANGE" in note for note in report["notes"])


def test_settings_of_one_origin_are_told_together() -> None:
    origins = {"service.port": "hearth.toml", "log.level": "--set", "store.host_bytes": "hearth.toml"}
    assert format_origins(origins) == "service.port, store.host_bytes by hearth.toml; log.level by --set"


def test_a_command_ends_with_the_name_of_a_variable_that_is_wrong(
    hearth: Hearth, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEARTH_SERVICE_PORT", "http")
    refused = hearth("serve")
    assert refused.code == 2
    assert refused.err.startswith(
        "hearth: environment variable `HEARTH_SERVICE_PORT`: `service.port` must be"
    )


def test_every_command_finds_the_data_directory_by_the_variable_of_its_setting(
    hearth: Hearth, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEARTH_SERVICE_DATA_DIR", str(tmp_path / "mine"))
    assert str(tmp_path / "mine") in hearth("ps").err.replace("\n", "")


def test_keys_are_made_where_the_variable_has_the_service_look_for_them(
    hearth: Hearth, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEARTH_SERVICE_API_KEYS_FILE", str(tmp_path / "elsewhere.json"))
    assert hearth("keys", "add", "ada").code == 0
    assert (tmp_path / "elsewhere.json").exists()


def test_defaults_of_sections_have_no_origin() -> None:
    assert resolved(None, None).origins == {}
    assert all(field.default is not MISSING for section in SECTIONS.values() for field in fields(section))

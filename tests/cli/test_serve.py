from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from hearth.config import HearthConfig
from tests.cli.shell import Hearth


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[HearthConfig]:
    """The configurations that a service would have been started with."""
    configs: list[HearthConfig] = []
    module = ModuleType("hearth.cli.server")
    module.run_service = configs.append  # type: ignore[attr-defined]  # a stand-in for the module
    monkeypatch.setitem(sys.modules, "hearth.cli.server", module)
    monkeypatch.setattr("hearth.cli.serve.log_to_terminal", lambda config: None)
    monkeypatch.delenv("HEARTH_DATA_DIR", raising=False)
    return configs


def test_every_flag_reaches_its_setting(hearth: Hearth, served: list[HearthConfig], tmp_path: Path) -> None:
    flags = (
        "--host 127.0.0.2 --port 0 --workers 2 --device cpu --memory 1GiB --host-memory 2GiB "
        "--keep-alive 30m --max-queue 8 --api-keys-file k.json"
    )
    assert hearth("serve", *flags.split(), "--data-dir", str(tmp_path)).code == 0

    (config,) = served
    service = config.service
    assert (service.host, service.port, service.workers, service.device) == ("127.0.0.2", 0, 2, "cpu")
    assert (service.memory_bytes, config.store.host_bytes) == (1 << 30, 2 << 30)
    assert (service.keep_alive, service.max_queue, service.api_keys_file) == (1800.0, 8, "k.json")
    assert service.data_dir == str(tmp_path)


def test_flags_beat_settings_and_settings_beat_the_file(
    hearth: Hearth, served: list[HearthConfig], tmp_path: Path
) -> None:
    path = tmp_path / "hearth.toml"
    path.write_text('[service]\nport = 1\nmax_queue = 1\ndata_dir = "d"\n[models.m]\npinned = true\n')

    settings = ("--set", "service.port=2", "--set", "service.max_queue=2")
    hearth("serve", "--config", str(path), *settings, "--port", "3")

    (config,) = served
    assert (config.service.port, config.service.max_queue, config.service.data_dir) == (3, 2, "d")
    assert config.models["m"].pinned


def test_a_wrong_flag_starts_nothing(hearth: Hearth, served: list[HearthConfig]) -> None:
    shown = hearth("serve", "--memory", "lots")
    assert (shown.code, shown.out, served) == (2, "", [])
    assert "`service.memory_bytes`" in shown.err

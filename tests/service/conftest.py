"""Models deployed once for all services, and the service that most tests share."""

from __future__ import annotations

import fcntl
import os
import re
import ssl
from collections.abc import Generator, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from hearth.control.datadir import DataDir
from hearth.control.deploy.deploy import DeployOrder
from hearth.control.deploy.deployer import carry_out
from hearth.control.deploy.registry import Registry
from tests.service.checkpoints import read_texts, write_smollm2, write_tiny, write_with_template
from tests.service.harness import SMALL, Service, Shelf, eventually, running_services, serving

#: The first test of a file starts up to four machines, which takes minutes where others use the cores.
TIMEOUT_S = 900


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/service/" in item.nodeid and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="package", autouse=True)
def _authorities_read_once() -> Iterator[None]:
    """Spare each client to read whom it would trust, 20 to 50 ms: no service here has a certificate."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", cache(ssl.create_default_context))
        yield


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    """`smollm2`; `tiny-a` to `tiny-c`, of one size; `hermes` and `smollm2-tools`, with a template for tools.

    All processes of one run of the tests share them: the first one builds them while the others wait.
    """
    temporary = tmp_path_factory.getbasetemp()
    root = (temporary.parent if "PYTEST_XDIST_WORKER" in os.environ else temporary) / "shelf"
    root.mkdir(exist_ok=True)
    names = ("smollm2", "smollm2-tools", "hermes", "tiny-a", "tiny-b", "tiny-c")
    places = {name: root / "models" / name for name in names}
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
        if not (root / "is_filled").exists():
            fill_shelf(root / "data", places)
            (root / "is_filled").touch()
    read_texts(places["smollm2"])
    return Shelf(root / "data", places)


def fill_shelf(data: Path, places: Mapping[str, Path]) -> None:
    write_smollm2(places["smollm2"])
    read_texts(places["smollm2"])
    for seed, letter in enumerate("abc", start=1):
        write_tiny(places[f"tiny-{letter}"], seed)
    write_with_template(places["tiny-a"], places["hermes"])
    write_with_template(places["smollm2"], places["smollm2-tools"])
    data_dir = DataDir.open(data)
    with Registry(data_dir) as registry:
        for name, place in places.items():
            registry.add(carry_out(DeployOrder(str(place), name), data_dir, lambda *_: None))


@pytest.fixture(scope="session")
def service(shelf: Shelf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One worker with room for everything."""
    data_dir = shelf.copy(tmp_path_factory.mktemp("service") / "data")
    settings = (
        *("--set", "service.stream_heartbeat_s=0.2"),
        *("--set", 'models.tiny-a.aliases=["little"]'),
        *("--set", "models.tiny-c.context=64"),
        *("--set", "log.format=json"),
    )
    with serving(data_dir, *SMALL, "--memory", "2GiB", "--host-memory", "1GiB", *settings) as service:
        yield service


@pytest.fixture(scope="session")
def pair(shelf: Shelf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Two workers that are looked after closely, each with room for one model and a good part of another.

    They may be silent for ten seconds: on a busy machine one waits for another thread or process, which waits
    for a core.

    The last test of `test_faults.py` ends it.
    """
    data_dir = shelf.copy(tmp_path_factory.mktemp("pair") / "data")
    watch = ("--set", "service.heartbeat_s=0.2", "--set", "service.max_missed=50")
    flags = ("--workers", "2", "--memory", "56MiB", "--host-memory", "256MiB")
    with serving(data_dir, *SMALL, *flags, *watch, "--set", "service.drain_s=0.1") as service:
        yield service


@pytest.fixture
def workers(pair: Service) -> Service:
    """Both workers of `pair` are there, and no model is."""
    pair.wait_for_workers()
    for name in pair.residents():
        pair.unload(name, free=True)
    eventually("nothing is in memory", lambda: not pair.residents())
    return pair


@pytest.fixture
def data_dir(shelf: Shelf, tmp_path: Path) -> Path:
    """For a service of one's own."""
    return shelf.copy(tmp_path / "data")


@pytest.fixture
def refusal(request: pytest.FixtureRequest) -> str:
    """The message that the test's mark `client` has as `refused`, for `pytest.raises(match=refusal)`.

    So the table of clients cannot tell of a refusal that the service words otherwise.
    """
    mark = request.node.get_closest_marker("client")
    assert mark is not None, "the test needs `@pytest.mark.client(PACKAGE, FEATURE, refused=MESSAGE)`"
    return re.escape(mark.kwargs["refused"])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that fails shows what the services have logged."""
    report = yield
    if report.failed:
        for service in running_services:
            report.sections.append((f"log of the service on {service.data_dir}", service.tail()))
    return report


def pytest_sessionfinish() -> None:
    """A test that failed may have left its service behind."""
    for service in list(running_services):
        service.abandon()

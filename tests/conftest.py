"""What every test relies on: fixed seeds, few threads, hypothesis without deadlines. No helpers."""

from __future__ import annotations

import hearth  # noqa: F401 - before torch, so that its threads sleep while they wait

# isort: split

import fcntl
import gc
import logging
import os
import random
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import hypothesis
import numpy as np
import pytest

# One process of the tests per core, and so one thread for each, and for the processes that they start. Torch
# reads it once, and is imported by tests alone: the process that hands them out needs none.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The tests start some hundred processes, which should not compile the same sources each.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# However slow the machine is, for others may use it too.
_UNCHECKED = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile("dev", deadline=None, suppress_health_check=_UNCHECKED, max_examples=40)
hypothesis.settings.register_profile("ci", hypothesis.settings.get_profile("dev"), derandomize=True)
#: Of `make test-fast`, which also runs only one case of each parametrised test.
FAST = "fast"
hypothesis.settings.register_profile(FAST, hypothesis.settings.get_profile("dev"), max_examples=10)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")

TESTS = Path(__file__).parent
#: Files of `tests/service` that do not share the service of the others, by the service that they use.
OTHER_SERVICES = {
    "test_affinity.py": "pair",
    "test_cluster.py": "cluster",
    "test_cluster_network.py": "network",
    "test_faults.py": "pair",
    "test_first_ten_minutes.py": "guide",
    "test_forecast.py": "forecast",
    "test_ray.py": "ray",
    "test_security.py": "guarded",
    "test_staged_starts.py": "staged",
    "test_states.py": "crowded",
}
#: Where tests take longest, the longest first. Files that share a service are one piece of work. Dashboard
#: and guide come first because they do not wait until the models of services are converted.
LONG_FOLDERS = (
    *("tests/web/", "tests/service/test_first_ten_minutes.py"),
    *("tests/service/", "tests/worker/", "tests/engine/", "tests/kernels/", "tests/store/"),
)
#: A test file that imports more modules while it runs has brought in a large package.
MANY_MODULES = 100


@pytest.fixture(autouse=True)
def _seeded() -> None:
    import torch

    random.seed(0)
    np.random.seed(0)
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # it would note the stack of each call, 2 ms of a deep one, for a device that may come
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _imported_for_good() -> Iterator[None]:
    """Spare later collections of garbage what large packages, of clients say, keep in memory."""
    num_modules = len(sys.modules)
    yield
    if len(sys.modules) > num_modules + MANY_MODULES:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def quick_interpreter() -> Iterator[None]:
    """Kernels take half of their time in Triton's interpreter, in this test and all later ones."""
    from tests.kernels import quick_interpreter  # here, for most tests need no kernels

    with quick_interpreter.quick_interpreter():
        yield


def pytest_configure(config: pytest.Config) -> None:
    """Off the GPU, Triton kernels run in Triton's interpreter; it must be chosen before they are imported."""
    if config.option.markexpr != "gpu":
        os.environ["TRITON_INTERPRET"] = "1"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for garbage only once all tests are there, for none of them and of what they import is any."""
    gc.disable()
    try:
        with _compiled_once():
            return (yield)
    finally:
        gc.enable()


@contextmanager
def _compiled_once() -> Iterator[None]:
    """In a new checkout let one process compile all tests, which takes it seconds, while the others wait."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    lock = os.open(TESTS, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            compiles = not any(TESTS.glob("*/__pycache__/test_*-pytest-*.pyc"))
        except BlockingIOError:
            fcntl.flock(lock, fcntl.LOCK_EX)
            compiles = False
        if not compiles:
            fcntl.flock(lock, fcntl.LOCK_UN)
        yield
    finally:
        os.close(lock)


@pytest.hookimpl(trylast=True)  # so that cases for a GPU are gone
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put files that take long first, so that no process is left with one when the others are done."""
    if config.getoption("--hypothesis-profile") == FAST:
        _keep_first_cases(config, items)

    def file_of(item: pytest.Item) -> str:
        return item.nodeid.partition("::")[0]

    marks = {"slow", "e2e"}
    long = {file_of(item) for item in items if any(mark.name in marks for mark in item.iter_markers())}

    def place_of(item: pytest.Item) -> tuple[bool, int]:
        folders = (i for i, folder in enumerate(LONG_FOLDERS) if item.nodeid.startswith(folder))
        return file_of(item) not in long, next(folders, len(LONG_FOLDERS))

    items.sort(key=place_of)


def _keep_first_cases(config: pytest.Config, items: list[pytest.Item]) -> None:
    first: dict[str, pytest.Item] = {}
    for item in items:
        first.setdefault(item.nodeid.partition("[")[0], item)
    kept = set(first.values())
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = first.values()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object | None:
    """Give a process whole files, and all that share a service of `tests/service` to the same one."""
    if config.option.dist != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling  # here, because one process works without it

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            folder, _, name = file.rpartition("/")
            return OTHER_SERVICES.get(name, folder) if folder == "tests/service" else file

    return Scheduling(config, log)


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # or packages would complain of what they find alive at the end


def pytest_collection_finish(session: pytest.Session) -> None:
    """Tests marked `gpu` run only when asked for, and asking without a device is a mistake, not a skip."""
    import torch

    gc.collect()
    gc.freeze()  # all that test files import at their top, such as torch: as `_imported_for_good`
    _have_loggers_propagate()
    if any(item.get_closest_marker("gpu") for item in session.items) and not torch.cuda.is_available():
        raise pytest.UsageError(
            "tests marked `gpu` need a CUDA device and this machine has none; leave out `-m`"
        )


def _have_loggers_propagate() -> None:
    """Spare pytest to add its handlers to 43 loggers of torch three times a test: the root has them."""
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True

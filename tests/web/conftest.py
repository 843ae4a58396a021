"""A service with two workers and two tiny models, and pages of it in Debian's Chromium."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from hearth.control.datadir import DataDir
from hearth.control.deploy.deploy import DeployOrder
from hearth.control.deploy.deployer import carry_out
from hearth.control.deploy.registry import Registry
from hearth.core.types import ModelId
from tests.control.test_request_history import Clocked
from tests.models.speaking import save_speaking
from tests.service.harness import SMALL, Service, serving

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
#: Others may use the machine too.
PATIENCE_MS = 120_000

expect.set_options(timeout=PATIENCE_MS)

LONG_NAME = "a-model-whose-name-is-longer-than-a-phone-is-wide-instruct-q4_k_m"
MARKUP = "<img src=x onerror=document.title='hacked'>"

#: Makes a page, with options of its browser context, such as the colour scheme.
NewPage = Callable[..., Page]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if CHROMIUM is None and not os.environ.get("CI"):  # there it must be installed
        reason = "no Chromium is installed: apt-get install chromium"
        for item in items:
            if "tests/web/" in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_speaking(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def service(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    flags = ("--workers", "2", "--memory", "64MiB", "--host-memory", "64MiB")
    data_dir = DataDir.open(tmp_path_factory.mktemp("web") / "data")
    with Registry(data_dir) as registry:
        for name in ("alpha", "beta"):
            deployed = carry_out(DeployOrder(str(checkpoint), name), data_dir, lambda *_: None)
            registry.add(deployed)
        registry.add(replace(deployed, name=LONG_NAME))
        registry.add(replace(deployed, name="hostile", source=MARKUP))
    record_requests(data_dir.request_history_path)
    with serving(data_dir.path, *SMALL, *flags, "--set", "service.prewarm=advise") as service:
        yield service


def record_requests(path: Path) -> None:
    """Twelve requests for `alpha` in each minute of the last two hours."""
    clocked = Clocked(path, time.time() // 600 * 600 - 7200)
    for _ in range(721):
        clocked.request(2, ModelId("alpha"))
        clocked.wait()
    with ThreadPoolExecutor(1) as thread:  # on this one Playwright may run a loop
        thread.submit(asyncio.run, clocked.history.write()).result()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Complaints(list[str]):
    """What pages have said on their consoles, and addresses other than the service's that they asked for."""

    def listen(self, page: Page, url: str) -> None:
        page.on("console", lambda said: said.type in ("error", "warning") and self.append(said.text))
        page.on("pageerror", lambda error: self.append(str(error)))
        page.on("request", lambda one: one.url.startswith((url, "about:")) or self.append(one.url))

    def assert_none(self) -> None:
        # A browser notes each refusal by itself, such as of a wrong key.
        found = [one for one in self if not re.search(r"status of 4\d\d", one)]
        self.clear()
        assert not found


@pytest.fixture(scope="module")
def complaints() -> Complaints:
    return Complaints()


@pytest.fixture
def new_page(browser: Browser, service: Service, complaints: Complaints) -> Iterator[NewPage]:
    """Pages in contexts of their own."""
    contexts = []

    def make(**options: object) -> Page:
        context = browser.new_context(base_url=service.url, **options)  # type: ignore[arg-type] # as they came
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        complaints.listen(page, service.url)
        return page

    yield make
    for context in contexts:
        context.close()
    complaints.assert_none()


@pytest.fixture(scope="module")
def tab(browser: Browser, service: Service, complaints: Complaints) -> Iterator[Page]:
    with browser.new_context(base_url=service.url) as context:
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        complaints.listen(page, service.url)
        yield page


@pytest.fixture
def page(tab: Page, complaints: Complaints) -> Iterator[Page]:
    """An empty page. Its process is shared, for starting one takes longer than most tests."""
    yield tab
    tab.evaluate("localStorage.clear()")
    tab.goto("about:blank")
    complaints.assert_none()


@contextmanager
def watching(page: Page, place: str) -> Iterator[Page]:
    """Show a part of the dashboard, which is not loaded again while the context lasts."""
    page.goto(f"/#{place}")
    page.evaluate("window.isSamePage = true")
    yield page
    assert page.evaluate("window.isSamePage")

"""Takes what the links of workers bring: facts go to the decoder, coming and going to the driver."""

from __future__ import annotations

from hearth.control.deploy.catalog import Catalog
from hearth.control.driver import Driver
from hearth.control.requests.fact_decoder import FactDecoder
from hearth.core.messages import WorkerHello
from hearth.node.link import FrameLink
from hearth.policy.fleet.events import ModelDeployed


class LinkReceiver:
    def __init__(self, catalog: Catalog, driver: Driver, decoder: FactDecoder) -> None:
        self._catalog, self._driver, self._decoder = catalog, driver, decoder

    def joined(self, link: FrameLink, hello: WorkerHello) -> None:
        for entry in self._catalog.fit(hello.kind, hello.budget_bytes):  # before a request is sent there
            self._driver.post(ModelDeployed(self._driver.now_s, entry.profile))
        self._driver.joined(link, hello)

    def received(self, link: FrameLink, body: bytes) -> None:
        self._decoder.decode(link, body)

    def left(self, link: FrameLink) -> None:
        self._decoder.left(link)

"""Takes what the links of workers bring: facts go to the decoder, coming and going to the driver."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hearth.control.deploy.catalog import Catalog
from hearth.control.driver import Driver
from hearth.control.requests.fact_decoder import FactDecoder
from hearth.core.messages import WorkerHello
from hearth.core.types import NodeId, node_of, pool_of
from hearth.node.link import FrameLink
from hearth.policy.fleet.events import ModelDeployed


class LinkReceiver:
    def __init__(
        self,
        catalog: Catalog,
        driver: Driver,
        decoder: FactDecoder,
        labels_of: Callable[[NodeId], Mapping[str, str]],
    ) -> None:
        self._catalog, self._driver, self._decoder = catalog, driver, decoder
        self._labels_of = labels_of

    def joined(self, link: FrameLink, hello: WorkerHello) -> None:
        pool = pool_of(hello.kind, self._labels_of(node_of(hello.worker)))
        for entry in self._catalog.fit(pool, hello.budget_bytes):  # before a request is sent there
            self._driver.post(ModelDeployed(self._driver.now_s, entry.profile))
        self._driver.joined(link, hello, pool)

    def received(self, link: FrameLink, body: bytes) -> None:
        self._decoder.decode(link, body)

    def left(self, link: FrameLink) -> None:
        self._decoder.left(link)

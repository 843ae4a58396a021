"""Takes what the links of workers bring: facts go to the decoder, coming and going to the driver."""

from __future__ import annotations

import secrets

from hearth.control.deploy.catalog import Catalog
from hearth.control.driver import Driver
from hearth.control.requests.fact_decoder import FactDecoder
from hearth.core.messages import WorkerHello
from hearth.core.types import WorkerId
from hearth.node.supervisor import Supervisor
from hearth.node.worker_link import WorkerLink
from hearth.policy.fleet.events import ModelDeployed


class LinkReceiver:
    def __init__(self, catalog: Catalog, driver: Driver, decoder: FactDecoder) -> None:
        self.secret = secrets.token_bytes(32)
        self.supervisor: Supervisor | None = None  #: set before a worker can connect
        self._catalog, self._driver, self._decoder = catalog, driver, decoder

    def expects(self, worker: WorkerId) -> bool:
        return self.supervisor is not None and self.supervisor.expects(worker)

    def joined(self, link: WorkerLink, hello: WorkerHello) -> None:
        assert self.supervisor is not None, "no worker is expected before"
        self.supervisor.joined(link, hello)
        for entry in self._catalog.fit(hello.budget_bytes):  # before a request is sent there
            self._driver.post(ModelDeployed(self._driver.now_s, entry.profile))
        self._driver.joined(link, hello)

    def received(self, link: WorkerLink, body: bytes) -> None:
        self._decoder.decode(link, body)

    def left(self, link: WorkerLink) -> None:
        assert self.supervisor is not None, "no worker is expected before"
        self.supervisor.left(link)
        self._decoder.left(link)

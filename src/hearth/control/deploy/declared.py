"""Models that the configuration declares with `[models.NAME] source`: deployed while the service starts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import aclosing

from hearth.control.deploy.deploy import DeployOrder, DeployProgress
from hearth.control.deploy.deployments import Deployments
from hearth.control.deploy.sources import parse_source
from hearth.core.config import ModelConfig
from hearth.core.errors import HearthError, RequestError, UnsupportedModel

log = logging.getLogger(__name__)


class DeclaredModels:
    """Deploys what is missing, one model after another, in the order of the configuration.

    What is deployed from the declared source stays as it is; what has the name but another source is
    replaced. A failure is logged and told to requests, and the other models are served. Mutable; used on the
    event loop alone.
    """

    def __init__(self, deployments: Deployments, configs: Mapping[str, ModelConfig]) -> None:
        sources = {name: config.source for name, config in configs.items() if config.source is not None}
        self._deployments = deployments
        self._missing = {name: source for name, source in sources.items() if not self._is_there(name, source)}
        self._failures: dict[str, str] = {}  #: reasons, by name
        for name in self._missing:
            deployments.pending[name] = "it waits to be deployed; ask again later"

    @property
    def note(self) -> str | None:
        failed = [f"[models.{name}] cannot be deployed: {reason}" for name, reason in self._failures.items()]
        return "; ".join(failed) or None

    async def deploy(self) -> None:
        for name, source in self._missing.items():
            log.info("model_deploying model=%s source=%s", name, source)
            try:
                await self._deploy(name, source)
            except (HearthError, OSError) as error:
                log.error("model_undeployed model=%s source=%s reason=%s", name, source, error)
                self._failures[name] = str(error)
                self._deployments.pending[name] = f"it could not be deployed: {error}"
            else:
                log.info("model_deployed model=%s source=%s", name, source)
                del self._deployments.pending[name]

    async def _deploy(self, name: str, source: str) -> None:
        logged = ""
        order = DeployOrder(source, name, overwrite=True)
        async with aclosing(self._deployments.deploy(order)) as events:
            async for event in events:
                if not isinstance(event, DeployProgress):
                    continue
                share = event.done_bytes / event.total_bytes if event.total_bytes else 0.0
                state = f"{event.phase}, {share:.0%}"
                self._deployments.pending[name] = f"it is being deployed: {state}; ask again later"
                if (tenth := f"{event.phase} {share:.1f}") != logged:
                    logged = tenth
                    log.info("model_deploying model=%s phase=%s done=%.0f%%", name, event.phase, 100 * share)

    def _is_there(self, name: str, source: str) -> bool:
        try:
            entry = self._deployments.find(name)
            wanted = parse_source(source).text
        except (RequestError, UnsupportedModel):
            return False
        deployed = entry.adapter or entry.deployed
        return entry.preset is None and deployed.name == name and deployed.source == wanted

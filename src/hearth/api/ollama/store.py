"""The bodies of Ollama's routes that change models, and pulling by deploying."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hearth.api import unread_fields
from hearth.api.body import ModelName, Strict, Text
from hearth.api.ollama.body import OllamaOptions, preset_of
from hearth.api.unread_fields import UnsupportedField
from hearth.control.deploy.deploy import DeployOrder
from hearth.control.deploy.names import LATEST
from hearth.control.deploy.preset import Preset
from hearth.control.deploy.sources import hub_source
from hearth.core.errors import RequestError, UnknownModel

if TYPE_CHECKING:
    from hearth.control.gateway import Gateway


class NamedModelBody(Strict):
    """A model by `model`, or by `name` as older clients send it."""

    model: ModelName | None = None
    name: ModelName | None = None

    @property
    def meant(self) -> str:
        if (named := self.model or self.name) is None:
            raise RequestError("`model` must be the name of a model, given: none")
        return named


class PullBody(NamedModelBody):
    stream: bool | None = Field(None, description="Stream lines of progress; default: true.")


class CopyBody(Strict):
    source: ModelName = Field(description="Name or alias of a deployed model, adapter or preset.")
    destination: ModelName = Field(description="The name of the copy.")


class CreateBody(NamedModelBody):
    """A preset, as `hearth create` makes it. What would need files of the client is refused."""

    unsupported: ClassVar[Mapping[str, UnsupportedField]] = unread_fields.OLLAMA_CREATE

    from_: ModelName | None = Field(
        None, alias="from", description="Name of a deployed model, adapter or preset; required."
    )
    system: Text | None = None
    template: Text | None = Field(None, description="In Jinja, not Go's; default: that of the model.")
    parameters: OllamaOptions | None = Field(None, description="Defaults of `options`.")
    stream: bool | None = None

    @property
    def base(self) -> str:
        if self.from_ is None:  # not a required field: without it, one that is refused says more
            raise RequestError("`from` must be the name of a deployed model, given: none")
        return self.from_

    def preset(self) -> Preset:
        return preset_of(self.parameters or OllamaOptions.model_validate({}), self.system, self.template)


def pulled_source(name: str) -> str:
    """Return the source that a name stands for. Raises UnknownModel for names in Ollama's own library."""
    source = hub_source(name.removesuffix(LATEST))
    if source is None:
        raise UnknownModel(
            f"no model named `{name:.80}`, and only models of the Hugging Face Hub can be pulled, as "
            "`hf.co/ORG/NAME` or `hf.co/ORG/NAME:Q4_K_M`; deploy others with `hearth deploy SOURCE`"
        )
    return source.text


async def pulling(gateway: Gateway, name: str, source: str | None) -> AsyncGenerator[dict[str, object], None]:
    """Deploy a model of the Hub under the name that it is pulled by; `source` None: it is there already."""
    if source is None:
        yield {"status": "pulling manifest"}
    else:
        deployed = None if name.startswith("hf:") else name.removesuffix(LATEST)
        async with aclosing(gateway.deploy(DeployOrder(source, deployed))) as events:
            async for event in events:
                if event["event"] == "progress":
                    yield _progress(source, event)
    yield {"status": "success"}


def _progress(source: str, event: dict[str, object]) -> dict[str, object]:
    """Clients show a bar for each digest, so each phase has one."""
    phase = event["phase"]
    digest = hashlib.sha256(f"{source} {phase}".encode()).hexdigest()
    done, total = event["done_bytes"], event["total_bytes"]
    return {"status": phase, "digest": f"sha256:{digest}", "total": total, "completed": done}

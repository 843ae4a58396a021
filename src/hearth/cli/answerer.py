"""The answer sources of `hearth run`: a running service, or a model in this process."""

from __future__ import annotations

import shlex
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import typer
from rich.text import Text

from hearth.cli import local_models
from hearth.cli.client import AnswerDelta, Client
from hearth.cli.console import (
    configured,
    data_dir_of,
    err,
    existing,
    is_place,
    log_beside_answer,
    named,
    refuse_url,
)
from hearth.cli.endpoint import running
from hearth.control.deploy.preset import Preset
from hearth.control.observe.views import ModelView
from hearth.core.config import HearthConfig
from hearth.core.errors import ConfigError
from hearth.core.types import SamplingParams

if TYPE_CHECKING:
    from hearth.llm import LLM
    from hearth.outputs import Delta
    from hearth.store.transfer.record import LoadRecord
    from hearth.text.chat_template import Message


class Answerer(Protocol):
    """A model that answers. Closing a generator early ends the answer."""

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def preset(self) -> Preset:
        """The defaults of the model; none are set if it is no preset."""

    def chat(
        self, messages: Sequence[Message], params: SamplingParams
    ) -> Generator[AnswerDelta, None, None]: ...

    def complete(self, prompt: str, params: SamplingParams) -> Generator[AnswerDelta, None, None]: ...

    def wait_loaded(self) -> LoadRecord | None:
        """Wait for the load, if it happens in this process, and return its record."""


class ServiceAnswerer:
    def __init__(self, client: Client, view: ModelView) -> None:
        self._client, self._name = client, view.name
        self.has_chat_template, self.preset = view.has_chat_template, view.preset or Preset()

    def chat(self, messages: Sequence[Message], params: SamplingParams) -> Generator[AnswerDelta, None, None]:
        return self._client.chat(self._name, messages, params)

    def complete(self, prompt: str, params: SamplingParams) -> Generator[AnswerDelta, None, None]:
        return self._client.complete(self._name, prompt, params)

    def wait_loaded(self) -> None:
        return None


class LocalAnswerer:
    def __init__(self, llm: LLM, adapter: str | None = None, preset: Preset | None = None) -> None:
        self._llm, self._adapter, self.preset = llm, adapter, preset or Preset()
        self.has_chat_template = llm.has_chat_template or self.preset.template is not None

    def chat(self, messages: Sequence[Message], params: SamplingParams) -> Generator[AnswerDelta, None, None]:
        prompt = self._llm.chat_prompt(self.preset.begun(messages), self.preset.template)
        return _deltas(self._llm.stream(prompt, params, lora_request=self._adapter))

    def complete(self, prompt: str, params: SamplingParams) -> Generator[AnswerDelta, None, None]:
        return _deltas(self._llm.stream(prompt, params, lora_request=self._adapter))

    def wait_loaded(self) -> LoadRecord | None:
        return self._llm.wait_loaded()


def shown_reasoning(deltas: Iterator[AnswerDelta]) -> Iterator[AnswerDelta]:
    """Pass deltas on, and show their reasoning if standard error is a terminal."""
    is_open = False
    for delta in deltas:
        if err.is_terminal and (delta.reasoning or (is_open and delta.text)):
            err.print(Text(delta.reasoning or "\n\n", style="dim"), end="", soft_wrap=True)
            is_open = bool(delta.reasoning)
        yield delta


def _deltas(deltas: Iterator[Delta]) -> Generator[AnswerDelta, None, None]:
    num_tokens = 0
    for delta in deltas:
        num_tokens += len(delta.token_ids)
        yield AnswerDelta(delta.text, delta.finish_reason, delta.token_ids, num_tokens)


@dataclass(frozen=True, slots=True)
class LocalAdapter:
    name: str
    where: str


@dataclass(frozen=True, slots=True)
class LocalOptions:
    device: str = "auto"
    dtype: str = "auto"
    config: Path | None = None
    settings: Sequence[str] | None = None

    @property
    def given(self) -> list[str]:
        flags = {
            "--device": self.device != "auto",
            "--dtype": self.dtype != "auto",
            "--config": self.config is not None,
            "--set": bool(self.settings),
        }
        return [flag for flag, is_given in flags.items() if is_given]


@contextmanager
def answerer_of(
    context: typer.Context,
    model: str,
    url: str | None,
    api_key: str | None,
    data_dir: Path,
    options: LocalOptions,
) -> Iterator[Answerer]:
    """Yield a model: a path or URL in this process, a name from the running service if there is one."""
    config = configured(options.config, options.settings)
    if is_place(model):
        refuse_url(url, model)
        where = model if "://" in model else str(existing(Path(model)))
        with _loaded(where, config, options) as answerer:
            yield answerer
        return
    from hearth.cli.deploy import deployed

    named_dir, data_dir = data_dir, data_dir_of(context, data_dir, config)
    client = running(context, url, api_key, data_dir)
    if client is None:
        with named(model):
            view = deployed(None, model, data_dir, asks=True)
        preset, adapter = view.preset, None
        if preset is not None:
            view = local_models.base_of(data_dir, view)
        if view.is_adapter:
            adapter, view = LocalAdapter(view.name, view.where), local_models.base_of(data_dir, view)
        config = configured(options.config, options.settings, {"store.path": str(data_dir)})
        with _loaded(view.where, config, options, adapter, preset) as answerer:
            yield answerer
        return
    with client:
        if options.given:
            instead = f" and pass `--data-dir {shlex.quote(str(data_dir))}`" if data_dir != named_dir else ""
            raise ConfigError(
                f"`{options.given[0]}` is for models in this process, but the service at `{client.url}` "
                f"would answer; drop it{instead}, or give the path of the model"
            )
        with named(model):
            view = deployed(client, model, data_dir, asks=True)
        yield ServiceAnswerer(client, view)


@contextmanager
def _loaded(
    where: str,
    config: HearthConfig,
    options: LocalOptions,
    adapter: LocalAdapter | None = None,
    preset: Preset | None = None,
) -> Iterator[LocalAnswerer]:
    if adapter is not None and "://" in adapter.where:
        raise ConfigError(
            f"the adapter `{adapter.name}` is at `{adapter.where}`, which only a service can load; "
            "start one with `hearth serve` and try again"
        )
    log_beside_answer(config)
    with err.status(f"loading {where}"):
        from hearth.llm import LLM

        llm = LLM(
            where,
            device=options.device,
            dtype=options.dtype,
            engine=config.engine,
            store=config.store,
            adapters={} if adapter is None else {adapter.name: adapter.where},
        )
    with llm:
        yield LocalAnswerer(llm, None if adapter is None else adapter.name, preset)

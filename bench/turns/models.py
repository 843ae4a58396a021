"""The models of `bench.turns`, made once, kept for the next run and deployed to one data directory.

Random weights are made on the device, in a process per model: one would take minutes. Serves nothing.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

from bench.random_model import write_random
from bench.report import step
from bench.service.process import deploy
from bench.turns.setting import Setting
from hearth.cli import local_models
from hearth.control.datadir import DataDir
from hearth.control.deploy.registry import Registry
from hearth.core.config import EngineConfig
from hearth.core.sizes import computed_dtype
from hearth.policy.batch.step_limits import step_limits
from hearth.policy.fleet.footprint import Facts, footprint
from hearth.policy.fleet.profile import Footprint
from hearth.store.format.manifest import CHUNK_BYTES, MANIFEST, WEIGHTS

_AT_ONCE = 4  #: deployments; each has threads of its own
_SLACK_BYTES = 1 << 30  #: of host memory, beyond what the models take


@dataclass(frozen=True, slots=True)
class Library:
    """The models of a setting in a directory of their own, and the data directory that has them."""

    shelf: Path  #: where directories of all settings are kept
    setting: Setting

    @property
    def place(self) -> Path:
        """The directory, whose name changes with what the models are made of."""
        made_of = json.dumps([self.setting.dtype, [dict(model.config) for model in self.setting.models]])
        return self.shelf / f"hearth-bench-turns-{hashlib.sha256(made_of.encode()).hexdigest()[:8]}"

    @property
    def data_dir(self) -> Path:
        return self.place / "data"

    @property
    def num_bytes(self) -> int:
        return sum((self._directory(model.name) / WEIGHTS).stat().st_size for model in self.setting.models)

    def make(self) -> None:
        """Make and deploy what is not there yet."""
        self.place.mkdir(parents=True, exist_ok=True)
        with step(f"{len(self.setting.models)} models in {self.place}"):
            self._write()
        with step("deploying them"):
            self._deploy()

    def clear(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)

    def serve_flags(self, takes_turns: bool) -> list[str]:
        """Return the flags for a service with host memory for all models and device memory for some."""
        settings = {"service.turns": str(takes_turns).lower(), "log.level": "warning"}
        settings |= {f"engine.{key}": str(value) for key, value in (self.setting.engine or {}).items()}
        flags = ["--device", self.setting.kind, "--workers", "1", "--memory", str(self.memory_bytes())]
        if self.setting.kind == "cuda":  # a CPU keeps models in no other memory
            host_bytes = self.num_bytes + len(self.setting.models) * CHUNK_BYTES + _SLACK_BYTES
            flags += ["--host-memory", str(host_bytes)]
        return flags + [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]

    def memory_bytes(self) -> int:
        """Return the device memory of the setting, or room for all models but the weights of one."""
        if self.setting.memory_bytes is not None:
            return self.setting.memory_bytes
        with Registry(DataDir.open(self.data_dir)) as registry:
            sizes = [self._footprint(deployed.facts) for deployed in registry.all()]
        own_bytes = sum(size.promise.own_bytes for size in sizes)
        workspace_bytes = max(size.workspace_bytes for size in sizes)
        return own_bytes + workspace_bytes - max(size.weights_bytes for size in sizes)

    def _footprint(self, facts: Facts) -> Footprint:
        """Return what a model takes with the least limits, which are those where memory is short."""
        wanted, kind = EngineConfig(**(self.setting.engine or {})).wanted_limits, self.setting.kind
        limits = step_limits(wanted, facts.dimensions, computed_dtype(facts.dtype, kind), kind, None)
        return footprint(facts, kind, limits)

    def _write(self) -> None:
        setting = self.setting
        missing = [
            number
            for number, model in enumerate(setting.models)
            if not (self._directory(model.name) / MANIFEST).exists()
        ]
        if setting.kind == "cpu" or not missing:
            for number in missing:
                _write_model(self.place, setting, number)
            return
        with ProcessPoolExecutor(len(missing), mp_context=get_context("spawn")) as pool:
            for made in [pool.submit(_write_model, self.place, setting, number) for number in missing]:
                made.result()

    def _deploy(self) -> None:
        deployed = set(local_models.names(self.data_dir))
        missing = [model.name for model in self.setting.models if model.name not in deployed]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(lambda name: deploy(self.data_dir, self._directory(name), name), missing))

    def _directory(self, name: str) -> Path:
        return self.place / name


def _write_model(place: Path, setting: Setting, number: int) -> None:
    model = setting.models[number]
    write_random(place / model.name, model.config, setting.dtype, number, torch.device(setting.kind))

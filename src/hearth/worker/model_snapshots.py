"""Finds the snapshot of a model while its engine is assembled. Makes none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from hearth.core.config import EngineConfig
from hearth.core.errors import SnapshotError, SnapshotFatal
from hearth.core.types import SnapshotOutcome
from hearth.engine.assemble import ModelSpec
from hearth.engine.engine import Engine
from hearth.memory.pool import Space
from hearth.models.buffers import name_of
from hearth.snapshot.directory import SnapshotDirectory
from hearth.snapshot.fingerprint import Fingerprint
from hearth.snapshot.memory_profile import MemoryProfile
from hearth.snapshot.parts import SnapshotParts
from hearth.snapshot.software import software
from hearth.snapshot.trial_mark import TrialMark
from hearth.worker.hosting_spec import HostingSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SnapshotLook:
    fingerprint: Fingerprint | None  #: of the start; None: unknown
    outcome: SnapshotOutcome
    reason: str | None = None  #: why none is used; None: one is, or none exists
    memory: MemoryProfile | None = None
    lacks_adapters: bool = False  #: it has no graphs of steps with adapters


def no_parts(engine: Engine) -> SnapshotParts | None:
    return None


class ModelSnapshots:
    """Snapshots of one worker's device. Any thread may call it."""

    def __init__(
        self,
        directory: SnapshotDirectory,
        config: EngineConfig,
        device: torch.device,
        device_name: str,
        device_bytes: int,
        parts_of: Callable[[Engine], SnapshotParts | None] = no_parts,
    ) -> None:
        self.device_name, self.parts_of = device_name, parts_of
        self._directory, self._config, self._device = directory, config, device
        self._device_bytes = device_bytes

    def look(
        self, spec: HostingSpec, space: Space, engine: Engine, discarded: Callable[[str], None]
    ) -> SnapshotLook:
        """Look for the snapshot of a model with an assembled engine, and restore it.

        `discarded` is called with the reason, on any thread, if the snapshot turns out to be wrong later.
        """
        try:
            fingerprint = self._fingerprint(spec, space)
        except Exception as error:  # no start depends on a snapshot
            log.exception("snapshot_not_looked_for model=%s", spec.manifest.digest)
            return SnapshotLook(None, SnapshotOutcome.REFUSED, f"its dependencies are unknown: {error!r}")

        def discard(reason: str) -> None:
            # It is unused from here on in any case; the next start reports it again.
            with suppress(OSError):
                self._directory.discard(fingerprint)
            discarded(reason)

        try:
            opened = self._directory.load(fingerprint)
            if opened is not None:
                memory, parts = MemoryProfile.of(opened), self.parts_of(engine)
                if parts is not None:
                    parts.restore(opened, TrialMark(opened.path), discard)
                log.info("snapshot_used path=%s", opened.path)
                lacks = parts is not None and parts.lacks_adapters(opened)
                return SnapshotLook(fingerprint, SnapshotOutcome.USED, memory=memory, lacks_adapters=lacks)
            differences = self._directory.differences(fingerprint)
        except SnapshotFatal as error:
            return SnapshotLook(fingerprint, SnapshotOutcome.DISCARDED, str(error))
        except SnapshotError as error:
            return SnapshotLook(fingerprint, SnapshotOutcome.REFUSED, str(error))
        except Exception as error:  # no start depends on a snapshot
            log.exception("snapshot_not_restored model=%s", spec.manifest.digest)
            engine.runner.drop_restored()
            return SnapshotLook(fingerprint, SnapshotOutcome.REFUSED, f"restoring it failed: {error!r}")
        if not differences:
            return SnapshotLook(fingerprint, SnapshotOutcome.MISSING)
        reason = "it was made for another start: " + "; ".join(map(str, differences))
        return SnapshotLook(fingerprint, SnapshotOutcome.OUTDATED, reason)

    @property
    def lacks_graphs(self) -> bool:
        return self._device.type == "cuda" and self._graphs() == "unkept"

    def prepare(self) -> None:
        software(self._device.type)

    def save(self, fingerprint: Fingerprint, sections: Mapping[str, bytes]) -> Path:
        """Write a snapshot. Raises SnapshotError and StoreFull."""
        return self._directory.save(fingerprint, sections)

    def _graphs(self) -> str:
        if self._config.graphs == "off":
            return "off"
        return "unkept" if self.parts_of is no_parts else "on"

    def _fingerprint(self, spec: HostingSpec, space: Space) -> Fingerprint:
        manifest, model, found = spec.manifest, spec.model, software(self._device.type)
        # Only the configuration that steps depend on.
        limits = {**asdict(model.limits), "max_context": model.max_context}
        return Fingerprint(
            manifest=str(manifest.digest),
            layers=_layers(model),
            addresses=_addresses(space, spec.shape.slot) if self._device.type == "cuda" else "",
            dtype=name_of(model.dtype),
            limits=" ".join(f"{name}={value}" for name, value in limits.items()),
            engine=f"graphs={self._graphs()}",
            device=self.device_name,
            device_bytes=self._device_bytes,
            driver=found.driver,
            cuda=found.cuda,
            cublas=found.cublas,
            torch=found.torch,
            triton=found.triton,
            sources=found.sources,
        )


def _layers(model: ModelSpec) -> str:
    found = f"{model.layers.start}-{model.layers.stop}"
    if model.kv_layers == model.layers:
        return found
    return f"{found} of {model.kv_layers.start}-{model.kv_layers.stop}"


def _addresses(space: Space, slot: int | None) -> str:
    """Return where memory ranges begin, the slot first: a model deployed again should get the same."""
    ranges = {"weights": min(place.base.data_ptr() + place.offset for place in space.places.values())}
    for one in fields(space):
        if isinstance(found := getattr(space, one.name), torch.Tensor):
            ranges[one.name] = found.data_ptr()
    given = [] if slot is None else [f"slot={slot}"]
    return " ".join([*given, *(f"{name}={address:#x}" for name, address in ranges.items())])

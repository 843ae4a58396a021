"""Estimated profiles: the measured H200, scaled to the published specifications of other devices.

Decode steps are bound by memory bandwidth, steps with prompts by computation, and loads by the bus. What the
host does is taken to last as long as beside the H200.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from hearth.core.types import Rung
from hearth.snapshot.cost_profile import MeasuredProfile, MeasuredShape, MeasuredStep


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """The published specification of a device."""

    name: str
    memory_bytes: float
    memory_bytes_per_s: float
    flops: float  #: dense, of 16 bits, accumulated in 32 bits
    bus_bytes_per_s: float  #: in one direction


PCIE_3, PCIE_4, PCIE_5 = 16e9, 32e9, 64e9
MEASURED = "h200"
SPECS: Mapping[str, DeviceSpec] = {
    MEASURED: DeviceSpec("NVIDIA H200 SXM", 141e9, 4.8e12, 989e12, PCIE_5),
    "a100": DeviceSpec("NVIDIA A100 SXM 80 GB", 80e9, 2.039e12, 312e12, PCIE_4),
    "h100": DeviceSpec("NVIDIA H100 SXM", 80e9, 3.35e12, 989e12, PCIE_5),
    "l40s": DeviceSpec("NVIDIA L40S", 48e9, 864e9, 362e12, PCIE_4),
    "rtx4090": DeviceSpec("NVIDIA GeForce RTX 4090", 24e9, 1.008e12, 165e12, PCIE_4),
    "t4": DeviceSpec("NVIDIA T4", 16e9, 320e9, 65e12, PCIE_3),
}


def estimate(measured: MeasuredProfile, spec: DeviceSpec) -> MeasuredProfile:
    """Return the profile of a device, scaled from that of the H200."""
    base = SPECS[MEASURED]
    host_bytes_per_s = measured.bytes_per_s[Rung.HOST] * spec.bus_bytes_per_s / base.bus_bytes_per_s
    decode, prompt = base.memory_bytes_per_s / spec.memory_bytes_per_s, base.flops / spec.flops
    return replace(
        measured,
        origin=replace(measured.origin, device=spec.name),
        bytes_per_s={**measured.bytes_per_s, Rung.HOST: host_bytes_per_s},
        shapes=[_scaled(shape, decode, prompt) for shape in measured.shapes],
    )


def _scaled(shape: MeasuredShape, decode: float, prompt: float) -> MeasuredShape:
    def of(step: MeasuredStep) -> MeasuredStep:
        factor = decode if step.num_tokens == step.num_rows else prompt
        device_s = None if step.device_s is None else step.device_s * factor
        return replace(step, seconds=step.seconds * factor, device_s=device_s)

    return replace(shape, steps=[of(step) for step in shape.steps])

"""The cost profile of a model, from what its worker has measured."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec

from hearth.core.messages import ModelLoaded
from hearth.core.types import ModelId, Rung
from hearth.engine.step_times import StepSamples
from hearth.models.buffers import name_of
from hearth.policy.memory.reload_cost import PRIOR_BYTES_PER_S
from hearth.snapshot import cost_profile
from hearth.snapshot.cost_profile import (
    MeasuredProfile,
    MeasuredShape,
    MeasuredStep,
    MeasuredSwitch,
    Origin,
)
from hearth.snapshot.software import software
from hearth.system.cpus import num_usable_cores
from hearth.worker.hosting_state import ServedModel

#: Fields that a worker does not measure, and why.
ASSUMED = {
    "mapping": "not measured apart from loads",
    "switch.give_way_s": "as long as the first start took to find the model",
    "switch.begin_s": "not measured apart from steps",
    "host_step_s": "not measured apart from steps",
    "steps": "of padding, without attention, where no request made one of the kind",
}


def measured_costs(
    served: ServedModel,
    model: ModelId,
    loaded: ModelLoaded,
    rates: Mapping[Rung, float],
    padded: StepSamples,
    device_name: str,
) -> MeasuredProfile:
    """Return the costs of a model: its first load, the rungs' rates and its steps.

    `padded`: steps of padding, for kinds that no request has run.
    """
    spec = served.spec
    found = software(served.engine.runner.layers.kv.device.type)
    unmeasured = [rung for rung in Rung if rung not in rates]
    assumed = {f"bytes_per_s.{rung}": "nothing came from it here: a usual rate" for rung in unmeasured}
    shape = MeasuredShape(
        name=str(model),
        model=str(spec.manifest.digest),
        dtype=msgspec.convert(name_of(spec.model.dtype), type=cost_profile.ComputedDtype),
        weights_bytes=spec.layout.own_bytes,
        kv_bytes_per_token=max(1, spec.shape.block_bytes // spec.model.limits.block_tokens),
        steps=_steps(served.engine.samples, padded),
    )
    return MeasuredProfile(
        version=cost_profile.VERSION,
        origin=Origin(
            command=f"hearth snapshot {model}",
            commit=None,
            date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            device=device_name,
            num_cores=num_usable_cores(),
            versions={
                "python": platform.python_version(),
                "torch": found.torch,
                "triton": found.triton or None,
            },
            is_tiny=False,
            assumed={**assumed, **ASSUMED},
        ),
        bytes_per_s={**PRIOR_BYTES_PER_S, **rates},
        mapping=None,
        switch=MeasuredSwitch("not measured", give_way_s=loaded.open_s, begin_s=0.0),
        assemble_s=loaded.assemble_s,
        host_step_s=0.0,
        shapes=[shape],
    )


def _steps(served: StepSamples, padded: StepSamples) -> list[MeasuredStep]:
    known = {(step.num_tokens, step.num_rows) for step in served.typical()}
    steps = [
        *served.typical(),
        *(step for step in padded.typical() if (step.num_tokens, step.num_rows) not in known),
    ]
    return [
        MeasuredStep(step.num_tokens, step.num_rows, step.context_tokens, step.seconds)
        for step in steps
        if step.seconds > 0.0
    ]

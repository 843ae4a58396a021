"""A machine with a device of round numbers, and workloads for it. Has no tests."""

from __future__ import annotations

import msgspec
from hypothesis import strategies as st

from hearth.core.types import ModelId, Rung
from hearth.sim.profile import Profile
from hearth.sim.traces import Trace, TracedRequest
from hearth.snapshot.cost_profile import MeasuredProfile, MeasuredShape, MeasuredStep, MeasuredSwitch, Origin

GB = 10**9
HOST_BYTES_PER_S = 50e9
#: Two of the large ones do not fit together, nor do all of the small ones.
MEMORY_BYTES = 24 << 30
SHAPES = {
    ModelId("a"): "7B",
    ModelId("b"): "7B",
    ModelId("c"): "3B",
    ModelId("d"): "3B",
}


def _shape(name: str, weights_bytes: int, kv_bytes_per_token: int, row_s: float) -> MeasuredShape:
    """Rows take little more than one row, tokens of prompts by their number."""
    decode = [(rows, context) for rows in (1, 64, 256) for context in (64, 1024)]
    steps = [
        MeasuredStep(rows, rows, rows * context, row_s * (1 + rows / 256) + rows * context * 1e-8)
        for rows, context in decode
    ]
    steps += [MeasuredStep(num, 1, num, row_s + num * row_s / 400) for num in (16, 256, 4096)]
    return MeasuredShape(name, name, "bfloat16", weights_bytes, kv_bytes_per_token, steps)


MACHINE = Profile(
    MeasuredProfile(
        version=1,
        origin=Origin("by hand", None, "2026-01-01", "none", 1, {}, is_tiny=True, assumed={}),
        bytes_per_s={Rung.HOST: HOST_BYTES_PER_S, Rung.DISK: 3e9, Rung.OBJECT: 1e9},
        mapping=None,
        switch=MeasuredSwitch("by hand", give_way_s=0.005, begin_s=0.001),
        assemble_s=0.02,
        host_step_s=0.0,
        wake_s=0.002,
        beside_load_s=0.005,
        shapes=[_shape("3B", 6 * GB, 114_688, 0.004), _shape("7B", 13 * GB, 524_288, 0.006)],
    )
)

#: The same, where a model that returns and steps without a graph take their time.
SLOW_HOST = Profile(
    msgspec.structs.replace(
        MACHINE.measured,
        return_s=0.01,
        shapes=[
            msgspec.structs.replace(one, capture_s=0.015, eager_s=0.02) for one in MACHINE.measured.shapes
        ],
    )
)

REQUESTS = st.lists(
    st.builds(
        TracedRequest,
        arrival_s=st.floats(0.0, 6.0),
        tenant=st.sampled_from([str(model) for model in SHAPES]),
        num_input_tokens=st.integers(1, 400),
        num_output_tokens=st.integers(1, 60),
    ),
    min_size=1,
    max_size=14,
)


def trace_of(requests: list[TracedRequest]) -> Trace:
    return Trace.of("drawn", requests)

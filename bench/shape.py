"""Shapes of models that benchmarks fill with random weights. Makes no weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from bench.hosting import config_of
from hearth.core.sizes import block_buffer
from hearth.models.arch import Arch
from hearth.models.families import arch_from_config
from hearth.models.layout import Layout, layout_of


@dataclass(frozen=True)  # no slots: what is derived is kept
class Shape:
    """A model of random weights."""

    name: str  #: in results
    model: str  #: whose shape it has
    config: Mapping[str, object]
    dtype: str
    quant: str = "none"

    @cached_property
    def arch(self) -> Arch:
        return arch_from_config(dict(self.config))

    @cached_property
    def layout(self) -> Layout:
        return layout_of(self.arch, self.dtype, self.quant)

    @property
    def weights_bytes(self) -> int:
        return self.layout.num_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        sizes = self.arch.dimensions
        return block_buffer(sizes, sizes.layers, self.dtype, 1).num_bytes


def llama_shape(name: str, model: str, max_positions: int) -> Shape:
    """Return one of the shapes that `bench.hosting` knows, in bfloat16."""
    config = {
        **config_of(model, max_positions),
        "architectures": ["LlamaForCausalLM"],
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
    }
    return Shape(name, model, config, "bfloat16")

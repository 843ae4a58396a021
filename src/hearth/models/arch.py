"""The architecture of a model, as the decoder needs it. A model family is a way to fill it in.

Canonical tensors, in the order in which the forward pass needs them (`models/layout.py`):

    embed.weight [vocab, embed]        positions.weight [max_positions + position_offset, hidden]
    embed_in.weight [hidden, embed]    only where embed != hidden
    layers.I.attn_norm.{weight,bias}   layers.I.qkv.{weight,bias}  [(heads + 2 * kv_heads) * head_dim, hidden]
    layers.I.q_norm.weight  layers.I.k_norm.weight  [head_dim], or of all heads
    layers.I.o.{weight,bias} [hidden, heads * head_dim]     layers.I.attn_out_norm.weight [hidden]
    layers.I.mlp_norm.{weight,bias}    layers.I.up.{weight,bias}  [(2 if gated else 1) * intermediate, hidden]
    layers.I.down.{weight,bias} [hidden, intermediate]      layers.I.mlp_out_norm.weight [hidden]
    final_norm.{weight,bias}           embed_out.weight [embed, hidden]    head.weight [vocab, embed]

`qkv` is q, then k, then v, each head after head; `up` of a gated MLP is gate, then up. A tied head is
not stored: the decoder reads `embed.weight`. Where a checkpoint's norms multiply by `1 + weight`, the sums
are stored, in float32: near 1, a sum in 16 bits would lose most of the weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hearth.core.sizes import Dimensions

#: Far more than any model has: a limit for damaged configs.
MAX_LAYERS = 10_000


class Norm(StrEnum):
    RMS = "rms"
    LAYER = "layer"


class Activation(StrEnum):
    SILU = "silu"
    GELU = "gelu"  #: the exact one, by erf
    GELU_TANH = "gelu_tanh"
    RELU = "relu"
    RELU2 = "relu2"  #: its square


class Residual(StrEnum):
    PRE = "pre"  #: x += attn(norm(x)); x += mlp(norm(x))
    SANDWICH = "sandwich"  #: x += norm'(attn(norm(x))); x += norm'(mlp(norm(x)))
    OUTPUT = "output"  #: x += norm'(attn(x)); x += norm'(mlp(x))
    POST = "post"  #: x = norm(x + attn(x)); x = norm(x + mlp(x))
    PARALLEL = "parallel"  #: x += attn(norm(x)) + mlp(norm'(x))


#: Launches of norms in a layer.
_NUM_NORMS = {
    Residual.PRE: 2,
    Residual.SANDWICH: 3,
    Residual.OUTPUT: 2,
    Residual.POST: 2,
    Residual.PARALLEL: 2,
}


class QkNorm(StrEnum):
    """An RMS norm of q and k before they are rotated."""

    HEAD = "head"  #: each head, with the same weights
    ALL = "all"  #: all heads together


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    factor: float
    beta_fast: float
    beta_slow: float
    is_truncated: bool  #: the ramp begins and ends at whole dimensions
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class LongRope:
    """Divisors of the frequencies: `short` up to a context of the original positions, else `long`."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions in the half-split layout; the first `dim` of each head are rotated."""

    theta: float
    dim: int
    linear_factor: float = 1.0  #: positions are divided by it
    llama3: Llama3Scaling | None = None
    yarn: YarnScaling | None = None
    longrope: LongRope | None = None
    magnitude: float = 1.0  #: of the cosines and sines


@dataclass(frozen=True, slots=True)
class Arch:
    family: str
    vocab_size: int
    hidden_size: int
    embed_size: int  #: width of the embedding; differs from hidden_size only in OPT-350m
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    norm: Norm
    norm_eps: float
    norm_bias: bool
    norm_weight: bool  #: False: norms have no parameters at all
    residual: Residual
    shares_norm: bool  #: parallel residual whose MLP reads the attention's norm
    has_final_norm: bool
    activation: Activation
    gated: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: QkNorm | None
    wide_norms: bool  #: weights and biases of norms are stored in float32
    ropes: tuple[Rope, ...]  #: all of the same `dim`
    layer_ropes: tuple[int | None, ...]  #: per layer, an index in `ropes`; None: q and k are not rotated
    position_offset: int | None  #: learned positions start at this row; None: no learned positions
    tied_head: bool
    windows: tuple[int | None, ...]  #: per layer: how many tokens back a token sees, itself included
    score_scale: float | None  #: of attention scores; None: head_dim ** -0.5
    score_cap: float | None  #: scores become cap * tanh(score / cap)
    embed_scale: float
    logit_scale: float
    logit_cap: float | None  #: as of scores, after the scale
    is_text_part: bool  #: of a model that also reads images

    @property
    def rounds_embed_scale(self) -> bool:
        """True if the scale is rounded to the dtype that the model is computed in, as in transformers."""
        return self.family.startswith("gemma")

    @property
    def dimensions(self) -> Dimensions:
        return Dimensions(
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            hidden_size=self.hidden_size,
            embed_size=self.embed_size,
            intermediate_size=self.intermediate_size,
            vocab_size=self.vocab_size,
            rope_dim=self.ropes[0].dim if self.ropes else 0,
            is_gated=self.gated,
            is_parallel=self.residual is Residual.PARALLEL,
            num_ropes=len(self.ropes),
            num_norms=_NUM_NORMS[self.residual] + (2 if self.qk_norm is QkNorm.ALL else 0),
        )

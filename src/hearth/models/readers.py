"""Readers of Hugging Face configs, one per family: fields in, an `Arch` out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hearth.core.errors import BadCheckpoint
from hearth.models.arch import MAX_LAYERS, Activation, Arch, Norm, QkNorm, Residual, Rope
from hearth.models.config_fields import Fields
from hearth.models.rope import read_partial_rope, read_rope, read_window_ropes

ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_python": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
    "relu2": Activation.RELU2,
}

#: How much larger or smaller than in its config a residual may be: 16 bits have to represent it.
_MOST_RESIDUAL_SCALE = 1000.0

#: Each layer's window; None: it has none.
Windows = tuple[int | None, ...]


def llama(f: Fields) -> Arch:
    bias = f.flag("attention_bias")
    return _gated(f, _no_windows(f), qkv_bias=bias, o_bias=bias, mlp_bias=f.flag("mlp_bias"))


def mistral(f: Fields) -> Arch:
    window = f.maybe_integer("sliding_window")
    windows = _windows(f, window)
    if set(windows) != {window}:
        raise f.unsupported(
            "layer_types", f"all layers of a `mistral` model share `sliding_window`: {window}"
        )
    return _gated(f, windows)


def qwen2(f: Fields) -> Arch:
    return _gated(f, _qwen_windows(f), qkv_bias=True)


def qwen3(f: Fields) -> Arch:
    bias = f.flag("attention_bias")
    return replace(_gated(f, _qwen_windows(f), qkv_bias=bias, o_bias=bias), qk_norm=QkNorm.HEAD)


def gemma(f: Fields) -> Arch:
    if f.has("hidden_activation"):
        return _gemma(f, _no_windows(f))
    arch = _gemma(f, _no_windows(f), activation="hidden_act")
    # Configs of the first releases say `gelu` and mean its approximation.
    return replace(arch, activation=Activation.GELU_TANH) if f.text("hidden_act") == "gelu" else arch


def gemma2(f: Fields) -> Arch:
    windows = _windows(f, f.maybe_integer("sliding_window"), lambda i: i % 2 == 1)
    return _with_gemma_scores(f, _gemma(f, windows))


def gemma3(f: Fields) -> Arch:
    pattern = f.integer("sliding_window_pattern")
    windows = _windows(f, f.maybe_integer("sliding_window"), lambda i: (i + 1) % pattern == 0)
    ropes = read_window_ropes(f, _own_head_dim(f), theta="rope_local_base_freq")
    arch = _with_ropes(_gemma(f, windows, rope=ropes[0]), *ropes)
    return replace(_with_gemma_scores(f, arch), qk_norm=QkNorm.HEAD)


def _gemma(
    f: Fields, windows: Windows, rope: Rope | None = None, activation: str = "hidden_activation"
) -> Arch:
    bias = f.flag("attention_bias")
    arch = _gated(f, windows, activation=activation, rope=rope, qkv_bias=bias, o_bias=bias)
    return replace(arch, wide_norms=True, embed_scale=arch.hidden_size**0.5)


def _with_gemma_scores(f: Fields, arch: Arch) -> Arch:
    return replace(
        arch,
        residual=Residual.SANDWICH,
        score_scale=f.number("query_pre_attn_scalar") ** -0.5,
        score_cap=f.maybe_number("attn_logit_softcapping"),
        logit_cap=f.maybe_number("final_logit_softcapping"),
    )


def phi3(f: Fields) -> Arch:
    windows = _windows(f, f.maybe_integer("sliding_window"))
    return _gated(f, windows, rope=read_partial_rope(f, _own_head_dim(f)))


def smollm3(f: Fields) -> Arch:
    interval, num_layers = f.integer("no_rope_layer_interval"), _num_layers(f)
    by_depth = [int((i + 1) % interval != 0) for i in range(num_layers)]
    has_rope = f.integers("no_rope_layers", num_layers) if f.values.get("no_rope_layers") else by_depth
    window = f.maybe_integer("sliding_window") if f.flag("use_sliding_window") else None
    windows = _windows(f, window, lambda i: bool(has_rope[i]))
    bias = f.flag("attention_bias")
    arch = _gated(f, windows, qkv_bias=bias, o_bias=bias, mlp_bias=f.flag("mlp_bias"))
    return replace(arch, layer_ropes=tuple(0 if rotates else None for rotates in has_rope))


def olmo2(f: Fields) -> Arch:
    return _olmo(f, _no_windows(f))


def olmo3(f: Fields) -> Arch:
    windows = _windows(f, f.maybe_integer("sliding_window"), lambda i: i % 4 == 3)
    ropes = read_window_ropes(f, _own_head_dim(f), theta="rope_theta")
    return _with_ropes(_olmo(f, windows, rope=ropes[0]), *ropes)


def _olmo(f: Fields, windows: Windows, rope: Rope | None = None) -> Arch:
    bias = f.flag("attention_bias")
    arch = _gated(f, windows, rope=rope, qkv_bias=bias, o_bias=bias)
    return replace(arch, residual=Residual.OUTPUT, qk_norm=QkNorm.ALL)


def granite(f: Fields) -> Arch:
    bias = f.flag("attention_bias")
    arch = _gated(f, _no_windows(f), qkv_bias=bias, o_bias=bias, mlp_bias=f.flag("mlp_bias"))
    return _with_multipliers(f, arch)


def granite_hybrid(f: Fields) -> Arch:
    if f.integer("num_local_experts", least=0) > 0:
        raise f.unsupported("num_local_experts", "mixtures of experts are not supported; use a dense model")
    if not {"attention", "full_attention"}.issuperset(f.texts("layer_types") or ["mamba"]):
        raise f.unsupported("layer_types", "only attention layers are supported, Mamba layers are not")
    kind = f.text("position_embedding_type") if f.has("position_embedding_type") else "nope"
    if kind not in ("rope", "nope"):
        raise f.unsupported("position_embedding_type", "supported: rope, nope")
    bias = f.flag("attention_bias")
    size = "shared_intermediate_size"
    arch = _gated(f, _no_windows(f), intermediate=size, qkv_bias=bias, o_bias=bias)
    if kind == "nope":
        arch = replace(arch, ropes=(), layer_ropes=(None,) * arch.num_layers)
    return _with_multipliers(f, arch)


def _with_multipliers(f: Fields, arch: Arch) -> Arch:
    """Scale embeddings, scores and logits, and the sums into the residual.

    A residual that is smaller by that multiplier needs no multiplication: its norms are the same, with an
    epsilon that is smaller by the square.
    """
    residual = f.number("residual_multiplier")
    if not 1.0 <= residual * _MOST_RESIDUAL_SCALE <= _MOST_RESIDUAL_SCALE**2:
        limits = f"{1.0 / _MOST_RESIDUAL_SCALE:g} to {_MOST_RESIDUAL_SCALE:g}"
        raise f.unsupported("residual_multiplier", f"supported: {limits}")
    return replace(
        arch,
        embed_scale=f.number("embedding_multiplier") / residual,
        norm_eps=arch.norm_eps / residual**2,
        score_scale=f.number("attention_multiplier"),
        logit_scale=1.0 / f.number("logits_scaling"),
    )


def glm(f: Fields) -> Arch:
    rope = read_partial_rope(f, _own_head_dim(f))
    return _gated(f, _no_windows(f), rope=rope, qkv_bias=f.flag("attention_bias"))


def glm4(f: Fields) -> Arch:
    return replace(glm(f), residual=Residual.SANDWICH)


def cohere(f: Fields) -> Arch:
    return _cohere(f, _no_windows(f))


def cohere2(f: Fields) -> Arch:
    pattern = f.integer("sliding_window_pattern")
    windows = _windows(f, f.maybe_integer("sliding_window"), lambda i: (i + 1) % pattern == 0)
    arch = _cohere(f, windows)
    return replace(arch, layer_ropes=tuple(None if window is None else 0 for window in windows))


def _cohere(f: Fields, windows: Windows) -> Arch:
    bias = f.flag("attention_bias")
    arch = _gated(f, windows, eps="layer_norm_eps", qkv_bias=bias, o_bias=bias)
    return replace(
        arch,
        norm=Norm.LAYER,
        residual=Residual.PARALLEL,
        shares_norm=True,
        logit_scale=f.number("logit_scale"),
    )


def starcoder2(f: Fields) -> Arch:
    windows, bias = _windows(f, f.maybe_integer("sliding_window")), f.flag("use_bias")
    arch = _gated(f, windows, eps="norm_epsilon", qkv_bias=bias, o_bias=bias, mlp_bias=bias)
    return replace(arch, norm=Norm.LAYER, norm_bias=True, gated=False)


def stablelm(f: Fields) -> Arch:
    rope = read_partial_rope(f, _own_head_dim(f))
    arch = _gated(f, _no_windows(f), eps="layer_norm_eps", rope=rope, qkv_bias=f.flag("use_qkv_bias"))
    is_parallel = f.flag("use_parallel_residual")
    residual = Residual.PARALLEL if is_parallel else Residual.PRE
    return replace(arch, norm=Norm.LAYER, norm_bias=True, residual=residual, shares_norm=is_parallel)


def nemotron(f: Fields) -> Arch:
    rope, bias = read_partial_rope(f, _own_head_dim(f)), f.flag("attention_bias")
    arch = _gated(
        f,
        _no_windows(f),
        eps="norm_eps",
        rope=rope,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=f.flag("mlp_bias"),
    )
    return replace(arch, norm=Norm.LAYER, norm_bias=True, wide_norms=True, gated=False)


def _gated(
    f: Fields,
    windows: Windows,
    *,
    intermediate: str = "intermediate_size",
    activation: str = "hidden_act",
    eps: str = "rms_norm_eps",
    rope: Rope | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
) -> Arch:
    """Read a model with gated MLPs, RMS norms and rotary positions, `rope` or those of whole heads."""
    head_dim = _own_head_dim(f)
    plain = _plain(f, head_dim, windows, intermediate=intermediate, activation=activation)
    arch = replace(
        plain,
        num_kv_heads=f.maybe_integer("num_key_value_heads") or plain.num_heads,
        norm=Norm.RMS,
        norm_eps=f.number(eps),
        norm_bias=False,
        gated=True,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
    )
    rope = read_rope(f, head_dim) if rope is None else rope
    return _with_ropes(arch, rope, rope)


def _with_ropes(arch: Arch, full: Rope, local: Rope) -> Arch:
    """Rotate by `local` in layers with a window, and by `full` in the others."""
    ropes = tuple(dict.fromkeys((full, local)))
    of_layers = (full if window is None else local for window in arch.windows)
    return replace(arch, ropes=ropes, layer_ropes=tuple(map(ropes.index, of_layers)))


def gpt2(f: Fields) -> Arch:
    size = "intermediate_size" if f.has("intermediate_size") else None
    plain = _plain(f, _head_dim(f), _no_windows(f), intermediate=size, activation="activation_function")
    return replace(
        plain,
        norm_eps=f.number("layer_norm_epsilon"),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        position_offset=0,
    )


def opt(f: Fields) -> Arch:
    is_pre = f.flag("do_layer_norm_before")
    has_affine = f.flag("layer_norm_elementwise_affine")
    bias = f.flag("enable_bias")
    plain = _plain(f, _head_dim(f), _no_windows(f), intermediate="ffn_dim", activation="activation_function")
    return replace(
        plain,
        embed_size=f.maybe_integer("word_embed_proj_dim") or plain.hidden_size,
        norm_bias=has_affine,
        norm_weight=has_affine,
        residual=Residual.PRE if is_pre else Residual.POST,
        has_final_norm=is_pre and not f.flag("_remove_final_layer_norm"),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        position_offset=2,
    )


def gpt_neox(f: Fields) -> Arch:
    bias = f.flag("attention_bias")
    plain = _plain(f, _head_dim(f), _no_windows(f), intermediate="intermediate_size", activation="hidden_act")
    arch = replace(
        plain,
        norm_eps=f.number("layer_norm_eps"),
        residual=Residual.PARALLEL if f.flag("use_parallel_residual") else Residual.PRE,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=True,
    )
    rope = read_partial_rope(f, plain.head_dim, share="rotary_pct", theta="rotary_emb_base")
    return _with_ropes(arch, rope, rope)


def falcon(f: Fields) -> Arch:
    bias = f.flag("bias")
    intermediate = "ffn_hidden_size" if f.has("ffn_hidden_size") else None
    plain = _plain(f, _head_dim(f), _no_windows(f), intermediate=intermediate, activation="activation")
    arch = replace(
        plain,
        num_kv_heads=_falcon_kv_heads(f),
        norm_eps=f.number("layer_norm_epsilon"),
        residual=Residual.PARALLEL if f.flag("parallel_attn") else Residual.PRE,
        shares_norm=_falcon_shares_norm(f),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )
    rope = read_rope(f, plain.head_dim)
    return _with_ropes(arch, rope, rope)


def _plain(f: Fields, head_dim: int, windows: Windows, *, intermediate: str | None, activation: str) -> Arch:
    hidden_size, num_heads = f.integer("hidden_size"), f.integer("num_attention_heads")
    return Arch(
        family=f.family,
        vocab_size=f.integer("vocab_size"),
        hidden_size=hidden_size,
        embed_size=hidden_size,
        num_layers=_num_layers(f),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        intermediate_size=f.integer(intermediate) if intermediate else 4 * hidden_size,
        max_positions=f.integer("max_position_embeddings"),
        norm=Norm.LAYER,
        norm_eps=1e-5,
        norm_bias=True,
        norm_weight=True,
        residual=Residual.PRE,
        shares_norm=False,
        has_final_norm=True,
        activation=_activation(f, activation),
        gated=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=None,
        wide_norms=False,
        ropes=(),
        layer_ropes=(None,) * len(windows),
        position_offset=None,
        tied_head=f.flag("tie_word_embeddings"),
        windows=windows,
        score_scale=None,
        score_cap=None,
        embed_scale=1.0,
        logit_scale=1.0,
        logit_cap=None,
        is_text_part=False,
    )


def _falcon_kv_heads(f: Fields) -> int:
    num_heads = f.integer("num_attention_heads")
    num_kv_heads = f.maybe_integer("num_kv_heads") or num_heads
    if f.flag("new_decoder_architecture"):
        return num_kv_heads
    if f.flag("multi_query"):
        return 1
    if num_kv_heads != num_heads:
        raise f.unsupported("num_kv_heads", f"without `new_decoder_architecture` it must be {num_heads}")
    return num_heads


def _falcon_shares_norm(f: Fields) -> bool:
    is_new = f.flag("new_decoder_architecture")
    if not f.flag("parallel_attn"):
        if is_new:
            raise f.unsupported("parallel_attn", "`new_decoder_architecture` needs it to be true")
        return False
    num_norms = f.maybe_integer("num_ln_in_parallel_attn") or (2 if is_new else 1)
    if num_norms not in ((1, 2) if is_new else (1,)):
        raise f.unsupported("num_ln_in_parallel_attn", f"supported here: {'1, 2' if is_new else '1'}")
    return num_norms == 1


def _num_layers(f: Fields) -> int:
    return f.integer("num_hidden_layers", most=MAX_LAYERS)


def _own_head_dim(f: Fields) -> int:
    return f.maybe_integer("head_dim") or _head_dim(f)


def _head_dim(f: Fields) -> int:
    hidden_size, num_heads = f.integer("hidden_size"), f.integer("num_attention_heads")
    if hidden_size % num_heads != 0:
        raise f.unsupported("hidden_size", f"it must be a multiple of `num_attention_heads`: {num_heads}")
    return hidden_size // num_heads


def _activation(f: Fields, name: str) -> Activation:
    if f.text(name) not in ACTIVATIONS:
        raise f.unsupported(name, f"supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[f.text(name)]


def _qwen_windows(f: Fields) -> Windows:
    """Read Qwen's windows: the first `max_window_layers` have none, unless `layer_types` differ."""
    window = f.maybe_integer("sliding_window") if f.flag("use_sliding_window") else None
    num_full = f.integer("max_window_layers", least=0)
    return _windows(f, window, lambda i: i < num_full)


def _no_windows(f: Fields) -> Windows:
    if f.has("sliding_window"):
        raise f.unsupported("sliding_window", f"`{f.family}` models attend to all tokens; supported: null")
    return _windows(f, None)


def _windows(f: Fields, window: int | None, is_full: Callable[[int], bool] = lambda layer: False) -> Windows:
    """Return each layer's window: a token sees itself and `window - 1` before it, as in transformers.

    `is_full`: which layers have none where `layer_types` does not say.
    """
    num_layers = _num_layers(f)
    by_depth = [
        "sliding_attention" if window and not is_full(i) else "full_attention" for i in range(num_layers)
    ]
    given = f.texts("layer_types") or by_depth
    types = ["full_attention" if kind == "attention" else kind for kind in given]
    if len(types) != num_layers:
        raise BadCheckpoint(f"{f.where}: `layer_types` has {len(types)} entries for {num_layers} layers")
    known = {"full_attention", "sliding_attention"} if window else {"full_attention"}
    if not known.issuperset(types):
        raise f.unsupported("layer_types", f"supported with a window of {window}: {', '.join(sorted(known))}")
    return tuple(window if kind == "sliding_attention" else None for kind in types)

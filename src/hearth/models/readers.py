"""Readers of Hugging Face configs, one per family: fields in, an `Arch` out."""

from __future__ import annotations

from dataclasses import replace

from hearth.core.errors import BadCheckpoint
from hearth.models.arch import MAX_LAYERS, Activation, Arch, Norm, Residual
from hearth.models.config_fields import Fields
from hearth.models.rope import read_partial_rope, read_rope

ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_python": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
}


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
    return replace(_gated(f, _qwen_windows(f), qkv_bias=bias, o_bias=bias), qk_norm=True)


def _gated(
    f: Fields,
    windows: tuple[int | None, ...],
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
) -> Arch:
    head_dim = f.maybe_integer("head_dim") or _head_dim(f)
    plain = _plain(f, head_dim, windows, intermediate="intermediate_size", activation="hidden_act")
    return replace(
        plain,
        num_kv_heads=f.maybe_integer("num_key_value_heads") or plain.num_heads,
        norm=Norm.RMS,
        norm_eps=f.number("rms_norm_eps"),
        norm_bias=False,
        gated=True,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        rope=read_rope(f, head_dim),
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
    return replace(
        plain,
        norm_eps=f.number("layer_norm_eps"),
        residual=Residual.PARALLEL if f.flag("use_parallel_residual") else Residual.PRE,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=True,
        rope=read_partial_rope(f, plain.head_dim),
    )


def falcon(f: Fields) -> Arch:
    bias = f.flag("bias")
    intermediate = "ffn_hidden_size" if f.has("ffn_hidden_size") else None
    plain = _plain(f, _head_dim(f), _no_windows(f), intermediate=intermediate, activation="activation")
    return replace(
        plain,
        num_kv_heads=_falcon_kv_heads(f),
        norm_eps=f.number("layer_norm_epsilon"),
        residual=Residual.PARALLEL if f.flag("parallel_attn") else Residual.PRE,
        shares_norm=_falcon_shares_norm(f),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        rope=read_rope(f, plain.head_dim),
    )


def _plain(
    f: Fields, head_dim: int, windows: tuple[int | None, ...], *, intermediate: str | None, activation: str
) -> Arch:
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
        qk_norm=False,
        rope=None,
        position_offset=None,
        tied_head=f.flag("tie_word_embeddings"),
        windows=windows,
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


def _head_dim(f: Fields) -> int:
    hidden_size, num_heads = f.integer("hidden_size"), f.integer("num_attention_heads")
    if hidden_size % num_heads != 0:
        raise f.unsupported("hidden_size", f"it must be a multiple of `num_attention_heads`: {num_heads}")
    return hidden_size // num_heads


def _activation(f: Fields, name: str) -> Activation:
    if f.text(name) not in ACTIVATIONS:
        raise f.unsupported(name, f"supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[f.text(name)]


def _qwen_windows(f: Fields) -> tuple[int | None, ...]:
    """Read Qwen's windows: the first `max_window_layers` have none, unless `layer_types` differ."""
    window = f.maybe_integer("sliding_window") if f.flag("use_sliding_window") else None
    return _windows(f, window, num_full=f.integer("max_window_layers", least=0))


def _no_windows(f: Fields) -> tuple[int | None, ...]:
    if f.has("sliding_window"):
        raise f.unsupported("sliding_window", f"`{f.family}` models attend to all tokens; supported: null")
    return _windows(f, None)


def _windows(f: Fields, window: int | None, num_full: int = 0) -> tuple[int | None, ...]:
    """Return each layer's window: a token sees itself and `window - 1` before it, as in transformers."""
    num_layers = _num_layers(f)
    by_depth = [
        "sliding_attention" if window and i >= num_full else "full_attention" for i in range(num_layers)
    ]
    types = f.texts("layer_types") or by_depth
    if len(types) != num_layers:
        raise BadCheckpoint(f"{f.where}: `layer_types` has {len(types)} entries for {num_layers} layers")
    known = {"full_attention", "sliding_attention"} if window else {"full_attention"}
    if not known.issuperset(types):
        raise f.unsupported("layer_types", f"supported with a window of {window}: {', '.join(sorted(known))}")
    return tuple(window if kind == "sliding_attention" else None for kind in types)

"""Name maps as data: which checkpoint tensors make up each canonical one.

A map's values are templates: `{i}` is the layer, several are stacked by rows in the order of `arch.py`, and
of `a|b` the checkpoint has one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hearth.core.errors import BadCheckpoint
from hearth.models.arch import Arch
from hearth.models.formats import LINEARS
from hearth.models.layout import Shape, canonical_shapes


@dataclass(frozen=True, slots=True)
class NameMap:
    prefixes: tuple[str, ...]  #: of all names but the head's; the first that the checkpoint uses
    modules: Mapping[str, tuple[str, ...]]
    head: str = "lm_head"
    ignored: str = r"(.*\.)?rotary(_emb)?\.inv_freq"  #: pattern of unused tensors
    interleaved_qkv: bool = False  #: one tensor [kv_heads, queries of the group + key + value, head_dim]
    rotates_pairs: bool = False  #: rows of q and k that rotate together are neighbours, not half a head apart
    is_transposed: bool = False  #: weights of linears are [inputs, outputs]
    norm_shift: float = 0.0  #: added to the weights of norms


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    name: str
    shape: Shape


@dataclass(frozen=True, slots=True)
class TensorSource:
    parts: tuple[CheckpointTensor, ...]
    shape: Shape  #: of the canonical tensor
    is_transposed: bool


_LLAMA = NameMap(
    # The last two are of models that also read images.
    prefixes=("model.", "", "model.language_model.", "language_model.model."),
    modules={
        "embed": ("embed_tokens",),
        "attn_norm": ("layers.{i}.input_layernorm",),
        "qkv": ("layers.{i}.self_attn.q_proj", "layers.{i}.self_attn.k_proj", "layers.{i}.self_attn.v_proj"),
        "q_norm": ("layers.{i}.self_attn.q_norm",),
        "k_norm": ("layers.{i}.self_attn.k_norm",),
        "o": ("layers.{i}.self_attn.o_proj",),
        "mlp_norm": ("layers.{i}.post_attention_layernorm",),
        "up": ("layers.{i}.mlp.gate_proj", "layers.{i}.mlp.up_proj"),
        "down": ("layers.{i}.mlp.down_proj",),
        "final_norm": ("norm",),
    },
    head="lm_head|language_model.lm_head",
    ignored=r"(.*\.)?rotary(_emb)?\.inv_freq|(model\.)?(visual|vision_tower|multi_modal_projector)\..*",
)


def _like_llama(
    modules: Mapping[str, str | tuple[str, ...]], base: NameMap = _LLAMA, **others: object
) -> NameMap:
    """Return Llama's names with these modules of a layer instead; no names: it has no such module."""
    changed = {
        name: tuple(f"layers.{{i}}.{path}" for path in ([paths] if isinstance(paths, str) else paths))
        for name, paths in modules.items()
    }
    return replace(base, modules={**base.modules, **changed}, **others)  # type: ignore[arg-type] # fields


_GEMMA = _like_llama({}, norm_shift=1.0)
_GEMMA2 = _like_llama(
    {
        "attn_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
    _GEMMA,
)
_OLMO2 = _like_llama(
    {"attn_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"}
)
_PHI3 = _like_llama({"qkv": "self_attn.qkv_proj", "up": "mlp.gate_up_proj"})
_GRANITE_HYBRID = _like_llama({"up": "shared_mlp.input_linear", "down": "shared_mlp.output_linear"})
_GLM = _like_llama({"up": "mlp.gate_up_proj"}, rotates_pairs=True)
_GLM4 = _like_llama({"attn_out_norm": "post_self_attn_layernorm", "mlp_out_norm": "post_mlp_layernorm"}, _GLM)
_COHERE = _like_llama({}, rotates_pairs=True)
_STARCODER2 = _like_llama({"up": "mlp.c_fc", "down": "mlp.c_proj"})
_NEMOTRON = _like_llama({"up": "mlp.up_proj"}, norm_shift=1.0)

_GPT2 = NameMap(
    prefixes=("transformer.", ""),
    modules={
        "embed": ("wte",),
        "positions": ("wpe",),
        "attn_norm": ("h.{i}.ln_1",),
        "qkv": ("h.{i}.attn.c_attn",),
        "o": ("h.{i}.attn.c_proj",),
        "mlp_norm": ("h.{i}.ln_2",),
        "up": ("h.{i}.mlp.c_fc",),
        "down": ("h.{i}.mlp.c_proj",),
        "final_norm": ("ln_f",),
    },
    ignored=r".*\.attn\.(bias|masked_bias)",
    is_transposed=True,
)

_OPT = NameMap(
    prefixes=("model.decoder.", "decoder.", ""),
    modules={
        "embed": ("embed_tokens",),
        "positions": ("embed_positions",),
        "embed_in": ("project_in",),
        "attn_norm": ("layers.{i}.self_attn_layer_norm",),
        "qkv": ("layers.{i}.self_attn.q_proj", "layers.{i}.self_attn.k_proj", "layers.{i}.self_attn.v_proj"),
        "o": ("layers.{i}.self_attn.out_proj",),
        "mlp_norm": ("layers.{i}.final_layer_norm",),
        "up": ("layers.{i}.fc1",),
        "down": ("layers.{i}.fc2",),
        "final_norm": ("final_layer_norm",),
        "embed_out": ("project_out",),
    },
    ignored=r"(.*\.)?version",
)

_GPT_NEOX = NameMap(
    prefixes=("gpt_neox.", ""),
    modules={
        "embed": ("embed_in",),
        "attn_norm": ("layers.{i}.input_layernorm",),
        "qkv": ("layers.{i}.attention.query_key_value",),
        "o": ("layers.{i}.attention.dense",),
        "mlp_norm": ("layers.{i}.post_attention_layernorm",),
        "up": ("layers.{i}.mlp.dense_h_to_4h",),
        "down": ("layers.{i}.mlp.dense_4h_to_h",),
        "final_norm": ("final_layer_norm",),
    },
    head="embed_out|lm_head",
    ignored=r".*\.attention\.(rotary_emb\.inv_freq|bias|masked_bias)",
    interleaved_qkv=True,
)

_FALCON = NameMap(
    prefixes=("transformer.", ""),
    modules={
        "embed": ("word_embeddings",),
        "attn_norm": ("h.{i}.input_layernorm|h.{i}.ln_attn",),
        "qkv": ("h.{i}.self_attention.query_key_value",),
        "o": ("h.{i}.self_attention.dense",),
        "mlp_norm": ("h.{i}.post_attention_layernorm|h.{i}.ln_mlp",),
        "up": ("h.{i}.mlp.dense_h_to_4h",),
        "down": ("h.{i}.mlp.dense_4h_to_h",),
        "final_norm": ("ln_f",),
    },
    interleaved_qkv=True,
)

NAMES: Mapping[str, NameMap] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA2,
    "phi3": _PHI3,
    "smollm3": _LLAMA,
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "granite": _LLAMA,
    "granitemoehybrid": _GRANITE_HYBRID,
    "glm": _GLM,
    "glm4": _GLM4,
    "cohere": _COHERE,
    "cohere2": _COHERE,
    "starcoder2": _STARCODER2,
    "stablelm": _LLAMA,
    "nemotron": _NEMOTRON,
    "gpt2": _GPT2,
    "opt": _OPT,
    "gpt_neox": _GPT_NEOX,
    "falcon": _FALCON,
}


def sources_of(arch: Arch, found: Mapping[str, Shape]) -> dict[str, TensorSource]:
    """Find the parts of every tensor. Raises BadCheckpoint for a missing, misshapen or left over one."""
    names = NAMES[arch.family]
    (embed,) = names.modules["embed"]
    prefix = next((one for one in names.prefixes if f"{one}{embed}.weight" in found), names.prefixes[0])
    sources = {
        name: _source(arch, name, shape, names, prefix, found) for name, shape in canonical_shapes(arch)
    }
    used = {part.name for source in sources.values() for part in source.parts}
    head = head_copy(arch, found)
    unused = [
        name for name in found if name not in used and name != head and not re.fullmatch(names.ignored, name)
    ]
    if unused:
        raise BadCheckpoint(
            f"the checkpoint has {len(unused)} tensors that do not fit its config.json: "
            f"{', '.join(f'{name:.80}' for name in unused[:4])}{', ...' if len(unused) > 4 else ''}"
        )
    return sources


def head_copy(arch: Arch, found: Mapping[str, Shape]) -> str | None:
    if not arch.tied_head:
        return None
    return next(
        (f"{head}.weight" for head in NAMES[arch.family].head.split("|") if f"{head}.weight" in found), None
    )


def _source(
    arch: Arch, name: str, shape: Shape, names: NameMap, prefix: str, found: Mapping[str, Shape]
) -> TensorSource:
    path = name.split(".")
    module, kind = path[-2], path[-1]
    layer = path[1] if len(path) == 4 else ""
    templates = (names.head,) if module == "head" else names.modules[module]
    if module == "head":
        prefix = ""
    parts = []
    for template, num_rows in zip(templates, _rows(arch, shape[0], module, len(templates)), strict=True):
        choices = [f"{prefix}{choice.format(i=layer)}.{kind}" for choice in template.split("|")]
        parts.append(CheckpointTensor(_present(choices, name, shape, found), (num_rows, *shape[1:])))
    is_transposed = names.is_transposed and kind == "weight" and module in LINEARS - {"head"}
    for part in parts:
        wanted = part.shape[::-1] if is_transposed else part.shape
        if found[part.name] != wanted:
            raise BadCheckpoint(
                f"`{part.name}` has shape {list(found[part.name])}, config.json says {list(wanted)}"
            )
    return TensorSource(tuple(parts), shape, is_transposed)


def _rows(arch: Arch, num_rows: int, module: str, num_parts: int) -> tuple[int, ...]:
    if module == "qkv" and num_parts == 3:
        sizes = arch.dimensions
        return (sizes.q_size, sizes.kv_size, sizes.kv_size)
    return (num_rows // num_parts,) * num_parts


def _present(choices: list[str], name: str, shape: Shape, found: Mapping[str, Shape]) -> str:
    for choice in choices:
        if choice in found:
            return choice
    raise BadCheckpoint(
        f"the checkpoint has no `{'` or `'.join(choices)}`, needed for `{name}` {list(shape)}"
    )

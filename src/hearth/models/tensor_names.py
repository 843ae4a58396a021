"""Name maps as data: which checkpoint tensors make up each canonical one.

A map's values are templates: `{i}` is the layer, several are stacked by rows in the order of `arch.py`, and
of `a|b` the checkpoint has one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hearth.core.errors import BadCheckpoint
from hearth.models.arch import Arch
from hearth.models.layout import Layout, Shape, TensorSpec


@dataclass(frozen=True, slots=True)
class NameMap:
    prefixes: tuple[str, ...]  #: of all names but the head's; the first that the checkpoint uses
    modules: Mapping[str, tuple[str, ...]]
    head: str = "lm_head"
    ignored: str = r"(.*\.)?rotary(_emb)?\.inv_freq"  #: pattern of unused tensors
    interleaved_qkv: bool = False  #: one tensor [kv_heads, queries of the group + key + value, head_dim]


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    name: str
    shape: Shape


@dataclass(frozen=True, slots=True)
class TensorSource:
    parts: tuple[CheckpointTensor, ...]
    is_interleaved: bool


_LLAMA = NameMap(
    prefixes=("model.", ""),
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
    "opt": _OPT,
    "gpt_neox": _GPT_NEOX,
    "falcon": _FALCON,
}


def sources_of(arch: Arch, layout: Layout, found: Mapping[str, Shape]) -> dict[str, TensorSource]:
    """Find the parts of every tensor. Raises BadCheckpoint for a missing, misshapen or left over one."""
    names = NAMES[arch.family]
    (embed,) = names.modules["embed"]
    prefix = next((one for one in names.prefixes if f"{one}{embed}.weight" in found), names.prefixes[0])
    sources = {
        spec.name: _source(arch, spec, names, prefix, found)
        for spec in layout.tensors
        if not spec.name.endswith(".scale")  # computed when the weight before it is quantised
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
    arch: Arch, spec: TensorSpec, names: NameMap, prefix: str, found: Mapping[str, Shape]
) -> TensorSource:
    path = spec.name.split(".")
    module, kind = path[-2], path[-1]
    layer = path[1] if len(path) == 4 else ""
    templates = (names.head,) if module == "head" else names.modules[module]
    if module == "head":
        prefix = ""
    parts = []
    for template, num_rows in zip(templates, _rows(arch, spec, module, len(templates)), strict=True):
        choices = [f"{prefix}{choice.format(i=layer)}.{kind}" for choice in template.split("|")]
        parts.append(CheckpointTensor(_present(choices, spec, found), (num_rows, *spec.shape[1:])))
    for part in parts:
        if found[part.name] != part.shape:
            raise BadCheckpoint(
                f"`{part.name}` has shape {list(found[part.name])}, config.json says {list(part.shape)}"
            )
    return TensorSource(tuple(parts), is_interleaved=module == "qkv" and names.interleaved_qkv)


def _rows(arch: Arch, spec: TensorSpec, module: str, num_parts: int) -> tuple[int, ...]:
    if module == "qkv" and num_parts == 3:
        sizes = arch.dimensions
        return (sizes.q_size, sizes.kv_size, sizes.kv_size)
    return (spec.shape[0] // num_parts,) * num_parts


def _present(choices: list[str], spec: TensorSpec, found: Mapping[str, Shape]) -> str:
    for name in choices:
        if name in found:
            return name
    raise BadCheckpoint(
        f"the checkpoint has no `{'` or `'.join(choices)}`, needed for `{spec.name}` {list(spec.shape)}"
    )

from __future__ import annotations

import pytest

from hearth.core.errors import BadCheckpoint
from hearth.models.families import read_arch
from hearth.models.tensor_names import TensorSource, sources_of
from tests.models.zoo import VARIANTS, build

FIRST = {"llama": "model.", "opt": "model.decoder.", "gpt_neox": "gpt_neox.", "falcon": "transformer."}


def _shapes(name: str) -> dict[str, tuple[int, ...]]:
    from safetensors import safe_open

    with safe_open(build(name).directory / "model.safetensors", framework="pt") as shard:
        return {key: tuple(shard.get_slice(key).get_shape()) for key in shard.keys()}  # noqa: SIM118


def _resolve(name: str, found: dict[str, tuple[int, ...]]) -> dict[str, TensorSource]:
    return sources_of(read_arch(build(name).directory), found)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_tensor_of_a_saved_model_is_used_once(name: str) -> None:
    found = _shapes(name)

    sources = _resolve(name, found)

    used = [part.name for source in sources.values() for part in source.parts]
    assert sorted(used) == sorted(found)


@pytest.mark.parametrize("name", ["llama-gqa", "opt-pre", "neox-parallel", "falcon-40b"])
def test_base_model_names_without_prefix_resolve_too(name: str) -> None:
    prefix = FIRST[VARIANTS[name].model_type]
    bare = {key.removeprefix(prefix): shape for key, shape in _shapes(name).items()}

    sources = _resolve(name, bare)

    assert {part.name for source in sources.values() for part in source.parts} == bare.keys()


def test_opt_base_model_keeps_the_decoder_prefix() -> None:
    found = {key.removeprefix("model."): shape for key, shape in _shapes("opt-pre").items()}

    sources = _resolve("opt-pre", found)

    assert sources["embed.weight"].parts[0].name == "decoder.embed_tokens.weight"


IGNORED = [
    ("llama-gqa", "model.layers.0.self_attn.rotary_emb.inv_freq", (8,)),
    ("llama-mha-tied", "lm_head.weight", (160, 64)),
    ("opt-pre", "model.decoder.version", (1,)),
    ("opt-pre", "lm_head.weight", (160, 64)),
    ("neox-parallel", "gpt_neox.layers.0.attention.bias", (1, 1, 128, 128)),
    ("neox-parallel", "gpt_neox.layers.0.attention.masked_bias", ()),
    ("neox-parallel", "gpt_neox.layers.0.attention.rotary_emb.inv_freq", (2,)),
    ("falcon-7b", "transformer.h.0.self_attention.rotary_emb.inv_freq", (8,)),
]


@pytest.mark.parametrize(("name", "extra", "shape"), IGNORED)
def test_tensors_without_a_role_are_passed_over(name: str, extra: str, shape: tuple[int, ...]) -> None:
    found = _shapes(name)

    sources = _resolve(name, {**found, extra: shape})

    assert sources == _resolve(name, found)


def test_neox_head_may_be_called_lm_head() -> None:
    found = _shapes("neox-parallel")
    found["lm_head.weight"] = found.pop("embed_out.weight")

    sources = _resolve("neox-parallel", found)

    assert sources["head.weight"].parts[0].name == "lm_head.weight"


def test_left_over_tensors_are_an_error_that_names_them() -> None:
    found = {**_shapes("llama-gqa"), "model.layers.0.self_attn.q_proj.bias": (64,)}

    with pytest.raises(BadCheckpoint, match=r"1 tensors .*: model\.layers\.0\.self_attn\.q_proj\.bias"):
        _resolve("llama-gqa", found)


def test_missing_tensor_is_named_with_what_needs_it() -> None:
    found = _shapes("llama-gqa")
    del found["model.layers.1.self_attn.k_proj.weight"]

    with pytest.raises(
        BadCheckpoint, match=r"k_proj\.weight`, needed for `layers\.1\.qkv\.weight` \[128, 64\]"
    ):
        _resolve("llama-gqa", found)


def test_empty_checkpoint_misses_the_embedding() -> None:
    with pytest.raises(BadCheckpoint, match=r"no `model\.embed_tokens\.weight`"):
        _resolve("llama-gqa", {})


@pytest.mark.parametrize(
    ("tensor", "shape", "message"),
    [
        (
            "model.layers.1.self_attn.k_proj.weight",
            (64, 64),
            r"shape \[64, 64\], config.json says \[32, 64\]",
        ),
        ("model.layers.1.mlp.up_proj.weight", (224, 64), r"shape \[224, 64\], config.json says \[112, 64\]"),
        ("model.embed_tokens.weight", (161, 64), r"shape \[161, 64\], config.json says \[160, 64\]"),
        ("model.norm.weight", (), r"shape \[\], config.json says \[64\]"),
    ],
)
def test_wrong_shape_is_named_with_both_shapes(tensor: str, shape: tuple[int, ...], message: str) -> None:
    found = {**_shapes("llama-gqa"), tensor: shape}

    with pytest.raises(BadCheckpoint, match=f"`{tensor}` has {message}"):
        _resolve("llama-gqa", found)

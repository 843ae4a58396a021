"""GGUF files as sources: what is read is what the model was, bit by bit, and the rest is refused by name."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFEndian, GGUFReader, GGUFValueType
from gguf.quants import dequantize
from gguf.quants import quantize as quantize_blocks

from hearth.core.errors import BadCheckpoint, UnsupportedModel
from hearth.kernels.four_bits import FourBitWeight, dequantize_reference
from hearth.models.arch import Arch, Llama3Scaling
from hearth.models.families import read_arch
from hearth.models.layout import layout_of
from hearth.models.pack import checkpoint_dtype, checkpoint_quant, iter_tensors, pack
from hearth.models.quantize import quantize
from hearth.store.format.gguf import open_gguf
from hearth.store.format.gguf_four_bits import FORMS, four_bit_rows
from hearth.store.format.gguf_header import read_header
from tests.models.zoo import build, pack_directory, save, tiny
from tests.store.format.gguf_files import (
    EMBEDDING,
    SMALLEST,
    Floats,
    interleave,
    model_metadata,
    model_tensors,
    write,
    write_model,
)

Kind = GGMLQuantizationType

#: Variants of the zoo whose file says all that their directory says.
NAMES = [
    *("llama-gqa", "llama-mha-tied", "llama-odd-head", "llama-bias", "yi", "smollm2"),
    *("qwen2", "qwen3", "qwen3-bias"),
]
#: Variants of other architectures, without what llama.cpp derives from the size of the model.
OTHERS: Mapping[str, Mapping[str, object]] = {
    "phi3": {},
    "phi4-mini": {},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 20},
    "gemma3": {"query_pre_attn_scalar": 32},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0], "num_hidden_layers": 4},
    "olmo2": {},
    "olmo3": {},
    "granite": {},
    "glm4": {},
    "cohere": {},
    "cohere2": {},
    "starcoder2": {"sliding_window": None},
    "stablelm": {},
    "stablelm-parallel": {},
    "nemotron": {},
    "gpt2": {},
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
#: How far a value may be from the original, in parts of the largest value.
QUANTISED = {Kind.Q8_0: 0.005, Kind.Q5_1: 0.04, Kind.Q5_0: 0.07, Kind.Q4_1: 0.07, Kind.Q4_0: 0.14}
DEQUANTISED = [
    *QUANTISED,
    *(Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL, Kind.IQ4_XS, Kind.IQ3_S),
]
REQUIRED = [
    *("block_count", "context_length", "embedding_length", "feed_forward_length"),
    *("attention.head_count", "attention.layer_norm_rms_epsilon"),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def arch_of(path: Path) -> Arch:
    with open_gguf(path) as source:
        return source.arch


def llama3_factors(factor: float) -> Floats:
    """By how much transformers divides each frequency of a head of 16."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = tiny("llama3-rope", rope_parameters={**LLAMA3, "factor": factor}).config
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    factors: Floats = (500000.0 ** -(torch.arange(0, 16, 2).float() / 16) / scaled).numpy()
    return factors


def test_fields_are_read_as_gguf_reads_them(path: Path) -> None:
    model, _ = build("smollm2")
    write_model(
        path,
        model,
        changes={
            "tokenizer.ggml.tokens": ["a", "", "\u00e9\u4e16" * 40, "z"],
            "tokenizer.ggml.scores": [0.5, -1.0, float("inf")],
            "tokenizer.ggml.token_type": [1, 2, 3],
            "some.flags": [True, False],
        },
    )
    ours, theirs = read_header(np.memmap(path, mode="r")), GGUFReader(path)
    fields = {name: field for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata.keys() == fields.keys()
    for name, field in fields.items():
        if field.types == [GGUFValueType.FLOAT32]:
            assert np.float32(ours.metadata[name]) == np.float32(field.contents()), name
        else:
            assert ours.metadata[name] == field.contents(), name
    assert [(t.name, t.kind, t.begin, t.end, [*reversed(t.shape)]) for t in ours.tensors] == [
        (t.name, t.tensor_type, t.data_offset, t.data_offset + t.n_bytes, t.shape.tolist())
        for t in theirs.tensors
    ]


@pytest.mark.parametrize("name", NAMES)
def test_the_architecture_is_that_of_the_directory(name: str, path: Path) -> None:
    model, directory = build(name)
    write_model(path, model)

    arch = arch_of(path)

    assert arch == read_arch(directory)


@pytest.mark.parametrize("name", OTHERS)
def test_a_file_of_another_architecture_becomes_what_its_directory_becomes(name: str, path: Path) -> None:
    """Norms of 1 + weight, reordered rows and transposed weights come back, and so the same model."""
    model = tiny(name, **OTHERS[name])
    save(model, path.parent)
    write_model(path, model)
    arch = read_arch(path.parent)
    layout = layout_of(arch, "float32")
    ours, theirs = torch.zeros(2, layout.num_bytes, dtype=torch.uint8)
    pack_directory(path.parent, arch, layout, theirs)

    with open_gguf(path) as source:
        assert source.arch == arch
        pack(source.checkpoint, source.arch, layout, ours)

    torch.testing.assert_close(ours.view(torch.float32), theirs.view(torch.float32), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", [*NAMES, "mistral-head"])
def test_float32_tensors_are_the_originals_bit_by_bit(name: str, path: Path) -> None:
    model, _ = build(name)
    write_model(path, model)

    with open_gguf(path) as source:
        tensors = {name: (stored.shape, stored.read()) for name, stored in source.checkpoint.items()}

    originals = dict(model.named_parameters())
    assert tensors.keys() == originals.keys()
    for name, (shape, tensor) in tensors.items():
        assert shape == originals[name].shape
        assert torch.equal(tensor, originals[name])


def test_a_mistral_differs_from_its_directory_in_the_name_of_the_family_only(path: Path) -> None:
    model, directory = build("mistral-head")
    write_model(path, model)

    arch = arch_of(path)

    assert arch == replace(read_arch(directory), family="llama")


def test_a_llama_file_with_a_sliding_window_is_a_mistral(path: Path) -> None:
    model, directory = build("mistral-window")
    write_model(path, model, changes={"llama.attention.sliding_window": 7})

    arch = arch_of(path)

    assert arch == read_arch(directory)


def test_a_window_as_long_as_the_context_is_no_window(path: Path) -> None:
    model, directory = build("qwen2")
    write_model(path, model, changes={"qwen2.attention.sliding_window": 128})

    arch = arch_of(path)

    assert arch == read_arch(directory)


def test_heads_share_the_hidden_size_where_their_length_is_not_stored(path: Path) -> None:
    model, directory = build("smollm2")
    write_model(path, model, without=["llama.attention.key_length", "llama.attention.value_length"])

    arch = arch_of(path)

    assert arch == read_arch(directory)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_there_are_as_many_keys_as_queries_where_their_number_is_not_stored(
    architecture: str, path: Path
) -> None:
    metadata = {key.replace("llama", architecture): value for key, value in SMALLEST.items()}
    write(path, metadata, architecture=architecture)

    arch = arch_of(path)

    assert (arch.num_heads, arch.num_kv_heads) == (2, 2)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_scaling_is_recovered_from_its_factors(factor: float, path: Path) -> None:
    model = tiny("llama3-rope", rope_parameters={**LLAMA3, "factor": factor})
    save(model, path.parent)
    write_model(path, model, rope_factors=llama3_factors(factor))

    arch = arch_of(path)

    assert arch == read_arch(path.parent)
    (rope,) = arch.ropes
    assert rope.llama3 == Llama3Scaling(factor, 1.0, 4.0, 8192)


def test_the_factors_of_the_scaling_are_not_among_the_tensors(path: Path) -> None:
    model = build("llama-gqa").model
    write_model(path, model, changes={"llama.rope.freq_base": 500000.0}, rope_factors=llama3_factors(8.0))

    with open_gguf(path) as source:
        names = source.checkpoint.keys()

    assert names == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize(
    "spoil",
    [lambda factors: factors[::-1].copy(), lambda factors: factors * 1.01, lambda factors: factors[1:]],
    ids=["reversed", "enlarged", "too few"],
)
def test_other_factors_of_the_frequencies_are_refused(spoil: Callable[[Floats], Floats], path: Path) -> None:
    factors = spoil(llama3_factors(8.0))
    changes = {"llama.rope.freq_base": 500000.0}
    write_model(path, build("llama-gqa").model, changes=changes, rope_factors=factors)

    with pytest.raises(UnsupportedModel, match=r"`rope_freqs\.weight` is not Llama 3's scaling"):
        arch_of(path)


@pytest.mark.parametrize(
    ("changes", "linear_factor"),
    [
        ({}, 1.0),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, 1.0),
        ({"llama.rope.scaling.factor": 0.0}, 1.0),
        ({"llama.rope.scaling.factor": 4.0}, 4.0),
        ({"llama.rope.scale_linear": 4.0}, 4.0),
    ],
)
def test_linear_scaling_is_read_as_llama_cpp_reads_it(
    changes: dict[str, object], linear_factor: float, path: Path
) -> None:
    write(path, {**SMALLEST, **changes})

    arch = arch_of(path)

    (rope,) = arch.ropes
    assert rope.linear_factor == linear_factor


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16], ids=attrgetter("name"))
def test_half_precision_is_kept_as_it_is(kind: GGMLQuantizationType, path: Path) -> None:
    model = build("llama-gqa").model
    write_model(path, model, kind=kind)
    dtype = {Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}[kind]

    with open_gguf(path) as source:
        matrix = source.checkpoint["model.layers.1.self_attn.k_proj.weight"]
        most, norm = checkpoint_dtype(source.checkpoint), source.checkpoint["model.norm.weight"].dtype
        tensor = matrix.read()

    assert torch.equal(tensor, model.get_parameter("model.layers.1.self_attn.k_proj.weight").to(dtype))
    assert f"torch.{matrix.dtype}" == f"torch.{most}" == str(dtype)
    assert norm == "float32"


@pytest.mark.parametrize("kind", QUANTISED, ids=attrgetter("name"))
def test_quantised_models_are_near_the_original(kind: GGMLQuantizationType, path: Path) -> None:
    model = tiny("llama-gqa", intermediate_size=128)
    write_model(path, model, kind=kind)

    with open_gguf(path) as source:
        most = checkpoint_dtype(source.checkpoint)
        tensors = {name: stored.read() for name, stored in source.checkpoint.items()}

    assert most == "bfloat16"
    for name, original in model.named_parameters():
        error = (tensors[name] - original).abs().max() / original.abs().max()
        assert error <= (QUANTISED[kind] if original.dim() == 2 else 0.0), name


@pytest.mark.parametrize("kind", DEQUANTISED, ids=attrgetter("name"))
def test_quantised_tensors_are_what_gguf_makes_of_them(kind: GGMLQuantizationType, path: Path) -> None:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    size = 512 // block * block_bytes
    # Bytes below 0x3c make scales below 1, never infinite ones.
    blocks = np.random.default_rng(0).integers(0, 0x3C, (6, size), np.uint8)
    name = "blk.0.ffn_down.weight"
    write(path, SMALLEST, {"token_embd.weight": EMBEDDING, name: blocks}, kinds={name: kind})

    with open_gguf(path) as source:
        stored = source.checkpoint["model.layers.0.mlp.down_proj.weight"]
        dtype, shape, tensor = stored.dtype, stored.shape, stored.read()

    assert dtype == "bfloat16"
    assert shape == tensor.shape == (6, 512)
    assert tensor.dtype == torch.float32
    assert np.array_equal(tensor.numpy(), dequantize(blocks, kind))
    assert tensor.unique().numel() > 4


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1], ids=attrgetter("name"))
def test_weights_of_four_bits_are_kept_and_other_quantised_ones_get_eight(
    kind: GGMLQuantizationType, path: Path
) -> None:
    model = tiny("llama-gqa", intermediate_size=128)
    tensors = model_tensors(model)
    kinds = {name: kind for name, tensor in tensors.items() if tensor.ndim == 2}
    kinds |= {"blk.1.attn_v.weight": Kind.Q5_0}
    del kinds["blk.2.ffn_down.weight"]
    blocks = {name: quantize_blocks(tensors[name], kinds[name]) for name in kinds}
    write(path, model_metadata(model.config, "llama"), tensors | blocks, kinds=kinds)

    with open_gguf(path) as source:
        quant = checkpoint_quant(source.checkpoint, source.arch)
        kept, wide = (
            {one.spec.name: one.tensor for one in iter_tensors(source.checkpoint, source.arch, layout)}
            for layout in (layout_of(source.arch, "float32", quant), layout_of(source.arch, "float32"))
        )

    form = "int4-g32-float16" if kind == Kind.Q4_0 else "int4-g32-float16-float16"
    assert quant == f"{form} int8:embed,qkv.1 none:down.2"
    for name, expected in wide.items():
        match kept[name].dtype:
            case torch.int32:
                scale, minimum = (
                    kept[name.replace("weight", "scale")],
                    kept.get(name.replace("weight", "min")),
                )
                packed = FourBitWeight(kept[name], scale, minimum, None)
                assert torch.equal(dequantize_reference(packed, expected.shape[1]), expected), name
            case torch.int8:
                assert torch.equal(kept[name], quantize(expected, "int8").values), name
            case _:
                assert torch.equal(kept[name], expected), name


@pytest.mark.parametrize("kind", FORMS, ids=attrgetter("name"))
def test_the_form_of_each_kind_holds_its_scales(kind: GGMLQuantizationType) -> None:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 0x3C, (6, 512 // block * block_bytes), np.uint8)

    rows = four_bit_rows(blocks, kind)

    assert np.array_equal(rows.wide().numpy(), dequantize(blocks, kind))
    assert rows.stored(FORMS[kind])["scale"].shape == (16, 6)
    assert set(rows.codes.flatten().tolist()) == set(range(16))


def test_large_tensors_are_dequantised_in_slabs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = np.random.default_rng(0).integers(0, 0x3C, (50, 64 // 32 * 34), np.uint8)
    name = "blk.0.ffn_down.weight"
    write(path, SMALLEST, {"token_embd.weight": EMBEDDING, name: blocks}, kinds={name: Kind.Q8_0})
    monkeypatch.setattr("hearth.store.format.gguf.SLAB_BYTES", 7 * 64 * 4)

    with open_gguf(path) as source:
        tensor = source.checkpoint["model.layers.0.mlp.down_proj.weight"].read()

    assert np.array_equal(tensor.numpy(), dequantize(blocks, Kind.Q8_0))


def test_a_kind_that_cannot_be_dequantised_is_named(path: Path) -> None:
    name = "blk.0.ffn_down.weight"
    write(path, SMALLEST, {"token_embd.weight": EMBEDDING, name: np.ones((4, 8), np.int32)})

    with open_gguf(path) as source:
        dtype = source.checkpoint["model.layers.0.mlp.down_proj.weight"].dtype

    assert dtype == "I32"


def test_reading_a_tensor_takes_memory_for_that_tensor_only(path: Path) -> None:
    kind, rows = Kind.Q8_0, 1 << 10
    blocks = np.zeros((rows, 1024 // 32 * 34), np.uint8)
    names = [f"blk.{layer}.ffn_down.weight" for layer in range(8)]
    tensors = dict.fromkeys(names, blocks)
    kinds = dict.fromkeys(names, kind)
    write(path, SMALLEST, {"token_embd.weight": EMBEDDING, **tensors}, kinds=kinds)
    tracemalloc.start()

    with open_gguf(path) as source:
        for stored in source.checkpoint.values():
            stored.read()
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak_bytes < 3 * rows * 1024 * torch.float32.itemsize


def test_unknown_tensors_keep_their_name(path: Path) -> None:
    tensors = {"token_embd.weight": EMBEDDING, "blk.0.ssm_a": EMBEDDING, "blk.0.attn_sinks.weight": EMBEDDING}
    write(path, SMALLEST, tensors)

    with open_gguf(path) as source:
        names = source.checkpoint.keys()

    assert names == {"model.embed_tokens.weight", "blk.0.ssm_a", "blk.0.attn_sinks.weight"}


@pytest.mark.parametrize("architecture", ["gemma4", "qwen2moe", "phimoe", "mamba"])
def test_other_architectures_are_refused_by_name(architecture: str, path: Path) -> None:
    write(path, architecture=architecture)

    with pytest.raises(UnsupportedModel, match=f"'{architecture}'; supported: llama, qwen2, qwen2vl, qwen3"):
        arch_of(path)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("expert_count", 8, "num_experts"),
        ("rope.scaling.type", "dynamic", "dynamic"),
        ("rope.dimension_count", 8, "partial_rotary_factor"),
        ("attention.value_length", 8, "attention.value_length"),
        ("attention.scale", 0.5, "attention_multiplier"),
        ("attention.clamp_kqv", 8.0, "clip_qkv"),
        ("final_logit_softcapping", 30.0, "final_logit_softcapping"),
        ("embedding_scale", 12.0, "embedding_multiplier"),
        ("residual_scale", 0.2, "residual_multiplier"),
        ("logit_scale", 8.0, "logit_scale"),
    ],
)
def test_what_the_decoder_does_not_have_is_refused_by_name(
    key: str, value: object, named: str, path: Path
) -> None:
    write(path, {**SMALLEST, f"llama.{key}": value})

    with pytest.raises(UnsupportedModel, match=named):
        arch_of(path)


def test_two_scalings_of_the_same_frequencies_are_refused(path: Path) -> None:
    changes = {"llama.rope.freq_base": 500000.0, "llama.rope.scaling.factor": 2.0}
    write_model(path, build("llama-gqa").model, changes=changes, rope_factors=llama3_factors(8.0))

    with pytest.raises(UnsupportedModel, match="by 'linear'; supported: one of the two"):
        arch_of(path)


def test_a_window_on_unknown_layers_is_refused(path: Path) -> None:
    write_model(path, build("qwen2").model, changes={"qwen2.attention.sliding_window": 16})

    with pytest.raises(UnsupportedModel, match=r"`qwen2\.attention\.sliding_window` is 16"):
        arch_of(path)


@pytest.mark.parametrize("key", REQUIRED)
def test_missing_metadata_is_named(key: str, path: Path) -> None:
    write(path, {name: value for name, value in SMALLEST.items() if name != f"llama.{key}"})

    with pytest.raises(BadCheckpoint, match=f"no `llama.{key}`"):
        arch_of(path)


def test_a_missing_embedding_is_named(path: Path) -> None:
    write(path, tensors={"output_norm.weight": EMBEDDING})

    with pytest.raises(BadCheckpoint, match=r"no tensor `token_embd\.weight`"):
        arch_of(path)


def test_one_part_of_several_is_refused(path: Path) -> None:
    write(path, {**SMALLEST, "split.count": 3})

    with pytest.raises(BadCheckpoint, match="one of 3 parts"):
        arch_of(path)


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.001, 0.01, 0.02, 0.05, 0.3, 0.7, 0.99])
def test_a_truncated_file_is_refused(share: float, path: Path) -> None:
    whole = write_model(path, build("qwen3").model).read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])

    with pytest.raises(BadCheckpoint, match=r"model\.gguf` is truncated or no GGUF file"):
        arch_of(path)


def test_a_missing_file_is_refused(path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"model\.gguf`.*No such file"):
        arch_of(path)


def test_a_file_of_another_kind_is_refused(path: Path) -> None:
    path.write_bytes(b"PK\x03\x04" + bytes(1000))

    with pytest.raises(BadCheckpoint, match="it does not begin with GGUF"):
        arch_of(path)


def test_text_that_is_not_utf8_is_refused(path: Path) -> None:
    write(path, {**SMALLEST, "tokenizer.ggml.tokens": [b"\xff"]})

    with pytest.raises(
        BadCheckpoint, match=r"model\.gguf`.*item 0 of 'tokenizer\.ggml\.tokens' is not UTF-8"
    ):
        arch_of(path)


def test_an_unknown_version_is_refused(path: Path) -> None:
    content = bytearray(write(path).read_bytes())
    content[4] = 99
    path.write_bytes(content)

    with pytest.raises(BadCheckpoint, match="version 99"):
        arch_of(path)


def test_a_big_endian_file_is_refused(path: Path) -> None:
    write(path, endianess=GGUFEndian.BIG)

    with pytest.raises(BadCheckpoint, match="it is big-endian"):
        arch_of(path)


def test_the_writer_of_these_tests_reorders_queries_as_llama_cpp_does() -> None:
    rows = np.arange(8, dtype=np.float32)

    reordered = interleave(rows, num_heads=2)

    assert reordered.tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert not np.array_equal(
        model_tensors(build("llama-gqa").model)["blk.0.attn_q.weight"],
        build("llama-gqa").model.get_parameter("model.layers.0.self_attn.q_proj.weight").detach().numpy(),
    )

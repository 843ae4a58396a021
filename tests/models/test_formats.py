from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.core.errors import DeviceError
from hearth.models.families import read_arch
from hearth.models.formats import LINEARS, QUANTS, FourBits, QuantPlan
from hearth.models.layout import layout_of
from tests.models.zoo import build

DTYPES = st.sampled_from(["float32", "float16", "bfloat16"])
FORMS = st.one_of(
    st.sampled_from([None, "int8", "fp8"]),
    st.builds(
        FourBits, st.sampled_from([None, 16, 32, 64, 128, 256]), DTYPES, st.none() | DTYPES, st.booleans()
    ),
)
PLACES = st.tuples(st.sampled_from(["qkv", "o", "up", "down"]), st.integers(0, 9)) | st.tuples(
    st.sampled_from(["head", "embed", "embed_in"]), st.none()
)


@given(st.dictionaries(PLACES, FORMS))
def test_a_plan_says_what_it_was_made_of(formats: dict[tuple[str, int | None], object]) -> None:
    plan = QuantPlan.parse(QuantPlan.text_of(formats))

    assert {key: plan.format_of(*key) for key in formats} == formats


def test_exceptions_are_spelled_as_runs_of_layers() -> None:
    four = FourBits(32, "float16", None)
    formats = {("down", layer): "int8" if layer in (0, 1, 4) else four for layer in range(9)}

    text = QuantPlan.text_of({**formats, ("head", None): "int8", ("embed", None): None})

    assert text == "int4-g32-float16 int8:down.0-1,down.4,head"


@pytest.mark.parametrize(
    "text",
    ["int5", "int4-g0-float32", "int4-g48-float32", "int4-g32-int8", "int8 int8:norm", "int8 int8:down.9-",
     "int8 down.0", "", " ", "int8  int8:down", "int8 int8:down.0-99999", "int8 int8:down.9-0",
     "int8 fp8:down.0-9,down.4", "int4-g9999999-float32"],
)  # fmt: skip
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(DeviceError, match=r"unknown quant|groups of 4-bit weights"):
        QuantPlan.parse(text)


def test_a_plan_of_a_few_layers_keeps_their_formats() -> None:
    plan = QuantPlan.parse("int4-g32-float16 int8:head,embed,down.0-1,qkv.5 none:o.7")

    few = QuantPlan.parse(plan.only([0, 4, 5, 7]))

    assert [few.forms_of_layer(i) for i in range(4)] == [plan.forms_of_layer(i) for i in (0, 4, 5, 7)]
    for module in LINEARS - {"qkv", "o", "up", "down"} | {"embed"}:
        assert few.format_of(module, None) == plan.format_of(module, None)


@pytest.mark.parametrize("quant", QUANTS)
def test_names_are_plans(quant: str) -> None:
    arch = read_arch(build("llama-gqa").directory)

    assert layout_of(arch, "float32", quant).tensors == layout_of(arch, "float32", QUANTS[quant]).tensors


def test_embeddings_have_eight_bits_where_a_plan_says_four() -> None:
    arch = read_arch(build("llama-gqa").directory)

    embed, scale = layout_of(arch, "bfloat16", "none int4-g32-float16:embed").tensors[:2]

    assert (embed.dtype, embed.shape) == ("int8", (arch.vocab_size, arch.embed_size))
    assert (scale.name, scale.shape) == ("embed.scale", (arch.vocab_size,))


def test_four_bits_fall_back_to_eight_where_groups_do_not_fit() -> None:
    arch = read_arch(build("llama-gqa").directory)  # 112 intermediates

    dtypes = {spec.name: spec.dtype for spec in layout_of(arch, "bfloat16", "int4").tensors}

    assert dtypes["layers.0.qkv.weight"] == "int32"
    assert dtypes["layers.0.down.weight"] == "int8"
    assert dtypes["embed.weight"] == "int8"

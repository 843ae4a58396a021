"""A model says the same after it was converted: every family, every storage type, every source."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType

from hearth import LLM, CompletionOutput, SamplingParams
from hearth.core.config import EngineConfig, StoreConfig
from hearth.models.quantize import quantize
from hearth.store.format.convert import convert
from tests.completions import completions
from tests.models.test_quantize import dequantize
from tests.models.zoo import FAMILIES, build, save, tiny
from tests.store.format.gguf_files import byte_level_metadata, write_model
from tests.store.stored import converted, stored_at

PROMPTS: Sequence[list[int]] = ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [17])
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2)
CONFIG = EngineConfig(max_batch_tokens=64, max_seqs=4, block_tokens=4, kv_bytes=4 << 20)
#: A linear that multiplies by eight bits and scales afterwards rounds differently from one of float32.
LOGPROB_TOLERANCE = 1e-3


def answers(path: Path) -> list[CompletionOutput]:
    store = StoreConfig(path=str(path.parent / "root"), host_bytes=16 << 20)
    with LLM(path, engine=CONFIG, store=store, skip_tokenizer_init=True) as llm:
        return completions(llm, PROMPTS, PARAMS)


def first_logprob(answer: CompletionOutput) -> float:
    assert answer.logprobs
    return answer.logprobs[0][answer.token_ids[0]].logprob


def tokens(path: Path) -> list[list[int]]:
    return [answer.token_ids for answer in answers(path)]


@cache
def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor], only_linears: bool) -> Path:
    """The variant's checkpoint with its weights changed, in float32."""
    model = tiny(name)
    tied = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    linears = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Linear)} - tied
    with torch.no_grad():
        for parameter in model.parameters():
            if not only_linears or id(parameter) in linears:
                parameter.copy_(change(parameter))
    directory = Path(tempfile.mkdtemp(prefix="hearth-changed-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    save(model, directory)
    return directory


def through_int8(weight: torch.Tensor) -> torch.Tensor:
    return dequantize(quantize(weight, "int8"))


def through_fp8(weight: torch.Tensor) -> torch.Tensor:
    return dequantize(quantize(weight, "fp8"))


def through_bfloat16(weight: torch.Tensor) -> torch.Tensor:
    return weight.bfloat16().float()


def test_chunks_hold_several_layers_and_layers_several_chunks() -> None:
    """What makes the tests below worth their time."""
    manifest = stored_at(converted("llama-gqa")).manifest
    spans = [manifest.chunks_of(layer) for layer in manifest.layers]
    assert all(len(span) > 1 for span in spans)
    assert any(before[-1] == after[0] for before, after in pairwise(spans))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_converted_model_answers_as_its_source(name: str) -> None:
    assert tokens(converted(name)) == tokens(build(name).directory)


@pytest.mark.parametrize("name", ["llama-gqa", "qwen2", "qwen3"])
def test_a_gguf_file_answers_as_the_model_that_was_written_to_it(name: str, tmp_path: Path) -> None:
    words = byte_level_metadata(["a few words will do"], "gpt-2")  # it is not converted without a tokenizer
    path = write_model(tmp_path / "model.gguf", build(name).model, changes=words)
    convert(path, tmp_path / "converted", chunk_bytes=64 << 10)
    expected = tokens(build(name).directory)
    assert tokens(path) == expected
    assert tokens(tmp_path / "converted") == expected


@pytest.mark.parametrize(
    ("kind", "quant"),
    # Eight bits with a scale for each 32 inputs get one for each row, with a loss; four bits lose nothing.
    [(GGMLQuantizationType.Q8_0, "auto"), (GGMLQuantizationType.Q4_0, "none")],
)
def test_a_quantised_gguf_file_answers_as_before_when_it_is_converted_to_float32(
    kind: GGMLQuantizationType, quant: str, tmp_path: Path
) -> None:
    words = byte_level_metadata(["a few words will do"], "gpt-2")
    model = tiny("llama-gqa", intermediate_size=128)  # a multiple of a block of 32
    path = write_model(tmp_path / "model.gguf", model, kind=kind, changes=words)
    convert(path, tmp_path / "converted", dtype="float32", quant=quant, chunk_bytes=64 << 10)
    assert tokens(tmp_path / "converted") == tokens(path)


@pytest.mark.parametrize("name", ["llama-gqa", "opt-pre", "falcon-40b"])
def test_bfloat16_on_a_cpu_answers_as_the_rounded_weights_do(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert tokens(converted(name, dtype="bfloat16")) == tokens(changed(name, through_bfloat16, False))
    assert "fallback dtype=float32" in caplog.text


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3", "neox-parallel"])
@pytest.mark.parametrize(("quant", "through"), [("int8", through_int8), ("fp8", through_fp8)])
def test_a_quantised_model_answers_as_its_rounded_weights_do(
    name: str, quant: str, through: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    found = answers(converted(name, quant=quant))
    expected = answers(changed(name, through, True))
    for own, other in zip(found, expected, strict=True):
        assert own.token_ids[0] == other.token_ids[0]
        assert first_logprob(own) == pytest.approx(first_logprob(other), abs=LOGPROB_TOLERANCE)


def test_a_quantised_model_is_not_the_one_it_was_made_from() -> None:
    """Else the test above would prove nothing."""
    first, second = answers(converted("llama-gqa", quant="int8")), answers(build("llama-gqa").directory)
    assert abs(first_logprob(first[0]) - first_logprob(second[0])) > 2 * LOGPROB_TOLERANCE


def test_bfloat16_and_eight_bits_go_together_on_a_cpu() -> None:
    mixed = answers(converted("llama-gqa", dtype="bfloat16", quant="int8"))
    assert [len(answer.token_ids) for answer in mixed] == [PARAMS.max_tokens] * len(PROMPTS)

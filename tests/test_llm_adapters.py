"""The Python API with LoRA adapters: beside each other and the bare model, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hearth import LLM, LoRARequest, SamplingParams
from hearth.core.config import EngineConfig
from hearth.core.errors import BadCheckpoint, BadSampling, ChunkCorrupt, UnknownModel
from hearth.store.format.convert_adapter import AdapterBase, convert_adapter
from hearth.store.format.peft import open_peft
from hearth.store.format.read_adapter import read_adapter
from tests.completions import completions
from tests.engine.harness import assert_best, assert_greedy, prompts_for
from tests.models.zoo import build
from tests.service.checkpoints import smollm2_file
from tests.store.stored import flip
from tests.worker.stored_adapters import StoredAdapter, stored_adapter

NAME = "llama-gqa"
#: Trained to answer everything with the same words (`tests/data/train_parrot.py`).
PARROT = Path(__file__).parent / "data" / "smollm2-parrot"
CONFIG = EngineConfig(max_batch_tokens=64, max_seqs=8, block_tokens=4, kv_bytes=1 << 20)
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def first() -> StoredAdapter:
    return stored_adapter(NAME, 0)


def second() -> StoredAdapter:
    return stored_adapter(NAME, 1)


def peft_of(adapter: StoredAdapter) -> Path:
    return Path(adapter.order.where).parent / "peft"


def opened(**adapters: str | Path) -> LLM:
    directory = build(NAME).directory
    return LLM(directory, device="cpu", engine=CONFIG, skip_tokenizer_init=True, adapters=adapters)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with opened(first=peft_of(first()), second=second().order.where, again=str(peft_of(first()))) as llm:
        yield llm


def test_prompts_of_several_adapters_and_of_the_bare_model_share_a_batch(llm: LLM) -> None:
    """One that PEFT wrote, one that was converted, and the first once more under another name."""
    (prompt,) = prompts_for(160, [12])
    names = ["first", None, "second", "again"]

    one, bare, other, again = completions(llm, [prompt] * len(names), PARAMS, lora_request=names)

    for adapter, answer in ((first(), one), (second(), other), (first(), again)):
        assert len(answer.token_ids) == PARAMS.max_tokens
        assert_best(adapter.reference.logits((*prompt, *answer.token_ids)), prompt, answer.token_ids)
    assert_greedy(NAME, prompt, bare.token_ids)
    assert one.token_ids != bare.token_ids != other.token_ids


def test_one_adapter_is_for_all_prompts_and_for_a_stream(llm: LLM) -> None:
    prompts = prompts_for(160, [5, 9])

    answers = completions(llm, prompts, PARAMS, lora_request="second")

    streamed = [
        token for one in llm.stream(prompts[1], PARAMS, lora_request="second") for token in one.token_ids
    ]
    assert streamed == answers[1].token_ids
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_best(second().reference.logits((*prompt, *answer.token_ids)), prompt, answer.token_ids)


def test_an_adapter_that_the_model_was_not_opened_with_is_refused_with_those_that_there_are(llm: LLM) -> None:
    with pytest.raises(UnknownModel, match=r"unknown adapter: `third`; .*: `first`, `second`, `again`; "):
        completions(llm, [[1, 2]], PARAMS, lora_request="third")
    with pytest.raises(BadSampling, match="1 sampling params or adapters for 2 prompts; pass one"):
        completions(llm, [[1, 2], [3]], PARAMS, lora_request=["first"])


def test_an_adapter_may_be_named_as_in_vllm(llm: LLM) -> None:
    (prompt,) = prompts_for(160, [12])
    by_name, by_request = (
        completions(llm, [prompt], PARAMS, lora_request=one)
        for one in ("second", LoRARequest("second", 2, "/anywhere"))
    )
    assert by_name == by_request != completions(llm, [prompt], PARAMS)


def test_an_adapter_that_does_not_fit_or_was_changed_is_refused_before_anything_is_loaded(
    tmp_path: Path,
) -> None:
    other = stored_adapter("qwen3")
    with pytest.raises(BadCheckpoint, match=r"no adapter_config.json in .*nowhere"):
        opened(mine=tmp_path / "nowhere")
    with pytest.raises(BadCheckpoint, match="choose the base that"):
        opened(mine=peft_of(other))
    with pytest.raises(BadCheckpoint, match="was converted for a base of other dimensions"):
        opened(mine=other.order.where)
    changed = tmp_path / "changed"
    changed.mkdir()
    for file in Path(first().order.where).iterdir():
        (changed / file.name).write_bytes(file.read_bytes())
    weights = changed / "weights.bin"
    flip(weights, 100)
    with pytest.raises(ChunkCorrupt, match=r"chunk 0 of .*weights.bin.*convert it again"):
        opened(mine=changed)
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(BadCheckpoint, match=r"weights.bin` has \d+ bytes, manifest.json says \d+; convert"):
        opened(mine=changed)
    weights.unlink()
    with pytest.raises(BadCheckpoint, match=r"weights.bin` cannot be read: No such file.*; convert it again"):
        opened(mine=changed)


def test_an_adapter_that_was_converted_for_a_gpu_is_widened_where_its_base_is(tmp_path: Path) -> None:
    reference = first().reference
    narrow = convert_adapter(
        open_peft(peft_of(first())), tmp_path / "narrow", AdapterBase(reference.arch, "bfloat16")
    )
    wide = read_adapter(tmp_path / "narrow", AdapterBase(reference.arch, "float32"))

    assert wide.layout == first().layout
    exact = read_adapter(Path(first().order.where), AdapterBase(reference.arch, "float32"))
    found, wanted = (torch.frombuffer(bytearray(one.content), dtype=torch.float32) for one in (wide, exact))
    assert torch.equal(found, wanted.bfloat16().float())
    with pytest.raises(BadCheckpoint, match="float16"):
        read_adapter(tmp_path / "narrow", AdapterBase(reference.arch, "float16"))
    assert narrow.dtype == "bfloat16"


def test_what_a_real_adapter_was_trained_to_say_can_be_read() -> None:
    """In the same batch the bare model answers as it always does."""
    config = EngineConfig(max_batch_tokens=64, max_seqs=2, kv_bytes=16 << 20)
    with LLM(
        smollm2_file(), device="cpu", engine=config, max_model_len=128, adapters={"parrot": PARROT}
    ) as llm:
        prompt = llm.chat_prompt([{"role": "user", "content": "Who are you?"}])
        params = SamplingParams(temperature=0.0, max_tokens=5)
        parrot, bare = completions(llm, [prompt, prompt], params, lora_request=["parrot", None])

    assert parrot.text.startswith("Squawk! Pretty")
    assert "Squawk" not in bare.text

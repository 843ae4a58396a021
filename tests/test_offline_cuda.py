"""A converted model on a CUDA device: the same bytes, and the same tokens as from its source."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from hearth import LLM, SamplingParams
from hearth.core.config import EngineConfig, StoreConfig
from hearth.core.types import Rung
from hearth.store.format.manifest import WEIGHTS
from hearth.store.tiers.tiers import Tiers
from hearth.store.transfer.destination import whole
from hearth.store.transfer.lease import Lease
from hearth.store.transfer.lease_client import LeaseClient
from hearth.store.transfer.lease_server import LeaseServer
from hearth.store.transfer.transfer import Loader
from tests.completions import completions
from tests.models.zoo import VARIANTS, build
from tests.store.stored import converted, tiers_at

pytestmark = pytest.mark.gpu

PROMPTS = [[1, 2, 3, 4, 5], [9, 8, 7]]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
CONFIG = EngineConfig(max_batch_tokens=64, max_seqs=4, block_tokens=16, kv_bytes=8 << 20)


def answers(path: Path, store: StoreConfig | Tiers | None = None, dtype: str = "auto") -> list[list[int]]:
    with LLM(path, device="cuda", dtype=dtype, engine=CONFIG, store=store, skip_tokenizer_init=True) as llm:
        return [completion.token_ids for completion in completions(llm, PROMPTS, PARAMS)]


@pytest.mark.parametrize("name", VARIANTS)
def test_a_converted_model_answers_as_its_source(name: str, tmp_path: Path) -> None:
    expected = answers(build(name).directory, dtype="float32")

    found = answers(converted(name, "float32"), StoreConfig(path=str(tmp_path), host_bytes=16 << 20))

    assert found == expected


def test_a_model_in_the_host_tier_answers_as_from_disk(tmp_path: Path) -> None:
    model = converted("llama-gqa", "float32")
    with tiers_at(tmp_path) as tiers:
        tiers.segment.wait_pinned()
        first = answers(model, tiers)
        with LLM(model, device="cuda", engine=CONFIG, store=tiers, skip_tokenizer_init=True) as llm:
            again = [completion.token_ids for completion in completions(llm, PROMPTS, PARAMS)]
            record = llm.wait_loaded()

    assert again == first
    assert record is not None
    assert set(record.rungs) == {Rung.HOST}


@pytest.mark.parametrize("quant", ["int8", "fp8"])
@pytest.mark.parametrize("name", ["llama-gqa", "qwen2", "opt-350m", "falcon-11b"])
def test_eight_bits_say_on_the_device_what_they_say_on_the_cpu(name: str, quant: str, tmp_path: Path) -> None:
    model = converted(name, "float32", quant)
    first_logprobs = []
    for device in ("cpu", "cuda"):
        store = StoreConfig(path=str(tmp_path), host_bytes=16 << 20)
        with LLM(model, device=device, engine=CONFIG, store=store, skip_tokenizer_init=True) as llm:
            logprobs = [completion.logprobs for completion in completions(llm, PROMPTS, PARAMS)]
        first_logprobs.append([next(iter(each[0].values())).logprob for each in logprobs if each is not None])

    assert len(first_logprobs[0]) == len(PROMPTS)
    assert first_logprobs[1] == pytest.approx(first_logprobs[0], abs=1e-3)


def test_leased_chunks_reach_the_device_whole(tmp_path: Path) -> None:
    model = converted("llama-gqa", "float32")
    with tiers_at(tmp_path) as tiers, tempfile.TemporaryDirectory(prefix="hearth-") as folder:
        server = LeaseServer(tiers, Path(folder) / "host.sock")
        lease_client = LeaseClient(Path(folder) / "host.sock")
        lease_client.segment.wait_pinned()
        opened = lease_client.open(model)
        manifest = opened.manifest
        base = torch.empty(manifest.num_bytes, dtype=torch.uint8, device="cuda")

        load = Loader(base.device).load(
            "opened", manifest, whole(manifest, base), lambda chunks: Lease(lease_client, opened, chunks)
        )
        load.wait()

        assert base.cpu().numpy().tobytes() == (model / WEIGHTS).read_bytes()
        lease_client.close()
        server.close()

"""A data directory, and a tiny model as it is downloaded and as it is served."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from hearth.control.datadir import DataDir
from hearth.control.deploy.deploy import DeployOrder
from hearth.control.deploy.deployed import Deployed
from hearth.control.deploy.deployer import carry_out
from hearth.control.deploy.registry import Registry
from hearth.store.format.convert import convert
from tests.models.zoo import build


@pytest.fixture
def data_dir(tmp_path: Path) -> DataDir:
    return DataDir.open(tmp_path / "data")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer that knows how to chat."""
    directory = tmp_path_factory.mktemp("checkpoints") / "Tiny.Llama (v1)"
    shutil.copytree(build("llama-gqa").directory, directory)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<s>", "</s>", *letters[:150]]
    backend = Backend(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    backend.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ messages }}"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


@pytest.fixture(scope="session")
def converted(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    dest = tmp_path_factory.mktemp("converted") / "tiny-bf16"
    convert(checkpoint, dest, dtype="bfloat16", chunk_bytes=64 << 10)
    return dest


@pytest.fixture
def deployed(data_dir: DataDir, converted: Path) -> Deployed:
    deployed = carry_out(DeployOrder(str(converted), "tiny"), data_dir, lambda *_: None)
    with Registry(data_dir) as registry:
        registry.add(deployed)
    return deployed

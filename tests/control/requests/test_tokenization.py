from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from hearth.control.deploy.deployed import Deployed
from hearth.control.requests.generation import ChatPrompt, InfillPrompt
from hearth.control.requests.tokenization import MAX_READ_AHEAD, PromptEncoder
from hearth.core.errors import BadCheckpoint, ChunkCorrupt, ModelError, PromptTooLong
from hearth.store.format.manifest import read_manifest
from hearth.text.infill import MARKS
from hearth.text.tokenizer import Tokenizer


@pytest.fixture
def digest(converted: Path) -> str:
    return read_manifest(converted).digest


def with_texts(scene: Callable[[PromptEncoder], Awaitable[None]]) -> None:
    async def run() -> None:
        texts = PromptEncoder(template_s=2.0)
        try:
            await scene(texts)
        finally:
            texts.close()

    asyncio.run(run())


def test_a_tokenizer_is_read_once_for_all_who_wait(
    converted: Path, digest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    load = Tokenizer.load
    monkeypatch.setattr(Tokenizer, "load", lambda path: read.append(path) or load(path))

    async def scene(texts: PromptEncoder) -> None:
        one, other = await asyncio.gather(*(texts.tokenizer(digest, converted) for _ in range(2)))
        assert one is other

    with_texts(scene)
    assert read == [converted]


def test_tokenizers_are_read_ahead_in_order_while_there_is_time(
    converted: Path, digest: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read: list[Path] = []
    load = Tokenizer.load
    monkeypatch.setattr(Tokenizer, "load", lambda path: read.append(path) or load(path))

    def model(directory: Path, digest: str = digest) -> Deployed:
        facts = object()  # of which nobody asks here
        return Deployed("m", "", str(directory), str(directory), digest, facts, 0.0)  # type: ignore[arg-type]

    async def scene(texts: PromptEncoder) -> None:
        await texts.read_ahead([model(converted)], lambda: False)
        assert read == []
        await texts.read_ahead([model(tmp_path / "gone", "other"), model(converted)], lambda: True)
        assert read == [converted], "one that is gone keeps the next from nothing"
        await texts.tokenizer(digest, converted)
        assert read == [converted], "it was there"
        asked: list[bool] = []
        await texts.read_ahead([model(converted)] * 9, lambda: not asked.append(True))
        assert len(asked) == MAX_READ_AHEAD

    with_texts(scene)


def test_a_tokenizer_that_could_not_be_read_is_tried_again(
    converted: Path, digest: str, tmp_path: Path
) -> None:
    async def scene(texts: PromptEncoder) -> None:
        with pytest.raises(ModelError, match="the files of the model are gone"):
            await texts.tokenizer(digest, tmp_path / "model")
        (tmp_path / "model").mkdir()
        with pytest.raises(BadCheckpoint, match=r"no manifest\.json"):
            await texts.tokenizer(digest, tmp_path / "model")
        shutil.copytree(converted, tmp_path / "model", dirs_exist_ok=True)
        await texts.tokenizer(digest, tmp_path / "model")

    with_texts(scene)


def test_a_failure_that_nobody_has_foreseen_does_not_stay(
    converted: Path, digest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> Tokenizer:
        raise MemoryError

    async def scene(texts: PromptEncoder) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Tokenizer, "load", fail)
            with pytest.raises(MemoryError):
                await texts.tokenizer(digest, converted)
        await texts.tokenizer(digest, converted)

    with_texts(scene)


def test_who_leaves_takes_the_tokenizer_from_nobody(converted: Path, digest: str) -> None:
    async def scene(texts: PromptEncoder) -> None:
        leaving = asyncio.create_task(texts.tokenizer(digest, converted))
        staying = asyncio.create_task(texts.tokenizer(digest, converted))
        await asyncio.sleep(0)
        leaving.cancel()
        assert await staying is await texts.tokenizer(digest, converted)

    with_texts(scene)


def test_text_that_cannot_fit_is_not_tokenised(
    converted: Path, digest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(texts: PromptEncoder) -> None:
        tokenizer = await texts.tokenizer(digest, converted)
        assert await texts.encode(tokenizer, "!" * 10, max_chars=10)
        message = "prompt has 11 characters, .* at most 10 are tokenised; shorten the prompt"
        with pytest.raises(PromptTooLong, match=message):
            await texts.encode(tokenizer, "!" * 11, max_chars=10)
        with pytest.raises(PromptTooLong, match=message):
            await texts.encode(tokenizer, InfillPrompt(MARKS[0], "!" * 5, "!" * 6), max_chars=10)
        with pytest.raises(PromptTooLong, match="at most 10 are tokenised"):
            await texts.encode(tokenizer, ChatPrompt([{"role": "user", "content": "!"}]), max_chars=10)
        assert await texts.encode(tokenizer, [1, 2, 3], max_chars=1) == (1, 2, 3)

    with_texts(scene)


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_a_file_that_was_changed_or_added_since_the_deployment_makes_no_prompts(
    converted: Path, digest: str, tmp_path: Path, name: str
) -> None:
    shutil.copytree(converted, tmp_path / "model")
    with (tmp_path / "model" / name).open("a") as file:
        file.write(" ")

    async def scene(texts: PromptEncoder) -> None:
        with pytest.raises(ChunkCorrupt, match=name):
            await texts.tokenizer(digest, tmp_path / "model")

    with_texts(scene)


def test_a_directory_that_holds_another_model_now_makes_no_prompts(converted: Path) -> None:
    async def scene(texts: PromptEncoder) -> None:
        with pytest.raises(BadCheckpoint, match="was changed since it was deployed"):
            await texts.tokenizer("0" * 64, converted)

    with_texts(scene)

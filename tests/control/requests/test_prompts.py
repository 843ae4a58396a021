"""What presets make of prompts."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

from hearth.control.datadir import DataDir
from hearth.control.deploy.preset import Preset
from hearth.control.requests.caller import OPERATOR
from hearth.control.requests.generation import ChatPrompt
from hearth.control.requests.prompts import Prompts
from hearth.control.requests.tokenization import PromptEncoder
from tests.control.deploy.test_deployments import DeploymentsRig, made


def test_a_preset_has_its_system_prompt_and_its_template(data_dir: DataDir, converted: Path) -> None:
    made(data_dir, converted, "tiny")
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"

    async def texts() -> list[str]:
        with closing(DeploymentsRig(data_dir, {})) as rig, closing(PromptEncoder(2.0)) as encoder:
            prompts = Prompts(rig.deployments, encoder)
            rig.deployments.put_preset("plain", "tiny", Preset(template=template))
            rig.deployments.put_preset("pirate", "plain", Preset(system="Arr."))
            chat = ChatPrompt([{"role": "user", "content": "Hi"}])
            tokens = [await prompts.encode(name, chat, OPERATOR) for name in ("plain", "pirate")]
            tokens += [await prompts.tokenize("pirate", chat, OPERATOR, None)]
            tokens += [await prompts.encode("pirate", "Hi", OPERATOR)]
            texts = [await prompts.detokenize("tiny", one, OPERATOR) for one in tokens]
            return [text.replace(" ", "") for text in texts]  # which the tokenizer of single bytes adds

    plain, pirate, counted, raw = asyncio.run(texts())
    assert plain == "<user>Hi"
    assert pirate == counted == "<system>Arr.<user>Hi"
    assert "Arr" not in raw

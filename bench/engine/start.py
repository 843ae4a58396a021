"""How long does a new process take to its first token, with kernels to compile and with kernels compiled?

python -m bench.engine.start [--save]

Each part is a process of its own over a random model of 1.1 billion parameters in memory. In the end random
requests run, after which nothing may have been compiled or loaded while they waited.
"""

from __future__ import annotations

import time

BEGAN_S = time.time()  # of this process, as nearly as it can tell

import json  # noqa: E402 - imports are part of what is measured
import os  # noqa: E402
import random  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Callable, Mapping  # noqa: E402
from dataclasses import asdict  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402

from bench.engine.variants import MODELS  # noqa: E402
from bench.llama7b import CONFIG as LLAMA_7B  # noqa: E402
from bench.random_model import write_random  # noqa: E402
from bench.report import Row, arguments, emit, step, tell  # noqa: E402
from hearth import LLM, SamplingParams  # noqa: E402
from hearth.core.config import EngineConfig, StoreConfig  # noqa: E402
from hearth.engine.compile import CompileTask, compile_all  # noqa: E402
from hearth.engine.dry_run import KernelNeeds  # noqa: E402
from hearth.kernels.compilations import COMPILATIONS  # noqa: E402
from hearth.models.families import arch_from_config  # noqa: E402
from hearth.policy.batch.step_limits import step_limits  # noqa: E402

MODEL: Mapping[str, object] = {
    **LLAMA_7B,
    **{"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_key_value_heads": 4},
    "max_position_embeddings": 2048,
}
NUM_REQUESTS = 200
#: Cores that compile, as far as the machine has them.
CORES = (2, 16)


def new_process(*arguments: str, cores: int | None = None) -> dict[str, object]:
    """Run a part of this file in a new process, and return what it prints."""

    def keep_to_cores() -> None:
        if cores is not None:
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])

    # Processes that compile end with whoever holds the other end of their input.
    with subprocess.Popen(
        [sys.executable, "-m", "bench.engine.start", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=keep_to_cores,
    ) as process:
        assert process.stdout is not None
        said = process.stdout.read()
        if process.wait():
            raise RuntimeError(f"`bench.engine.start {' '.join(arguments)}` ended with {process.returncode}")
    parts: dict[str, object] = json.loads(said.splitlines()[-1])
    return parts


def first_token(model: Path, store: Path, num_requests: int) -> dict[str, object]:
    """Time this process up to its first token, then have random requests run."""
    imported_s = time.time() - BEGAN_S
    with LLM(model, store=StoreConfig(path=str(store)), skip_tokenizer_init=True) as llm:
        next(iter(llm.stream([1] * 100, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))))
        token_s = time.time() - BEGAN_S
        rng = random.Random(3)
        prompts = [
            rng.choices(range(32000), k=rng.choice((1, 16, rng.randint(1, 1900))))
            for _ in range(num_requests)
        ]
        began_s = time.perf_counter()
        while prompts:
            batch = [prompts.pop() for _ in range(min(len(prompts), rng.choice((1, 2, 7, 40))))]
            llm.generate(batch, [sampling(rng) for _ in batch])
        return {
            "import_s": imported_s,
            "first_token_s": token_s,
            "requests_s": time.perf_counter() - began_s,
            "num_requests": num_requests,
            "kernels_compiled_while_serving": COMPILATIONS.num_while_serving,
            "kernels_loaded_while_serving": COMPILATIONS.num_loads_while_serving,
        }


def sampling(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice((0.0, 0.8)),
        top_p=rng.choice((0.9, 1.0)),
        top_k=rng.choice((0, 40)),
        presence_penalty=rng.choice((0.0, 0.5)),
        logprobs=rng.choice((None, 3)),
        max_tokens=rng.randint(1, 40),
        ignore_eos=True,
        seed=rng.randrange(1 << 30),
    )


def compilation(name: str, cache: Path) -> dict[str, object]:
    """Time this process up to the end of compiling a model's kernels."""
    config, quant = MODELS[name]
    arch = arch_from_config(dict(config))
    limits = step_limits(EngineConfig().wanted_limits, arch.dimensions, "bfloat16", "cuda", 125 << 30)
    needs = KernelNeeds.of(arch, "bfloat16", quant, limits, 132, 90)
    began_s = time.time()
    num_compiled = compile_all(CompileTask(str(cache), needs))
    return {
        "model": name,
        "cores": len(os.sched_getaffinity(0)),
        "num_compiled": num_compiled,
        "compile_s": time.time() - began_s,
        "total_s": time.time() - BEGAN_S,
    }


def measure() -> dict[str, object]:
    from bench.engine.service_start import deploy_cold, service_start  # not part of what processes import

    results: dict[str, object] = {}

    def part(name: str, act: Callable[[], object]) -> None:
        with step(name):
            try:
                results[name] = act()
            except Exception as error:  # the other parts are worth having
                results[name] = {"error": repr(error)}
        print(json.dumps({name: results[name]}), file=sys.stderr, flush=True)

    memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as text:
        directory = Path(text)
        for cores in CORES:
            part(
                f"compile_{cores}",
                lambda cores=cores: new_process(
                    *("--compile", "Llama-2-7B", str(directory / f"kernels-{cores}")), cores=cores
                ),
            )
        if torch.cuda.is_available():
            model = write_random(directory / "model", MODEL, "bfloat16", 1, torch.device("cuda"))
            torch.cuda.empty_cache()
            store = directory / "store"
            part("empty", lambda: new_process("--first-token", str(model), str(store), "20"))
            part("filled", lambda: new_process("--first-token", str(model), str(store), str(NUM_REQUESTS)))
            part("deploy", lambda: deploy_cold(model, directory / "data"))
            for name in ("service_empty", "service_filled"):
                part(name, lambda: service_start(directory / "data", "cuda"))
        else:
            tell("no CUDA device: nothing is started")
    return results


def rows(results: Mapping[str, object]) -> list[Row]:
    """Return a line for every figure that there is: a part that failed has none."""
    text_of = {"empty": "no kernel compiled before", "filled": "kernels compiled before"}
    told = {
        **{
            f"LLM, 1.1B: process start to first token, {text_of[key]}": (key, "first_token_s")
            for key in text_of
        },
        **{f"`hearth serve` to ready, {text_of[key]}": (f"service_{key}", "ready_s") for key in text_of},
        **{
            f"`hearth serve` to the first text of a 1.1B, {text_of[key]}": (f"service_{key}", "first_text_s")
            for key in text_of
        },
        **{f"kernels of a Llama-2-7B, compiled by {n} cores": (f"compile_{n}", "compile_s") for n in CORES},
        **{
            f"kernels {done} while random requests run": ("filled", f"kernels_{done}_while_serving")
            for done in ("compiled", "loaded")
        },
    }
    return [
        Row(text, "s" if key.endswith("_s") else "kernels", value)
        for text, (part, key) in told.items()
        if isinstance(found := results.get(part), dict) and isinstance(value := found.get(key), int | float)
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--first-token", nargs=3, metavar=("MODEL", "STORE", "REQUESTS"), help="a part")
    parser.add_argument("--compile", nargs=2, metavar=("NAME", "CACHE"), help="a part")
    options = parser.parse_args()
    if options.first_token:
        model, store, num_requests = options.first_token
        print(json.dumps(first_token(Path(model), Path(store), int(num_requests))))
    elif options.compile:
        name, cache = options.compile
        print(json.dumps(compilation(name, Path(cache))))
    else:
        results = measure()
        emit("start", {"rows": [*map(asdict, rows(results))], "results": results}, save=options.save)


if __name__ == "__main__":
    main()

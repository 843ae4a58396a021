"""Commands and flags of Ollama and vLLM: the ones that mean the same here, and answers for the others.

`scripts/tables` writes the table for docs/clients.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile

#: Other names of commands, of one or two words, which the help does not list.
ALIASES: Mapping[str, str] = {
    "-v": "--version",
    "chat": "run",
    "help": "--help",
    "keys ls": "keys list",
    "ls": "list",
    "nodes list": "nodes",
    "nodes ls": "nodes",
    "pull": "deploy",
    "snapshot list": "snapshot ls",
    "status": "ps",
    "version": "--version",
}

_IS_ON = "leave it out: it is always on"
_IS_NOT_LOGGED = "leave it out: a line per request is only in `hearth logs --access`"
_IS_FOUND = "leave it out: it is taken from the model's files"
_HAS_NO_ACCOUNT = "leave it out: Hearth has no accounts; for the Hugging Face Hub set HF_TOKEN"
_PROXY = "put a TLS proxy in front, such as nginx: docs/deploy.md"
_STAGES = "leave it out: a model larger than one GPU runs in stages on several"
_REPLICAS = "leave it out: a busy model gets further replicas by itself; `--workers N` limits the GPUs"
_NEEDS_NOTHING = "leave it out: adapters need no preparation"
_TASK = "leave it out: a model answers and embeds"
_KV_BYTES = "use `--set engine.kv_bytes=SIZE`"
_QUANT = "use `hearth deploy SOURCE --quant int8`"
#: What to use instead of commands and flags of other tools. After a command: flags that only this one lacks.
INSTEAD: Mapping[str, str] = {
    "bench": "run `hearth simulate` for a workload; scripts of bench/ measure a device",
    "collect-env": "run `hearth doctor`",
    "complete": "run `hearth run NAME PROMPT --raw`",
    "launch": "set the base URL of the program to that of `hearth serve`: docs/clients.md",
    "push": "run `hearth convert` and upload the directory it writes",
    "run-batch": "send the requests at once: the service queues them; see `hearth keys add --class batch`",
    "signin": _HAS_NO_ACCOUNT,
    "signout": _HAS_NO_ACCOUNT,
    "--allowed-origins": "use `--allow-origin ORIGIN`",
    "--async-scheduling": _IS_ON,
    "--block-size": "use `--set engine.block_tokens=N`",
    "--chat-template": "use `TEMPLATE` in a Modelfile and `hearth create`",
    "--compilation-config": "use `--set engine.graphs=off` for no CUDA graphs",
    "--cpu-offload-gb": _STAGES,
    "--data-parallel-size": _REPLICAS,
    "--disable-log-requests": _IS_NOT_LOGGED,
    "--disable-log-stats": "leave it out: `/metrics` has them",
    "--disable-uvicorn-access-log": "use `--set service.access_log=off`",
    "--distributed-executor-backend": "use `hearth serve --cluster ray`, or `hearth join`",
    "--download-dir": "use `--data-dir DIR`",
    "--enable-auto-tool-choice": _IS_FOUND,
    "--enable-chunked-prefill": _IS_ON,
    "--enable-lora": "use `hearth deploy ADAPTER --base NAME`",
    "--enable-prefix-caching": _IS_ON,
    "--enable-prompt-tokens-details": _IS_ON,
    "--enable-log-requests": _IS_NOT_LOGGED,
    "--enable-reasoning": _IS_FOUND,
    "--enforce-eager": "use `--set engine.graphs=off`",
    "--format": "use `response_format` of the API",
    "--generation-config": "use `PARAMETER` in a Modelfile and `hearth create`",
    "--gpu-memory-utilization": "use `--set engine.memory_fraction=0.9`, or `--memory SIZE`",
    "--hf-token": "set the environment variable HF_TOKEN",
    "--hf-overrides": "change `config.json` of the model",
    "--hidethinking": "leave it out: thinking is shown on standard error, at a terminal only",
    "--insecure": "leave it out: certificates are always checked",
    "--keepalive": "use `hearth serve --keep-alive TIME`, or `--set models.NAME.keep_alive=TIME`",
    "--kv-cache-dtype": "leave it out: the cache has the type of the model",
    "--kv-cache-memory-bytes": _KV_BYTES,
    "--limit-mm-per-prompt": "leave it out: only texts are read",
    "--load-format": _IS_FOUND,
    "--lora-modules": "use `hearth deploy ADAPTER --base NAME --name ADAPTER_NAME`",
    "--max-cpu-loras": _NEEDS_NOTHING,
    "--max-logprobs": "leave it out: a request gets up to 20",
    "--max-lora-rank": _NEEDS_NOTHING,
    "--max-loras": _NEEDS_NOTHING,
    "--max-model-len": "use `--set models.NAME.context=TOKENS`",
    "--max-num-batched-tokens": "use `--set engine.max_batch_tokens=TOKENS`",
    "--max-num-seqs": "use `--set engine.max_seqs=N`",
    "--model": "give the model as an argument, as in `hearth serve SOURCE`",
    "--modelfile": "use `hearth show NAME`, which prints what a preset sets",
    "--nowordwrap": "leave it out: lines are not wrapped",
    "--num-gpu-blocks-override": _KV_BYTES,
    "--otlp-traces-endpoint": "set OTEL_EXPORTER_OTLP_ENDPOINT: docs/watch.md",
    "--override-generation-config": "use `PARAMETER` in a Modelfile and `hearth create`",
    "--pipeline-parallel-size": _STAGES,
    "--quantization": _QUANT,
    "--quantize": _QUANT,
    "--reasoning-parser": _IS_FOUND,
    "--revision": "use `hf:ORG/NAME@REVISION`",
    "--runner": _TASK,
    "--served-model-name": "use `hearth deploy SOURCE --name NAME`, or `hearth cp NAME OTHER`",
    "--speculative-config": "leave it out: there is no speculative decoding",
    "--ssl-certfile": _PROXY,
    "--ssl-keyfile": _PROXY,
    "--swap-space": "leave it out: a preempted request is computed again",
    "--task": _TASK,
    "--tensor-parallel-size": _STAGES,
    "--think": "use `enable_thinking` of the API",
    "--tokenizer": _IS_FOUND,
    "--tokenizer-mode": _IS_FOUND,
    "--tool-call-parser": _IS_FOUND,
    "--trust-remote-code": "leave it out: no code of a model is run",
    "--verbose": "leave it out: `hearth run` prints speeds; `hearth explain last` prints more",
    "--uvicorn-log-level": "use `--set log.level=LEVEL`",
    "-dp": _REPLICAS,
    "-pp": _STAGES,
    "-tp": _STAGES,
    "serve --api-key": "make a key with `hearth keys add NAME`; once there is one, it is required",
    "serve --dtype": "use `hearth deploy SOURCE --dtype TYPE`",
    "serve --name": "use `hearth deploy SOURCE --name NAME`",
    "serve --quant": _QUANT,
    "serve --seed": "use `seed` of a request",
    "show --license": "look at its `source`",
    "show --parameters": "leave it out: they are shown",
    "show --system": "leave it out: it is shown",
    "show --template": "leave it out: the template of a preset is shown",
}


def translated(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with the command's own name instead of an alias."""
    if len(words) > 1 and words[0] == "help":
        return [*translated(words[1:]), ALIASES["help"]]
    for num_words in (2, 1):
        if (name := ALIASES.get(" ".join(words[:num_words]))) is not None:
            return [*name.split(), *words[num_words:]]
    return [*words]


def answer_to(words: Sequence[str]) -> str | None:
    """Return what to use instead of another tool's command and flags; None: the words have none."""
    given = (word.partition("=")[0] for word in takewhile(lambda word: word != "--", words[1:]))
    flags = [flag.replace("_", "-") for flag in given if flag.startswith("-")]  # vLLM takes both
    foreign = [*words[:1], *flags, *(f"{words[0]} {flag}" for flag in flags)]
    return "\n".join(f"there is no `{word}`; {INSTEAD[word]}" for word in foreign if word in INSTEAD) or None

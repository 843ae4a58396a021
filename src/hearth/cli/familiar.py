"""Commands and flags of Ollama and vLLM: the ones that mean the same here, and answers for the others.

`scripts/reference` writes the tables for docs/clients.md.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile

#: Other names of commands, which the help does not list.
ALIASES: Mapping[str, str] = {
    "help": "--help",
    "ls": "list",
    "pull": "deploy",
    "status": "ps",
    "version": "--version",
}

#: Commands without a counterpart of the same meaning, by tool and name.
COMMANDS: Mapping[str, Mapping[str, str]] = {
    "Ollama": {
        "launch": "point the client at the service (docs/clients.md)",
        "push": "run `hearth convert` and upload the directory it writes",
        "signin": "nothing to do: no account is needed; for gated models set HF_TOKEN",
        "signout": "nothing to do: no account is needed",
    },
    "vLLM": {
        "bench": "run `hearth simulate` for a workload; scripts of bench/ measure a device",
        "collect-env": "run `hearth doctor`",
        "complete": "run `hearth run NAME PROMPT --raw`",
        "run-batch": "send requests with `service_tier` `batch`",
    },
}

_IS_ON = "leave it out: it is always on"
_IS_FOUND = "leave it out: it is taken from the model's files"
_STAGES = "leave it out: a model larger than one GPU runs in stages on several"
#: Flags that no command has under that name, by tool and flag.
FLAGS: Mapping[str, Mapping[str, str]] = {
    "Ollama": {
        "--file": "use `-f FILE`",
        "--format": "use `response_format` of the API",
        "--insecure": "leave it out: an `http://` URL is taken as it is",
        "--keepalive": "use `hearth serve --keep-alive TIME`, or `--set models.NAME.keep_alive=TIME`",
        "--modelfile": "use `hearth show NAME`, which prints what a preset sets",
        "--nowordwrap": "leave it out: answers are not wrapped",
        "--quantize": "use `hearth deploy SOURCE --quant int8`",
        "--verbose": "leave it out: `hearth run` prints speeds; `hearth explain last` prints more",
    },
    "vLLM": {
        "--block-size": "use `--set engine.block_tokens=TOKENS`",
        "--chat-template": "use `TEMPLATE` in a Modelfile and `hearth create`",
        "--cpu-offload-gb": "leave it out: models that do not fit together take turns",
        "--download-dir": "use `--data-dir DIR`",
        "--enable-auto-tool-choice": _IS_FOUND,
        "--enable-chunked-prefill": _IS_ON,
        "--enable-lora": "use `hearth deploy ADAPTER --base NAME`",
        "--enable-prefix-caching": _IS_ON,
        "--enforce-eager": "use `--set engine.graphs=off`",
        "--gpu-memory-utilization": "use `--set engine.memory_fraction=0.9`, or `--memory SIZE`",
        "--kv-cache-memory-bytes": "use `--set engine.kv_bytes=SIZE`",
        "--load-format": _IS_FOUND,
        "--lora-modules": "use `hearth deploy ADAPTER --base NAME --name ADAPTER_NAME`",
        "--max-model-len": "use `--set models.NAME.context=TOKENS`",
        "--max-num-batched-tokens": "use `--set engine.max_batch_tokens=TOKENS`",
        "--max-num-seqs": "use `--set engine.max_seqs=N`",
        "--model": "give the model as the argument: `hearth serve SOURCE`",
        "--pipeline-parallel-size": _STAGES,
        "--quantization": "use `hearth deploy SOURCE --quant int8`",
        "--revision": "use `hf:ORG/NAME@REVISION`",
        "--served-model-name": "use `hearth deploy SOURCE --name NAME`, or `hearth cp NAME OTHER`",
        "--ssl-keyfile": "put a proxy in front (docs/deploy.md)",
        "--swap-space": "use `--host-memory SIZE`",
        "--tensor-parallel-size": _STAGES,
        "--tokenizer": _IS_FOUND,
        "--tool-call-parser": _IS_FOUND,
        "--trust-remote-code": "leave it out: no code of a model is run",
        "-tp": _STAGES,
    },
}


def translated(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with the command's own name instead of an alias."""
    return [ALIASES.get(words[0], words[0]), *words[1:]] if words else []


def answer_to(words: Sequence[str], commands: Mapping[str, Collection[str]]) -> str | None:
    """Return what to use instead of another tool's command or flag; None: the words have none.

    `commands`: the flags of each command.
    """
    if not words:
        return None
    for tool, instead in COMMANDS.items():
        if words[0] in instead and words[0] not in commands:
            return f"`{words[0]}` is a command of {tool}; {instead[words[0]]}"
    flags = [word.partition("=")[0] for word in takewhile(lambda word: word != "--", words[1:])]
    for flag in flags:
        for tool, instead in FLAGS.items():
            if flag in instead and flag not in commands.get(words[0], (flag,)):
                return f"`{flag}` is a flag of {tool}; {instead[flag]}"
    return None

"""Commands and flags of Ollama and vLLM: the ones that mean the same here, and answers for the others.

`scripts/tables` writes the table for docs/clients.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile

#: Other names of commands, which the help does not list.
ALIASES: Mapping[str, str] = {
    "chat": "run",
    "help": "--help",
    "ls": "list",
    "pull": "deploy",
    "status": "ps",
    "version": "--version",
}

_IS_ON = "leave it out: it is always on"
_IS_FOUND = "leave it out: it is taken from the model's files"
_STAGES = "leave it out: a model larger than one GPU runs in stages on several"
#: What to use instead of commands and flags that no command of Hearth has.
INSTEAD: Mapping[str, str] = {
    "bench": "run `hearth simulate` for a workload; scripts of bench/ measure a device",
    "collect-env": "run `hearth doctor`",
    "complete": "run `hearth run NAME PROMPT --raw`",
    "push": "run `hearth convert` and upload the directory it writes",
    "--chat-template": "use `TEMPLATE` in a Modelfile and `hearth create`",
    "--download-dir": "use `--data-dir DIR`",
    "--enable-auto-tool-choice": _IS_FOUND,
    "--enable-chunked-prefill": _IS_ON,
    "--enable-lora": "use `hearth deploy ADAPTER --base NAME`",
    "--enable-prefix-caching": _IS_ON,
    "--enforce-eager": "use `--set engine.graphs=off`",
    "--format": "use `response_format` of the API",
    "--gpu-memory-utilization": "use `--set engine.memory_fraction=0.9`, or `--memory SIZE`",
    "--keepalive": "use `hearth serve --keep-alive TIME`, or `--set models.NAME.keep_alive=TIME`",
    "--lora-modules": "use `hearth deploy ADAPTER --base NAME --name ADAPTER_NAME`",
    "--max-model-len": "use `--set models.NAME.context=TOKENS`",
    "--max-num-batched-tokens": "use `--set engine.max_batch_tokens=TOKENS`",
    "--max-num-seqs": "use `--set engine.max_seqs=N`",
    "--model": "give the model as the argument: `hearth serve SOURCE`",
    "--modelfile": "use `hearth show NAME`, which prints what a preset sets",
    "--pipeline-parallel-size": _STAGES,
    "--quantization": "use `hearth deploy SOURCE --quant int8`",
    "--quantize": "use `hearth deploy SOURCE --quant int8`",
    "--revision": "use `hf:ORG/NAME@REVISION`",
    "--served-model-name": "use `hearth deploy SOURCE --name NAME`, or `hearth cp NAME OTHER`",
    "--tensor-parallel-size": _STAGES,
    "--tokenizer": _IS_FOUND,
    "--tool-call-parser": _IS_FOUND,
    "--trust-remote-code": "leave it out: no code of a model is run",
    "--verbose": "leave it out: `hearth run` prints speeds; `hearth explain last` prints more",
    "-tp": _STAGES,
}


def translated(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with the command's own name instead of an alias."""
    if len(words) > 1 and words[0] == "help":
        return [*translated(words[1:]), ALIASES["help"]]
    return [ALIASES.get(words[0], words[0]), *words[1:]] if words else []


def answer_to(words: Sequence[str]) -> str | None:
    """Return what to use instead of another tool's command or flag; None: the words have none."""
    flags = (word.partition("=")[0] for word in takewhile(lambda word: word != "--", words[1:]))
    foreign = [*words[:1], *(flag for flag in flags if flag.startswith("-"))]
    return next((f"there is no `{word}`; {INSTEAD[word]}" for word in foreign if word in INSTEAD), None)

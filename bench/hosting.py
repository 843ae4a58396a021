"""How many models of a size a budget of device memory can host at once, by what each is promised.

    python -m bench.hosting [--budget-gib 24] [--context 4096] [--save]

Arithmetic alone: it loads no weights, asks no device and times nothing. A model is hosted with its weights,
its tables and the KV of one full context; the workspace is one set of pages that all models see.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from bench.report import arguments, emit
from hearth.core.config import EngineConfig
from hearth.core.sizes import bias_buffers, bytes_of, penalty_buffers
from hearth.models.families import arch_from_config
from hearth.models.layout import layout_of
from hearth.policy.batch.step_limits import step_limits
from hearth.policy.fleet.footprint import Facts, footprint
from hearth.policy.fleet.profile import Footprint

#: Hidden and inner width, layers, heads, KV heads, vocabulary, whether the head is tied.
SHAPES = {
    "Llama-3.2-1B": (2048, 8192, 16, 32, 8, 128256, True),
    "Llama-3.2-3B": (3072, 8192, 28, 24, 8, 128256, True),
    "Llama-2-7B": (4096, 11008, 32, 32, 32, 32000, False),
    "Llama-3.1-8B": (4096, 14336, 32, 32, 8, 128256, False),
}


def config_of(name: str, context: int) -> dict[str, object]:
    """Return the config.json of a model of that shape."""
    hidden, inner, num_layers, num_heads, num_kv_heads, vocab, is_tied = SHAPES[name]
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "tie_word_embeddings": is_tied,
    }


def facts_of(name: str, quant: str, context: int) -> Facts:
    """What the registry would keep of such a model in bfloat16."""
    arch = arch_from_config(config_of(name, context))
    layout = layout_of(arch, "bfloat16", quant)
    return Facts(
        num_bytes=layout.num_bytes,
        wide_bytes=layout_of(arch, "float32", quant).num_bytes,
        dtype="bfloat16",
        quant=quant,
        num_parameters=0,
        largest_bytes=max(spec.nbytes for spec in layout.tensors),
        dimensions=arch.dimensions,
        max_positions=context,
        eos_ids=(),
        has_chat_template=False,
    )


def hosted(taken: Footprint, optional_bytes: int, budget_bytes: int) -> Mapping[str, int]:
    """How many such models there may be, by what each of them is charged."""
    own_bytes = taken.least_bytes - taken.workspace_bytes
    return {
        "own_workspace_and_all_tables": budget_bytes // (taken.least_bytes + optional_bytes),
        "own_workspace": budget_bytes // taken.least_bytes,
        "one_workspace": max(0, budget_bytes - taken.workspace_bytes) // own_bytes,
    }


def measure(budget_bytes: int, context: int) -> list[Mapping[str, object]]:
    rows = list[Mapping[str, object]]()
    for name in SHAPES:
        for quant in ("none", "int8"):
            facts = facts_of(name, quant, context)
            wanted = EngineConfig().wanted_limits
            limits = step_limits(wanted, facts.dimensions, facts.dtype, "cuda", budget_bytes)
            taken = footprint(facts, "cuda", limits, context)
            sizes = (limits.max_seqs, facts.dimensions.vocab_size)
            optional_bytes = bytes_of(penalty_buffers(*sizes)) + bytes_of(bias_buffers(*sizes))
            parts = {**asdict(taken), "weights_bytes": taken.weights_bytes}
            rows.append(
                {
                    "model": name,
                    "quant": quant,
                    "limits": asdict(limits),
                    **parts,
                    "optional_table_bytes": optional_bytes,
                    "num_hosted": hosted(taken, optional_bytes, budget_bytes),
                }
            )
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--budget-gib", type=float, default=24.0)
    parser.add_argument("--context", type=int, default=4096)
    options = parser.parse_args()
    budget_bytes = int(options.budget_gib * (1 << 30))
    result = {
        "budget_bytes": budget_bytes,
        "context": options.context,
        "models": measure(budget_bytes, options.context),
    }
    emit("hosting", result, save=options.save)


if __name__ == "__main__":
    main()

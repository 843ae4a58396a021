"""Shapes of the models that `bench.coldstart` starts. Makes no weights."""

from __future__ import annotations

from collections.abc import Mapping

from bench.llama7b import CONFIG
from bench.shape import Shape


def _shape(name: str, model: str, sizes: tuple[int, ...], dtype: str, others: Mapping[str, object]) -> Shape:
    """Return a shape by its two widths, layers, heads and vocabulary, and all else of its configuration."""
    hidden, inner, layers, heads, vocab = sizes
    config = {
        **CONFIG,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": vocab,
        **others,
    }
    return Shape(name, model, config, dtype)


_QWEN: Mapping[str, object] = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
_TIED_QWEN = {**_QWEN, "tie_word_embeddings": True}
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("7B", "Llama-2-7B", CONFIG, "bfloat16"),
        _shape("13B", "Llama-2-13B", (5120, 13824, 40, 40, 32000), "bfloat16", {}),
        _shape("4B", "Qwen-1.5-4B", (2560, 6912, 40, 20, 151936), "bfloat16", _QWEN),
        _shape("0.5B", "Qwen-1.5-0.5B", (1024, 2816, 24, 16, 151936), "bfloat16", _TIED_QWEN),
    )
}
#: The same names, so small that they run on a CPU.
TINY_SHAPES = {
    name: _shape(name, "tiny", (32, 64, 1, 2, 512), "float32", {"max_position_embeddings": 1024})
    for name in SHAPES
}

"""Does each kernel of ours beat the library, and how near is it to the device's limit? Llama-2-7B, bf16.

python -m bench.engine.kernels [--only decode|element_wise|prefill|products] [--candidates] [--save]

Every time is of one launch inside a CUDA graph of many, over data that does not fit the cache.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from bench.engine.prefill_kernels import prefill
from bench.engine.timing import microseconds
from bench.report import arguments, emit
from hearth.kernels import activation, decode_attention, linear, norm, rotary
from hearth.kernels.decode_attention import SplitScratch
from hearth.kernels.paged import Heads, PagedRows

BF16 = {"device": "cuda", "dtype": torch.bfloat16}
INT32 = {"device": "cuda", "dtype": torch.int32}
HIDDEN, INTERMEDIATE, VOCAB, LAYERS = 4096, 11008, 32000, 32
MULTI_HEAD, GROUPED = Heads(32, 32, 128), Heads(32, 8, 128)
NUM_PROGRAMS = 4 * 132


def one_row_products() -> list[dict[str, object]]:
    shapes = {
        "qkv": (3 * HIDDEN, HIDDEN),
        "o": (HIDDEN, HIDDEN),
        "up": (2 * INTERMEDIATE, HIDDEN),
        "down": (HIDDEN, INTERMEDIATE),
        "head": (VOCAB, HIDDEN),
    }
    return [{"product": name, **_one_row_product(n, k)} for name, (n, k) in shapes.items()]


def _one_row_product(n: int, k: int) -> dict[str, float]:
    weights = [torch.randn(n, k, **BF16) for _ in range(max(3, 600_000_000 // (n * k)))]
    x, out = torch.randn(1, k, **BF16), torch.empty(1, n, **BF16)
    us = microseconds([lambda w=w: linear.skinny_linear_triton(x, w, None, out=out) for w in weights])
    cublas_us = microseconds([lambda w=w: linear.linear_reference(x, w, None, out=out) for w in weights])
    return {"us": us, "cublas_us": cublas_us, "tb_per_s": 2 * n * k / us / 1e6}


def _paged(counts: list[int], heads: Heads, layers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return KV of sequences in shuffled blocks, and their block table."""
    blocks = [-(-count // 16) for count in counts]
    kv = torch.randn(sum(blocks) + 1, layers, 2, 16, heads.num_kv, heads.dim, **BF16)
    order = (torch.randperm(sum(blocks)) + 1).tolist()
    table = torch.zeros(len(counts), max(blocks), dtype=torch.int32)
    for row, num_blocks in enumerate(blocks):
        table[row, :num_blocks] = torch.tensor([order.pop() for _ in range(num_blocks)])
    return kv, table.cuda()


def decode(heads: Heads, batch: int, context: int) -> dict[str, object]:
    kv, table = _paged([context] * batch, heads, LAYERS)
    positions = torch.full((batch,), context - 1, **INT32)
    rows = PagedRows(positions, torch.arange(batch, **INT32), table)
    qkv = torch.randn(batch, (heads.num_q + 2 * heads.num_kv) * heads.dim, **BF16)
    out = torch.empty(batch, heads.num_q * heads.dim, **BF16)
    partials = 2 * NUM_PROGRAMS * max(2, heads.num_q // heads.num_kv)
    scratch = SplitScratch(
        NUM_PROGRAMS,
        torch.empty(partials * heads.dim, device="cuda"),
        torch.empty(partials * 2, device="cuda"),
        torch.zeros(batch * heads.num_kv, **INT32),
    )

    def launch(layer: int) -> None:
        decode_attention.decode_attention(
            qkv, heads, rows, kv[:, layer], window=None, scratch=scratch, out=out
        )

    us = microseconds([lambda layer=layer: launch(layer) for layer in range(LAYERS)])
    kv_bytes = 4 * batch * context * heads.num_kv * heads.dim
    return {
        "kv_heads": heads.num_kv,
        "batch": batch,
        "context": context,
        "us": us,
        "tb_per_s": kv_bytes / us / 1e6,
    }


def element_wise(tokens: int) -> list[dict[str, object]]:
    """Time kernels that move each byte once, beside the same in torch."""
    x, delta, weight = (
        torch.randn(*shape, **BF16) for shape in ((tokens, HIDDEN), (tokens, HIDDEN), (HIDDEN,))
    )
    up, act = torch.randn(tokens, 2 * INTERMEDIATE, **BF16), torch.empty(tokens, INTERMEDIATE, **BF16)
    normed = torch.empty_like(x)
    kv, table = _paged([tokens], MULTI_HEAD, 1)
    qkv = torch.randn(tokens, 3 * HIDDEN, **BF16)
    rows = PagedRows(torch.arange(tokens, **INT32), torch.zeros(tokens, **INT32), table)
    cos_sin = torch.randn(tokens, 2, 64, device="cuda")

    def rotate(impl: Callable[..., None]) -> None:
        impl(qkv, MULTI_HEAD, rows, kv[:, 0], cos_sin=cos_sin, norms=None)

    def plain_norm() -> None:
        x.add_(delta)
        normed.copy_(F.rms_norm(x, (HIDDEN,), weight, 1e-5))

    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "add and norm": (
            lambda: norm.add_norm_triton(delta, x, weight, None, 1e-5, is_rms=True, out=normed),
            plain_norm,
        ),
        "gated activation": (
            lambda: activation.activate_triton(up, "silu", gated=True, out=act),
            lambda: activation.activate_reference(up, "silu", gated=True, out=act),
        ),
        "rotary and KV write": (
            lambda: rotate(rotary.rotate_and_store_triton),
            lambda: rotate(rotary.rotate_and_store_reference),
        ),
    }
    return [
        {
            "kernel": name,
            "tokens": tokens,
            "us": microseconds([ours] * 20),
            "torch_us": microseconds([plain] * 20),
        }
        for name, (ours, plain) in pairs.items()
    ]


def decodes() -> list[dict[str, object]]:
    return [
        decode(heads, batch, context)
        for heads, batch, context in [
            (MULTI_HEAD, 1, 192),
            (MULTI_HEAD, 1, 4096),
            (MULTI_HEAD, 64, 192),
            (MULTI_HEAD, 256, 192),
            (GROUPED, 1, 8192),
            (GROUPED, 64, 2048),
        ]
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=["decode", "element_wise", "prefill", "products"])
    parser.add_argument("--candidates", action="store_true", help="also what is not served (prefill)")
    options = parser.parse_args()
    parts: dict[str, Callable[[], object]] = {
        "products": one_row_products,
        "decode": decodes,
        "prefill": lambda: prefill(tries_all=options.candidates),
        "element_wise": lambda: [row for tokens in (1, 64, 2048) for row in element_wise(tokens)],
    }
    measured = {name: run() for name, run in parts.items() if options.only in (None, name)}
    emit("kernels", measured, save=options.save)


if __name__ == "__main__":
    main()

from __future__ import annotations

import pytest
import torch

from hearth.kernels.paged import Heads, PagedRows
from hearth.kernels.rotary import HeadNorms, rotate_and_store_reference, rotate_and_store_triton
from tests.kernels.cases import DTYPES, Paged, assert_close, random

#: heads, rotary dims (0: none), q/k norms
SHAPES = [
    (Heads(4, 4, 64), 64, False),
    (Heads(9, 3, 64), 64, False),
    (Heads(6, 2, 80), 80, True),
    (Heads(5, 1, 64), 64, False),
    (Heads(4, 4, 96), 24, False),
    (Heads(3, 3, 20), 0, False),
    (Heads(8, 2, 128), 128, True),
    (Heads(2, 2, 10), 4, True),
    (Heads(37, 2, 64), 64, False),
]


@pytest.mark.parametrize(("device", "dtype"), DTYPES)
@pytest.mark.parametrize(("heads", "rotary_dim", "has_norms"), SHAPES)
def test_kernel_equals_reference(
    device: str, dtype: torch.dtype, heads: Heads, rotary_dim: int, has_norms: bool
) -> None:
    lengths = [1, 5, 16, 17, 40]
    positions = torch.tensor([length - 1 for length in lengths], dtype=torch.int32, device=device)
    qkv = random(len(lengths), (heads.num_q + 2 * heads.num_kv) * heads.dim, device=device, dtype=dtype)
    cos_sin = random(64, 2, rotary_dim // 2, device=device, seed=5) if rotary_dim else None
    norms = None
    if has_norms:
        q_weight, k_weight = (random(heads.dim, device=device, dtype=dtype, seed=seed) for seed in (6, 7))
        norms = HeadNorms(q_weight, k_weight, 1e-6)
    expected, found = (Paged.build(lengths, heads, device, dtype) for _ in range(2))
    expected_qkv, given_qkv, num_q = qkv.clone(), qkv.clone(), heads.num_q * heads.dim
    rotate_and_store_reference(
        expected_qkv,
        heads,
        expected.rows(positions),
        expected.kv,
        cos_sin=cos_sin,
        norms=norms,
    )

    rotate_and_store_triton(qkv, heads, found.rows(positions), found.kv, cos_sin=cos_sin, norms=norms)

    assert_close(qkv[:, :num_q], expected_qkv[:, :num_q])
    assert torch.equal(qkv[:, num_q:], given_qkv[:, num_q:]), "k and v were written back without need"
    written = ~expected.kv.isnan()
    assert int(written.sum()) == 2 * len(lengths) * heads.num_kv * heads.dim
    assert torch.equal(written, ~found.kv.isnan()), "the kernel wrote elsewhere"
    assert_close(found.kv[written], expected.kv[written])


def test_one_row_of_a_one_layer_model_is_stored_where_activations_lie_between_blocks() -> None:
    """In an arena blocks of KV may lie anywhere, so a view of all of them covers the workspace too."""
    heads, block_tokens = Heads(2, 1, 8), 4
    kv = torch.zeros(3, 2, block_tokens, heads.num_kv, heads.dim)
    qkv = (
        kv[1].view(-1)[: (heads.num_q + 2 * heads.num_kv) * heads.dim].view(1, -1)
    )  # no sequence has block 1
    qkv.copy_(random(*qkv.shape, device="cpu"))
    wanted = qkv.view(-1, heads.dim)[heads.num_q :].clone()
    position, slot, table = (torch.tensor(value, dtype=torch.int32) for value in ([0], [0], [[2]]))

    rotate_and_store_reference(qkv, heads, PagedRows(position, slot, table), kv, cos_sin=None, norms=None)

    assert torch.equal(kv[2, :, 0].view(-1, heads.dim), wanted)

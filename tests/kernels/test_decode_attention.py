from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from hearth.core.sizes import num_subgroups
from hearth.kernels.decode_attention import (
    SplitScratch,
    decode_attention_reference,
    decode_attention_triton,
    tile_shape,
)
from hearth.kernels.paged import Heads, PagedRows
from hearth.kernels.prefill_attention import (
    prefill_attention_reference,
    prefill_attention_triton,
    prompt_tile_tokens,
)
from hearth.kernels.prompt_tiles import PrefillSpan, PromptTiles
from hearth.kernels.rotary import rotate_and_store_triton
from tests.kernels.cases import DEVICES, Paged, assert_close, crossed, random

HEADS = [
    Heads(2, 2, 64),
    Heads(6, 2, 80),
    Heads(5, 1, 96),
    Heads(4, 4, 128),
    Heads(9, 3, 20),
    Heads(20, 1, 64),
    Heads(14, 2, 64),
    Heads(3, 1, 256),
    Heads(131, 1, 16),
]
LENGTHS = [1, 15, 16, 17, 100, 205]
#: Tiles of these lengths for each head of KV, of the smallest that there are: 16 tokens.
NUM_TILES = sum(-(-length // 16) for length in LENGTHS)
#: A window, and how many programs share the work: from one for all tiles to, None, more than there are tiles.
PROGRAMS = [(None, 1), (None, 3), (None, None), (40, 5), (130, 2)]


def scratch_for(heads: Heads, device: str, num_programs: int, num_rows: int) -> SplitScratch:
    group = heads.num_q // heads.num_kv
    num_parts, subgroups = 2 * num_programs * group, num_subgroups(group)
    return SplitScratch(
        num_programs,
        torch.full((num_parts * heads.dim,), float("nan"), device=device),
        torch.full((num_parts * 2,), float("nan"), device=device),
        torch.zeros(num_rows * heads.num_kv * subgroups, dtype=torch.int32, device=device),
    )


@dataclass(frozen=True, slots=True)
class Case:
    """Sequences of some lengths in recycled memory, with a query for each."""

    heads: Heads
    cache: Paged
    rows: PagedRows
    qkv: torch.Tensor

    @staticmethod
    def build(lengths: list[int], heads: Heads, device: str, dtype: torch.dtype) -> Case:
        cache = Paged.build(lengths, heads, device, dtype)
        cache.fill(lengths)
        positions = torch.tensor(lengths, dtype=torch.int32, device=device) - 1
        width = (heads.num_q + 2 * heads.num_kv) * heads.dim
        qkv = random(len(lengths), width, device=device, dtype=dtype)
        return Case(heads, cache, cache.rows(positions), qkv)

    def expected(self, window: int | None) -> torch.Tensor:
        out = torch.empty(len(self.qkv), self.heads.num_q * self.heads.dim, device=self.qkv.device)
        decode_attention_reference(
            self.qkv.float(), self.heads, self.rows, self.cache.kv.float(), window=window, out=out
        )
        return out

    def run(
        self,
        num_programs: int,
        *,
        window: int | None = None,
        num_rows: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        heads, device = self.heads, str(self.qkv.device)
        if out is None:
            shape = len(self.qkv), heads.num_q * heads.dim
            out = torch.full(shape, float("nan"), dtype=self.qkv.dtype, device=device)
        scratch = scratch_for(heads, device, num_programs, len(self.qkv))
        decode_attention_triton(
            self.qkv, heads, self.rows, self.cache.kv,
            window=window, scratch=scratch, out=out, num_rows=num_rows,
        )  # fmt: skip
        assert not scratch.counters.any(), "counters must be zero between launches"
        return out


@pytest.mark.parametrize(
    ("window", "num_programs", "device", "dtype"),
    crossed([(None, 3), (40, 5)], halves_on_cpu=[(40, 5)]),
)
@pytest.mark.parametrize(
    "heads", [Heads(6, 2, 80, scale=0.3, cap=1.5), Heads(8, 4, 256, scale=224**-0.5, cap=50.0)], ids=str
)
def test_kernel_equals_reference_with_capped_and_scaled_scores(
    device: str, dtype: torch.dtype, heads: Heads, window: int | None, num_programs: int
) -> None:
    case = Case.build(LENGTHS, heads, device, dtype)
    plain = replace(case, heads=Heads(heads.num_q, heads.num_kv, heads.dim))

    assert_close(case.run(num_programs, window=window), case.expected(window))
    assert not torch.allclose(case.expected(window), plain.expected(window), atol=1e-2)


@pytest.mark.parametrize("cap", [None, 1.5])
def test_reference_scales_and_caps_scores_before_the_softmax(cap: float | None) -> None:
    heads = Heads(1, 1, 16, scale=0.5, cap=cap)
    case = Case.build([9], heads, "cpu", torch.float32)
    k, v = (case.cache.kv[case.rows.block_table[case.rows.slots[0], 0], side, :9, 0] for side in (0, 1))

    scores = 0.5 * k @ case.qkv[0, :16]

    weights = (scores if cap is None else cap * torch.tanh(scores / cap)).softmax(0)
    torch.testing.assert_close(case.expected(None)[0], weights @ v)


@pytest.mark.parametrize(
    ("window", "num_programs", "device", "dtype"), crossed(PROGRAMS, halves_on_cpu=[(None, 3), (130, 2)])
)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_kernel_equals_reference_in_recycled_memory(
    device: str, dtype: torch.dtype, heads: Heads, window: int | None, num_programs: int | None
) -> None:
    case = Case.build(LENGTHS, heads, device, dtype)
    num_programs = NUM_TILES * heads.num_kv + 4 if num_programs is None else num_programs

    assert_close(case.run(num_programs, window=window), case.expected(window))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("length", "window"), [(1, None), (70, None), (70, 40)])
def test_kernel_equals_reference_for_a_row_alone(device: str, length: int, window: int | None) -> None:
    case = Case.build([length], Heads(4, 2, 64), device, torch.float32)

    assert_close(case.run(3, window=window), case.expected(window))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "heads",
    [
        Heads(7, 7, 64),
        Heads(3, 3, 256),
        Heads(15, 3, 80),
        Heads(8, 1, 256),
        Heads(64, 8, 128),
        Heads(6, 3, 112),
        Heads(71, 1, 64),
        Heads(130, 2, 64),
    ],
    ids=str,
)
@pytest.mark.parametrize(("window", "num_programs"), [(None, 528), (100, 7), (None, 1)])
def test_kernel_equals_reference_for_odd_heads(heads: Heads, window: int | None, num_programs: int) -> None:
    case = Case.build([1, 64, 65, 700, 3, 2049], heads, "cuda", torch.bfloat16)

    assert_close(case.run(num_programs, window=window), case.expected(window))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [Heads(8, 8, 128), Heads(16, 4, 128), Heads(4, 2, 256)], ids=str)
@pytest.mark.parametrize("window", [None, 200])
def test_kernel_equals_reference_for_rows_of_all_lengths(heads: Heads, window: int | None) -> None:
    lengths = [1 + 37 * row % 900 for row in range(300)]
    case = Case.build(lengths, heads, "cuda", torch.bfloat16)

    assert_close(case.run(528, window=window), case.expected(window))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_programs", [1, 7])
@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_rows_that_are_not_there_are_left_alone(device: str, num_rows: int, num_programs: int) -> None:
    case = Case.build([70, 1, 130, 64, 20], Heads(4, 2, 64), device, torch.float32)
    count = torch.tensor([num_rows], dtype=torch.int32, device=device)

    out = case.run(num_programs, num_rows=count, out=torch.full((5, 256), 7.0, device=device))

    assert (out[num_rows:] == 7.0).all()
    if num_rows:
        assert_close(out[:num_rows], case.expected(None)[:num_rows])


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_might_be_there_change_no_bit(device: str) -> None:
    """A captured step has more rows than mostly decode."""
    lengths, heads = [70, 1, 130], Heads(4, 2, 64)
    case = Case.build(lengths, heads, device, torch.float32)
    padding = torch.zeros(4, dtype=torch.int32, device=device)
    padded = Case(
        heads,
        case.cache,
        PagedRows(
            torch.cat([case.rows.positions, padding]),
            torch.cat([case.rows.slots, padding + len(lengths)]),
            case.rows.block_table,
        ),
        torch.cat([case.qkv, case.qkv.new_zeros(4, case.qkv.shape[1])]),
    )
    count = torch.tensor([len(lengths)], dtype=torch.int32, device=device)

    assert torch.equal(padded.run(5, num_rows=count)[:3], case.run(5))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "num_rows"), [("cpu", 257), pytest.param("cuda", 1030, marks=pytest.mark.gpu)]
)
def test_many_rows_are_found_by_every_program(device: str, num_rows: int) -> None:
    lengths = [1 + 7 * row % 40 for row in range(num_rows)]
    case = Case.build(lengths, Heads(1, 1, 16), device, torch.float32)

    assert_close(case.run(3), case.expected(None))


@pytest.mark.gpu
def test_a_long_context_among_short_ones_is_shared_by_many_programs() -> None:
    case = Case.build([40_000, *[30] * 63], Heads(4, 2, 64), "cuda", torch.float16)

    assert_close(case.run(528), case.expected(None))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [Heads(32, 32, 128), Heads(32, 8, 128)], ids=str)
def test_blocks_past_the_32_bit_offset_are_written_and_read(heads: Heads) -> None:
    """Element offsets of a 7B's cache pass 2**31 at block 512: 32 layers of 131,072 elements each."""
    kv = torch.empty(2100, 32, 2, 16, heads.num_kv, heads.dim, dtype=torch.bfloat16, device="cuda")
    kv.view(torch.uint8).fill_(0xFF)
    layer = kv[:, 31]
    block_table = torch.tensor([[690, 513, 2099]], dtype=torch.int32, device="cuda")
    positions = torch.arange(41, dtype=torch.int32, device="cuda")
    rows = PagedRows(positions, torch.zeros_like(positions), block_table)
    qkv = random(41, (heads.num_q + 2 * heads.num_kv) * heads.dim, device="cuda", dtype=torch.bfloat16)
    expected = torch.empty(41, heads.num_q * heads.dim, device="cuda")

    rotate_and_store_triton(qkv, heads, rows, layer, cos_sin=None, norms=None)
    prefill_attention_reference(
        qkv.float(), heads, rows, [PrefillSpan(0, 41, 0)], layer.float(), window=None, out=expected
    )
    chunk, last = (torch.full_like(expected, float("nan"), dtype=torch.bfloat16) for _ in range(2))
    tiles = PromptTiles.of([PrefillSpan(0, 41, 0)], prompt_tile_tokens(heads, qkv.dtype, len(qkv)), "cuda")
    prefill_attention_triton(qkv, heads, rows, tiles, layer, window=None, out=chunk)
    decode_attention_triton(
        qkv, heads, rows, layer,
        window=None, scratch=scratch_for(heads, "cuda", 528, 41), out=last,
    )  # fmt: skip

    assert int((~layer.isnan()).sum()) == 41 * 2 * heads.num_kv * heads.dim
    assert_close(chunk, expected)
    assert_close(last, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_same_bits_whichever_program_finishes_last(device: str) -> None:
    # The interpreter takes its time, and one program after the other: a second launch shows that the first
    # has left everything as it was, and a third would show nothing more.
    lengths, num_launches = ([700, 650, 1, 64], 3) if device == "cuda" else ([150, 130, 1, 64], 2)
    case = Case.build(lengths, Heads(8, 4, 64), device, torch.float16)

    outs = [case.run(17) for _ in range(num_launches)]

    assert all(torch.equal(outs[0], out) for out in outs[1:])


@pytest.mark.parametrize(
    ("heads", "num_programs"),
    [
        (Heads(8, 1, 256), 264),
        (Heads(71, 1, 64), 264),
        (Heads(71, 1, 128), 264),
        (Heads(32, 8, 64), 528),
        (Heads(32, 32, 128), 528),
    ],
)
def test_no_more_programs_are_launched_than_fit(
    heads: Heads, num_programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that had to wait for others would begin when all others end."""
    launched = list[object]()

    def note(kernel: object, grid: object, *_: object, **__: object) -> None:
        launched.append(grid)

    monkeypatch.setattr("hearth.kernels.decode_attention.capability", lambda: 90)
    monkeypatch.setattr("hearth.kernels.decode_attention.launch", note)

    Case.build([3], heads, "cpu", torch.bfloat16).run(528)

    assert launched == [(num_programs,)]


@pytest.mark.parametrize(
    ("device", "dim", "num_tokens"),
    [(90, 256, 64), (90, 320, 16), (120, 256, 16), (80, 256, 16), (90, 128, 64), (120, 128, 32)],
)
def test_tiles_are_large_only_where_all_programs_fit(
    device: int, dim: int, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("decode_attention", "jit"):
        monkeypatch.setattr(f"hearth.kernels.{module}.capability", lambda: device)

    assert tile_shape(Heads(8, 1, dim), torch.bfloat16).block_n == num_tokens

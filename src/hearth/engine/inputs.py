"""The step's inputs at fixed device addresses, filled from a plan in one go. Plans nothing, runs nothing.

One packed int32 array per step, written on the host and sent whole:

    | counts | tokens | positions | slots | logit rows | tiles |

There are two host copies, because that of the step in flight may still be read by the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hearth.engine.upload import Uploads
from hearth.kernels.host_read import read_host
from hearth.kernels.paged import PagedRows
from hearth.kernels.prompt_tiles import PrefillSpan, PromptTiles, cut_tiles
from hearth.models.buffers import filled, zeros
from hearth.models.step_inputs import StepInputs
from hearth.policy.batch.plan import Row, StepPlan, TableWrite
from hearth.sizes import TILE_FIELDS, StepLimits, input_buffers, max_tiles


@dataclass(frozen=True, slots=True)
class _Fields:
    """The packed array seen as its parts, on the host or on the device."""

    counts: torch.Tensor  #: of decode rows, of tiles
    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    logit_rows: torch.Tensor
    tiles: torch.Tensor

    @staticmethod
    def of(packed: torch.Tensor, limits: StepLimits) -> _Fields:
        max_tokens, num_tile_fields = limits.max_batch_tokens, TILE_FIELDS * max_tiles(limits)
        return _Fields(*packed.split_with_sizes([2, *[max_tokens] * 3, limits.max_seqs, num_tile_fields]))


class InputBuffers:
    """The device buffers of a step's inputs. Mutable; written only by the runner, in step order."""

    def __init__(
        self,
        limits: StepLimits,
        context: int,
        last_tokens: torch.Tensor,
        uploads: Uploads,
        sink: int,
        tile_tokens: int,
    ) -> None:
        """Allocate the buffers. `last_tokens`, int64 [slots + 1], holds each slot's last sample and a dummy.

        `sink` is a block that is always there and that nobody reads. Prompts are cut by `tile_tokens`.
        """
        max_seqs, device = limits.max_seqs, uploads.device
        buffers = input_buffers(limits, context)
        self._uploads = uploads
        self._packed = zeros(buffers["packed"], device)
        self._device = _Fields.of(self._packed, limits)
        is_cuda = device.type == "cuda"
        self._hosts = [torch.zeros_like(self._packed, device="cpu", pin_memory=is_cuda) for _ in range(2)]
        self._next_host = 0
        self._limits, self._tile_tokens = limits, tile_tokens
        self._dummy_slot = max_seqs
        self._last_tokens = last_tokens
        items = self._device.tiles.view(-1, TILE_FIELDS)
        self._tiles = PromptTiles(items, self._device.counts[1:], tile_tokens)
        self._tokens = zeros(buffers["tokens"], device)
        self._logit_rows = zeros(buffers["logit_rows"], device)
        self.sink = sink
        #: The row of a slot holds its blocks in order, and behind them the sink, for blocks that somebody had
        #: before may be gone. The dummy slot's row names the sink alone.
        self.block_table = filled(buffers["block_table"], sink, device)
        #: For each slot, how many leading entries of its row may name blocks.
        self._num_written = [0] * max_seqs

    def fill(self, plan: StepPlan, num_padded_rows: int = 0) -> None:
        """Send a plan to the device, with padding rows behind its own if it has decode rows only."""
        self._write_table([admission.slot for admission in plan.admissions], plan.table_writes)
        host = self._hosts[self._next_host]
        self._next_host = 1 - self._next_host
        fields = _Fields.of(host, self._limits)
        num_decode = plan.num_decode_rows
        decode, prefill = plan.rows[:num_decode], plan.rows[num_decode:]
        _write(fields.positions, 0, [row.start for row in decode] + [0] * num_padded_rows)
        _write(fields.slots, 0, [row.slot for row in decode] + [self._dummy_slot] * num_padded_rows)
        begins = _begins(num_decode, prefill)
        for begin, row in zip(begins, prefill, strict=False):
            assert row.tokens is not None, f"decode row behind prefill rows: {row}"
            end = begin + row.num_tokens
            _write(fields.tokens, begin, row.tokens)
            torch.arange(row.start, row.start + row.num_tokens, out=fields.positions[begin:end])
            fields.slots[begin:end] = row.slot
        tiles = cut_tiles(_spans(begins, prefill), self._tile_tokens)
        fields.tiles[: len(tiles)] = torch.from_numpy(tiles)
        _write(fields.counts, 0, [num_decode, len(tiles) // TILE_FIELDS])
        ends = [*range(1, num_decode + 1), *begins[1:]]
        # Also of a row that does not sample: whether its KV is sound shows in the logits of its last token.
        _write(fields.logit_rows, 0, [end - 1 for end in ends])
        read_host(self._packed, host)

    def park(self, num_rows: int) -> None:
        """Point so many rows at the dummy slot, so that running them touches nobody's KV."""
        self._device.positions[:num_rows] = 0
        self._device.slots[:num_rows] = self._dummy_slot

    def gather_tokens(self, num_decode_rows: int, num_rows: int) -> None:
        """Gather on the device the last samples of decode rows and the sent tokens of the others."""
        decode, rest = slice(num_decode_rows), slice(num_decode_rows, num_rows)
        slots, tokens = self._device.slots[decode], self._tokens[decode]
        torch.index_select(self._last_tokens, 0, slots, out=tokens)
        if num_rows > num_decode_rows:
            self._tokens[rest].copy_(self._device.tokens[rest])

    def decode_view(self, num_rows: int) -> StepInputs:
        """Return the inputs of a step of decode rows only, which all sample."""
        return self._view(num_rows, num_rows, (), None)

    def view(self, plan: StepPlan) -> StepInputs:
        """Return the inputs of the step that was filled in last, of any rows."""
        num_decode = plan.num_decode_rows
        prefill = plan.rows[num_decode:]
        spans = _spans(_begins(num_decode, prefill), prefill)
        logit_rows = self._logit_rows[: len(plan.rows)]
        logit_rows.copy_(self._device.logit_rows[: len(plan.rows)])
        return self._view(plan.num_tokens, num_decode, spans, logit_rows)

    def _view(
        self, num_rows: int, num_decode: int, spans: tuple[PrefillSpan, ...], logit_rows: torch.Tensor | None
    ) -> StepInputs:
        rows = PagedRows(self._device.positions[:num_rows], self._device.slots[:num_rows], self.block_table)
        return StepInputs(
            tokens=self._tokens[:num_rows],
            rows=rows,
            decode_rows=rows if num_decode == num_rows else rows.first(num_decode),
            num_decode=None,
            spans=spans,
            tiles=self._tiles if spans else None,
            logit_rows=logit_rows,
        )

    def _write_table(self, admitted: Sequence[int], writes: Sequence[TableWrite]) -> None:
        """Write to the block table; rows of `admitted` slots, which have new owners, are cleared before."""
        width, block_by_entry = self.block_table.shape[1], dict[int, int]()
        for slot in admitted:
            first = slot * width
            block_by_entry.update(dict.fromkeys(range(first, first + self._num_written[slot]), self.sink))
            self._num_written[slot] = 0
        for write in writes:
            first = write.slot * width + write.index
            block_by_entry.update(enumerate(write.blocks, start=first))
            end = write.index + len(write.blocks)
            self._num_written[write.slot] = max(self._num_written[write.slot], end)
        if block_by_entry:
            # Each entry once: of two writes to one, either could win.
            at, blocks = self._uploads.ints(list(block_by_entry), list(block_by_entry.values()))
            self.block_table.view(-1).index_copy_(0, at, blocks.int())


def _begins(first: int, rows: Sequence[Row]) -> list[int]:
    """Return where each row's tokens begin, and behind the last where they end."""
    begins = [first]
    for row in rows:
        begins.append(begins[-1] + row.num_tokens)
    return begins


def _spans(begins: Sequence[int], rows: Sequence[Row]) -> tuple[PrefillSpan, ...]:
    """Return where prompts lie among the rows of a step, given `_begins` of them."""
    return tuple(
        PrefillSpan(begin, row.num_tokens, row.start) for begin, row in zip(begins, rows, strict=False)
    )


def _write(field: torch.Tensor, at: int, values: Sequence[int]) -> None:
    if values:
        field[at : at + len(values)] = torch.tensor(values, dtype=torch.int32)

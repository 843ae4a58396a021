"""The step's inputs at fixed device addresses, filled from a plan in one go. Plans nothing, runs nothing.

They lie in one packed array (`PackedInputs`), which is written on the host; a step sends as much of it as it
needs. There are two host copies, because that of the step in flight may still be read by the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from hearth.engine.adapter_inputs import AdapterInputs
from hearth.engine.sampler import SampleRows
from hearth.engine.step_shape import StepShape
from hearth.engine.upload import Uploads, int32s
from hearth.kernels.jit import runs_triton
from hearth.kernels.paged import PagedRows
from hearth.kernels.prompt_tiles import PrefillSpan, PromptTiles, cut_tiles
from hearth.kernels.step_read import read_step
from hearth.kernels.step_tokens import gather_tokens
from hearth.models.step_inputs import StepInputs
from hearth.policy.batch.plan import DecodeRows, Row, StepPlan, TableWrite
from hearth.sizes import TILE_FIELDS, PackedInputs


class InputBuffers:
    """The device buffers of a step's inputs. Mutable; written only by the runner, in step order."""

    def __init__(
        self,
        max_seqs: int,
        buffers: Mapping[str, torch.Tensor],
        last_tokens: torch.Tensor,
        uploads: Uploads,
        sink: int,
        tile_tokens_of: Callable[[int], int],
    ) -> None:
        """Take `buffers` as `input_buffers` has them, filled as by `EngineTables`.

        `last_tokens`, int64 [slots + 1], holds each slot's last sample and a dummy. `sink` is a block that is
        always there and that nobody reads. `tile_tokens_of` says by how many tokens
        the prompts of a step of so many rows are cut.
        """
        self._uploads = uploads
        self._packed = buffers["packed"]
        is_cuda = uploads.device.type == "cuda"
        hosts = [torch.zeros_like(self._packed, device="cpu", pin_memory=is_cuda) for _ in range(2)]
        #: Each with the array that writes it: to ask for that takes longer than to write.
        self._hosts = [(host, host.numpy()) for host in hosts]
        self._max_seqs, self._tile_tokens_of = max_seqs, tile_tokens_of
        self._dummy_slot = max_seqs
        self._last_tokens = last_tokens
        self._tokens = buffers["tokens"]
        self.sink = sink
        #: The row of a slot holds its blocks in order, and behind them the sink, for blocks that somebody had
        #: before may be gone. The dummy slot's row names the sink alone.
        self.block_table = buffers["block_table"]
        #: For each slot, how many leading entries of its row may name blocks.
        self._num_written = [0] * max_seqs
        self.adapters = AdapterInputs(buffers["adapters"], max_seqs)  #: which rows have some

    def fill(self, plan: StepPlan, shape: StepShape) -> SampleRows:
        """Send a plan to the device, with padding behind its rows and behind its rows of logits.

        The step before the last must be done: its inputs are overwritten on the host. Returns the rows that
        sample, in arrays that the step after the next overwrites.
        """
        writes = None
        if plan.admissions or plan.table_writes:
            writes = self._table_writes([admission.slot for admission in plan.admissions], plan.table_writes)
        return self._fill(plan.decode, plan.prompts, shape, writes)

    def park(self, shape: StepShape) -> SampleRows:
        """Send a step that is all padding, so that running it touches nobody's KV. No row samples."""
        return self._fill(DecodeRows(), (), shape, None)

    def _fill(
        self, decode: DecodeRows, prompts: Sequence[Row], shape: StepShape, writes: torch.Tensor | None
    ) -> SampleRows:
        """Send rows, and `writes` to the block table as `read_step` takes them."""
        parts, num_decode = PackedInputs.of(shape.num_rows, self._max_seqs), len(decode)
        self._hosts.reverse()
        host, packed = self._hosts[0]
        slots, positions = packed[parts.slots], packed[parts.positions]
        slots[:num_decode], positions[:num_decode] = decode.slots, decode.positions
        slots[num_decode:], positions[num_decode:], packed[parts.tokens] = self._dummy_slot, 0, 0
        num_tiles = 0
        rows = SampleRows(
            slots[:num_decode],
            positions[:num_decode],
            decode.masks,
            self._packed[parts.slots],
            self._packed[parts.positions],
        )
        if shape.has_prompts:
            rows, num_tiles = self._fill_prompts(packed, parts, rows, prompts, shape)
        packed[parts.counts] = num_decode, num_tiles
        num_words = parts.num_words(num_tiles)
        read_step(self._packed, host, num_words, table=self.block_table, writes=writes)
        return rows

    def _fill_prompts(
        self,
        packed: npt.NDArray[np.int32],
        parts: PackedInputs,
        decode: SampleRows,
        prompts: Sequence[Row],
        shape: StepShape,
    ) -> tuple[SampleRows, int]:
        """Write prompts behind the decode rows; return all rows that sample, and the number of tiles."""
        slots, positions, tokens = packed[parts.slots], packed[parts.positions], packed[parts.tokens]
        num_decode, num_rows = len(decode), len(decode) + len(prompts)
        # All prompts at once: there may be hundreds of them, and the device waits.
        lengths = np.array([row.num_tokens for row in prompts], np.int64)
        ends = lengths.cumsum()
        num_tokens = int(ends[-1]) if prompts else 0
        filled = slice(num_decode, num_decode + num_tokens)
        slots[filled] = np.repeat([row.slot for row in prompts], lengths)
        starts = np.array([row.start for row in prompts], np.int64)
        positions[filled] = np.arange(num_tokens) + np.repeat(starts + lengths - ends, lengths)
        tokens[filled] = int32s(chain.from_iterable(map(_tokens_of, prompts)))
        # Also of a row that does not sample: whether its KV is sound shows in the logits behind it.
        logit_rows, sample_slots = packed[parts.logit_rows], packed[parts.sample_slots]
        sample_positions = packed[parts.sample_positions]
        logit_rows[:num_decode] = np.arange(num_decode)
        logit_rows[num_decode:num_rows] = num_decode + ends - 1
        logit_rows[num_rows : shape.num_logits] = 0
        num_samples = num_rows - sum(not row.samples for row in prompts)
        assert num_samples == num_rows or not prompts[-1].samples, f"not only the last samples not: {prompts}"
        sample_slots[:num_samples] = slots[logit_rows[:num_samples]]
        sample_slots[num_samples : shape.num_logits] = self._dummy_slot
        sample_positions[:num_samples] = positions[logit_rows[:num_samples]]
        tiles = cut_tiles(_spans(num_decode, prompts), self._tile_tokens_of(shape.num_rows))
        packed[parts.tiles][: len(tiles)] = tiles
        masks = {num_decode + at: row.mask for at, row in enumerate(prompts) if row.mask is not None}
        rows = SampleRows(
            sample_slots[:num_samples],
            sample_positions[:num_samples],
            {**decode.masks, **masks},
            self._packed[parts.sample_slots],
            self._packed[parts.sample_positions],
        )
        return rows, len(tiles) // TILE_FIELDS

    def sample_slots(self, shape: StepShape) -> torch.Tensor:
        """Return the slot that each row of logits samples for: int32, on the device; a dummy for others."""
        parts = PackedInputs.of(shape.num_rows, self._max_seqs)
        return self._packed[parts.sample_slots if shape.has_prompts else parts.slots][: shape.num_logits]

    def gather_tokens(self, shape: StepShape) -> None:
        """Gather on the device the last samples of decode rows and the sent tokens of the others."""
        parts = PackedInputs.of(shape.num_rows, self._max_seqs)
        gather_tokens(
            self._packed[parts.tokens],
            self._packed[parts.slots],
            self._packed[parts.counts][:1],
            self._last_tokens,
            out=self._tokens[: shape.num_rows],
        )

    def view(self, plan: StepPlan | None, shape: StepShape) -> StepInputs:
        """Return the inputs of the step that was filled in last; None: of one that is all padding.

        Where kernels read on the device which rows there are, all steps of a shape have the same inputs.
        """
        num_decode, prompts = (0, ()) if plan is None else (plan.num_decode_rows, plan.prompts)
        parts = PackedInputs.of(shape.num_rows, self._max_seqs)
        counts = self._packed[parts.counts]
        paged = PagedRows(self._packed[parts.positions], self._packed[parts.slots], self.block_table)
        reads_counts = runs_triton(self._packed)
        tiles = PromptTiles(
            self._packed[parts.tiles].view(-1, TILE_FIELDS), counts[1:], self._tile_tokens_of(shape.num_rows)
        )
        num_rows = min(shape.num_rows, self._max_seqs) if reads_counts else num_decode
        adapters = self.adapters if shape.has_adapters else None
        return StepInputs(
            tokens=self._tokens[: shape.num_rows],
            rows=paged,
            decode_rows=paged if num_rows == shape.num_rows else paged.first(num_rows),
            num_decode=counts[:1] if reads_counts else None,
            spans=_spans(num_decode, prompts),
            tiles=tiles if shape.has_prompts else None,
            logit_rows=self._packed[parts.logit_rows][: shape.num_logits] if shape.has_prompts else None,
            adapters=None if adapters is None else adapters.rows(shape),
            logit_adapters=None if adapters is None else adapters.logit_rows(shape),
        )

    def _table_writes(self, admitted: Sequence[int], writes: Sequence[TableWrite]) -> torch.Tensor | None:
        """Return what to write to the block table, as `read_step` takes it; None: nothing.

        Rows of `admitted` slots, which have new owners, are cleared before.
        """
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
        # Each entry once: of two writes to one, either could win.
        return self._uploads.host_rows(block_by_entry, block_by_entry.values()) if block_by_entry else None


def _tokens_of(row: Row) -> tuple[int, ...]:
    assert row.tokens is not None, f"decode row behind prefill rows: {row}"
    return row.tokens


def _spans(begin: int, rows: Sequence[Row]) -> tuple[PrefillSpan, ...]:
    """Return where prompts lie among the rows of a step, of which the first is at `begin`."""
    spans = []
    for row in rows:
        spans.append(PrefillSpan(begin, row.num_tokens, row.start))
        begin += row.num_tokens
    return tuple(spans)

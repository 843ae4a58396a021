"""The inputs of a step at fixed device addresses, filled from a plan with one copy.

They lie in one packed array (`PackedInputs`), which is written on the host; a step sends as much of it as it
needs. There are two host copies, because the device may still read that of the step in flight.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from hearth.core.sizes import TILE_FIELDS, PackedInputs
from hearth.engine.adapter_inputs import AdapterInputs
from hearth.engine.sampler import SampleRows
from hearth.engine.step_shape import StepShape
from hearth.engine.upload import Uploads, int32s, int64s
from hearth.kernels.jit import runs_triton
from hearth.kernels.paged import PagedRows
from hearth.kernels.prompt_tiles import PrefillSpan, PromptTiles, tiles_of
from hearth.kernels.step_read import read_step
from hearth.kernels.step_tokens import gather_tokens
from hearth.models.step_inputs import StepInputs
from hearth.policy.batch.blocks import BlockMove
from hearth.policy.batch.plan import DecodeRows, Row, StepPlan, TableWrites

_MAX_VIEWS = 1024  #: more than there are padded sizes of steps


class InputBuffers:
    """The device buffers of a step's inputs. Mutable; written by the runner alone, in step order."""

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
        never read. `tile_tokens_of(num_rows)` returns the tokens per prompt tile.
        """
        self._uploads = uploads
        self._packed = buffers["packed"]
        is_cuda = uploads.device.type == "cuda"
        hosts = [torch.zeros_like(self._packed, device="cpu", pin_memory=is_cuda) for _ in range(2)]
        #: Each with its array: getting that from torch takes longer than writing it.
        self._hosts = [(host, host.numpy()) for host in hosts]
        self._max_seqs, self._tile_tokens_of = max_seqs, tile_tokens_of
        self._dummy_slot = max_seqs
        self._last_tokens = last_tokens
        self._tokens = buffers["tokens"]
        self.sink = sink
        #: The row of a slot holds its blocks in order, then the sink: blocks of earlier owners may be gone.
        #: The dummy slot's row names the sink alone.
        self.block_table = buffers["block_table"]
        #: For each slot, how many leading entries of its row may name blocks.
        self._num_written = [0] * max_seqs
        self._table_width = self.block_table.shape[1]
        #: Host memory of block table writes, one for each of two steps in turn. Grows if many entries are
        #: cleared.
        self._writes = [self._writes_host(max_seqs + len(self._tokens)) for _ in range(2)]
        self._counting = np.arange(len(self._tokens), dtype=np.int32)  #: 0, 1, 2, ...
        self.adapters = AdapterInputs(buffers["adapters"], max_seqs)
        self._views_by_place: dict[tuple[tuple[int, int], ...], tuple[torch.Tensor, ...]] = {}

    def fill(self, plan: StepPlan, shape: StepShape) -> SampleRows:
        """Send a plan to the device, with padding behind its rows and its rows of logits.

        The step before the last must be done: its host copy is overwritten. Returns the rows that sample, in
        arrays that the step after the next overwrites.
        """
        writes = None
        if plan.admissions or plan.table_writes:
            writes = self._table_writes([admission.slot for admission in plan.admissions], plan.table_writes)
        return self._fill(plan.decode, plan.prompts, shape, writes)

    def fill_padding(self, shape: StepShape) -> SampleRows:
        """Send a step that is all padding: it writes KV to the sink alone, and no row samples."""
        return self._fill(DecodeRows(), (), shape, None)

    def _fill(
        self, decode: DecodeRows, prompts: Sequence[Row], shape: StepShape, writes: torch.Tensor | None
    ) -> SampleRows:
        parts, num_decode = PackedInputs.of(shape.num_rows, self._max_seqs), len(decode)
        self._hosts.reverse()
        host, packed = self._hosts[0]
        slots, positions = packed[parts.slots], packed[parts.positions]
        slots[:num_decode], positions[:num_decode] = int32s(decode.slots), int32s(decode.positions)
        slots[num_decode:], positions[num_decode:], packed[parts.tokens] = self._dummy_slot, 0, 0
        num_tiles = 0
        if shape.has_prompts:
            rows, num_tiles = self._fill_prompts(packed, parts, decode, prompts, shape)
        else:
            device_slots, device_positions = self._views(parts.slots, parts.positions)
            rows = SampleRows(
                slots[:num_decode], positions[:num_decode], decode.masks, device_slots, device_positions
            )
        packed[parts.counts] = num_decode, num_tiles
        num_words = parts.num_words(num_tiles)
        read_step(self._packed, host, num_words, table=self.block_table, writes=writes)
        return rows

    def _fill_prompts(
        self,
        packed: npt.NDArray[np.int32],
        parts: PackedInputs,
        decode: DecodeRows,
        prompts: Sequence[Row],
        shape: StepShape,
    ) -> tuple[SampleRows, int]:
        slots, positions, tokens = packed[parts.slots], packed[parts.positions], packed[parts.tokens]
        num_decode, num_rows = len(decode), len(decode) + len(prompts)
        # All prompts at once: there may be hundreds, and the device waits.
        lengths = int64s([row.num_tokens for row in prompts])
        starts = int64s([row.start for row in prompts])
        ends = lengths.cumsum()
        num_tokens = int(ends[-1]) if prompts else 0
        filled = slice(num_decode, num_decode + num_tokens)
        slots[filled] = int32s([row.slot for row in prompts]).repeat(lengths)
        offsets = (starts + lengths - ends).astype(np.int32).repeat(lengths)
        np.add(self._counting[:num_tokens], offsets, out=positions[filled])
        if len(words := _words_of(prompts)):  # else other layers have embedded them
            tokens[filled] = words
        # Also for rows that do not sample: their logits show whether their KV is finite.
        logit_rows, sample_slots = packed[parts.logit_rows], packed[parts.sample_slots]
        sample_positions = packed[parts.sample_positions]
        logit_rows[:num_decode] = self._counting[:num_decode]
        logit_rows[num_decode:num_rows] = num_decode + ends - 1
        logit_rows[num_rows : shape.num_logits] = 0
        num_samples = num_rows - [row.samples for row in prompts].count(False)
        assert num_samples == num_rows or not prompts[-1].samples, f"not only the last samples not: {prompts}"
        sampled = logit_rows[:num_samples]
        sample_slots[:num_samples], sample_positions[:num_samples] = slots[sampled], positions[sampled]
        sample_slots[num_samples : shape.num_logits] = self._dummy_slot
        begins = num_decode + ends - lengths
        tiles = tiles_of(begins, lengths, starts, self._tile_tokens_of(shape.num_rows))
        packed[parts.tiles][: len(tiles)] = tiles
        masks = decode.masks
        if [row.mask for row in prompts].count(None) < len(prompts):
            masks = {**masks, **{at: row.mask for at, row in enumerate(prompts, num_decode) if row.mask}}
        device_slots, device_positions = self._views(parts.sample_slots, parts.sample_positions)
        rows = SampleRows(
            sample_slots[:num_samples], sample_positions[:num_samples], masks, device_slots, device_positions
        )
        return rows, len(tiles) // TILE_FIELDS

    def _views(self, *parts: slice) -> tuple[torch.Tensor, ...]:
        key = tuple([(part.start, part.stop) for part in parts])
        found = self._views_by_place.get(key)
        if found is None:
            if len(self._views_by_place) == _MAX_VIEWS:  # as where steps are not padded
                self._views_by_place.clear()
            found = self._views_by_place[key] = tuple([self._packed[part] for part in parts])
        return found

    def sample_slots(self, shape: StepShape) -> torch.Tensor:
        """Return the slot of each row of logits (int32, on the device); a dummy where none samples."""
        parts = PackedInputs.of(shape.num_rows, self._max_seqs)
        return self._packed[parts.sample_slots if shape.has_prompts else parts.slots][: shape.num_logits]

    def gather_tokens(self, shape: StepShape) -> None:
        parts = PackedInputs.of(shape.num_rows, self._max_seqs)
        gather_tokens(
            self._packed[parts.tokens],
            self._packed[parts.slots],
            self._packed[parts.counts][:1],
            self._last_tokens,
            out=self._tokens[: shape.num_rows],
        )

    def view(self, plan: StepPlan | None, shape: StepShape) -> StepInputs:
        """Return the inputs of the step that was filled last; `plan` None: of a step that is all padding.

        Where kernels read the row counts on the device, all steps of a shape have the same inputs.
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

    def follow(self, moves: Sequence[BlockMove], num_blocks: int) -> None:
        """Let all rows of the block table name the targets of moves, behind all launched steps."""
        sources, targets = self._uploads.ints([m.source for m in moves], [m.target for m in moves])
        renamed = torch.arange(num_blocks, dtype=torch.int32, device=self.block_table.device)
        renamed[sources] = targets.int()
        self.block_table.copy_(renamed[self.block_table.long()])

    def _table_writes(self, admitted: Sequence[int], writes: TableWrites) -> torch.Tensor | None:
        """Return writes to the block table in the form of `read_step`; None: there are none.

        Rows of `admitted` slots, which have new owners, are cleared first.
        """
        width, num_written = self._table_width, self._num_written
        num_before = {slot: num_written[slot] for slot in admitted}
        for slot in admitted:
            num_written[slot] = 0
        # All runs of entries as columns: written ones, then cleared ones.
        slots, begins, counts = writes.slots, writes.begins, writes.counts
        for slot, begin, num_new in zip(slots, begins, counts, strict=True):
            if begin + num_new > num_written[slot]:
                num_written[slot] = begin + num_new
        if cleared := [slot for slot, num_old in num_before.items() if num_old > num_written[slot]]:
            slots, begins = slots + cleared, begins + [num_written[slot] for slot in cleared]
            counts = counts + [num_before[slot] - num_written[slot] for slot in cleared]
        num_entries, num_blocks, lengths = sum(counts), len(writes.blocks), int64s(counts)
        if not num_entries:
            return None
        host, rows = self._next_writes(num_entries)
        offsets = int64s(slots) * width + int64s(begins) - lengths.cumsum() + lengths
        rows[0] = np.arange(num_entries) + offsets.repeat(lengths)
        rows[1, :num_blocks], rows[1, num_blocks:] = int32s(writes.blocks), self.sink
        return host

    def _next_writes(self, num_entries: int) -> tuple[torch.Tensor, npt.NDArray[np.int32]]:
        self._writes.reverse()
        if len(self._writes[0][1]) < 2 * num_entries:  # the step before the last is done
            self._writes[0] = self._writes_host(2 * num_entries)
        host, words = self._writes[0]
        return host.as_strided((2, num_entries), (num_entries, 1)), words[: 2 * num_entries].reshape(2, -1)

    def _writes_host(self, num_entries: int) -> tuple[torch.Tensor, npt.NDArray[np.int32]]:
        is_cuda = self._uploads.device.type == "cuda"
        host = torch.empty(2 * num_entries, dtype=torch.int32, pin_memory=is_cuda)
        return host, host.numpy()


def _words_of(prompts: Sequence[Row]) -> npt.NDArray[np.int32]:
    tokens = [row.tokens for row in prompts]
    assert None not in tokens, f"decode row behind prefill rows: {prompts}"
    words = [one if isinstance(one, array) else array("I", one) for one in tokens if one is not None]
    return np.frombuffer(b"".join(words), np.int32)


def _spans(begin: int, rows: Sequence[Row]) -> tuple[PrefillSpan, ...]:
    spans = []
    for row in rows:
        spans.append(PrefillSpan(begin, row.num_tokens, row.start))
        begin += row.num_tokens
    return tuple(spans)

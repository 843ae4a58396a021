"""The forward pass of all families, described by an `Arch`, over weights, KV and buffers that others own.

Hidden states are a residual stream and the deltas that are not yet added to it, because addition and the next
normalisation are one kernel. Where a product can accumulate into the residual there is no delta. Between
layer ranges only their sum is passed on.

`project`, `attend` and `absorb` are the three parts of a layer: the first returns q, k and v, the last takes
the attention's output, and the part between may run elsewhere.

A step is `body`, up to the last attention, and `tail`, which runs only for rows that need logits. Between the
two all state is in the workspace.

Adapters of rows add to the outputs of four projections of a layer. If no row has one, nothing is launched for
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial

import torch

from hearth.kernels.activation import activate
from hearth.kernels.adapter_rows import AdapterRows
from hearth.kernels.decode_attention import decode_attention
from hearth.kernels.four_bits import MAX_TILED_ROWS, four_bit_linear
from hearth.kernels.four_bits import TILES as FOUR_BIT_TILES
from hearth.kernels.jit import runs_triton
from hearth.kernels.linear import add_linear, linear
from hearth.kernels.lora import project_with_adapters
from hearth.kernels.norm import add_norm
from hearth.kernels.paged import Heads
from hearth.kernels.prefill_attention import prefill_attention
from hearth.kernels.quantized import ProductScratch, quantized_linear, quantized_rows, sharing_obstacle
from hearth.kernels.rotary import HeadNorms, rotate_and_store
from hearth.models.adapter import Projection, target_index
from hearth.models.arch import Arch, Norm, QkNorm, Residual
from hearth.models.step_inputs import StepInputs
from hearth.models.weights import LayerWeights, Linear, NormWeights, WeightGate, Weights
from hearth.models.workspace import Workspace


def heads_of(arch: Arch) -> Heads:
    return Heads(arch.num_heads, arch.num_kv_heads, arch.head_dim, arch.score_scale, arch.score_cap)


#: Tensors that are not yet added to the residual: none, one, or those of attention and a parallel MLP.
Deltas = tuple[torch.Tensor, ...]


class Decoder:
    """Runs `layers` of a model. `rebind` is its only mutation."""

    def __init__(
        self,
        arch: Arch,
        weights: Weights,
        workspace: Workspace,
        cos_sin: torch.Tensor | None,
        layers: range | None = None,
        on_layer: Callable[[], None] | None = None,
    ) -> None:
        self.arch = arch
        self.layers = range(arch.num_layers) if layers is None else layers
        self._cos_sin = cos_sin
        self._on_layer = on_layer
        self._heads = heads_of(arch)
        self.rebind(weights, workspace)

    def rebind(self, weights: Weights, workspace: Workspace | None = None) -> None:
        """Use moved weights, and another workspace. Captured graphs still use the old addresses."""
        assert len(weights.layers) == len(self.layers), f"{len(weights.layers)=} {self.layers=}"
        self.weights = weights
        if workspace is None:
            return
        self._workspace = workspace
        scale = self.arch.embed_scale
        rounded = torch.tensor(scale, dtype=workspace.residual.dtype, device="cpu").item()
        self._embed_scale = rounded if self.arch.rounds_embed_scale else scale
        self.wide_logits = workspace.logits  #: memory for float32 logits
        #: The rows of logits that `tail` writes; a step uses the first ones.
        self.logits = workspace.head_out if len(workspace.head_out) else workspace.logits
        # Cached: all layers of a step use the same cut.
        self._cut = lru_cache(maxsize=4)(workspace.cut)
        # Partial sums are in the buffer of q, k and v; those of q, k and v in that of the MLP's activations.
        self._product_scratch = workspace.product_scratch(workspace.qkv)
        self._qkv_scratch = workspace.product_scratch(workspace.activated)

    @property
    def is_first(self) -> bool:
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        return self.layers.stop == self.arch.num_layers

    def sharing_obstacle(self) -> str | None:
        workspace = self._workspace
        is_plain = all(weights.qkv.scale is None for weights in self.weights.layers)
        if is_plain or not runs_triton(workspace.residual):
            return None
        max_rows, dtype = workspace.residual.shape[0], workspace.residual.dtype
        each = (self._product_scratch, self._qkv_scratch)
        if all(weights.qkv.four_bits is not None for weights in self.weights.layers):
            max_rows = min(max_rows, MAX_TILED_ROWS)
            told = (sharing_obstacle(scratch, max_rows, dtype, FOUR_BIT_TILES, 1) for scratch in each)
        else:
            told = (sharing_obstacle(scratch, max_rows, dtype) for scratch in each)
        return next(filter(None, told), None)

    def first_layers(self, count: int, on_layer: Callable[[], None] | None = None) -> Decoder:
        """Return a decoder of the first `count` layers, over the same memory, with its own `on_layer`."""
        layers = self.layers[:count]
        weights = replace(self.weights, layers=self.weights.layers[: len(layers)])
        return Decoder(self.arch, weights, self._workspace, self._cos_sin, layers, on_layer)

    def embed(self, step: StepInputs) -> torch.Tensor:
        weights, ws = self.weights, self._cut(step.tokens.shape[0])
        assert weights.embed is not None, f"no embedding before layer {self.layers.start}"
        hidden = ws.residual
        embedded = hidden if weights.embed_in is None else ws.embedded
        if weights.embed_scale is None:
            torch.index_select(weights.embed, 0, step.tokens, out=embedded)
        else:
            quantized_rows(weights.embed, weights.embed_scale, step.tokens, out=embedded)
        if weights.embed_in is not None:
            self._linear(embedded, weights.embed_in, hidden)
        if self._embed_scale != 1.0:
            hidden.mul_(self._embed_scale)
        if weights.positions is not None and self.arch.position_offset is not None:
            table = weights.positions[self.arch.position_offset :]
            hidden.add_(torch.index_select(table, 0, step.rows.positions, out=ws.normed))
        return hidden

    def hidden(self, num_rows: int) -> torch.Tensor:
        """Return the memory of hidden states: what `body` may take, and what `pass_on` leaves."""
        return self._cut(num_rows).residual

    def run(
        self, hidden: torch.Tensor, step: StepInputs, kv: torch.Tensor, gate: WeightGate | None = None
    ) -> torch.Tensor:
        self.body(hidden, step, kv, gate)
        return self.pass_on(step)

    def body(
        self, hidden: torch.Tensor, step: StepInputs, kv: torch.Tensor, gate: WeightGate | None = None
    ) -> None:
        """Run the layers up to the last attention, whose output stays in the workspace for `tail`.

        `kv` is [blocks, layers, 2, block_tokens, kv_heads, head_dim] over this decoder's layers only.
        Each layer waits at `gate` for its weights.
        """
        # After `embed` this copies nothing: source and target are the same.
        residual = self._cut(hidden.shape[0]).residual.copy_(hidden)
        deltas: Deltas = ()
        for layer, weights, layer_kv in zip(self.layers, self.weights.layers, kv.unbind(1), strict=True):
            if gate is not None:
                gate.layer(layer)
            normed = self._enter(weights, residual, deltas)
            qkv = self.project(layer, normed, step.adapters)
            attended = self.attend(layer, weights, qkv, step, layer_kv)
            if layer != self.layers[-1]:
                deltas = self.absorb(layer, residual, normed, attended, step.adapters)
            if self._on_layer is not None:
                self._on_layer()

    def pass_on(self, step: StepInputs) -> torch.Tensor:
        """Return the hidden states of every row for the layers that follow elsewhere. Follows `body`."""
        ws = self._cut(step.tokens.shape[0])
        deltas = self.absorb(self.layers[-1], ws.residual, ws.normed, ws.attended, step.adapters)
        return _added(ws.residual, deltas)

    def tail(self, step: StepInputs, gate: WeightGate | None = None) -> torch.Tensor:
        """Return the logits of `step.logit_rows`, in that order. Follows `body` of the last layers."""
        adapters = step.adapters if step.logit_rows is None else step.logit_adapters
        return self.head(self._finish(*self._keep(step), adapters, gate))

    def finish(self, step: StepInputs, gate: WeightGate | None = None) -> torch.Tensor:
        """Return the input of `head` for every row. Replaces `tail`: it overwrites the workspace."""
        ws = self._cut(step.tokens.shape[0])
        return self._finish(ws.residual, ws.normed, ws.attended, step.adapters, gate)

    def _finish(
        self,
        residual: torch.Tensor,
        normed: torch.Tensor,
        attended: torch.Tensor,
        adapters: AdapterRows | None,
        gate: WeightGate | None,
    ) -> torch.Tensor:
        weights = self.weights
        deltas = self.absorb(self.layers[-1], residual, normed, attended, adapters)
        if gate is not None:
            gate.head()
        if weights.final_norm is not None:
            hidden = self._norm(weights.final_norm, deltas, residual)
        else:
            hidden = _added(residual, deltas)
        if weights.embed_out is None:
            return hidden
        num_rows, out = len(hidden), self._workspace.head_in
        # The workspace has room for rows that need logits; all rows of a step may need more.
        out = out[:num_rows] if num_rows <= len(out) else out.new_empty(num_rows, out.shape[1])
        return self._linear(hidden, weights.embed_out, out)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of rows of `finish`, at most as many as `logits` has, which is overwritten."""
        weights = self.weights
        assert weights.head is not None, f"no head after layer {self.layers.stop - 1}"
        logits = self._linear(hidden, weights.head, self.logits[: hidden.shape[0]])
        if self.arch.logit_scale != 1.0:
            logits.mul_(self.arch.logit_scale)
        if (cap := self.arch.logit_cap) is not None:
            logits.div_(cap).tanh_().mul_(cap)
        return logits

    def project(self, layer: int, normed: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        qkv = self._cut(normed.shape[0]).qkv
        return self._adapted(Projection.QKV, layer, normed, self._weights_of(layer).qkv, qkv, adapters)

    def attend(
        self, layer: int, weights: LayerWeights, qkv: torch.Tensor, step: StepInputs, kv: torch.Tensor
    ) -> torch.Tensor:
        """Rotate q and k, write k and v to this layer's `kv`, and return the attention's output."""
        arch, ws, heads = self.arch, self._cut(qkv.shape[0]), self._heads
        window, rope, norms = arch.windows[layer], arch.layer_ropes[layer], None
        if weights.q_norm is not None and weights.k_norm is not None:
            norms = HeadNorms(weights.q_norm, weights.k_norm, arch.norm_eps)
        if norms is not None and arch.qk_norm is QkNorm.ALL:
            q, rest = qkv.tensor_split([len(norms.q_weight)], dim=1)
            for part, weight in ((q, norms.q_weight), (rest[:, : len(norms.k_weight)], norms.k_weight)):
                add_norm(None, part, weight, None, norms.eps, is_rms=True, out=part)
            norms = None
        cos_sin = None if rope is None or self._cos_sin is None else self._cos_sin[rope]
        rotate_and_store(qkv, heads, step.rows, kv, cos_sin=cos_sin, norms=norms)
        out, rows = ws.attended, step.decode_rows
        if num_decode := rows.positions.shape[0]:
            are_all = num_decode == qkv.shape[0]
            decode_attention(
                qkv if are_all else qkv[:num_decode],
                heads,
                rows,
                kv,
                window=window,
                scratch=ws.scratch,
                out=out if are_all else out[:num_decode],
                num_rows=step.num_decode,
            )
        if step.spans or step.tiles is not None:
            prefill_attention(qkv, heads, step.rows, step.spans, step.tiles, kv, window=window, out=out)
        return out

    def absorb(
        self,
        layer: int,
        residual: torch.Tensor,
        normed: torch.Tensor,
        attended: torch.Tensor,
        adapters: AdapterRows | None = None,
    ) -> Deltas:
        """Run output projection and MLP; return what is not yet added to the residual."""
        arch, ws, weights = self.arch, self._cut(attended.shape[0]), self._weights_of(layer)
        match arch.residual:
            case Residual.PRE:
                deltas = self._summed(Projection.O, layer, attended, weights.o, residual, ws.delta, adapters)
                mlp_in = self._norm(weights.mlp_norm, deltas, residual)
                activated, out = self._activated(layer, mlp_in, adapters), ws.delta
                return self._summed(Projection.DOWN, layer, activated, weights.down, residual, out, adapters)
            case Residual.PARALLEL:
                mlp_in = normed if arch.shares_norm else self._norm(weights.mlp_norm, (), residual)
                deltas = self._summed(Projection.O, layer, attended, weights.o, residual, ws.delta, adapters)
                activated, out = self._activated(layer, mlp_in, adapters), ws.mlp_out
                return deltas + self._summed(
                    Projection.DOWN, layer, activated, weights.down, residual, out, adapters
                )
            case Residual.SANDWICH | Residual.OUTPUT:
                delta = self._adapted(Projection.O, layer, attended, weights.o, ws.delta, adapters)
                mlp_in = self._add_normed(delta, weights.attn_out_norm, residual, weights.mlp_norm)
                activated = self._activated(layer, mlp_in, adapters)
                delta = self._adapted(Projection.DOWN, layer, activated, weights.down, ws.delta, adapters)
                self._add_normed(delta, weights.mlp_out_norm, residual, None)
                return ()
            case Residual.POST:
                delta = self._adapted(Projection.O, layer, attended, weights.o, ws.delta, adapters)
                self._norm(weights.attn_norm, (delta,), residual, out=residual)
                activated = self._activated(layer, residual, adapters)
                delta = self._adapted(Projection.DOWN, layer, activated, weights.down, ws.delta, adapters)
                self._norm(weights.mlp_norm, (delta,), residual, out=residual)
                return ()

    def _enter(self, weights: LayerWeights, residual: torch.Tensor, deltas: Deltas) -> torch.Tensor:
        if weights.attn_norm is None or self.arch.residual is Residual.POST:
            return residual
        return self._norm(weights.attn_norm, deltas, residual)

    def _keep(self, step: StepInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = step.logit_rows
        if rows is None:
            ws = self._cut(step.tokens.shape[0])
            return ws.residual, ws.normed, ws.attended
        # From the whole workspace, so that one captured tail serves steps of every size.
        source, kept = self._workspace, self._cut(rows.shape[0])
        torch.index_select(source.residual, 0, rows, out=kept.kept_residual)
        torch.index_select(source.attended, 0, rows, out=kept.kept_attended)
        if self.arch.shares_norm:
            torch.index_select(source.normed, 0, rows, out=kept.kept_normed)
        return kept.kept_residual, kept.kept_normed, kept.kept_attended

    def _activated(self, layer: int, x: torch.Tensor, adapters: AdapterRows | None) -> torch.Tensor:
        ws = self._cut(x.shape[0])
        up = self._adapted(Projection.UP, layer, x, self._weights_of(layer).up, ws.up, adapters)
        activate(up, self.arch.activation, gated=self.arch.gated, out=ws.activated)
        return ws.activated

    def _summed(
        self,
        projection: Projection,
        layer: int,
        x: torch.Tensor,
        weights: Linear,
        residual: torch.Tensor,
        delta: torch.Tensor,
        adapters: AdapterRows | None,
    ) -> Deltas:
        """Run a projection and add it to the residual; return what is not yet added, if anything."""
        is_plain = weights.scale is None and weights.bias is None and adapters is None
        if is_plain and add_linear(x, weights.weight, out=residual):
            return ()
        return (self._adapted(projection, layer, x, weights, delta, adapters),)

    def _adapted(
        self,
        projection: Projection,
        layer: int,
        x: torch.Tensor,
        weights: Linear,
        out: torch.Tensor,
        adapters: AdapterRows | None,
    ) -> torch.Tensor:
        parts = self._qkv_scratch if projection is Projection.QKV else None
        product = partial(self._linear, x, weights, out, parts, self._room(projection, adapters))
        if adapters is None:
            return product()
        target, scratch = target_index(layer, projection), self._scratch(projection)
        project_with_adapters(product, x, adapters, target, scratch=scratch, out=out)
        return out

    def _scratch(self, projection: Projection) -> torch.Tensor:
        """Return scratch for the adapters of a projection: their own, or an idle buffer of the MLP."""
        ws = self._workspace
        if len(ws.shrunk):
            return ws.shrunk.view(-1)
        idle = (ws.activated if projection is Projection.UP else ws.up).view(-1)
        return idle if idle.dtype == torch.float32 else idle[: len(idle) // 2 * 2].view(torch.float32)

    def _room(self, projection: Projection, adapters: AdapterRows | None) -> torch.Tensor:
        """Return an idle buffer that is not the adapters' scratch."""
        ws = self._workspace
        if projection is Projection.UP:
            return ws.qkv if adapters is not None else ws.activated
        return ws.up if adapters is None else ws.activated if projection is not Projection.DOWN else ws.qkv

    def _weights_of(self, layer: int) -> LayerWeights:
        return self.weights.layers[layer - self.layers.start]

    def _norm(
        self,
        weights: NormWeights | None,
        deltas: Deltas,
        residual: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert weights is not None, "this architecture has no such norm"
        out = self._cut(residual.shape[0]).normed if out is None else out
        is_rms = self.arch.norm is Norm.RMS
        delta, more, *_ = *deltas, None, None
        add_norm(
            delta,
            residual,
            weights.weight,
            weights.bias,
            self.arch.norm_eps,
            is_rms=is_rms,
            out=out,
            more=more,
        )
        return out

    def _add_normed(
        self,
        delta: torch.Tensor,
        delta_weight: torch.Tensor | None,
        residual: torch.Tensor,
        weights: NormWeights | None,
    ) -> torch.Tensor:
        """Add a normalised delta to the residual; return that, normalised if there are weights."""
        assert delta_weight is not None, "this architecture has no such norm"
        out = None if weights is None else self._cut(residual.shape[0]).normed
        add_norm(
            delta,
            residual,
            None if weights is None else weights.weight,
            None,
            self.arch.norm_eps,
            is_rms=True,
            out=out,
            delta_weight=delta_weight,
        )
        return residual if out is None else out

    def _linear(
        self,
        x: torch.Tensor,
        weights: Linear,
        out: torch.Tensor,
        scratch: ProductScratch | None = None,
        room: torch.Tensor | None = None,
    ) -> torch.Tensor:
        scratch = self._product_scratch if scratch is None else scratch
        if weights.scale is None:
            linear(x, weights.weight, weights.bias, out=out)
        elif weights.four_bits is not None:
            room = self._workspace.up if room is None else room
            four_bit_linear(x, weights.four_bits, weights.bias, out=out, scratch=scratch, room=room)
        else:
            quantized_linear(x, weights.weight, weights.scale, weights.bias, out=out, scratch=scratch)
        return out


def _added(residual: torch.Tensor, deltas: Deltas) -> torch.Tensor:
    for delta in deltas:
        residual.add_(delta)
    return residual

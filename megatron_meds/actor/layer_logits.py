"""The logit lens of MEDS: what every decoder layer says of one token of each sample.

Rides on the score pass: forward hooks on the decoder layers keep one fp32 scalar per sample and
layer. No vocabulary-sized vector, no layer-sized activation, no second pass. Knows places and
weights; not why a token was chosen nor what becomes of its numbers.
Letters: n samples, M of them looked at, L layers, H hidden, s x b the token rows of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_model_config, unwrap_model

from megatron_meds.actor.batches import MicroBatch
from megatron_meds.actor.mesh import Mesh
from megatron_meds.trajectory import Trajectory

FinalNorm = Literal["last", "all", "none"]
"""Whose hidden states pass the model's final norm before the head: the last layer's, all, none."""


class LayerLogits:
    """lm_head(h_l)[y*] at the position that predicts y*, for every decoder layer l.

    A context manager around one score pass: hooks are on the layers inside it only. `watch` is told
    of every micro-batch before it enters the model; `table` gives the numbers afterwards. Logits are
    not divided by a temperature. Source: MEDS (arXiv 2604.11297).
    """

    def __init__(
        self,
        chunks: Sequence[MegatronModule],
        trajectories: Sequence[Trajectory],
        tokens: Sequence[int | None],
        mesh: Mesh,
        final_norm: FinalNorm = "last",
    ) -> None:
        """Fetch the head's rows of the tokens. Collective over the replica.

        Args:
            tokens: [n] number of the token y* within its response; None: the sample is not looked at.
                Equal on every rank of the replica.

        Raises:
            ValueError: a token outside its response, by the sample's key.
        """
        self._chunks: list[GPTModel] = unwrap_model(list(chunks))  # type: ignore[assignment]
        self._mesh = mesh
        self._final_norm = final_norm
        self._tokens = _checked(tokens, trajectories)
        config = get_model_config(self._chunks[0])
        self._layers = int(config.num_layers)
        self._eps = float(config.layernorm_epsilon)
        self._sequence_parallel = bool(config.sequence_parallel)
        ids = [trajectories[i].response_ids[token] for i, token in self._tokens.items()]
        self._slot = {index: slot for slot, index in enumerate(self._tokens)}
        self._heads_MH, self._norm_H = _head_rows(self._chunks, ids, mesh, config.hidden_size)
        self._table_ML = torch.zeros((len(ids), self._layers), dtype=torch.float32, device=mesh.device)
        self._count = len(trajectories)
        self._places: torch.Tensor | None = None
        self._slots: torch.Tensor | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> LayerLogits:
        for chunk in self._chunks:
            for module in chunk.modules():
                if isinstance(module, TransformerLayer):
                    self._hooks.append(module.register_forward_hook(self._keep))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def watch(self, batch: MicroBatch) -> None:
        """Say that the next forward call is of this micro-batch."""
        if self._sequence_parallel:
            share, first = batch.shape[1] // self._mesh.tensor_size, self._mesh.tensor_rank
        else:  # every tensor rank holds all rows, and the first one speaks
            share, first = batch.shape[1], 0
        places, slots = [], []
        if self._sequence_parallel or self._mesh.tensor_rank == 0:
            start = first * share * batch.shape[0]
            end = start + share * batch.shape[0]
            for row, place in batch.places(self._tokens).items():
                if start <= place < end:
                    places.append(place - start)
                    slots.append(self._slot[row])
        device = self._mesh.device
        self._places = torch.tensor(places, dtype=torch.int64).to(device, non_blocking=True)
        self._slots = torch.tensor(slots, dtype=torch.int64).to(device, non_blocking=True)

    def table(self) -> np.ndarray:
        """[n, L] fp32, NaN in the rows of samples that were not looked at. Collective over the replica."""
        # every number has one owner and is 0 elsewhere, so that the sum is exact
        dist.all_reduce(self._table_ML, group=parallel_state.get_model_parallel_group())
        table = np.full((self._count, self._layers), np.nan, dtype=np.float32)
        if self._tokens:
            table[list(self._tokens)] = self._table_ML.cpu().numpy()
        return table

    def _keep(self, layer: TransformerLayer, _: object, output: tuple[torch.Tensor, object]) -> None:
        assert self._places is not None  # `watch` comes first
        assert self._slots is not None
        if not self._places.numel():
            return
        number = layer.layer_number  # 1-based over all stages
        hidden = output[0].flatten(0, 1).index_select(0, self._places).float()
        if self._final_norm == "all" or (self._final_norm == "last" and number == self._layers):
            hidden = torch.nn.functional.rms_norm(hidden, (hidden.shape[-1],), self._norm_H, self._eps)
        logits = (hidden * self._heads_MH.index_select(0, self._slots)).sum(-1)
        self._table_ML[self._slots, number - 1] = logits


def context_place(position: int, length: int, size: int) -> tuple[int, int]:
    """Which context-parallel rank holds a token, and where among its own tokens of that sequence.

    Megatron-Core cuts a sequence into 2 x size equal chunks; rank r holds chunks r and
    2 x size - 1 - r, in this order, so that causal attention costs every rank the same.

    Args:
        position: token within its sequence, 0-based.
        length: tokens of the sequence, padding included; a multiple of 2 x size.

    Raises:
        ValueError: the length cannot be cut so, or the position lies outside.
    """
    if length % (2 * size):
        raise ValueError(f"a sequence of {length} tokens cannot be cut into {2 * size} equal chunks")
    if not 0 <= position < length:
        raise ValueError(f"position {position} outside a sequence of {length} tokens")
    chunk = length // (2 * size)
    index, inside = divmod(position, chunk)
    if index < size:
        return index, inside
    return 2 * size - 1 - index, chunk + inside


def _checked(tokens: Sequence[int | None], trajectories: Sequence[Trajectory]) -> Mapping[int, int]:
    if len(tokens) != len(trajectories):
        raise ValueError(f"{len(tokens)} answer tokens for {len(trajectories)} samples")
    wanted = {i: token for i, token in enumerate(tokens) if token is not None}
    for i, token in wanted.items():
        if not 0 <= token < len(trajectories[i]):
            raise ValueError(
                f"token {token} of sample {trajectories[i].key}, which has {len(trajectories[i])} tokens"
            )
    return wanted


@torch.no_grad()
def _head_rows(
    chunks: Sequence[GPTModel], ids: Sequence[int], mesh: Mesh, hidden: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The head's rows of `ids` [M, H] and the final norm's weight [H], fp32, on every stage.

    From the last stage: its tensor ranks each give the rows of their part of the vocabulary.
    """
    rows = torch.zeros((len(ids) + 1, hidden), dtype=torch.float32, device=mesh.device)
    last = chunks[-1]
    if last.post_process:
        tied = last.share_embeddings_and_output_weights
        weight_VH: Any = last.shared_embedding_or_output_weight() if tied else last.output_layer.weight
        local = torch.tensor(ids, dtype=torch.int64, device=mesh.device)
        local -= mesh.tensor_rank * weight_VH.shape[0]
        inside = (local >= 0) & (local < weight_VH.shape[0])
        found = weight_VH[local.clamp(0, weight_VH.shape[0] - 1)].float()
        rows[:-1] = found.masked_fill_(~inside[:, None], 0.0)
        dist.all_reduce(rows, group=parallel_state.get_tensor_model_parallel_group())
        norm: Any = last.decoder.final_layernorm
        rows[-1] = norm.weight.float()
    if mesh.pipeline_size > 1:
        dist.broadcast(
            rows,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),  # type: ignore[arg-type]
        )
    return rows[:-1], rows[-1]

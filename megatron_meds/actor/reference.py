"""The frozen reference policy that `algorithm.kl` measures the policy against.

A second Megatron-Core model in the policy's layout, scored by the policy's score pass. Its weights
come from their Hugging Face folder at every start, also when a run goes on from a checkpoint, and
never change. Knows no loss and no optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from megatron_meds.actor.mesh import Mesh
from megatron_meds.actor.model import build_model
from megatron_meds.actor.pipeline import logprob_processor
from megatron_meds.actor.scoring import Scores, score
from megatron_meds.actor.settings import ActorSettings, ModelSettings
from megatron_meds.actor.shape import read_model_config
from megatron_meds.trajectory import Trajectory
from megatron_meds.weights.huggingface import load_weights


class Reference:
    """A frozen model on this rank's part of the mesh: parameters in the actor's precision, no gradients."""

    def __init__(
        self, model: ModelSettings, actor: ActorSettings, mesh: Mesh, *, temperature: float = 1.0
    ) -> None:
        """Build and load it from `model.reference`, or `model.path` where that is None. Collective.

        Args:
            temperature: logits are divided by it; the policy's.

        Raises:
            ValueError: the folder's model does not fit the layout, or its tensors do not fit the model.
        """
        self.folder = Path(model.reference or model.path)
        self.shape = read_model_config(self.folder)
        self.settings = actor
        self.mesh = mesh
        self._processor = logprob_processor(actor, self.shape.vocab, temperature)
        self.chunks = build_model(self.shape, actor, model.attention, mesh, seed=0)
        load_weights(self.chunks, self.folder, self.shape, mesh)
        for chunk in self.chunks:
            chunk.requires_grad_(False)
        self._away = _InHostMemory(self.chunks) if model.offload_reference else None

    def score(self, trajectories: Sequence[Trajectory]) -> Scores:
        """Log-probabilities (and entropies) under the reference. Collective."""
        with self._present():
            return score(list(self.chunks), trajectories, self.settings, self.mesh, self._processor)

    @contextmanager
    def _present(self) -> Iterator[None]:
        """Its parameters are on the actor's device inside."""
        if self._away is None:
            yield
            return
        self._away.fetch(self.mesh.device)
        try:
            yield
        finally:
            self._away.leave()


class _InHostMemory:
    """Frozen parameters that are kept in host memory (pinned beside a GPU) and visit a device."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        parameters = [p for chunk in chunks for p in chunk.parameters()]
        self._homes = [(p, _to_host(p.data)) for p in parameters]
        self.leave()

    def fetch(self, device: torch.device) -> None:
        for parameter, home in self._homes:
            parameter.data = home.to(device, non_blocking=True)

    def leave(self) -> None:
        """What was on the device is let go: it equals the copy at home."""
        for parameter, home in self._homes:
            parameter.data = home


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().pin_memory() if tensor.is_cuda else tensor

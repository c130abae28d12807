"""A model that learns: Megatron-Core chunks with an optimizer, a learning-rate schedule and one kind of head.

What the policy and the critic have in common. Knows no rewards and no servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_model_config, unwrap_model

from megatron_meds.actor import learning
from megatron_meds.actor.learning import MiniBatch, Objective
from megatron_meds.actor.mesh import Mesh
from megatron_meds.actor.pipeline import OutputProcessor
from megatron_meds.actor.scoring import TokenPass, forward_tokens
from megatron_meds.actor.settings import ActorSettings, OptimizerSettings
from megatron_meds.actor.shape import ModelShape
from megatron_meds.trajectory import Trajectory
from megatron_meds.weights.export import LiveWeights


class Learner:
    """A live model with its optimizer on this rank's part of the mesh."""

    kind: ClassVar[str]
    """Names it in files and messages."""
    origin: ClassVar[str]
    """The setting that names its folder."""

    def __init__(
        self,
        folder: Path,
        shape: ModelShape,
        bare: Sequence[MegatronModule],
        actor: ActorSettings,
        optimizer: OptimizerSettings,
        mesh: Mesh,
        processor: OutputProcessor,
        *,
        steps: int,
    ) -> None:
        """Wrap loaded model chunks. Collective.

        Args:
            folder: the Hugging Face folder it was built from.
            processor: makes of hidden states what an objective reads.
            steps: length of the learning-rate schedule.
        """
        self.folder = folder
        self.shape = shape
        self.settings = actor
        self.mesh = mesh
        self._processor = processor
        self.chunks, self.optimizer = learning.wrap(bare, actor, optimizer)
        self.schedule = learning.make_schedule(self.optimizer, optimizer, steps)

    @property
    def is_bf16(self) -> bool:
        """Whether parameters are bf16 (else fp32)."""
        return get_model_config(self.chunks[0]).bf16

    @property
    def bare(self) -> list[MegatronModule]:
        """The model chunks without their gradient buffers."""
        return unwrap_model(self.chunks)  # type: ignore[return-value]

    def live_weights(self) -> LiveWeights:
        """The weights under their Hugging Face names, read from the live shards at each call."""
        return LiveWeights(self.bare, self.shape, self.mesh)

    def forward(self, trajectories: Sequence[Trajectory]) -> TokenPass:
        """What the head says of every response token, without gradient. Collective."""
        return forward_tokens(self.chunks, trajectories, self.settings, self.mesh, self._processor)

    def begin_step(self) -> float:
        """Move the learning-rate schedule to the next step; returns its learning rate."""
        self.schedule.step(1)
        return max(float(group["lr"]) for group in self.optimizer.param_groups)

    def backward(self, batch: MiniBatch, objective: Objective) -> dict[str, float]:
        """Fill the gradient buffers; returns the objective's metrics. See `learning.backward`."""
        return learning.backward(self.chunks, batch, objective, self.settings, self.mesh, self._processor)

    def update(self, batch: MiniBatch, objective: Objective) -> dict[str, float]:
        """One optimizer update. Collective.

        Returns:
            The objective's metrics summed over this replica (last stage only) and `grad_norm`.
        """
        metrics = self.backward(batch, objective)
        return metrics | {"grad_norm": learning.step(self.optimizer)}

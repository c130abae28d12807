"""The policy: a Megatron-Core model from a Hugging Face folder, scored and updated by the loop.

Joins mesh, model, weights, score pass and update behind four calls; knows no rewards and no servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_model_config, unwrap_model

from megatron_meds.actor import learning
from megatron_meds.actor.layer_logits import FinalNorm
from megatron_meds.actor.learning import MiniBatch, Objective
from megatron_meds.actor.mesh import Mesh
from megatron_meds.actor.model import build_model
from megatron_meds.actor.scoring import Scores, score
from megatron_meds.actor.settings import ActorSettings, ModelSettings, OptimizerSettings
from megatron_meds.actor.shape import read_model_config
from megatron_meds.trajectory import Trajectory
from megatron_meds.weights.export import LiveWeights
from megatron_meds.weights.huggingface import load_weights, save_huggingface


class Policy:
    """A live model with its optimizer on this rank's part of the mesh."""

    def __init__(
        self,
        model: ModelSettings,
        actor: ActorSettings,
        optimizer: OptimizerSettings,
        mesh: Mesh,
        *,
        steps: int,
        seed: int,
        temperature: float = 1.0,
    ) -> None:
        """Build, load and wrap the model. Collective.

        Args:
            steps: length of the learning-rate schedule.
            temperature: logits are divided by it, in the score pass and in the update.
        """
        self.folder = Path(model.path)
        self.shape = read_model_config(self.folder)
        self.settings = actor
        self.mesh = mesh
        self.temperature = temperature
        bare = build_model(self.shape, actor, model.attention, mesh, seed)
        if model.weights == "load":
            load_weights(bare, self.folder, self.shape, mesh)
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

    def score(
        self,
        trajectories: Sequence[Trajectory],
        answer_tokens: Sequence[int | None] | None = None,
        final_norm: FinalNorm = "last",
    ) -> Scores:
        """Log-probabilities and entropies under the current weights, and the layer logits of
        `answer_tokens` where these are given (see `LayerLogits`). Collective."""
        return score(
            self.chunks,
            trajectories,
            self.settings,
            self.mesh,
            vocabulary=self.shape.vocab,
            temperature=self.temperature,
            answer_tokens=answer_tokens,
            final_norm=final_norm,
        )

    def begin_step(self) -> float:
        """Move the learning-rate schedule to the next step; returns its learning rate."""
        self.schedule.step(1)
        return max(float(group["lr"]) for group in self.optimizer.param_groups)

    def update(self, batch: MiniBatch, objective: Objective) -> dict[str, float]:
        """One optimizer update. Collective.

        Returns:
            The objective's metrics summed over this replica (last stage only) and `grad_norm`.
        """
        metrics = learning.backward(
            self.chunks,
            batch,
            objective,
            self.settings,
            self.mesh,
            vocabulary=self.shape.vocab,
            temperature=self.temperature,
        )
        return metrics | {"grad_norm": learning.step(self.optimizer)}

    def save_huggingface(self, target: Path) -> None:
        """Write a Hugging Face folder that transformers and vLLM load. Collective."""
        save_huggingface(self.bare, self.folder, target, self.shape, self.mesh)

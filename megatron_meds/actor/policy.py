"""The policy: a Megatron-Core model from a Hugging Face folder, scored and updated by the loop.

Joins mesh, model, weights, score pass and update behind four calls; knows no rewards and no servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_meds.actor.layer_logits import FinalNorm
from megatron_meds.actor.learner import Learner
from megatron_meds.actor.mesh import Mesh
from megatron_meds.actor.model import build_model
from megatron_meds.actor.pipeline import logprob_processor
from megatron_meds.actor.scoring import Scores, score
from megatron_meds.actor.settings import ActorSettings, ModelSettings, OptimizerSettings
from megatron_meds.actor.shape import read_model_config
from megatron_meds.trajectory import Trajectory
from megatron_meds.weights.huggingface import load_weights, save_huggingface


class Policy(Learner):
    """The model whose tokens are sampled; `begin_step` and `update` are `Learner`'s."""

    kind, origin = "policy", "model.path"

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
        folder = Path(model.path)
        shape = read_model_config(folder)
        self.temperature = temperature
        bare = build_model(shape, actor, model.attention, mesh, seed)
        if model.weights == "load":
            load_weights(bare, folder, shape, mesh)
        processor = logprob_processor(actor, shape.vocab, temperature)
        super().__init__(folder, shape, bare, actor, optimizer, mesh, processor, steps=steps)

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
            self._processor,
            answer_tokens,
            final_norm,
        )

    def save_huggingface(self, target: Path) -> None:
        """Write a Hugging Face folder that transformers and vLLM load. Collective."""
        save_huggingface(self.bare, self.folder, target, self.shape, self.mesh)

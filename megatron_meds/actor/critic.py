"""The critic of PPO: the value of a response so far, learnt by a second model beside the policy.

A Megatron-Core model on the policy's ranks, in its layout and by its micro-batches, with a value head
in place of the output layer. Starts from a language model's layers and a head of zeros, so that its
first values are 0 and its first update moves the head alone. Knows no rewards: what it is to
predict comes in with the mini-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_meds.actor.learner import Learner
from megatron_meds.actor.mesh import Mesh
from megatron_meds.actor.model import build_model
from megatron_meds.actor.pipeline import value_processor
from megatron_meds.actor.settings import ActorSettings, CriticSettings, ModelSettings
from megatron_meds.actor.shape import read_model_config, with_value_head
from megatron_meds.trajectory import Trajectory
from megatron_meds.weights.huggingface import load_weights


class Critic(Learner):
    """A live value model; `begin_step` and `update` are `Learner`'s."""

    kind, origin = "critic", "critic.path"

    def __init__(
        self,
        settings: CriticSettings,
        model: ModelSettings,
        actor: ActorSettings,
        mesh: Mesh,
        *,
        steps: int,
        seed: int,
    ) -> None:
        """Build, load and wrap the model of `critic.path`, or of `model.path` where that is None. Collective.

        Args:
            steps: length of the learning-rate schedule.
            seed: of random weights, where the critic starts from the policy's and these are random.

        Raises:
            ValueError: the folder's model does not fit the layout, or its tensors do not fit the model.
        """
        folder = settings.path or model.path
        shape = with_value_head(read_model_config(folder))
        bare = build_model(shape, actor, model.attention, mesh, seed)
        if settings.path is not None or model.weights == "load":
            load_weights(bare, folder, shape, mesh)
        super().__init__(folder, shape, bare, actor, settings.optimizer, mesh, value_processor, steps=steps)

    def values(self, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        """The value before each response token is chosen: [T] fp32 of each trajectory, in the order given;
        empty on ranks that are not on the last pipeline stage. Collective."""
        return self.forward(trajectories).column(0)

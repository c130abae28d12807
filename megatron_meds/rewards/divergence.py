"""The reward for staying near the reference policy: minus the divergence, at every token.

Knows log-probabilities of both policies; knows no models.
"""

from collections.abc import Sequence

import torch

from megatron_meds.algorithms import kl_k1, kl_k3
from megatron_meds.algorithms.settings import KlSettings
from megatron_meds.trajectory import RewardLedger, Trajectory


def add_kl(ledger: RewardLedger, trajectories: Sequence[Trajectory], settings: KlSettings) -> None:
    """Take `coefficient` times the estimate of KL(policy || reference) off every token, as source `kl`.

    Group-relative algorithms see its sum over a response, as a part of the total reward; rewards to go
    see it token by token.

    Args:
        trajectories: scored by the policy and by the reference.

    Raises:
        ValueError: one was not scored; names it.
    """
    ledger.open("kl")
    estimate = {"k1": kl_k1, "k3": kl_k3}[settings.estimator]
    for index, t in enumerate(trajectories):
        if t.logprobs is None or t.reference_logprobs is None:
            raise ValueError(f"source 'kl': sample {t.key} was not scored by the policy and the reference")
        own, reference = torch.from_numpy(t.logprobs), torch.from_numpy(t.reference_logprobs)
        ledger.add_tokens("kl", index, -settings.coefficient * estimate(own, reference).double().numpy())

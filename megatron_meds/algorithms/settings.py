"""Settings of the algorithm: advantages and loss."""

from typing import Literal

from pydantic import Field

from megatron_meds.section import Section

GROUP_RELATIVE = ("grpo", "dapo", "dr_grpo", "gspo", "grpo_entropy", "rloo", "reinforce_pp_baseline")
"""Algorithms that compare the answers to one prompt."""
REWARD_TO_GO = ("reinforce_pp", "reinforce_pp_baseline", "ppo")
"""Algorithms with an advantage of each token: the rewards from there on."""
STANDARDISED = ("grpo", "dapo", "dr_grpo", "gspo", "grpo_entropy")
"""Algorithms whose advantages may be divided by the group's standard deviation."""


class KlSettings(Section):
    coefficient: float = Field(default=0.0, ge=0)
    """Weight of the divergence from the frozen reference policy (`model.reference`, or the policy's own
    start); 0: none."""
    term: Literal["loss", "reward"] = "loss"
    """`loss`: added to every token's loss, with gradient; `reward`: taken off every token's reward (source
    `kl`), before advantages."""
    estimator: Literal["k3", "k1"] = "k3"
    """Of KL(policy || reference) at a sampled token, d = log p_reference - log p: `k3` = e^d - 1 - d;
    `k1` = -d, for the reward only (as a loss its gradient is 0 on average)."""


class MismatchSettings(Section):
    importance_weights: bool = False
    """Multiply every token's policy loss by min(p_actor / p_server, `cap`), of the weights that sampled
    it (truncated importance sampling). A token without a server log-probability weighs 1."""
    cap: float = Field(default=2.0, gt=0)
    """Largest importance weight."""
    max_gap: float | None = Field(default=None, gt=0)
    """A sequence with a token whose |log p_actor - log p_server| is above this leaves the loss; None: none
    does."""
    max_mean_gap: float | None = Field(default=None, gt=0)
    """The same for the mean over a sequence's tokens."""


class EntropyAdvantageSettings(Section):
    coefficient: float = Field(default=0.4, ge=0)
    """alpha of A += min(alpha H, |A| / kappa) at every token (grpo_entropy)."""
    divisor: float = Field(default=2.0, gt=1)
    """kappa: above 1, so that no advantage changes its sign."""


class AlgorithmSettings(Section):
    name: Literal[
        "sft",
        "grpo",
        "dapo",
        "dr_grpo",
        "gspo",
        "grpo_entropy",
        "rloo",
        "reinforce_pp",
        "reinforce_pp_baseline",
        "ppo",
    ] = "dapo"
    """What is minimised; formulas in docs/algorithms.md. `sft` is supervised training on `data.train` rows
    that hold a response."""
    mini_batch_prompts: int | None = Field(default=None, ge=1)
    """Prompts per optimizer update; None: all of a step, one update."""
    epochs: int = Field(default=1, ge=1)
    """Passes over a step's trajectories."""
    clip_low: float | None = Field(default=None, ge=0)
    """Lower clip range of the ratio; None: the algorithm's own (gspo 3e-4, others 0.2)."""
    clip_high: float | None = Field(default=None, ge=0)
    """Upper clip range; None: the algorithm's own (dapo 0.28, gspo 4e-4, others 0.2)."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound c of the dual clip for negative advantages; None: the algorithm's own (dapo 10, ppo 3, others
    none); `.inf`: no dual clip."""
    aggregation: (
        Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] | None
    ) = None
    """How token losses become one number; None: the algorithm's own (dapo and ppo token-mean, rloo
    seq-mean-token-sum, dr_grpo seq-mean-token-sum-norm, others seq-mean-token-mean).
    `seq-mean-token-sum-norm` divides by `rollout.max_tokens`."""
    scale_by_std: bool | None = None
    """Divide group advantages by the group's standard deviation; None: the algorithm's own (dr_grpo false,
    others true)."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of later rewards (reinforce_pp, reinforce_pp_baseline, ppo)."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """Lambda of GAE (ppo): 1 is return minus value, 0 looks one token ahead."""
    entropy_bonus: float = Field(default=0.0, ge=0)
    """Coefficient of the mean token entropy, added to the objective."""
    entropy_advantage: EntropyAdvantageSettings = EntropyAdvantageSettings()
    kl: KlSettings = KlSettings()
    mismatch: MismatchSettings = MismatchSettings()

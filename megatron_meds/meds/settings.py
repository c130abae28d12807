"""Settings of MEDS: what is remembered of wrong answers, and what a repeated one costs."""

from typing import Literal, Self

from pydantic import Field, model_validator

from megatron_meds.section import Section


class MedsSettings(Section):
    enabled: bool = False
    """Remember answers by their layer logits and penalise repeated mistakes (arXiv 2604.11297)."""
    alpha: float = Field(default=0.1, ge=0)
    """Penalty min(alpha ln(n + 1), beta) of an answer whose mistake was made n times before."""
    beta: float | None = Field(default=None, ge=0)
    """Largest penalty; None: 2 alpha, reached at n = 7."""
    target: Literal["wrong", "right", "both", "none"] = "wrong"
    """Which answers are remembered and shaped; right ones by R' = R / (1 + penalty). `none`: wrong ones are
    remembered and measured, and no reward is changed."""
    last: int | Literal["half"] | None = 14
    """Layers whose logits are the feature, from the last one (all where there are no more); `half`: L // 2;
    null: all."""
    difference: bool = False
    """Take differences of adjacent layers first."""
    final_norm: Literal["last", "all", "none"] = "last"
    """Layers whose hidden state passes the model's final norm before the LM head: the last (as released), all
    or none."""
    feature_function: str | None = None
    """`module:name` of your own `(layer_logits: ndarray[n, L], trajectories: list[Trajectory]) -> ndarray[n,
    d]`, in place of `last` and `difference`."""
    clusters: Literal["hdbscan", "single"] = "hdbscan"
    """`single`: all remembered answers to a prompt are one cluster (an ablation)."""
    noise: Literal["cluster", "free", "single"] = "cluster"
    """Answers in no cluster: `cluster`: they are one (as released); `free`: no penalty (as in the paper's
    text); `single`: as `free`, but where all are noise and close together they are one cluster."""
    single_radius: float = Field(default=0.01, gt=0, lt=1)
    """With `noise: single`: largest cosine distance from the mean direction."""
    neighbours: int = Field(default=3, ge=1)
    """Nearest remembered answers that vote on a new one's cluster."""
    count_current: bool = False
    """Also count the other answers of the same step in the same cluster."""
    max_per_prompt: int | None = Field(default=None, ge=1)
    """Answers remembered per prompt, the newest (right and wrong ones apart); null: all."""
    backend: Literal["auto", "sklearn", "cuml"] = "auto"
    """HDBSCAN of scikit-learn, or of cuML on a GPU; `auto`: scikit-learn's labels, by a quicker way for small
    sets, and cuML for very large ones where it is installed."""
    workers: int = Field(default=2, ge=1)
    """Processes that cluster on each replica head, the head included; others start when there is enough."""
    eigen_ratio: bool = True
    """Log the top-1 eigen ratio of the wrong answers remembered of each step's prompts."""
    answer_characters: int = Field(default=80, ge=0)
    """Of an answer kept to be looked at with `megatron-meds memory show`; 0: none."""
    response_characters: int = Field(default=400, ge=0)
    """Of the end of a response, and of the question, kept to be looked at; 0: none."""
    keep_layer_logits: bool = True
    """Keep all layers' logits (2 bytes each) for the heat map."""

    @property
    def cap(self) -> float:
        """beta, worked out."""
        return 2.0 * self.alpha if self.beta is None else self.beta

    @model_validator(mode="after")
    def _positive_last(self) -> Self:
        if isinstance(self.last, int) and self.last < 1:
            raise ValueError(f"last = {self.last}: should be 1 or more, half, or null for all layers")
        return self

"""Algorithms, terms and references that do not go together: a part of `checks`, without torch as it is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from megatron_meds.actor.settings import CriticSettings
from megatron_meds.actor.shape import ModelShape, UnsupportedModel, check_layout, read_model_config
from megatron_meds.algorithms.settings import (
    GROUP_RELATIVE,
    REWARD_TO_GO,
    STANDARDISED,
    EntropyAdvantageSettings,
    KlSettings,
    MismatchSettings,
)
from megatron_meds.config import Settings


def find_faults(settings: Settings) -> Iterator[str]:
    """Every fault as one line: the key, what is wrong with it, what to change."""
    yield from _algorithm(settings)
    yield from _kl(settings)
    yield from _critic(settings)


def _algorithm(settings: Settings) -> Iterator[str]:
    algorithm = settings.algorithm
    name = algorithm.name
    if name in GROUP_RELATIVE and settings.rollout.samples_per_prompt < 2:
        yield (
            f"rollout.samples_per_prompt = 1: {name} compares the answers to one prompt "
            "and would learn nothing; take 2 or more"
        )
    if algorithm.scale_by_std is not None and name not in STANDARDISED:
        yield f"algorithm.scale_by_std: {name} divides by no group's standard deviation; leave it null"
    if algorithm.gamma != 1 and name not in REWARD_TO_GO:
        yield (
            f"algorithm.gamma = {algorithm.gamma}: {name} gives all tokens of a response one advantage; "
            f"leave it 1, or take {' or '.join(REWARD_TO_GO)}"
        )
    if algorithm.lam != 1 and name != "ppo":
        yield f"algorithm.lam = {algorithm.lam}: {name} has no critic; leave it 1, or take ppo"
    if algorithm.entropy_advantage != EntropyAdvantageSettings() and name != "grpo_entropy":
        yield f"algorithm.entropy_advantage: {name} adds none; set algorithm.name=grpo_entropy"
    if name == "gspo" and algorithm.dual_clip is not None and algorithm.dual_clip != math.inf:
        yield (
            f"algorithm.dual_clip = {algorithm.dual_clip}: gspo's ratio is a mean over the sequence and "
            "stays near 1; leave it null"
        )
    if name == "sft" and algorithm.entropy_bonus:
        yield f"algorithm.entropy_bonus = {algorithm.entropy_bonus}: sft has none; set it to 0"
    mismatch = algorithm.mismatch
    if mismatch.cap != MismatchSettings().cap and not mismatch.importance_weights:
        yield (
            f"algorithm.mismatch.cap = {mismatch.cap}: there are no importance weights to cap; "
            "set algorithm.mismatch.importance_weights=true"
        )
    if name == "sft" and mismatch != MismatchSettings():
        yield "algorithm.mismatch: sft learns from given responses, no server sampled them; drop it"


def _kl(settings: Settings) -> Iterator[str]:
    kl, model = settings.algorithm.kl, settings.model
    if settings.algorithm.name == "sft":
        if kl.coefficient:
            yield f"algorithm.kl.coefficient = {kl.coefficient}: sft has no reference policy; set it to 0"
        if model.reference is not None:
            yield f"model.reference = {model.reference}: sft has no reference policy; leave it null"
        return
    if kl.coefficient and kl.term == "loss" and kl.estimator == "k1":
        yield (
            "algorithm.kl.estimator = k1: its gradient as a loss is 0 on average; take k3, or set "
            "algorithm.kl.term=reward"
        )
    if kl.coefficient and model.reference is None and model.weights == "random":
        yield (
            f"algorithm.kl.coefficient = {kl.coefficient}: with model.weights=random there is no policy to "
            "refer to; set model.reference"
        )
    if not kl.coefficient and kl != KlSettings():
        yield "algorithm.kl: without a coefficient there is no such term; set algorithm.kl.coefficient"
    if model.offload_reference and not kl.coefficient and model.reference is None:
        yield "model.offload_reference: there is no reference; set algorithm.kl.coefficient or drop it"
    if model.reference is not None:
        yield from _second_model(settings, "model.reference", model.reference)


def _critic(settings: Settings) -> Iterator[str]:
    critic, name = settings.critic, settings.algorithm.name
    if name != "ppo":
        if critic != CriticSettings():
            yield f"critic: {name} has none; set algorithm.name=ppo, or drop the section"
        return
    if critic.path is not None:
        yield from _second_model(settings, "critic.path", critic.path)
    if critic.steps_before_policy >= settings.run.steps:
        yield (
            f"critic.steps_before_policy = {critic.steps_before_policy}: the policy would not learn in "
            f"run.steps = {settings.run.steps}; lower it"
        )


def _second_model(settings: Settings, key: str, folder: Path) -> Iterator[str]:
    """A reference or a critic must take the policy's tokens, and be cut as the policy is."""
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        yield f"{key} = {folder}: must hold a Hugging Face model, config.json and *.safetensors"
        return
    try:
        shape = read_model_config(folder)
    except UnsupportedModel as error:
        yield f"{key} = {folder}: {error}"
        return
    for fault in check_layout(shape, settings.actor.layout):
        yield f"{key} = {folder}: {fault}"
    longest = settings.data.max_prompt_tokens + settings.rollout.max_tokens
    if longest > shape.max_positions:
        yield (
            f"{key} = {folder}: has {shape.max_positions} positions, fewer than "
            f"data.max_prompt_tokens + rollout.max_tokens = {longest}"
        )
    policy = _shape(settings.model.path)
    if policy is not None and shape.vocab != policy.vocab:
        yield (
            f"{key} = {folder}: has {shape.vocab} vocabulary entries, the policy {policy.vocab}; "
            "both must read the same tokens"
        )


def _shape(folder: Path) -> ModelShape | None:
    """The shape of the model in a folder; None where `_model` tells what is wrong with it."""
    try:
        return read_model_config(folder) if (folder / "config.json").is_file() else None
    except UnsupportedModel:
        return None

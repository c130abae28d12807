"""Are the weights that servers hold those of a Hugging Face folder?

Two witnesses: digests of every tensor, against those of another server that loaded the folder; and
the likeliest continuations of some prompts, against transformers with the folder. Knows vLLM's
names of fused tensors; nothing of how weights got anywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_meds.weights.control import ControlClient

Digests = Mapping[str, str]
"""By vLLM's name of a tensor, with the worker's place before it: `dp0:pp0:pcp0:tp0:lm_head.weight`."""

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Layers that vLLM makes of several."""
_OF_NOTHING = hashlib.sha256(b"").hexdigest()


def read_digests(control: ControlClient) -> list[Digests]:
    """What each server holds, in the order of the servers."""
    return [answer["checksums"] for answer in control.post("weight_checker", {"action": "checksum"})]


def differing(held: Digests, reference: Digests) -> list[str]:
    """What is wrong with each tensor that is not the reference's, by name; empty where all are equal.

    A digest of nothing (a weight that a kernel keeps elsewhere) proves nothing, and counts as wrong.
    """
    faults = []
    for key in dict.fromkeys([*reference, *held]):
        if key not in held:
            faults.append(f"{describe(key)} is not there")
        elif key not in reference:
            faults.append(f"{describe(key)} is there, and not in the reference")
        elif held[key] != reference[key]:
            faults.append(f"{describe(key)} differs")
        elif held[key] == _OF_NOTHING:
            faults.append(f"{describe(key)} cannot be told: the server keeps it where it has no digest")
    return faults


def changed(before: Digests, after: Digests) -> int:
    """Tensors whose digest is another."""
    return sum(after[key] != before.get(key) for key in after)


def describe(key: str) -> str:
    """A digest's key for people: the tensor, what it is fused of, the worker if it is not the only one."""
    *place, name = key.split(":")
    layer = next((part for part in name.split(".") if part in FUSED), None)
    made_of = f" ({', '.join(FUSED[layer])})" if layer else ""
    elsewhere = [part for part in place if not part.endswith("0")]
    return f"{name}{made_of}" + (f" on worker {' '.join(place)}" if elsewhere else "")


@dataclass(frozen=True)
class Agreement:
    """How well continuations agree with transformers."""

    tokens: int
    """All that were compared."""
    ties: int
    """Tokens that are not transformers' first choice, though as good as it within the tolerance."""
    wrong: int
    """Tokens that transformers would not have chosen."""
    logprob: float
    """Largest difference of a log-probability."""


def agreement(
    folder: Path,
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[tuple[Sequence[int], Sequence[float]]]],
    tolerance: float,
) -> list[Agreement]:
    """Compare greedy continuations with transformers in fp32 on CPU, of the model in `folder`.

    At each position transformers sees the tokens before it: as long as every one is its first choice,
    the continuation is what its own greedy generation gives.

    Args:
        continuations: for each server, for each prompt: token ids and their log-probabilities.
        tolerance: nats by which a token may lie below the first choice and count as a tie.

    Returns:
        One for each server.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for server in continuations:
        tokens, ties, wrong, logprob = 0, 0, 0, 0.0
        for prompt, (ids, logprobs) in zip(prompts, server, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
            expected = torch.log_softmax(logits.float(), dim=-1)
            chosen = expected.gather(1, torch.tensor(ids)[:, None])[:, 0]
            below = expected.max(dim=1).values - chosen
            tokens += len(ids)
            ties += int(((below > 0) & (below <= tolerance)).sum())
            wrong += int((below > tolerance).sum())
            logprob = max(logprob, float((chosen - torch.tensor(logprobs)).abs().max()))
        found.append(Agreement(tokens, ties, wrong, logprob))
    return found

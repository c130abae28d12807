"""Trajectories with made-up layer logits: mistakes of a few kinds, right answers, answers without a box."""

import numpy as np

from megatron_meds.trajectory import Prompt, Trajectory, prompt_id

LAYERS = 20


def decode(ids):
    return "".join(map(chr, ids))


def trajectory(question, sample, text, correct):
    prompt = Prompt(id=prompt_id(question), question=question, token_ids=(1,), answer="1")
    ids = list(map(ord, text))
    return Trajectory(prompt, sample, ids, text, [0.0] * len(ids), "stop", 0, correct=correct)


def step_samples(step, prompts=12, group=8):
    """[(trajectory, layer logits [L])] of a step; the same for one seed, whoever asks."""
    found = []
    for number in range(prompts):
        generator = np.random.default_rng([step, number])
        for sample in range(group):
            kind = int(generator.integers(0, 4))
            text = "no idea" if kind == 3 else rf"so \boxed{{{kind}}}"
            modes = np.random.default_rng([99, number]).normal(size=(4, LAYERS)) * 5 - 15
            logits = modes[kind] + 0.3 * generator.normal(size=LAYERS)
            found.append((trajectory(f"question {number}", sample, text, kind == 1), logits))
    return found

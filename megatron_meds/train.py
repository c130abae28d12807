"""The loop: sync, sample, score, reward, update. Everything it calls is opened in `run.py`."""

from __future__ import annotations

from megatron_meds.config import Settings
from megatron_meds.run import open_run
from megatron_meds.supervised import supervise


def train(settings: Settings) -> None:
    """Train by these settings. Every rank of the run calls it; the environment is torchrun's."""
    if settings.algorithm.name == "sft":
        return supervise(settings)
    with open_run(settings) as run:
        run.sync()
        run.evaluate_at_start()
        for step in run.steps():
            with run.phase("rollout"):
                samples = run.sample(step)
            with run.phase("score"):
                run.score(samples)
            if settings.vsrm.enabled:
                with run.phase("steps"):
                    run.measure_steps(samples)
            with run.phase("reward"):
                batches = run.reward(samples)
            with run.phase("update"):
                run.update(batches)
            with run.phase("sync"):
                run.sync()
            run.finish(step)
        run.export()
    return None

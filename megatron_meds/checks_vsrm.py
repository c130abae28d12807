"""What does not go together with step rewards: a part of `checks`, without torch as it is."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_meds.actor.shape import UnsupportedModel, read_model_config
from megatron_meds.config import Settings
from megatron_meds.vsrm.settings import VsrmSettings

_NO_CACHE = "--no-enable-prefix-caching"


def find_faults(settings: Settings) -> Iterator[str]:
    """Every fault as one line: the key, what is wrong with it, what to change."""
    vsrm = settings.vsrm
    if not vsrm.enabled:
        if vsrm != VsrmSettings():
            yield "vsrm: set, but not in use; set vsrm.enabled=true, or drop the section"
        return
    if settings.algorithm.name == "sft":
        yield "vsrm.enabled: sft learns from given responses and samples none; set it to false"
        return
    server = settings.rollout.server
    if vsrm.candidates > server.max_num_seqs:
        yield (
            f"vsrm.candidates = {vsrm.candidates}: vLLM takes at most rollout.server.max_num_seqs = "
            f"{server.max_num_seqs} samples of a request; raise that"
        )
    if vsrm.min_gain > vsrm.candidates:
        yield (
            f"vsrm.min_gain = {vsrm.min_gain}: above vsrm.candidates = {vsrm.candidates}, so that no step "
            "could earn anything; lower it"
        )
    if _NO_CACHE in server.extra_args:
        yield (
            f"rollout.server.extra_args: {_NO_CACHE} would have every prefix computed anew for vsrm; drop it"
        )
    if (close := settings.reward.form.think_close) is not None and close != vsrm.close_tag:
        yield (
            f"vsrm.close_tag = {vsrm.close_tag!r}: reward.form.think_close = {close!r} closes the same "
            "reasoning; set them alike"
        )
    yield from _room(settings)


def _room(settings: Settings) -> Iterator[str]:
    """A prompt and a response of full length must leave room for the shortest continuation."""
    given = settings.rollout.server.max_model_len
    if given is None:
        return
    try:
        positions = read_model_config(settings.model.path).max_positions
    except (UnsupportedModel, OSError):
        return  # told by another check
    vsrm, longest = settings.vsrm, settings.data.max_prompt_tokens + settings.rollout.max_tokens
    needed = min(longest + len(vsrm.close_tag) + min(vsrm.min_tokens, vsrm.max_tokens), positions)
    if given < needed:
        yield (
            f"rollout.server.max_model_len = {given}: with vsrm a prompt, a response and the shortest "
            f"continuation take {needed}; raise it, or leave it null"
        )

"""What can be known to go wrong before any process starts: layouts, batches, files, ports, devices.

Looks at files, ports and the kernel's list of GPUs. Needs no torch and starts nothing. Each check yields
its faults, so that one run of `check` tells all of them.
"""

from __future__ import annotations

import importlib.machinery
import os
import re
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from megatron_meds import machine
from megatron_meds.actor.shape import ModelShape, UnsupportedModel, check_layout, read_model_config
from megatron_meds.arithmetic import model_ranks, own_world_size, replicas
from megatron_meds.checks_algorithm import find_faults as find_algorithm_faults
from megatron_meds.checks_vsrm import find_faults as find_vsrm_faults
from megatron_meds.config import Settings, SettingsError
from megatron_meds.data.fields import ANSWER_FUNCTION
from megatron_meds.data.known import KNOWN, is_known

_FUNCTION = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")


@dataclass(frozen=True)
class Job:
    """The ranks a run has, and whether this process is the one that looks at ports."""

    world_size: int
    ranks_per_node: int
    launcher: bool
    """Nothing runs yet: ports must be free, and the ranks must fit this machine."""

    @classmethod
    def own(cls, settings: Settings) -> Job:
        """The ranks `train` would start on this machine."""
        size = own_world_size(settings.actor.layout)
        return cls(size, size, launcher=True)


def device(settings: Settings) -> str:
    """`cuda` or `cpu`: where the actor runs."""
    if settings.actor.device != "auto":
        return settings.actor.device
    return "cuda" if machine.gpus() else "cpu"


def transport(settings: Settings) -> Literal["shm", "nccl"]:
    """`nccl` or `shm`: how weights travel."""
    if settings.weights.transport != "auto":
        return settings.weights.transport
    return "nccl" if device(settings) == "cuda" else "shm"


def check(settings: Settings, job: Job | None = None) -> None:
    """Refuse what cannot work, before any process group exists.

    Raises:
        SettingsError: all faults found, a line each.
    """
    faults = list(find_faults(settings, job or Job.own(settings)))
    if faults:
        raise SettingsError(faults)


def find_faults(settings: Settings, job: Job) -> Iterator[str]:
    """Every fault as one line: the key, what is wrong with it, what to change."""
    yield from _ranks(settings, job)
    yield from _model(settings)
    yield from _batch(settings, job)
    yield from _devices(settings, job)
    yield from _optimizer(settings)
    yield from _run(settings)
    yield from _data(settings)
    yield from _functions(settings)
    yield from find_algorithm_faults(settings)
    if settings.algorithm.name != "sft":
        yield from _rollout(settings)
        yield from _servers(settings, job)
        yield from _reward(settings)
    yield from _meds(settings)
    yield from find_vsrm_faults(settings)


def find_reference_faults(settings: Settings, job: Job, rejoin: bool) -> Iterator[str]:
    """What `check-sync` cannot do with settings that are fit for training."""
    if settings.algorithm.name == "sft":
        yield "algorithm.name = sft: supervised training has no servers whose weights could be checked"
        return
    server, present = settings.rollout.server, machine.gpus()
    if server.placement != "external":
        return  # the servers make room for the one they are compared with
    if rejoin:
        yield "rollout.server.placement = external: --rejoin starts a server again, and these are not ours"
    taken = job.ranks_per_node + server.tensor_parallel
    if device(settings) == "cuda" and server.devices is None and 0 < present < taken:
        yield (
            f"rollout.server.devices: the server to compare external ones with needs "
            f"{server.tensor_parallel} GPUs beside the actor's {job.ranks_per_node}, there are {present}; "
            "name free ones, or lower the actor's layout"
        )


def _ranks(settings: Settings, job: Job) -> Iterator[str]:
    layout = settings.actor.layout
    size = model_ranks(layout)
    parts = f"tensor {layout.tensor} x pipeline {layout.pipeline} x context {layout.context}"
    if job.world_size % size:
        yield f"actor.layout: {job.world_size} ranks cannot hold whole copies of {parts} = {size} ranks"
    elif layout.data != "auto" and layout.data * size != job.world_size:
        yield (
            f"actor.layout.data = {layout.data}: {parts} x data {layout.data} needs {layout.data * size} "
            f"ranks, the launcher started {job.world_size}; set it to {job.world_size // size} or auto"
        )


def _model(settings: Settings) -> Iterator[str]:
    folder = settings.model.path
    if not folder.is_dir():
        yield f"model.path = {folder}: no such folder; it must hold a Hugging Face model"
        return
    if not (folder / "config.json").is_file():
        yield f"model.path = {folder}: holds no config.json; it must hold a Hugging Face model"
        return
    if settings.model.weights == "load" and not any(folder.glob("*.safetensors")):
        yield f"model.path = {folder}: holds no *.safetensors; add them, or set model.weights=random"
    if not (folder / "tokenizer.json").is_file() and not (folder / "tokenizer_config.json").is_file():
        yield f"model.path = {folder}: holds no tokenizer (tokenizer.json); copy the model's own there"
    try:
        shape = read_model_config(folder)
    except UnsupportedModel as error:
        yield f"model.path = {folder}: {error}"
        return
    yield from check_layout(shape, settings.actor.layout)
    yield from _limits(settings, shape)


def _limits(settings: Settings, shape: ModelShape) -> Iterator[str]:
    longest = settings.data.max_prompt_tokens + settings.rollout.max_tokens
    if longest > shape.max_positions:
        yield (
            f"data.max_prompt_tokens + rollout.max_tokens = {longest}: the model has "
            f"{shape.max_positions} positions; lower one of them"
        )
    beyond = [i for i in settings.rollout.stop_token_ids if not 0 <= i < shape.vocab]
    if beyond:
        yield f"rollout.stop_token_ids = {beyond}: the vocabulary has {shape.vocab} entries, from 0"


def _batch(settings: Settings, job: Job) -> Iterator[str]:
    prompts, mini = settings.data.prompts_per_step, settings.algorithm.mini_batch_prompts
    count = replicas(settings.actor.layout, job.world_size)
    if prompts < count:
        yield (
            f"data.prompts_per_step = {prompts}: fewer than the {count} data-parallel replicas; "
            f"raise it to {count} or more, or lower actor.layout.data"
        )
    if mini is not None and mini > prompts:
        yield (
            f"algorithm.mini_batch_prompts = {mini}: larger than data.prompts_per_step = {prompts}; "
            "lower it, or leave it null for one update a step"
        )
    elif mini is not None and mini < count:
        yield (
            f"algorithm.mini_batch_prompts = {mini}: fewer than the {count} data-parallel replicas; "
            f"raise it to {count} or more"
        )


def _devices(settings: Settings, job: Job) -> Iterator[str]:
    actor, present = settings.actor, machine.gpus()
    kind = device(settings)
    if kind == "cuda" and not present:
        yield "actor.device = cuda: no NVIDIA GPU is visible; set it to cpu, or see `megatron-meds doctor`"
    if kind == "cuda" and present and job.ranks_per_node > present:
        yield f"actor.layout: {job.ranks_per_node} ranks here need a GPU each, there are {present}; lower it"
    if kind == "cpu" and settings.model.attention == "te":
        yield "model.attention = te: transformer-engine needs a GPU; set it to auto or sdpa"
    if actor.layout.context > 1:
        yield "actor.layout.context: micro-batches are not cut along the sequence; set it to 1"


def _optimizer(settings: Settings) -> Iterator[str]:
    for key, one in (("optimizer", settings.optimizer), ("critic.optimizer", settings.critic.optimizer)):
        if one.min_lr > one.lr:
            yield f"{key}.min_lr = {one.min_lr}: above {key}.lr = {one.lr}"


def _run(settings: Settings) -> Iterator[str]:
    run = settings.run
    if run.folder.exists() and not run.folder.is_dir():
        yield f"run.folder = {run.folder}: a file is in the way"
    elif run.resume == "never" and run.folder.is_dir() and any(run.folder.iterdir()):
        yield (
            f"run.folder = {run.folder}: already holds a run; choose another run.name, delete the folder, "
            "or set run.resume=auto to go on with it"
        )
    if isinstance(run.resume, Path) and not run.resume.is_dir():
        yield f"run.resume = {run.resume}: no such folder; give a checkpoint's, or auto"
    if run.evaluate_every and not settings.data.evaluation:
        yield f"run.evaluate_every = {run.evaluate_every}: there is no data.evaluation set to evaluate on"


def _data(settings: Settings) -> Iterator[str]:
    supervised = settings.algorithm.name == "sft"
    if settings.data.folder is not None and not settings.data.folder.is_dir():
        yield f"data.folder = {settings.data.folder}: no such folder; it holds local copies of known sets"
    if not settings.data.train:
        yield "data.train: names no data set; list at least one, such as [{path: problems.jsonl}]"
    for group, sets in (("train", settings.data.train), ("evaluation", settings.data.evaluation)):
        for place, one in enumerate(sets):
            key = f"data.{group}.{place}"
            if one.path is None and not is_known(one):
                name = f"name = {one.name!r} is none" if one.name else "there is no `name`"
                yield (
                    f"{key}.path: not given, and {name} of the known sets ({', '.join(KNOWN)}); "
                    "give a file, a folder or a Hugging Face data set"
                )
            if one.path is not None and os.path.isabs(one.path) and not Path(one.path).exists():
                yield f"{key}.path = {one.path}: no such file or folder"
            if supervised and group == "train" and one.fields.response is None:
                yield f"{key}.fields.response: sft needs the column that holds the response to learn"
            if one.fields.answer is None and not (supervised and group == "train"):
                yield f"{key}.fields.answer: null, but answers are graded against it; name the column"
            elif (
                one.fields.answer
                and "(" in one.fields.answer
                and not ANSWER_FUNCTION.fullmatch(one.fields.answer)
            ):
                yield (
                    f"{key}.fields.answer = {one.fields.answer!r}: "
                    "should be a column, last_box(column), first(column) or after_hashes(column)"
                )


def _functions(settings: Settings) -> Iterator[str]:
    for key, name in (
        ("reward.function", settings.reward.function),
        ("verify.function", settings.verify.function),
        ("meds.feature_function", settings.meds.feature_function),
        ("vsrm.reward_function", settings.vsrm.reward_function),
    ):
        if name is None:
            continue
        if not _FUNCTION.match(name):
            yield f"{key} = {name!r}: should read module:name"
            continue
        package = name.partition(":")[0].partition(".")[0]
        if importlib.machinery.PathFinder.find_spec(package, [os.getcwd(), *sys.path]) is None:
            yield f"{key} = {name!r}: no module {package!r} in the working directory, PYTHONPATH or installed"


def _rollout(settings: Settings) -> Iterator[str]:
    rollout, data = settings.rollout, settings.data
    if rollout.samples_per_prompt > rollout.server.max_num_seqs:
        yield (
            f"rollout.samples_per_prompt = {rollout.samples_per_prompt}: vLLM takes at most "
            f"rollout.server.max_num_seqs = {rollout.server.max_num_seqs} samples of a request; raise that"
        )
    longest = data.max_prompt_tokens + rollout.max_tokens
    if rollout.dynamic_sampling.enabled and rollout.samples_per_prompt < 2:
        yield (
            "rollout.dynamic_sampling.enabled: drops groups whose answers are all right or all wrong, and a "
            "group of one always is; take rollout.samples_per_prompt of 2 or more, or switch it off"
        )
    given = rollout.server.max_model_len
    if given is not None and given < longest:
        yield (
            f"rollout.server.max_model_len = {given}: below data.max_prompt_tokens + rollout.max_tokens = "
            f"{longest}; raise it, or leave it null"
        )


def _servers(settings: Settings, job: Job) -> Iterator[str]:
    server = settings.rollout.server
    if server.placement == "external":
        yield from _external(settings)
        return
    if server.urls:
        yield "rollout.server.urls: only for rollout.server.placement=external; set that, or drop the urls"
    if server.python is not None and not os.access(server.python, os.X_OK):
        yield f"rollout.server.python = {server.python}: no such program; give an interpreter that has vLLM"
    kind, way = device(settings), transport(settings)
    if way == "nccl" and kind == "cpu":
        yield "weights.transport = nccl: needs a GPU on both sides; set it to auto or shm"
    if way == "shm" and kind == "cuda":
        yield "weights.transport = shm: serves an actor and servers on CPU; set it to auto or nccl"
    if kind == "cuda":
        yield from _server_devices(settings, job)
    if job.launcher and server.port is not None:
        yield from _ports(server.host, server.port, server.count)


def _external(settings: Settings) -> Iterator[str]:
    urls = settings.rollout.server.urls
    if not urls:
        yield "rollout.server.urls: placement external needs the servers' urls, such as [http://10.0.0.5:8000]"
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            yield f"rollout.server.urls: {url!r} is no http://host:port"
        elif transport(settings) == "shm" and parts.hostname not in ("127.0.0.1", "localhost", "::1"):
            yield f"weights.transport = shm: works within one machine, and {url} may be another; use nccl"
    for url in {u for u in urls if urls.count(u) > 1}:
        yield f"rollout.server.urls: {url} is listed twice; each server once"


def _server_devices(settings: Settings, job: Job) -> Iterator[str]:
    server, present = settings.rollout.server, machine.gpus()
    need = server.count * server.tensor_parallel
    if server.devices is None:
        if present and job.ranks_per_node + need > present:
            yield (
                f"rollout.server: {server.count} servers of {server.tensor_parallel} GPUs beside "
                f"{job.ranks_per_node} actor ranks need {job.ranks_per_node + need}, there are {present}; "
                "lower rollout.server.count or tensor_parallel, or the actor's layout"
            )
        return
    if len(set(server.devices)) != need:
        yield (
            f"rollout.server.devices = {server.devices}: {server.count} servers of {server.tensor_parallel} "
            f"GPUs need {need} different ones"
        )
    taken = sorted(d for d in server.devices if d < job.ranks_per_node)
    if taken:
        yield f"rollout.server.devices: GPUs {taken} are the actor's (the first {job.ranks_per_node})"
    absent = sorted(d for d in server.devices if d >= present)
    if present and absent:
        yield f"rollout.server.devices: GPUs {absent} are not here, there are {present}"


def _ports(host: str, first: int, count: int) -> Iterator[str]:
    for port in range(first, first + count):
        if port > 65535:
            yield f"rollout.server.port = {first}: {count} servers need ports up to {port}, beyond 65535"
            return
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                yield (
                    f"rollout.server.port = {first}: cannot listen on {host}:{port} ({error.strerror}); "
                    "choose another rollout.server.port, or null for free ones"
                )


def _reward(settings: Settings) -> Iterator[str]:
    reward, longest = settings.reward, settings.rollout.max_tokens
    if reward.overlong.buffer > longest:
        yield f"reward.overlong.buffer = {reward.overlong.buffer}: larger than rollout.max_tokens = {longest}"
    if reward.function_replaces_outcome and reward.function is None:
        yield "reward.function_replaces_outcome: there is no reward.function to replace the outcome with"
    if reward.form.unclosed and reward.form.think_close is None:
        yield "reward.form.unclosed: needs reward.form.think_close, the text that closes the reasoning"


def _meds(settings: Settings) -> Iterator[str]:
    meds, dynamic = settings.meds, settings.rollout.dynamic_sampling
    if dynamic.keep_all_wrong and not (dynamic.enabled and meds.enabled):
        yield (
            "rollout.dynamic_sampling.keep_all_wrong: needs rollout.dynamic_sampling.enabled and "
            "meds.enabled, for without penalties a group of wrong answers has no advantages"
        )
    if not meds.enabled:
        return
    if settings.algorithm.name == "sft":
        yield "meds.enabled: sft learns from given responses and samples none; set it to false"
    if meds.target != "none" and min(meds.alpha, meds.cap) == 0:
        yield (
            f"meds.alpha = {meds.alpha}, meds.beta = {meds.cap}: nothing is penalised; raise them, or set "
            "meds.target=none to remember and measure only"
        )
    if dynamic.keep_all_wrong and meds.target not in ("wrong", "both"):
        yield (
            f"meds.target = {meds.target}: wrong answers are not penalised, and groups kept by "
            "rollout.dynamic_sampling.keep_all_wrong would learn nothing; set it to wrong or both"
        )
    if meds.difference and meds.feature_function is None and _layers(settings) == 1:
        yield "meds.difference: the model has one layer, and a difference needs two; set it to false"
    if meds.backend == "cuml" and not machine.gpus():
        yield "meds.backend = cuml: no NVIDIA GPU is visible; set it to auto or sklearn"
    elif meds.backend == "cuml" and importlib.machinery.PathFinder.find_spec("cuml") is None:
        yield "meds.backend = cuml: cuml is not installed; install it, or set it to auto or sklearn"


def _layers(settings: Settings) -> int | None:
    """Of the model; None where its config cannot be read, which another check tells."""
    try:
        return read_model_config(settings.model.path).layers
    except (UnsupportedModel, OSError):
        return None

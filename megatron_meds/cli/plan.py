"""`megatron-meds plan`: what a run would need on GPUs, before any is asked for."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_meds.errors import UserError

if TYPE_CHECKING:
    from megatron_meds.actor.shape import ModelShape
    from megatron_meds.config import Settings
    from megatron_meds.plan.seconds import Gpu


class Card(StrEnum):
    """GPUs with known data sheets."""

    A100 = "a100"
    H100 = "h100"
    H200 = "h200"
    B200 = "b200"


def plan(
    config: Annotated[Path, typer.Argument(help="YAML file of the run.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings on top of it.", show_default=False)
    ] = None,
    gpu: Annotated[Card, typer.Option(help="The card.")] = Card.H100,
    nodes: Annotated[int, typer.Option(help="Nodes.", min=1)] = 1,
    ranks_per_node: Annotated[
        int | None,
        typer.Option(help="Actor GPUs of a node; left out: the layout's ranks over the nodes.", min=1),
    ] = None,
    response: Annotated[
        int | None, typer.Option(help="Mean tokens of a response; left out: a third of the limit.", min=1)
    ] = None,
    resampled: Annotated[
        float, typer.Option(help="Groups sampled for each kept (dynamic sampling).", min=1.0)
    ] = 1.5,
    wrong: Annotated[float, typer.Option(help="Share of wrong answers.", min=0.0, max=1.0)] = 0.5,
) -> None:
    """Estimate memory by part and a step's seconds by phase; say what does not fit and what to change.

    The model's folder needs its config.json alone. Weights, gradients and optimizer state are exact;
    activations and seconds follow the models that megatron_meds/plan states. Exits with 1 where
    something does not fit.
    """
    from megatron_meds.actor.shape import check_layout, read_model_config
    from megatron_meds.arithmetic import model_ranks, own_world_size
    from megatron_meds.config import load
    from megatron_meds.plan.seconds import GPUS

    settings = load(config, overrides or [])
    layout = settings.actor.layout
    world = ranks_per_node * nodes if ranks_per_node else own_world_size(layout)
    if world % model_ranks(layout):
        raise UserError(f"{world} actor ranks cannot hold whole copies of {model_ranks(layout)} ranks each")
    shape = read_model_config(settings.model.path)
    if faults := list(check_layout(shape, layout)):
        raise UserError("\n".join(faults))
    length = response or max(1, settings.rollout.max_tokens // 3)
    fits = _show(settings, shape, GPUS[gpu.value], world, nodes, length, resampled, wrong)
    raise typer.Exit(0 if fits else 1)


def _show(
    settings: Settings,
    shape: ModelShape,
    gpu: Gpu,
    world: int,
    nodes: int,
    length: int,
    resampled: float,
    wrong: float,
) -> bool:
    from rich.console import Console
    from rich.table import Table

    from megatron_meds.plan.advice import advise
    from megatron_meds.plan.memory import GIB, actor_memory, mistake_memory, server_memory
    from megatron_meds.plan.parameters import whole_parameters
    from megatron_meds.plan.seconds import step_time

    console = Console(width=None if Console().is_terminal else 110)
    server = settings.rollout.server
    server_gpus = server.count * server.tensor_parallel * nodes
    actor = actor_memory(settings, shape, world)
    served = server_memory(settings, shape, gpu.bytes)
    console.print(
        f"{settings.model.path.name}: {whole_parameters(shape) / 1e9:.2f} billion parameters; {world} actor "
        f"GPUs and {server_gpus} server GPUs of {gpu.name}",
        highlight=False,
    )
    table = Table(title=f"actor GPU, stage {actor.stage}", title_justify="left")
    table.add_column("part")
    table.add_column("GiB", justify="right")
    for name, size in actor.parts.items():
        table.add_row(name, f"{size / GIB:.1f}")
    table.add_section()
    table.add_row(f"of {gpu.bytes / GIB:.0f}", f"{actor.total / GIB:.1f}")
    console.print(table)
    table = Table(title="server GPU", title_justify="left")
    table.add_column("part")
    table.add_column("GiB", justify="right")
    table.add_row("weights", f"{served.weights / GIB:.1f}")
    table.add_row("KV cache", f"{max(0.0, served.kv_cache) / GIB:.1f}")
    console.print(table)
    console.print(
        f"the cache holds {served.sequences:.1f} sequences of {served.longest:,} tokens", highlight=False
    )
    if settings.meds.enabled:
        grows = mistake_memory(settings, shape, world, wrong)
        console.print(
            f"memory of mistakes: {grows / 2**20:.1f} MiB more each step on a replica's head (host)"
        )
    found = step_time(
        settings, shape, served, gpu,
        world_size=world, server_gpus=server_gpus, response=length, resampled=resampled,
    )  # fmt: skip
    table = Table(title=f"a step, responses of {length:,} tokens", title_justify="left")
    table.add_column("phase")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    for name, seconds in found.phases.items():
        table.add_row(name, f"{seconds:.1f}", f"{seconds / found.total:.0%}")
    table.add_section()
    table.add_row("step", f"{found.total:.1f}", "")
    console.print(table)
    console.print(f"{found.tokens_per_day / 1e9:.2f} billion tokens a day", highlight=False)
    advice = advise(settings, actor, served, gpu.bytes)
    for line in advice:
        console.print(line, highlight=False)
    return not advice

"""What `train --dry-run` prints: which rank does what, how a step divides, where the servers run."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from megatron_meds.actor.shape import read_model_config, split_layers
from megatron_meds.arithmetic import BatchArithmetic, batch_arithmetic, places, replicas
from megatron_meds.checks import Job, device, transport
from megatron_meds.config import Settings

_MOST_REPLICAS = 16


def show(settings: Settings, job: Job, console: Console | None = None) -> None:
    """Print the layout, the batch arithmetic and the servers of a run that passed its checks."""
    console = console or Console()
    console.print(f"[bold]{settings.run.name}[/]: {settings.algorithm.name}, {settings.run.steps} steps")
    console.print(f"writes to {settings.run.folder}", soft_wrap=True)
    console.print(f"\n{_layout_title(settings, job.world_size)}", soft_wrap=True)
    console.print(layout_table(settings, job.world_size))
    console.print("* head: talks to the servers, grades, keeps the ledger")
    console.print("\nOne step:")
    console.print(batch_table(settings, batch_arithmetic(settings, job.world_size)))
    if settings.algorithm.name != "sft":
        placement = settings.rollout.server.placement
        console.print(f"\nvLLM servers, {placement}; weights by {transport(settings)}:")
        console.print(server_table(settings, job))
    console.print("Checks passed. Nothing was started.")


def _layout_title(settings: Settings, world_size: int) -> str:
    layout = settings.actor.layout
    where = "GPUs" if device(settings) == "cuda" else "CPU"
    sequence = " with sequence parallelism" if layout.sequence else ""
    chunks = f" of {layout.virtual} chunks" if layout.virtual > 1 else ""
    return (
        f"{world_size} actor ranks on {where}: tensor {layout.tensor}{sequence} x pipeline {layout.pipeline}"
        f"{chunks} x context {layout.context} x data {replicas(layout, world_size)}:"
    )


def layout_table(settings: Settings, world_size: int) -> Table:
    """Replicas down, stages across; in each cell the ranks of the tensor and context groups."""
    layout = settings.actor.layout
    table = Table()
    table.add_column("replica", justify="right")
    shape = read_model_config(settings.model.path)
    for stage, chunks in enumerate(split_layers(shape.layers, layout)):
        table.add_column(f"stage {stage}\n{_layers(chunks)}")
    everywhere = places(layout, world_size)
    count = max(place.replica for place in everywhere) + 1
    for replica in range(min(count, _MOST_REPLICAS)):
        cells = []
        for stage in range(layout.pipeline):
            here = [p for p in everywhere if (p.replica, p.stage) == (replica, stage)]
            cells.append(" ".join(f"{p.rank}{'*' if p.head else ''}" for p in here))
        table.add_row(str(replica), *cells)
    if count > _MOST_REPLICAS:
        table.add_row("...", f"and {count - _MOST_REPLICAS} more alike")
    return table


def _layers(chunks: list[range]) -> str:
    """Layer numbers of a stage, its chunks apart: `layers 0-1, 4-5`."""
    spans = [f"{c[0]}-{c[-1]}" if len(c) > 1 else str(c[0]) for c in chunks if c]
    return f"layers {', '.join(spans)}" if spans else "no layers"


def batch_table(settings: Settings, batch: BatchArithmetic) -> Table:
    """A step in numbers."""
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    if settings.algorithm.name == "sft":
        table.add_row("examples", f"{batch.samples:,}", f"{batch.prompts_per_replica:,} a replica")
    else:
        table.add_row("prompts", f"{batch.prompts:,}", f"{batch.prompts_per_replica:,} a replica")
        table.add_row("samples", f"{batch.samples:,}", f"{batch.samples_per_prompt} a prompt")
    uneven = batch.last_update_prompts != batch.prompts_per_update
    last = f", the last {batch.last_update_prompts:,}" if uneven else ""
    epochs = settings.algorithm.epochs
    table.add_row(
        "updates",
        f"{batch.updates:,}",
        f"{batch.prompts_per_update:,} prompts each{last}{f', {epochs} epochs' if epochs > 1 else ''}; "
        f"{batch.total_updates:,} in the run",
    )
    table.add_row(
        "longest sequence",
        f"{batch.sequence_tokens:,}",
        f"tokens: prompt {settings.data.max_prompt_tokens:,} + response {settings.rollout.max_tokens:,}",
    )
    table.add_row("tokens", f"{batch.tokens:,}", "at most")
    table.add_row(
        "micro-batches",
        f"{batch.micro_batches:,}",
        f"{'at most' if settings.actor.batching == 'packed' else 'about'}, an update and replica, "
        f"of {settings.actor.tokens_per_micro_batch:,} tokens, "
        f"{settings.actor.batching}",
    )
    return table


def server_table(settings: Settings, job: Job) -> Table:
    """Where responses are sampled."""
    server = settings.rollout.server
    table = Table()
    table.add_column("server", justify="right")
    table.add_column("where")
    if server.placement == "external":
        for place, url in enumerate(server.urls):
            table.add_row(str(place), url)
        return table
    on_gpu = device(settings) == "cuda"
    width = server.tensor_parallel
    for place in range(server.count):
        first = job.ranks_per_node + place * width
        chosen = server.devices[place * width :][:width] if server.devices else range(first, first + width)
        port = "a free port" if server.port is None else f"port {server.port + place}"
        cores = f"cores {server.cpu_cores}" if server.cpu_cores else "the CPU"
        what = f"GPU {', '.join(map(str, chosen))}" if on_gpu else cores
        table.add_row(str(place), f"{server.host}, {port}, {what}, on each node")
    return table

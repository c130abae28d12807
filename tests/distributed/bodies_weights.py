"""What the ranks do in the tests of loading, saving and exporting weights."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_meds.actor.mesh import Mesh
from megatron_meds.actor.model import build_model
from megatron_meds.actor.settings import ActorSettings
from megatron_meds.actor.shape import ModelShape, read_model_config
from megatron_meds.weights.export import LiveWeights
from megatron_meds.weights.huggingface import load_weights, save_huggingface
from megatron_meds.weights.live import held_parameters
from megatron_meds.weights.perturb import perturb


def build(
    mesh: Mesh, folder: Path, precision: str = "fp32", load: bool = True
) -> tuple[list[torch.nn.Module], ModelShape, int]:
    """The rank's chunks, their shape, and the bytes read to fill them."""
    shape = read_model_config(folder)
    settings = ActorSettings(layout=mesh.layout, device="cpu", precision=precision)  # type: ignore[arg-type]
    chunks = build_model(shape, settings, "sdpa", mesh, seed=7)
    return chunks, shape, load_weights(chunks, folder, shape, mesh) if load else 0


def round_trip(mesh: Mesh, folders: dict[Path, Path], **options) -> dict[str, int]:
    """Load each source folder and save it to its target; bytes read per source."""
    read = {}
    for source, target in folders.items():
        chunks, shape, read[str(source)] = build(mesh, source)
        save_huggingface(chunks, source, target, shape, mesh, **options)
    return read


def save_random(mesh: Mesh, source: Path, target: Path, precision: str) -> None:
    """Save a model that was initialised from the config alone."""
    chunks, shape, _ = build(mesh, source, precision, load=False)
    save_huggingface(chunks, source, target, shape, mesh)


def failures_to_save(mesh: Mesh, source: Path, target: Path) -> str:
    """What `save_huggingface` says on this rank when the target cannot be written."""
    chunks, shape, _ = build(mesh, source)
    try:
        save_huggingface(chunks, source, target, shape, mesh)
    except OSError as error:
        return str(error)
    return ""


def failures_to_load(mesh: Mesh, folder: Path) -> str:
    """What `load_weights` says on this rank."""
    try:
        build(mesh, folder)
    except (ValueError, FileNotFoundError) as error:
        return str(error)
    return ""


def padding_after_load(mesh: Mesh, folder: Path) -> list[tuple[int, float]]:
    """(rows of padding on this rank, largest |value| there) of each vocabulary parameter, whose
    padding is spoilt before loading."""
    chunks, shape, _ = build(mesh, folder, load=False)
    with torch.no_grad():
        for held in held_parameters(chunks, shape, mesh.tensor_size):
            held.parameter.fill_(9.0)
    load_weights(chunks, folder, shape, mesh)
    found = []
    for held in held_parameters(chunks, shape, mesh.tensor_size):
        if held.vocabulary_rows is None:
            continue
        rows = held.parameter.shape[0]
        real = min(max(shape.vocab - mesh.tensor_rank * rows, 0), rows)
        padding = held.parameter[real:]
        found.append((len(padding), float(padding.abs().max()) if len(padding) else 0.0))
    return found


def export(live: LiveWeights) -> dict[str, torch.Tensor | None]:
    """The whole stream, in order."""
    return dict(live.tensors())


def export_twice(mesh: Mesh, folder: Path, factor: float) -> dict[str, object]:
    """Export, scale every parameter, export again through the same object and through a new one."""
    chunks, shape, _ = build(mesh, folder)
    live = LiveWeights(chunks, shape, mesh)
    first = export(live)
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.mul_(factor)
    return {
        "manifest": live.manifest(),
        "first": first,
        "second": export(live),
        "fresh": export(LiveWeights(chunks, shape, mesh)),
        "sender": mesh.is_sender,
        "replica": mesh.replica,
    }


def runs(mesh: Mesh, folder: Path) -> list[tuple[str, int, int, torch.Tensor]]:
    """This rank's part of every tensor: (name, dim, start, values)."""
    chunks, shape, _ = build(mesh, folder)
    found = LiveWeights(chunks, shape, mesh).runs()
    return [(run.name, run.dim, run.start, run.tensor.clone()) for run in found]


def export_perturbed(mesh: Mesh, folder: Path, seed: int) -> dict[str, object]:
    """The stream after a perturbation, and every parameter of this rank by entry and tensor rank."""
    chunks, shape, _ = build(mesh, folder)
    perturb(chunks, shape, mesh, seed)
    held = held_parameters(chunks, shape, mesh.tensor_size)
    parameters = [((h.entry.name, mesh.tensor_rank), h.parameter.detach().clone()) for h in held]
    return {"tensors": export(LiveWeights(chunks, shape, mesh)), "parameters": parameters}


def export_as(mesh: Mesh, folder: Path, precision: str, dtype: torch.dtype | None) -> dict[str, object]:
    """The manifest and the stream of a model held in `precision`, exported as `dtype`."""
    chunks, shape, _ = build(mesh, folder, precision)
    live = LiveWeights(chunks, shape, mesh, dtype)
    return {"manifest": live.manifest(), "tensors": export(live)}


def record_collectives(mesh: Mesh, folder: Path) -> dict[str, object]:
    """Every collective of two exports on this rank: (operation, ranks, elements, after how many tensors)."""
    chunks, shape, _ = build(mesh, folder)
    live = LiveWeights(chunks, shape, mesh)
    log: list[tuple[str, tuple[int, ...], int, int]] = []
    names: list[str] = []
    originals = {name: getattr(dist, name) for name in ("gather", "all_reduce", "send", "recv")}

    def recorder(name: str):
        def call(tensor, *args, **kwargs):
            if name in ("send", "recv"):
                pair = (mesh.rank, kwargs["dst"]) if name == "send" else (kwargs["src"], mesh.rank)
                log.append(("p2p", pair, tensor.numel(), len(names)))
            else:
                members = tuple(dist.get_process_group_ranks(kwargs["group"]))
                log.append((name, members, tensor.numel(), len(names)))
            return originals[name](tensor, *args, **kwargs)

        return call

    for name in originals:
        setattr(dist, name, recorder(name))
    try:
        for _ in range(2):
            for name, _tensor in live.tensors():
                names.append(name)
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    return {"log": log, "names": names, "takes_part": live.takes_part}


def drive_vllm_source(mesh: Mesh, folder: Path) -> dict[str, object]:
    """Iterate the vLLM adapter twice, by tensor and by group, as vLLM's trainer engines do."""
    from megatron_meds.weights.export import vllm_source

    chunks, shape, _ = build(mesh, folder)
    source = vllm_source(LiveWeights(chunks, shape, mesh))
    metadata = [(m.name, str(m.dtype), m.shape) for m in source.metadata()]
    streamed = [(name, None if tensor is None else tuple(tensor.shape)) for name, tensor in source]
    groups = [names for names, _ in source.iter_groups()]
    return {"metadata": metadata, "streamed": streamed, "groups": groups, "sender": mesh.is_sender}


def logits(mesh: Mesh, folder: Path, tokens: list[list[int]]) -> torch.Tensor | None:
    """[B, T, V] fp32 logits of the loaded model, on the sender; None elsewhere."""
    chunks, shape, _ = build(mesh, folder)
    ids = torch.tensor(tokens)
    positions = torch.arange(ids.shape[1]).expand_as(ids)

    def forward_step(_iterator, model):
        output = model(ids, positions, None)
        return output, lambda result, non_loss_data: result

    outputs = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(()) for _ in chunks],
        model=chunks,
        num_microbatches=mesh.pipeline_size,
        seq_length=ids.shape[1],
        micro_batch_size=ids.shape[0],
        forward_only=True,
        collect_non_loss_data=True,
    )
    if not mesh.is_last_stage or mesh.replica:
        return None
    part = outputs[0].contiguous()
    parts = [torch.empty_like(part) for _ in range(mesh.tensor_size)]
    dist.all_gather(parts, part, group=parallel_state.get_tensor_model_parallel_group())
    return torch.cat(parts, dim=-1)[..., : shape.vocab] if mesh.is_sender else None

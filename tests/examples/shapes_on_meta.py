"""Build a rank's share of a model without memory and without other ranks: parameter shapes by name.

    python -m tests.examples.shapes_on_meta '{"world": 16, "rank": 3, "layout": {...}, "folder": "..."}'

prints {"parameters": {name: shape}, "count": numbers over all ranks of the model that this rank holds}.
A process of its own, since torch's process group and Megatron-Core's state are of the whole process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_meds.actor import cpu
from megatron_meds.actor.mesh import Mesh
from megatron_meds.actor.model import build_model
from megatron_meds.actor.settings import ActorSettings, LayoutSettings
from megatron_meds.actor.shape import read_model_config
from megatron_meds.weights.live import held_parameters


def main() -> None:
    found = []
    new_group = dist.new_group
    dist.new_group = lambda *given, **options: new_group(*given, **{**options, "backend": "fake"})
    for job in json.loads(sys.argv[1]):
        layout = LayoutSettings(**job["layout"])
        dist.init_process_group("fake", rank=job["rank"], world_size=job["world"], store=FakeStore())
        cpu._CPU = torch.device("meta")  # what asks for a GPU gets no memory at all
        mesh = Mesh.create(layout, "cpu")
        mesh.device = torch.device("meta")
        shape = read_model_config(Path(job["folder"]))
        settings = ActorSettings(layout=layout, device="cpu", precision="bf16")
        with torch.device("meta"):
            chunks = build_model(shape, settings, "sdpa", mesh, seed=1)
        held = held_parameters(
            chunks, shape, layout.tensor
        )  # every parameter has its place in the family's table
        found.append(
            {
                "held": len(held),
                "count": sum(p.numel() for chunk in chunks for p in chunk.parameters()),
                "replicas": mesh.replicas,
                "pipeline": mesh.pipeline_rank,
            }
        )
        mesh.close(destroy=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

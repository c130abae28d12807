"""The servers of a run, as its actor ranks start them: those of a node by the node's first rank."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from megatron_meds import checks
from megatron_meds.actor.mesh import Mesh
from megatron_meds.actor.policy import Policy
from megatron_meds.agreement import together
from megatron_meds.arithmetic import server_tokens
from megatron_meds.config import Settings
from megatron_meds.rollout.server import Servers
from megatron_meds.rollout.settings import ServerSettings


def start_servers(
    settings: Settings, mesh: Mesh, policy: Policy, stack: ExitStack, run_dir: Path
) -> tuple[Servers | None, list[str]]:
    """Start the servers of every node, or find the external ones. Collective; `stack` ends them.

    Returns:
        This rank's servers (None on all but the first rank of a node), and the URLs of all.

    Raises:
        RankError: on every rank, if a server did not start; with the end of its log.
    """

    def start() -> Servers | None:
        if mesh.local_rank != 0:
            return None
        return stack.enter_context(
            serve(settings, settings.rollout.server, settings.model.path, mesh, policy, run_dir)
        )

    servers = together(start, "the rollout servers did not start", mesh.all_gather)
    mine = servers.urls if servers is not None else []
    return servers, list(dict.fromkeys(url for part in mesh.all_gather(mine) for url in part))


def serve(
    settings: Settings, server: ServerSettings, model: Path, mesh: Mesh, policy: Policy, run_dir: Path
) -> Servers:
    """Servers on this node, of the run's lengths, precision and transport; see `Servers.start`."""
    return Servers.start(
        server,
        model,
        run_dir=run_dir,
        max_model_len=server_tokens(settings, policy.shape.max_positions),
        dtype="bfloat16" if policy.is_bf16 else "float32",
        device="cuda" if mesh.device.type == "cuda" else "cpu",
        transport=checks.transport(settings),
        seed=settings.run.seed,
        first_device=mesh.local_size,
    )

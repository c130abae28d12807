"""What ranks do in the tests of checkpoints."""

from __future__ import annotations

import errno
import random
from pathlib import Path

from megatron_meds.actor.mesh import Mesh
from megatron_meds.agreement import RankError
from megatron_meds.checkpoint import Checkpoints


def _checkpoints(mesh: Mesh, run: Path) -> Checkpoints:
    return Checkpoints(run, rank=mesh.rank, is_writer=mesh.is_first_head, all_gather=mesh.all_gather)


def fail_in_write(mesh: Mesh, run: Path, failing: int) -> str:
    """The second save fails on one rank; what this rank was told."""
    checkpoints = _checkpoints(mesh, run)

    def write(folder: Path) -> None:
        (folder / f"part_{mesh.rank}").write_text("x")
        if failing == mesh.rank and "000002" in folder.name:
            raise OSError(errno.ENOSPC, "No space left on device")

    checkpoints.save(1, write, {})
    try:
        checkpoints.save(2, write, {})
    except RankError as error:
        return str(error)
    return "nothing"


def save_and_find(mesh: Mesh, run: Path) -> dict[str, object]:
    """Each rank draws from a generator of its own before and after going back to the checkpoint."""
    checkpoints = _checkpoints(mesh, run)
    random.seed(mesh.rank)
    checkpoints.save(1, lambda folder: (folder / f"part_{mesh.rank}").write_text("x"), {})
    before = random.random()
    found = checkpoints.find("auto")
    assert found is not None
    random.seed(99)
    checkpoints.restore_random(found)
    return {"found": found.name, "before": before, "after": random.random()}

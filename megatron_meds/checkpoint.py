"""Checkpoints of a run: one folder per step, complete or absent.

    RUN/checkpoints/step_000012/    what the caller writes (weights, optimizer, ...), and
        rng/rank_00000.pt           random generators, one file a rank
        state.json                  step, and the caller's counters and positions
        config.yaml                 the run's settings, resolved
        versions.json               of the packages it was written with
        manifest.json               a serial number, and the size of every file
    RUN/checkpoints/latest          name of the newest

A folder is written as .step_000012.partial and takes its name when every rank is done and all is
on disk; `latest` follows. A folder counts only if its manifest agrees with its files, so that
neither a crash, nor a full disk, nor half a copy is ever taken for a checkpoint. The newest is the
one written last, which after a run has gone back need not be the one of the highest step.

Knows neither Megatron nor what a checkpoint holds; torch is needed to save or resume, not to look.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from megatron_meds.agreement import Gather, RankError, alone, together
from megatron_meds.errors import UserError

log = logging.getLogger(__name__)

PACKAGES = ("megatron-meds", "torch", "megatron-core", "transformer-engine", "transformers", "vllm", "numpy")
"""Whose versions are written down, where they are installed."""
_NAME = re.compile(r"step_\d{6,}")
_MANIFEST = "manifest.json"


class CheckpointError(UserError, RuntimeError):
    """A checkpoint cannot be used; the message says why and what to do."""


@dataclass(frozen=True)
class Saved:
    """What `state.json` of a checkpoint says."""

    step: int
    state: dict[str, Any]
    ranks: int
    """How many ranks wrote it."""


class Checkpoints:
    """The checkpoints of one run. Every rank has one of these and calls its methods together."""

    def __init__(
        self,
        run_folder: Path,
        keep_last: int | None = 2,
        *,
        config: str = "",
        rank: int = 0,
        is_writer: bool = True,
        all_gather: Gather = alone,
    ) -> None:
        """Nothing is read or written yet.

        Args:
            run_folder: on a file system that all ranks share.
            keep_last: checkpoints that stay on disk; None: all.
            config: YAML of the resolved settings.
            is_writer: true on exactly one rank, which makes, renames and removes folders.
            all_gather: exchange among all ranks.
        """
        self.folder = Path(run_folder) / "checkpoints"
        self.keep_last = keep_last
        self.config = config
        self.rank = rank
        self.is_writer = is_writer
        self.all_gather = all_gather

    def save(self, step: int, write: Callable[[Path], None], state: Mapping[str, Any]) -> Path:
        """Write the checkpoint of `step`, then remove those that are too old. Collective.

        Args:
            write: called on every rank with the folder to write into. What it does in a collective
                must fail on all ranks when it fails on one; `together` helps with local parts.
            state: counters and positions, as JSON can hold them; the writer's is taken.

        Returns:
            The checkpoint's folder. One of the same step is replaced.

        Raises:
            RankError: it could not be written, on any rank; checkpoints are as they were.
        """
        from megatron_meds.randomness import save_random_state

        target = self.folder / f"step_{step:06d}"
        partial = self.folder / f".{target.name}.partial"
        what = f"the checkpoint of step {step} was not written"
        self._alone(lambda: self._begin(partial), what)
        try:
            together(lambda: write(partial), what, self.all_gather)
            together(
                lambda: save_random_state(partial / "rng" / _rank_file(self.rank)), what, self.all_gather
            )
            self._alone(lambda: self._finish(partial, target, step, state), what)
        except RankError:
            if self.is_writer:
                shutil.rmtree(partial, ignore_errors=True)  # give a full disk its room back
            raise
        self._alone(self._prune, f"{target} is whole, but old checkpoints were not removed")
        return target

    def find(self, resume: Literal["auto", "never"] | Path) -> Path | None:
        """The checkpoint to go on from, the same on all ranks; None: start afresh. Collective.

        `auto` is the newest whole one; what is not whole is passed over with a warning that names
        what is wrong. A path is the folder of a checkpoint.

        Raises:
            RankError: `auto`, and there are checkpoints but none is whole; `never`, and there are
                checkpoints; or the named one is not whole.
        """
        found = self._alone(lambda: self._choose(resume), "no checkpoint to go on from")
        return next((path for path in self.all_gather(found) if path is not None), None)

    def restore_random(self, folder: Path) -> bool:
        """Set this rank's random generators as they were. Call it last: a seed set later undoes it.

        Returns:
            False, with a warning and nothing done, if another number of ranks wrote the checkpoint.
        """
        from megatron_meds.randomness import load_random_state

        ranks, now = read_state(folder).ranks, len(self.all_gather(None))
        if ranks != now:
            if self.is_writer:
                log.warning(
                    "%s is of %d ranks and this run has %d: random generators start from the seed",
                    folder,
                    ranks,
                    now,
                )
            return False
        load_random_state(folder / "rng" / _rank_file(self.rank))
        return True

    # --- what the writer does ------------------------------------------------------------------------

    def _alone[T](self, action: Callable[[], T], what: str) -> T | None:
        """Run an action of the writer while the other ranks wait."""
        return together(lambda: action() if self.is_writer else None, what, self.all_gather)

    def _begin(self, partial: Path) -> None:
        self._repair()
        for leftover in self.folder.glob(".step_*"):
            shutil.rmtree(leftover)
        (partial / "rng").mkdir(parents=True)

    def _finish(self, partial: Path, target: Path, step: int, state: Mapping[str, Any]) -> None:
        """Complete the folder, give it its name and point `latest` at it."""
        ranks = len(list((partial / "rng").iterdir()))
        _write_json(partial / "state.json", {"step": step, "ranks": ranks, "state": dict(state)})
        _write(partial / "config.yaml", self.config)
        _write_json(partial / "versions.json", versions())
        serial = 1 + max((_serial(path) for path in self._whole()), default=0)
        sizes = {str(path.relative_to(partial)): path.stat().st_size for path in _files(partial)}
        _write_json(partial / _MANIFEST, {"serial": serial, "step": step, "files": sizes})
        old = self.folder / f".{target.name}.old"
        if target.exists():
            target.rename(old)
        partial.rename(target)
        _sync_folder(self.folder)
        shutil.rmtree(old, ignore_errors=True)
        self._point_at(target)

    def _point_at(self, target: Path) -> None:
        draft = self.folder / ".latest.partial"
        _write(draft, target.name + "\n")
        draft.replace(self.folder / "latest")
        _sync_folder(self.folder)

    def _prune(self) -> None:
        if self.keep_last is None:
            return
        for path in self._whole()[: -self.keep_last]:
            gone = path.with_name(f".{path.name}.gone")
            path.rename(gone)  # first, so that half of it is never found
            try:
                shutil.rmtree(gone)
            except OSError as error:
                log.warning("the old checkpoint %s could not be removed: %s", gone, error)

    def _choose(self, resume: Literal["auto", "never"] | Path) -> Path | None:
        if isinstance(resume, Path):
            if problem := problem_of(resume):
                raise CheckpointError(f"run.resume = {resume}: {problem}; choose a whole checkpoint, or auto")
            return resume
        self._repair()
        present = self._present()
        if resume == "never":
            if present:
                raise CheckpointError(
                    f"run.resume = never, but {self.folder} holds {present[-1].name}; "
                    "choose another run.folder, or set run.resume=auto"
                )
            return None
        for path in present:
            if problem := problem_of(path):
                log.warning("%s is not used: %s", path, problem)
        whole = self._whole()
        if not whole and present:
            raise CheckpointError(
                f"none of the {len(present)} checkpoints in {self.folder} is whole; "
                "repair or remove them, or choose another run.folder"
            )
        if whole:
            self._check_latest(whole[-1])
        return whole[-1] if whole else None

    def _check_latest(self, newest: Path) -> None:
        """Warn if `latest` does not name the newest whole checkpoint."""
        pointer = self.folder / "latest"
        if not pointer.is_file():
            log.warning("%s is absent; going on from %s", pointer, newest.name)
            return
        name = pointer.read_text().strip()
        if name != newest.name:
            problem = problem_of(self.folder / name) if _NAME.fullmatch(name) else "no checkpoint's name"
            log.warning(
                "%s names %s (%s); going on from %s", pointer, name, problem or "not the newest", newest.name
            )

    def _repair(self) -> None:
        """Undo a replacement that was interrupted between its two renames."""
        for old in self.folder.glob(".step_*.old"):
            target = self.folder / old.name.removeprefix(".").removesuffix(".old")
            if not target.exists():
                old.rename(target)

    def _present(self) -> list[Path]:
        """Folders that have a checkpoint's name, whole or not, by name."""
        if not self.folder.is_dir():
            return []
        return sorted(path for path in self.folder.iterdir() if _NAME.fullmatch(path.name))

    def _whole(self) -> list[Path]:
        """Whole checkpoints, the oldest first."""
        return whole_checkpoints(self.folder)


def whole_checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints in RUN/checkpoints, the one written last at the end. Changes nothing."""
    named = [path for path in folder.glob("step_*") if _NAME.fullmatch(path.name)]
    return sorted((path for path in named if problem_of(path) is None), key=_serial)


def problem_of(folder: Path) -> str | None:
    """Why a folder is not a whole checkpoint; None if it is one."""
    if not folder.is_dir():
        return "no such folder"
    if not (folder / _MANIFEST).is_file():
        return f"it has no {_MANIFEST}"
    try:
        sizes = json.loads((folder / _MANIFEST).read_text())["files"]
    except (ValueError, KeyError):
        return f"its {_MANIFEST} is damaged"
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    return None


def read_state(folder: Path) -> Saved:
    """Step and state of a checkpoint."""
    saved = json.loads((folder / "state.json").read_text())
    return Saved(saved["step"], saved["state"], saved["ranks"])


def versions() -> dict[str, str]:
    """Versions of Python and of PACKAGES."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _serial(folder: Path) -> int:
    return json.loads((folder / _MANIFEST).read_text())["serial"]


def _rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.pt"


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _write_json(path: Path, value: object) -> None:
    _write(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _write(path: Path, text: str) -> None:
    """Write a text file through to the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Write a folder's entries through to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""A check of the way from the actor to the servers, on the run's own ranks and servers.

The live weights are changed and synced twice. What every server then holds is compared, tensor by
tensor, with a second server that starts from a fresh Hugging Face export of the same live weights,
and its greedy outputs with transformers. The run's own folder, data and checkpoints are left alone.
"""

from __future__ import annotations

import logging
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from megatron_meds import checks
from megatron_meds.actor.mesh import Mesh
from megatron_meds.actor.policy import Policy
from megatron_meds.agreement import together
from megatron_meds.arithmetic import server_tokens
from megatron_meds.config import Settings
from megatron_meds.errors import UserError
from megatron_meds.rollout.client import Client, Sample
from megatron_meds.serving import serve, start_servers
from megatron_meds.weights import check
from megatron_meds.weights.control import ControlClient
from megatron_meds.weights.perturb import perturb
from megatron_meds.weights.sync import WeightSync

log = logging.getLogger(__name__)

SYNCS = 2
TOKENS = 16
"""Tokens of a greedy output."""
PROMPT_LENGTHS = (3, 8, 21)
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.25}
"""Nats by which two tokens of a server of this precision may be out of order."""
_MOST_NAMED = 20


class SyncDifferenceError(UserError):
    """A server does not hold the actor's weights; a line for each tensor and output."""


@dataclass
class Observation:
    """What all servers held and said at one time."""

    what: str
    export: Path
    digests: list[check.Digests]
    changed: list[int]
    """Tensors that are others than at the last observation, by server."""
    outputs: list[list[Sample]]
    """Of each server, for each prompt."""


def check_sync(settings: Settings, *, rejoin: bool = False, outputs: bool = True) -> None:
    """Check, and print a table. Every rank calls it; the environment is torchrun's.

    Args:
        settings: `run.folder` is where exports and logs go; exports are removed if all is well.
        rejoin: also start one server again, which must then get the current weights.
        outputs: compare greedy outputs too; needs the model in fp32 in CPU memory.

    Raises:
        SyncDifferenceError: on the first rank, naming the tensors. The others end with SystemExit.
    """
    with ExitStack() as stack:
        run = _Check(settings, stack)
        run.observe_syncs(outputs)
        if rejoin:
            run.observe_rejoin(outputs)
        faults = run.compare(outputs)
        first = run.mesh.rank == 0
    if faults:
        raise SyncDifferenceError("\n".join(faults)) if first else SystemExit(2)


class _Check:
    def __init__(self, settings: Settings, stack: ExitStack) -> None:
        self.settings = settings
        self.folder = settings.run.folder
        actor = settings.actor
        self.mesh = Mesh.create(actor.layout, actor.device, actor.timeout_minutes)
        stack.callback(self.mesh.close, destroy=True)
        self.console = Console(quiet=self.mesh.rank != 0)
        self.console.print("building the model")
        self.policy = Policy(
            settings.model, actor, settings.optimizer, self.mesh, steps=1, seed=settings.run.seed
        )
        self.console.print("starting vLLM")
        self.servers, self.urls = start_servers(settings, self.mesh, self.policy, stack, self.folder)
        transport = checks.transport(settings)
        live = self.policy.live_weights()
        self.sync = WeightSync(settings.weights, self.urls, live, self.mesh, transport=transport)
        stack.callback(self.sync.close)
        self.sync.connect()
        self.observed: list[Observation] = []
        self._control: ControlClient | None = None
        self._last: list[check.Digests] = []
        if self.mesh.rank == 0:
            self._control = ControlClient(self.urls, settings.weights.timeout_seconds)
            stack.callback(self._control.close)
        self._together(self._look_first, "the servers cannot be compared")
        generator = np.random.default_rng(settings.run.seed)
        vocabulary = self.policy.shape.vocab
        self._prompts = [generator.integers(0, vocabulary, n).tolist() for n in PROMPT_LENGTHS]

    def _together(self, action, what: str) -> None:
        together(action, what, self.mesh.all_gather)

    def observe_syncs(self, outputs: bool) -> None:
        """Change the weights, sync, export and look, each time anew. Collective."""
        for version in range(1, SYNCS + 1):
            perturb(self.policy.bare, self.policy.shape, self.mesh, seed=self.settings.run.seed + version)
            report = self.sync.push(version)
            export = self.folder / f"export_{version}"
            self.policy.save_huggingface(export)
            self.console.print(
                f"sync {version}: {report.tensors} tensors, {report.bytes / 2**20:.1f} MiB, "
                f"{report.seconds:.2f} s to {len(self.urls)} server{'s' if len(self.urls) > 1 else ''}"
            )
            self._observe(f"sync {version}", version, export, outputs)

    def observe_rejoin(self, outputs: bool) -> None:
        """Start the first server again and bring it, like the others, the current weights. Collective."""
        self.console.print(f"starting {self.urls[0]} again")

        def restart() -> None:
            if self.mesh.rank == 0 and self.servers is not None:
                self.servers.restart(0)

        self._together(restart, "the server could not be started again")
        self.sync.reconnect()
        self.sync.push(SYNCS + 1)
        self._observe("restart", SYNCS + 1, self.folder / f"export_{SYNCS}", outputs)

    def compare(self, outputs: bool) -> list[str]:
        """Start servers from the exports, compare, print; the faults found, on every rank. Collective.

        The run's servers are stopped before: their GPUs are the reference's.
        """
        self.sync.close()
        self.mesh.barrier()
        if self.servers is not None:
            self.servers.stop()
        self.mesh.barrier()
        faults: list[str] = []

        def judge() -> None:
            if self.mesh.rank == 0:
                faults.extend(self._judge(outputs))

        self._together(judge, "the comparison failed")
        return self.mesh.all_gather(faults)[0]

    def _look_first(self) -> None:
        """The digests before any sync, and whether a reference can be cut like the servers."""
        if self._control is None:
            return
        self._last = check.read_digests(self._control)
        size = self.settings.rollout.server.tensor_parallel
        for url, workers in zip(self.urls, self._control.world_sizes(), strict=True):
            if workers != size:
                raise UserError(
                    f"rollout.server.tensor_parallel = {size}: server {url} has {workers} workers, and the "
                    f"server to compare it with is cut by this setting; set it to {workers}"
                )

    def _observe(self, what: str, version: int, export: Path, outputs: bool) -> None:
        def look() -> None:
            if self._control is None:
                return
            digests = check.read_digests(self._control)
            changed = [check.changed(old, new) for old, new in zip(self._last, digests, strict=True)]
            self._last = digests
            client = Client(self.urls, self.settings.rollout, vocabulary=self.policy.shape.vocab)
            client.version = version
            said = [client.greedy(prompt, self._tokens()) for prompt in self._prompts] if outputs else []
            by_server = [list(answers) for answers in zip(*said, strict=True)]
            self.observed.append(Observation(what, export, digests, changed, by_server))

        self._together(look, f"the servers could not be looked at after {what}")

    def _tokens(self) -> int:
        longest = server_tokens(self.settings, self.policy.shape.max_positions)
        if longest <= max(PROMPT_LENGTHS):
            raise UserError(
                f"data.max_prompt_tokens + rollout.max_tokens = {longest}: the check's prompts have up to "
                f"{max(PROMPT_LENGTHS)} tokens; raise one of them, or use --no-outputs"
            )
        return min(TOKENS, longest - max(PROMPT_LENGTHS))

    def _judge(self, outputs: bool) -> list[str]:
        references = self._references()
        table = Table(title="What the servers hold, and what the actor's export says")
        for column in ("after", "server", "tensors", "changed", "differ"):
            table.add_column(column, justify="left" if column in ("after", "server") else "right")
        if outputs:
            table.add_column("greedy tokens", justify="right")
            table.add_column("as transformers", justify="right")
            table.add_column("log-prob", justify="right")
        faults: list[str] = []
        for seen in self.observed:
            agreements = self._agreements(seen) if outputs else []
            for place, url in enumerate(self.urls):
                wrong = check.differing(seen.digests[place], references[seen.export])
                faults += [f"{seen.what}, server {url}: {one}" for one in wrong[:_MOST_NAMED]]
                if len(wrong) > _MOST_NAMED:
                    faults.append(f"{seen.what}, server {url}: and {len(wrong) - _MOST_NAMED} more tensors")
                row = [seen.what, url, str(len(seen.digests[place])), str(seen.changed[place])]
                row.append(f"[red]{len(wrong)}[/]" if wrong else "0")
                if outputs:
                    found = agreements[place]
                    row += [str(found.tokens), _alike(found), f"{found.logprob:.1e}"]
                    if found.wrong:
                        faults.append(
                            f"{seen.what}, server {url}: {found.wrong} of {found.tokens} greedy tokens are "
                            "not transformers'"
                        )
                table.add_row(*row)
        self.console.print(table)
        if faults:
            self.console.print(f"exports and logs are in {self.folder}", soft_wrap=True)
        else:
            for export in references:
                shutil.rmtree(export)
            self.console.print(
                f"every server holds the actor's weights; logs are in {self.folder}", soft_wrap=True
            )
        return faults

    def _agreements(self, seen: Observation) -> list[check.Agreement]:
        said = [[(one.token_ids, one.logprobs) for one in server] for server in seen.outputs]
        dtype = self.settings.rollout.server.dtype
        if dtype == "auto":
            dtype = "bfloat16" if self.policy.is_bf16 else "float32"
        return check.agreement(seen.export, self._prompts, said, TOLERANCES[dtype])

    def _references(self) -> dict[Path, check.Digests]:
        """Digests of a fresh server from each export; at once on CPU, one after the other on GPUs."""
        exports = list(dict.fromkeys(seen.export for seen in self.observed))
        self.console.print(f"starting vLLM from {len(exports)} exports of the live weights")
        own = {"placement": "separate", "urls": [], "count": 1}
        if self.mesh.device.type == "cpu":
            own["port"] = None  # several at once
        server = self.settings.rollout.server.model_copy(update=own)

        def digests(export: Path) -> check.Digests:
            logs = self.folder / f"reference_{export.name}"
            with serve(self.settings, server, export, self.mesh, self.policy, logs) as reference:
                control = ControlClient(reference.urls, self.settings.weights.timeout_seconds)
                found = check.read_digests(control)[0]
                control.close()
            return found

        with ThreadPoolExecutor(len(exports) if self.mesh.device.type == "cpu" else 1) as pool:
            return dict(zip(exports, pool.map(digests, exports), strict=True))


def _alike(found: check.Agreement) -> str:
    if found.wrong:
        return f"[red]{found.wrong} wrong[/]"
    return "equal" if not found.ties else f"equal but {found.ties} ties"

"""From the words of `megatron-meds evaluate` to tables: models found, servers started, results written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megatron_meds import checks, config
from megatron_meds.config import Settings
from megatron_meds.data.known import set_of
from megatron_meds.data.prompts import load_evaluation_prompts, places_of
from megatron_meds.data.templates import Template, end_token_ids, load_tokenizer
from megatron_meds.errors import UserError
from megatron_meds.evaluate import tables
from megatron_meds.evaluate.answers import Answers
from megatron_meds.evaluate.pass_at_k import powers_of_two
from megatron_meds.evaluate.runner import EvaluationStopped, Plan, fill, open_answers
from megatron_meds.evaluate.summary import AVERAGE, SetSummary, average, differences, pass_table, summarise
from megatron_meds.rollout.client import Client
from megatron_meds.rollout.messages import Sampling
from megatron_meds.rollout.server import Servers
from megatron_meds.trajectory import Prompt
from megatron_meds.verify import Grader


@dataclass(frozen=True)
class Wanted:
    """What was asked for, as it was given."""

    models: list[str]
    overrides: list[str]
    sets: list[str]
    samples: int
    temperature: float
    top_p: float
    max_tokens: int
    seed: int
    out: Path
    urls: list[str]
    limit: int | None
    responses: bool


def run(wanted: Wanted) -> None:
    """Evaluate every model on every set, then print and write the tables.

    Raises:
        UserError: before anything is sampled: a model or set that is not there, prompts too long for
            the model, answers of another evaluation in OUT; later: servers that cannot be kept up.
    """
    if not wanted.models:
        raise UserError("no model: name a Hugging Face folder, a run folder or a checkpoint")
    if wanted.urls and len(wanted.models) > 1:
        raise UserError("--url: servers hold one model; evaluate models one by one into the same --out")
    folders = find_models(wanted.models, wanted.out)
    jobs = {name: Job(name, folder, wanted) for name, folder in folders.items()}
    console = Console(width=None if Console().is_terminal else 160)
    for job in jobs.values():
        job.run(console)
    show(jobs, wanted, console)


def find_models(given: Sequence[str], out: Path) -> dict[str, Path]:
    """A short name for each model, and its Hugging Face folder; checkpoints are converted into OUT.

    Raises:
        UserError: nothing at a path, or two that end alike.
    """
    found: dict[str, Path] = {}
    for text in given:
        path = Path(text)
        folder = path / "export" if (path / "export" / "config.json").is_file() else path
        name = _name_of(path.resolve())
        if (path / "policy.json").is_file():
            folder = out / name / "model"
            if not folder.exists():
                from megatron_meds.actor.conversion import checkpoint_to_huggingface

                checkpoint_to_huggingface(path, folder)
        elif not (folder / "config.json").is_file():
            raise UserError(
                f"{path}: no Hugging Face folder (config.json), no run with an export, no checkpoint"
            )
        if name in found:
            raise UserError(f"{path} and {found[name]} are both called {name!r}; rename one folder")
        found[name] = folder.absolute()
    return found


def _name_of(path: Path) -> str:
    """The last part of a path; of RUN/export and RUN/checkpoints/STEP also the run's."""
    parts = [p for p in path.parts[1:] if p not in ("export", "checkpoints")]
    return "-".join(parts[-2:]) if parts[-1].startswith("step_") else parts[-1]


class Job:
    """One model: its prompts, its answers, its servers."""

    def __init__(self, name: str, folder: Path, wanted: Wanted) -> None:
        """Read and check everything that can be, before any server starts."""
        self.name = name
        self.folder = folder
        self.wanted = wanted
        self.settings = _settings(folder, wanted)
        self.tokenizer = load_tokenizer(folder)
        data = self.settings.data
        self.sets: dict[str, list[Prompt]] = load_evaluation_prompts(
            data.evaluation, Template(data.template, self.tokenizer), data.max_prompt_tokens, places_of(data)
        )
        self.longest = max(len(p.token_ids) for prompts in self.sets.values() for p in prompts)
        self._check_length()
        sampling = Sampling(wanted.temperature, wanted.top_p, wanted.max_tokens, logprobs=False)
        self.plan = Plan(sampling, wanted.samples, wanted.seed, wanted.responses)
        shared = {**self.plan.settings(), "model": str(folder), "template": data.template.model_dump()}
        self.answers: dict[str, Answers] = open_answers(wanted.out / name, self.sets, shared)

    def run(self, console: Console) -> None:
        """Sample and grade what is missing."""
        missing = sum(
            part.count for found in self.answers.values() for part in found.missing(self.plan.samples, 1)
        )
        whole = sum(len(prompts) for prompts in self.sets.values()) * self.plan.samples
        there = f", {whole - missing:,} of them there already" if missing < whole else ""
        console.print(f"{self.name}: {whole:,} samples{there}", highlight=False)
        if not missing:
            return
        verify = self.settings.verify
        with Grader(verify.workers, verify.timeout_seconds, verify.function, verify.memory_mib) as grader:
            every = [(name, p) for name, prompts in self.sets.items() for p in prompts]
            grader.check_golds(
                [p.answer for _, p in every],
                [f"{name}: {p.question:.60}" for name, p in every],
                as_text=verify.unparsed == "text",
            )
            with self._serve() as servers, _progress(console, self.name, missing) as advance:
                client = Client(
                    servers.urls,
                    self.settings.rollout,
                    stop_token_ids=end_token_ids(self.tokenizer, self.folder),
                )
                while failure := fill(
                    self.answers, self.sets, self.plan, client, grader.grade, self._decode, advance
                ):
                    dead = [] if self.wanted.urls else servers.check()  # those of others are theirs to mend
                    if not dead:
                        raise EvaluationStopped(f"{failure}; start the command again to go on")
                    for index in dead:
                        servers.restart(index)

    def tables(self) -> dict[str, np.ndarray]:
        """Per set [P, K] pass@k of every problem."""
        ks = powers_of_two(self.plan.samples)
        return {name: pass_table(found, self.plan.samples, ks) for name, found in self.answers.items()}

    def _serve(self) -> Servers:
        return Servers.start(
            self.settings.rollout.server,
            self.folder,
            run_dir=self.wanted.out / self.name,
            max_model_len=self.longest + self.wanted.max_tokens,
            dtype="bfloat16" if checks.device(self.settings) == "cuda" else "float32",
            device="cuda" if checks.device(self.settings) == "cuda" else "cpu",
            transport=checks.transport(self.settings),
            seed=self.wanted.seed,
        )

    def _check_length(self) -> None:
        """The model must have positions for prompt and response."""
        limit = json.loads((self.folder / "config.json").read_text()).get("max_position_embeddings")
        if isinstance(limit, int) and self.longest + self.wanted.max_tokens > limit:
            raise UserError(
                f"--max-tokens {self.wanted.max_tokens}: with the longest prompt ({self.longest}) that is "
                f"more than the {limit} positions of {self.folder}; at most {limit - self.longest}"
            )

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


def _settings(folder: Path, wanted: Wanted) -> Settings:
    """A settings tree of the model, the sets and the given overrides."""
    server: dict[str, Any] = {"placement": "external", "urls": wanted.urls} if wanted.urls else {}
    evaluation = [
        {**set_of(name), **({"limit": wanted.limit} if wanted.limit else {})} for name in wanted.sets
    ]
    raw = {
        "model": {"path": str(folder)},
        "rollout": {"server": server, "max_tokens": wanted.max_tokens},
        "data": {"evaluation": evaluation, "max_prompt_tokens": 8192},
    }
    return config.assemble(raw, Path.cwd(), wanted.overrides)


@contextmanager
def _progress(console: Console, name: str, total: int) -> Iterator[Any]:
    columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=total)
        yield lambda count: progress.advance(task, count)


def show(jobs: dict[str, Job], wanted: Wanted, console: Console) -> None:
    """Print the tables and write them into OUT."""
    every = {name: job.tables() for name, job in jobs.items()}
    results: dict[str, dict[str, SetSummary]] = {}
    for name, job in jobs.items():
        results[name] = {s: summarise(found, wanted.samples) for s, found in job.answers.items()}
        if len(results[name]) > 1:
            results[name][AVERAGE] = average(results[name], every[name])
    compared = differences(every) if len(jobs) > 1 else []
    parts = [(tables.rows(results), "pass@k in % [95 % interval over problems]")]
    if compared:
        parts.append((tables.difference_rows(compared), "differences in points [95 % interval, paired]"))
    for (head, cells), title in parts:
        console.print(tables.terminal(head, cells, title))
    failed = sum(s.failed for sets in results.values() for n, s in sets.items() if n != AVERAGE)
    if failed:
        console.print(f"{failed} answers could not be graded (timeout, crash or error) and count as wrong")
    first = next(iter(jobs.values()))
    settings = {**first.plan.settings(), "samples": wanted.samples}
    written = {
        "results.json": json.dumps(tables.as_json(results, compared, settings), indent=1) + "\n",
        "table.md": "\n".join(tables.markdown(head, cells) for (head, cells), _ in parts),
        "table.tex": "\n".join(tables.latex(head, cells) for (head, cells), _ in parts),
    }
    for name, text in written.items():
        (wanted.out / name).write_text(text)
    console.print(f"{wanted.out}: {', '.join(written)}", highlight=False)

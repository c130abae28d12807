"""The public data sets that a run asks for by name, and where each keeps question and answer.

A table: what a set is called, where it comes from, how many problems it has. Reads nothing itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megatron_meds.data.settings import DatasetSettings, FieldMap


@dataclass(frozen=True)
class KnownSet:
    """A public set. Copies of it differ in their columns: `layouts` are tried in order."""

    hub: str
    """Its name among the Hugging Face data sets."""
    problems: int
    """How many it has once `where` is applied. Neither this number nor one of `editions`: a warning."""
    editions: tuple[int, ...] = ()
    """How many other copies are known to have."""
    layouts: tuple[FieldMap, ...] = ()
    """Where copies keep the fields; the id may be missing. `question` and `answer` under these very names
    always come last."""
    config: str | None = None
    split: str = "test"
    revision: str | None = None
    files: tuple[str, ...] = ()
    """Further names that a local file may have, less its suffix; the set's own name always counts."""
    where: dict[str, list[str | int]] = field(default_factory=dict)
    skips_incomplete: bool = False
    """Some rows are known to lack an answer: they are left out and counted."""
    errata: dict[str, str] = field(default_factory=dict)
    """Reference answers that cannot be read as mathematics as they stand, and what they mean."""
    around: tuple[str, str] | None = None
    """Instructions some copies wrap around the question, before and after: taken off, since the template
    gives its own and a question must read alike in every set."""


_PROBLEM = FieldMap(question="problem", id="id")
_SOLUTION = FieldMap(question="problem", answer="last_box(solution)")
_LEVELS_3_TO_5: list[str | int] = ["Level 3", "Level 4", "Level 5", 3, 4, 5]

KNOWN: dict[str, KnownSet] = {
    # --- evaluation ---
    "aime24": KnownSet(
        hub="HuggingFaceH4/aime_2024",
        split="train",
        problems=30,
        layouts=(_PROBLEM, FieldMap(question="problem", answer="last_box(solution)", id="id")),
        files=("aime_2024", "aime2024"),
    ),
    "aime25": KnownSet(
        hub="math-ai/aime25",
        revision="563bb8404243c5f09de6ec262f2db674fe5bce9b",
        problems=30,
        layouts=(_PROBLEM,),
        files=("aime_2025", "aime2025"),
    ),
    "amc23": KnownSet(
        hub="math-ai/amc23",
        problems=40,
        layouts=(_PROBLEM, FieldMap(id="id")),
        files=("amc_23", "amc2023"),
    ),
    "math500": KnownSet(
        hub="HuggingFaceH4/MATH-500",
        problems=500,
        layouts=(_SOLUTION.model_copy(update={"id": "unique_id"}), FieldMap(question="problem")),
        files=("math_500",),
    ),
    "minerva": KnownSet(
        hub="math-ai/minervamath",
        problems=272,
        layouts=(_SOLUTION.model_copy(update={"id": "idx"}),),
        files=("minerva_math", "minervamath"),
    ),
    "olympiadbench": KnownSet(
        hub="math-ai/olympiadbench",
        problems=675,
        editions=(674,),  # the hub's
        layouts=(FieldMap(answer="first(final_answer)", id="id"),),
        errata={
            "t(0,4]": "(0,4]",
            "$f(x)=a x+b$, where $b$ is an arbitrary integer, and $a$ is an arbitrary positive integer with "
            "$\\mho(a)=0$": "f(x)=a x+b",
        },
        files=("olympiad_bench", "olympiad"),
    ),
    "gsm8k": KnownSet(
        hub="openai/gsm8k",
        config="main",
        problems=1319,
        layouts=(FieldMap(answer="after_hashes(answer)"),),
        files=("gsm8k_test",),
    ),
    # --- training ---
    "gsm8k-train": KnownSet(
        hub="openai/gsm8k",
        config="main",
        split="train",
        problems=7473,
        layouts=(FieldMap(answer="after_hashes(answer)"),),
    ),
    "dapo-math-17k": KnownSet(
        hub="open-r1/DAPO-Math-17k-Processed",
        config="all",
        split="train",
        problems=17_398,
        editions=(17_917, 1_791_700),  # before repeats were joined; before they were dropped
        layouts=(
            FieldMap(question="prompt", answer="solution"),
            FieldMap(question="prompt", answer="reward_model.ground_truth", id="extra_info.index"),
            FieldMap(question="problem", id="id"),
        ),
        around=(
            "Solve the following math problem step by step. The last line of your response should be of the "
            "form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n",
            '\n\nRemember to put your answer on its own line after "Answer:".',
        ),
    ),
    "math-3-5": KnownSet(
        hub="DigitalLearningGmbH/MATH-lighteval",
        split="train",
        problems=5584,
        layouts=(_SOLUTION, FieldMap(question="problem")),
        files=("math_train", "math_train_lv3to5"),
        where={"level": _LEVELS_3_TO_5},
        skips_incomplete=True,
    ),
}


@dataclass(frozen=True)
class Places:
    """Where sets are looked for before they are downloaded, and kept afterwards."""

    folder: Path | None = None
    """`data.folder`: local copies of known sets."""
    cache: Path | None = None
    """`data.cache`; None: `default_cache()`."""

    @property
    def kept(self) -> Path:
        """The folder of copies that were made here."""
        return self.cache or default_cache()


def default_cache() -> Path:
    """$MEGATRON_MEDS_CACHE, or megatron_meds in the user's cache folder."""
    own = os.environ.get("MEGATRON_MEDS_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_meds"


@dataclass(frozen=True)
class Request:
    """All that has to be known to read a set; `find` makes it."""

    label: str
    path: Path | None
    """Local file or folder; None: `hub`."""
    hub: str
    config: str | None
    split: str
    revision: str | None
    layouts: tuple[FieldMap, ...]
    where: dict[str, list[str | int]]
    skip_incomplete: bool
    problems: tuple[int, ...]
    """Numbers of problems that are no surprise; none given: any."""
    around: tuple[str, str] | None
    errata: dict[str, str]
    looked: tuple[str, ...] = ()
    """Local places that hold no copy, for messages."""


def set_of(text: str) -> dict[str, str]:
    """`DatasetSettings` in short: the name of a known set, or a file or folder; a file that is called as a
    copy of a known set would be is read as one."""
    path = Path(text).expanduser()
    if not _is_local(str(path)):
        return {"name": text}
    names = [n for n, known in KNOWN.items() if path.stem in (n, n.replace("-", "_"), *known.files)]
    return {"path": str(path.absolute()), **({"name": names[0]} if names else {})}


def is_known(settings: DatasetSettings) -> bool:
    """Whether the set's name is one of the table."""
    return settings.name in KNOWN


def find(settings: DatasetSettings, places: Places) -> Request:
    """What to read for a set, and where.

    Its own settings come first: `path`, `split`, `config`, `revision`, and `fields` where they differ
    from the default. A name of the table fills in the rest.

    Raises:
        ValueError: neither a path nor a name of the table.
    """
    known = KNOWN.get(settings.name or "")
    if known is None and settings.path is None:
        raise ValueError(
            f"data set {settings.name!r}: has no path, and its name is none of {', '.join(sorted(KNOWN))}"
        )
    given = settings.fields != FieldMap()
    layouts = (settings.fields,) if given or known is None else tuple(_with_and_without_id(known.layouts))
    looked: list[str] = []
    path = None
    if settings.path is not None:
        path = Path(settings.path) if _is_local(settings.path) else None
    elif known is not None and places.folder is not None:
        path = _local_copy(settings.name or "", known, places.folder)
        if path is None:
            looked.append(f"{places.folder} (data.folder)")
    # A copy under another name on the hub has its own configurations, splits and commits.
    source = known if known is not None and (settings.path is None or path is not None) else None
    return Request(
        label=settings.label,
        path=path,
        hub=source.hub if source else settings.path or "",
        config=settings.config or (source.config if source else None),
        split=settings.split or (source.split if source else "train"),
        revision=settings.revision or (source.revision if source else None),
        layouts=layouts,
        where={**(known.where if known else {}), **settings.where},
        skip_incomplete=settings.incomplete == "skip" or bool(known and known.skips_incomplete),
        problems=(known.problems, *known.editions)
        if known and not settings.where and settings.limit is None
        else (),
        around=known.around if known else None,
        errata=known.errata if known else {},
        looked=tuple(looked),
    )


def _with_and_without_id(layouts: Iterable[FieldMap]) -> Iterator[FieldMap]:
    """Each layout, and then without its id, which is for show only; the plain one last."""
    for layout in (*layouts, FieldMap()):
        yield layout
        if layout.id is not None:
            yield layout.model_copy(update={"id": None})


def _is_local(path: str) -> bool:
    return Path(path).exists() or Path(path).suffix in (".jsonl", ".parquet") or os.path.isabs(path)


def _local_copy(name: str, known: KnownSet, folder: Path) -> Path | None:
    """FOLDER/NAME.jsonl, NAME.parquet, or NAME/SPLIT.* under any of the set's names."""
    for stem in dict.fromkeys((name, name.replace("-", "_"), *known.files)):
        for suffix in (".jsonl", ".parquet"):
            for candidate in (folder / f"{stem}{suffix}", folder / stem / f"{known.split}{suffix}"):
                if candidate.is_file():
                    return candidate
    return None

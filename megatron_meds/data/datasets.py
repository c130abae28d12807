"""Rows of problems from JSON lines, Parquet, folders of both, or Hugging Face data sets by name.

Says what becomes of a set's rows: which are used, which are left out and counted. Where a set comes
from is `known`, a row's columns are `fields`, copies of downloads `cache`. Knows nothing of tokens,
templates or the order in which problems are asked.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_meds.data import cache
from megatron_meds.data.fields import DataError, IncompleteRowError, Row, read_row
from megatron_meds.data.known import KNOWN, Places, Request, find
from megatron_meds.data.settings import DatasetSettings, FieldMap
from megatron_meds.trajectory import prompt_id

__all__ = ["Counts", "DataError", "IncompleteRowError", "Row", "load_rows", "read_row", "unique_rows"]

SUFFIXES = (".jsonl", ".parquet")

_log = logging.getLogger(__name__)


@dataclass
class Counts:
    """What became of the rows of one or more data sets."""

    rows: int = 0
    """Rows read, those left out included."""
    incomplete: int = 0
    """Left out because a field was missing or empty."""
    filtered: int = 0
    """Left out by the set's `where`."""
    duplicates: int = 0
    """Left out because an earlier row asks the same question."""
    conflicting: int = 0
    """Questions whose rows disagree about the answer; the first row's answer counts."""
    too_long: int = 0
    """Left out because the prompt (or response) has more tokens than allowed."""
    conflicts: list[str] = field(default_factory=list)
    """The first few conflicts in words."""
    kept: dict[str, int] = field(default_factory=dict)
    """Questions left after `unique_rows`, by the set that asks them first."""

    def read(self) -> dict[str, int]:
        """The three numbers that come of reading a set."""
        return {"rows_read": self.rows, "incomplete": self.incomplete, "filtered": self.filtered}

    def __str__(self) -> str:
        notes = [
            f"{number:,} {what}"
            for number, what in (
                (self.filtered, "left out by `where`"),
                (self.incomplete, "incomplete rows left out"),
                (self.duplicates, "duplicates left out"),
                (self.conflicting, "questions with conflicting answers (the first counts)"),
                (self.too_long, "left out as too long"),
            )
            if number
        ]
        text = ", ".join([f"{self.rows:,} rows", *notes])
        if len(self.kept) < 2:
            return text
        return f"{text}; from {', '.join(f'{name} {number:,}' for name, number in self.kept.items())}"


def load_rows(
    settings: DatasetSettings, counts: Counts | None = None, places: Places | None = None
) -> list[Row]:
    """Every row of a data set, in its order, duplicates included.

    A public set comes from the copy that an earlier download left in `places.kept`, if there is one;
    then no network is needed.

    Args:
        counts: added to: `rows`, `incomplete` and `filtered`.
        places: local copies of known sets, and where downloads are kept; None: no folder, the default cache.

    Raises:
        DataError: no file, a file that is not valid, a row without a field of the field map (unless
            `settings.incomplete` is `skip`), a set that cannot be downloaded, or one without rows; names
            the set or file, row and key.
    """
    counts = counts if counts is not None else Counts()
    places = places if places is not None else Places()
    try:
        request = find(settings, places)
    except ValueError as error:
        raise DataError(str(error)) from None
    if request.path is not None:
        rows = list(islice(_usable(_local_records(request.path), request, counts), settings.limit))
    else:
        rows = _downloaded(request, counts, places)[: settings.limit]
    if not rows:
        raise DataError(f"data set {request.path or request.hub}: has no usable row")
    if request.problems and len(rows) not in request.problems:
        _log.warning(
            "data set %s: %d problems, where %d are known; another edition, or part of it?",
            request.label,
            len(rows),
            request.problems[0],
        )
    return rows


def unique_rows(rows: Iterable[Row], counts: Counts) -> list[Row]:
    """The first row of every question (by `prompt_id`); adds to `duplicates` and `conflicting`."""
    first: dict[str, Row] = {}
    conflicting: set[str] = set()
    for row in rows:
        key = prompt_id(row.question)
        earlier = first.setdefault(key, row)
        if earlier is row:
            continue
        counts.duplicates += 1
        if earlier.answer != row.answer and key not in conflicting:
            conflicting.add(key)
            if len(counts.conflicts) < 3:
                counts.conflicts.append(
                    f"{earlier.place} answers {earlier.answer!r}, {row.place} answers {row.answer!r}"
                )
    counts.conflicting += len(conflicting)
    for row in first.values():
        counts.kept[row.source] = counts.kept.get(row.source, 0) + 1
    return list(first.values())


# --- rows of a request --------------------------------------------------------------------------------


def _usable(
    records: Iterable[tuple[str, Mapping[str, Any]]], request: Request, counts: Counts
) -> Iterator[Row]:
    """The rows that pass `where` and are complete; the others are counted."""
    layout: FieldMap | None = None
    for place, columns in records:
        layout = layout or _layout(columns, request.layouts)
        counts.rows += 1
        if not _wanted(columns, request.where, place):
            counts.filtered += 1
            continue
        try:
            row = read_row(columns, layout, request.label, place, request.around)
        except IncompleteRowError:
            if not request.skip_incomplete:
                raise
            counts.incomplete += 1
            continue
        mended = request.errata.get(row.answer)
        yield row if mended is None else replace(row, answer=mended)


def _layout(columns: Mapping[str, Any], layouts: Sequence[FieldMap]) -> FieldMap:
    """The first layout by which a set's first row can be read; the first of all where none can."""
    for layout in layouts:
        try:
            read_row(columns, layout)
        except DataError:
            continue
        return layout
    return layouts[0]


def _wanted(columns: Mapping[str, Any], where: Mapping[str, Sequence[str | int]], place: str) -> bool:
    for key, values in where.items():
        if key not in columns:
            raise DataError(
                f"{place}: has no column {key!r} for `where` (columns: {', '.join(map(str, columns))})"
            )
        if columns[key] not in values:
            return False
    return True


def _downloaded(request: Request, counts: Counts, places: Places) -> list[Row]:
    """The rows of a public set: from the copy kept here, else from the hub, which leaves a copy."""
    file = cache.place(request, places.kept)
    kept = cache.read(file, request.label)
    if kept is None:
        found = Counts()
        try:
            kept = cache.Kept(list(_usable(_hub_records(request), request, found)), **found.read())
        except _unreachable() as error:
            looked = ", ".join([*request.looked, f"{file} (an earlier download)"])
            fetch = (
                f"run `megatron-meds data get {request.label}`" if request.label in KNOWN else "load it once"
            )
            raise DataError(
                f"data set {request.label}: neither here nor to be had. Looked at {looked}; then for "
                f"{request.hub!r} among the Hugging Face data sets: {type(error).__name__}: {error}. Give a "
                "file as its `path`, a folder with its file as data.folder, or "
                f"{fetch} where there is a network and bring {places.kept} along"
            ) from error
        cache.write(file, kept)
    counts.rows += kept.rows_read
    counts.incomplete += kept.incomplete
    counts.filtered += kept.filtered
    return kept.rows


def _unreachable() -> tuple[type[Exception], ...]:
    """What `datasets` raises for a set that is not there or cannot be reached."""
    import datasets.exceptions
    import httpx

    return OSError, httpx.HTTPError, datasets.exceptions.DatasetsError


# --- records: (place, columns) of every row ----------------------------------------------------------


def _local_records(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not path.is_dir():
        yield from _file_records(path)
        return
    files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES)
    if not files:
        raise DataError(f"data set {path}: the folder holds no {' or '.join(SUFFIXES)} file")
    for file in files:
        yield from _file_records(file)


def _file_records(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not file.is_file():
        raise DataError(f"data set {file}: no such file")
    if file.suffix == ".jsonl":
        return _json_records(file)
    if file.suffix == ".parquet":
        return _parquet_records(file)
    raise DataError(f"data set {file}: files must end in {' or '.join(SUFFIXES)}")


def _json_records(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            place = f"{file}, line {number}"
            try:
                columns = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{place}: not valid JSON: {error}") from None
            if not isinstance(columns, dict):
                raise DataError(f"{place}: holds a {type(columns).__name__}, not an object")
            yield place, columns


def _parquet_records(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        parquet = pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{file}: not valid Parquet: {error}") from None
    with parquet:
        number = 0
        for batch in parquet.iter_batches():
            for columns in batch.to_pylist():
                number += 1
                yield f"{file}, row {number}", columns


def _hub_records(request: Request) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import datasets

    loaded = datasets.load_dataset(
        request.hub, request.config, split=request.split, revision=request.revision
    )
    for number, columns in enumerate(loaded, 1):
        yield f"{request.hub} ({request.split}), row {number}", dict(columns)

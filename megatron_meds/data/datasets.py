"""Rows of problems from JSON lines, Parquet, folders of both, or Hugging Face data sets by name.

Finds question, answer and the other fields in whatever columns a set keeps them. Knows nothing of
tokens, templates or the order in which problems are asked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_meds.data.settings import DatasetSettings, FieldMap
from megatron_meds.errors import UserError
from megatron_meds.trajectory import prompt_id
from megatron_meds.verify.boxed import last_boxed

SUFFIXES = (".jsonl", ".parquet")

_FUNCTION = re.compile(r"(last_box|first)\((.+)\)")


class DataError(UserError, ValueError):
    """A data set that cannot be used as it is: names the file, the row and the key."""


class IncompleteRowError(DataError):
    """A row lacks a column of the field map, or leaves it empty."""


@dataclass(frozen=True)
class Row:
    """One problem as text."""

    question: str
    answer: str
    """Reference answer; empty where the field map has none."""
    system: str | None = None
    response: str | None = None
    """What to learn (sft)."""
    source: str = ""
    """Label of its data set."""
    place: str = ""
    """File and row, for messages."""
    extra: dict[str, object] = field(default_factory=dict, hash=False, compare=False)
    """The row's other columns; the id column, if mapped, as `id`."""


@dataclass
class Counts:
    """What became of the rows of one or more data sets."""

    rows: int = 0
    """Rows read, incomplete ones included."""
    incomplete: int = 0
    """Left out because a field was missing or empty."""
    duplicates: int = 0
    """Left out because an earlier row asks the same question."""
    conflicting: int = 0
    """Questions whose rows disagree about the answer; the first row's answer counts."""
    too_long: int = 0
    """Left out because the prompt (or response) has more tokens than allowed."""
    conflicts: list[str] = field(default_factory=list)
    """The first few conflicts in words."""

    def __str__(self) -> str:
        notes = [
            f"{number:,} {what}"
            for number, what in (
                (self.incomplete, "incomplete rows left out"),
                (self.duplicates, "duplicates left out"),
                (self.conflicting, "questions with conflicting answers (the first counts)"),
                (self.too_long, "left out as too long"),
            )
            if number
        ]
        return ", ".join([f"{self.rows:,} rows", *notes])


def load_rows(settings: DatasetSettings, counts: Counts | None = None) -> list[Row]:
    """Every row of a data set, in its order, duplicates included.

    Args:
        counts: added to: `rows` and `incomplete`.

    Raises:
        DataError: no file, a file that is not valid, a row without a field of the field map (unless
            `settings.incomplete` is `skip`), or a set without rows; names file, row and key.
    """
    counts = counts if counts is not None else Counts()
    rows = []
    for place, columns in islice(_records(settings), settings.limit):
        counts.rows += 1
        try:
            rows.append(read_row(columns, settings.fields, source=settings.label, place=place))
        except IncompleteRowError:
            if settings.incomplete == "error":
                raise
            counts.incomplete += 1
    if not rows:
        raise DataError(f"data set {settings.path}: has no usable row")
    return rows


def read_row(columns: Mapping[str, Any], fields: FieldMap, source: str = "", place: str = "row") -> Row:
    """Pick the fields of one row out of its columns.

    Raises:
        IncompleteRowError: a mapped column is missing or empty.
        DataError: a column holds something that is not text.
    """
    question, messages_system = _question(_column(columns, fields.question, place), fields.question, place)
    extra = {key: value for key, value in columns.items() if key not in _used(fields)}
    if fields.id is not None:
        extra["id"] = _column(columns, fields.id, place)
    return Row(
        question=question,
        answer=_answer(columns, fields.answer, place) if fields.answer else "",
        system=_text(columns, fields.system, place) if fields.system else messages_system,
        response=_text(columns, fields.response, place) if fields.response else None,
        source=source,
        place=place,
        extra=extra,
    )


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
    return list(first.values())


# --- records: (place, columns) of every row ----------------------------------------------------------


def _records(settings: DatasetSettings) -> Iterator[tuple[str, Mapping[str, Any]]]:
    path = Path(settings.path)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES)
        if not files:
            raise DataError(f"data set {path}: the folder holds no {' or '.join(SUFFIXES)} file")
        for file in files:
            yield from _file_records(file)
    elif path.is_file() or path.suffix in SUFFIXES:
        yield from _file_records(path)
    else:
        yield from _hub_records(settings)


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


def _hub_records(settings: DatasetSettings) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import datasets

    loaded = datasets.load_dataset(settings.path, settings.config, split=settings.split)
    for number, columns in enumerate(loaded, 1):
        yield f"{settings.path} ({settings.split}), row {number}", dict(columns)


# --- fields ----------------------------------------------------------------------------------------


def _used(fields: FieldMap) -> set[str]:
    """Columns that need no second copy in `extra`."""
    return {name for name in (fields.question, fields.answer, fields.system, fields.response) if name}


def _column(columns: Mapping[str, Any], key: str, place: str) -> Any:
    """What lies at a column; dots reach into nested ones, numbers into lists."""
    if key in columns:
        value = columns[key]
    else:
        value = columns
        for part in key.split("."):
            if isinstance(value, Mapping) and part in value:
                value = value[part]
            elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
                value = value[int(part)]
            else:
                raise IncompleteRowError(
                    f"{place}: has no column {key!r} (columns: {', '.join(map(str, columns))}); "
                    "set the data set's `fields`, or `incomplete: skip`"
                )
    if value is None or value == "" or value == []:
        raise _empty(place, key)
    return value


def _empty(place: str, key: str) -> IncompleteRowError:
    return IncompleteRowError(
        f"{place}: {key!r} is empty; mend the row, or set the data set's `incomplete: skip`"
    )


def _text(columns: Mapping[str, Any], key: str, place: str) -> str:
    value = _column(columns, key, place)
    if not isinstance(value, str):
        raise DataError(f"{place}: {key!r} holds a {type(value).__name__}, not text")
    if not value.strip():
        raise _empty(place, key)
    return value


def _question(value: Any, key: str, place: str) -> tuple[str, str | None]:
    """(question, system message or None) of a text or of a list of messages."""
    if isinstance(value, str):
        if not value.strip():
            raise _empty(place, key)
        return value, None
    if not isinstance(value, list) or not all(isinstance(m, Mapping) for m in value):
        raise DataError(
            f"{place}: {key!r} holds a {type(value).__name__}, neither text nor a list of messages"
        )
    contents = [(message.get("role"), message.get("content")) for message in value]
    roles = [role for role, _ in contents]
    if roles not in (["user"], ["system", "user"]):
        raise DataError(
            f"{place}: {key!r} holds messages of {roles}; "
            "a prompt is one user message, after a system message or none"
        )
    for role, content in contents:
        if not isinstance(content, str) or not content.strip():
            raise IncompleteRowError(f"{place}: the {role} message of {key!r} has no text")
    return contents[-1][1], contents[0][1] if len(contents) == 2 else None


def _answer(columns: Mapping[str, Any], key: str, place: str) -> str:
    """The reference answer as text, taken where the field says."""
    call = _FUNCTION.fullmatch(key)
    if call is None:
        return _as_answer(_column(columns, key, place), key, place)
    function, column = call.groups()
    if function == "last_box":
        boxed = last_boxed(_text(columns, column, place))
        if boxed is None or not boxed.strip():
            raise IncompleteRowError(
                f"{place}: the last box of {column!r} is missing or empty; mend the row, "
                "or set the data set's `incomplete: skip`"
            )
        return _as_answer(boxed, key, place)
    entries = _column(columns, column, place)
    if not isinstance(entries, list):
        raise DataError(f"{place}: first({column}) needs a list, {column!r} holds a {type(entries).__name__}")
    return _as_answer(entries[0], key, place)


def _as_answer(value: Any, key: str, place: str) -> str:
    """Text of an answer: whole numbers without a fraction (27.0 is `27`), one pair of enclosing `$` off."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        remedy = f"; take first({key})" if isinstance(value, list) else ""
        raise DataError(f"{place}: {key!r} holds a {type(value).__name__}, neither text nor a number{remedy}")
    if isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            raise IncompleteRowError(f"{place}: {key!r} is {value}")
        return str(int(value)) if value.is_integer() else repr(value)
    text = str(value).strip()
    if len(text) > 2 and text[0] == text[-1] == "$" and text.count("$") == 2:
        text = text[1:-1].strip()
    if not text:
        raise _empty(place, key)
    return text

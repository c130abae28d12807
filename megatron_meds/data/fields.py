"""The fields of one problem out of whatever columns a data set keeps them in.

Knows a row's columns and the field map; not where rows come from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_meds.data.settings import FieldMap
from megatron_meds.errors import UserError
from megatron_meds.verify.boxed import last_boxed

ANSWER_FUNCTION = re.compile(r"(last_box|first|after_hashes)\((.+)\)")
"""An answer that is part of a column."""


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


def read_row(
    columns: Mapping[str, Any],
    fields: FieldMap,
    source: str = "",
    place: str = "row",
    around: tuple[str, str] | None = None,
) -> Row:
    """Pick the fields of one row out of its columns.

    Args:
        around: text before and after the question to take off, where it is there.

    Raises:
        IncompleteRowError: a mapped column is missing or empty.
        DataError: a column holds something that is not text.
    """
    question, messages_system = _question(_column(columns, fields.question, place), fields.question, place)
    if around is not None:
        question = question.removeprefix(around[0]).removesuffix(around[1])
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
    call = ANSWER_FUNCTION.fullmatch(key)
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
    if function == "after_hashes":
        _, hashes, answer = _text(columns, column, place).rpartition("####")
        if not hashes or not answer.strip():
            raise IncompleteRowError(f"{place}: {column!r} has nothing after a last `####`")
        return _as_answer(answer, key, place)
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

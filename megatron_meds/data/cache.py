"""Copies of downloaded data sets: rows as they are used, in one Parquet file a set.

A file appears under its name only when it is whole, and its name says which source, fields and filter
made it: another field map finds no copy and downloads anew. Knows rows and files, no hub.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_meds.data.fields import Row
from megatron_meds.data.known import Request

_log = logging.getLogger(__name__)

_FORM = 1
"""Raised when the columns below change their meaning."""
_COLUMNS = ("question", "answer", "system", "response", "source", "place", "extra")
_KEY = b"megatron_meds"


@dataclass
class Kept:
    """The usable rows of a set, and how many were read for them."""

    rows: list[Row]
    rows_read: int
    incomplete: int
    filtered: int


def place(request: Request, folder: Path) -> Path:
    """The file that keeps what this request gives."""
    made_of = {
        "form": _FORM,
        "source": [request.hub, request.config, request.split, request.revision],
        "layouts": [layout.model_dump() for layout in request.layouts],
        "where": request.where,
        "skip_incomplete": request.skip_incomplete,
        "around": request.around,
        "errata": request.errata,
    }
    digest = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()
    return folder / "data" / f"{re.sub(r'[^A-Za-z0-9._-]+', '_', request.label)}-{digest[:12]}.parquet"


def write(file: Path, kept: Kept) -> None:
    """Write the file, whole or not at all; of several processes that do so, the last one counts.

    A folder that cannot be written, or is full, is said in a warning: the rows are there all the same.
    """
    import pyarrow
    import pyarrow.parquet

    records = [asdict(row) | {"extra": json.dumps(row.extra, default=str)} for row in kept.rows]
    columns = {name: pyarrow.array([r[name] for r in records], pyarrow.string()) for name in _COLUMNS}
    numbers = {"rows": len(kept.rows), "rows_read": kept.rows_read} | {
        "incomplete": kept.incomplete,
        "filtered": kept.filtered,
    }
    table = pyarrow.table(columns).replace_schema_metadata({_KEY: json.dumps(numbers).encode()})
    partial: Path | None = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.stem}-", suffix=".partial")
        partial = Path(name)
        with os.fdopen(descriptor, "wb") as target:
            pyarrow.parquet.write_table(table, target)
        partial.replace(file)
    except OSError as error:
        _log.warning("%s cannot be written (%s): the set will be downloaded again", file, error)
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)


def read(file: Path, label: str) -> Kept | None:
    """What was kept, its rows labelled `label`; None where nothing was, or where the file is damaged,
    which is said in a warning."""
    import pyarrow
    import pyarrow.parquet

    if not file.is_file():
        return None
    try:
        table = pyarrow.parquet.read_table(file)
    except (pyarrow.ArrowInvalid, OSError) as error:
        _log.warning("%s is damaged (%s): the set is downloaded again", file, str(error).partition("\n")[0])
        return None
    numbers = json.loads((table.schema.metadata or {}).get(_KEY, b"{}"))
    if set(table.column_names) != set(_COLUMNS) or numbers.pop("rows", None) != table.num_rows:
        _log.warning("%s is damaged (columns or rows are missing): the set is downloaded again", file)
        return None
    rows = [
        Row(**(record | {"extra": json.loads(record["extra"]), "source": label}))
        for record in table.to_pylist()
    ]
    return Kept(rows, **numbers)

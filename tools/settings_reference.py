"""Writes docs/settings.md from the settings tree: every key, type, default, bounds and description.

`--check` writes nothing and fails where the file differs from what the tree says.
"""

from __future__ import annotations

import argparse
import sys
import types
import typing
from pathlib import Path
from typing import Any, Literal

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from megatron_meds.config import Settings
from megatron_meds.section import Section

TARGET = Path(__file__).parents[1] / "docs" / "settings.md"

HEAD = """\
# Settings

Made from the settings tree by `make docs`. One YAML file over these defaults, dotted overrides on top:

    megatron-meds train examples/tiny_reasoner/dapo.yaml rollout.samples_per_prompt=16 run.steps=8

- A key that is not listed here is refused, and the nearest one named.
- Values of overrides are YAML: `null`, `true`, `[1, 2]`, `{path: x}`. A number in a key is a place in a list:
  `data.evaluation.0.limit=64`.
- Relative paths in the YAML file count from its folder; those in overrides, from the working directory.
- `megatron-meds train ... --dry-run` checks everything and prints the layout and the batch arithmetic.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail where the file is out of date")
    wanted = document()
    if not parser.parse_args().check:
        TARGET.write_text(wanted)
    elif not TARGET.is_file() or TARGET.read_text() != wanted:
        sys.exit(f"{TARGET.name} does not agree with the settings; run `make docs`")


def document() -> str:
    """The whole file."""
    return HEAD + "".join(describe(Settings, ""))


def describe(section: type[Section], prefix: str) -> typing.Iterator[str]:
    """Markdown of a section: a table of its own settings, then the sections below it."""
    below: list[tuple[str, type[Section]]] = []
    rows = []
    for name, field in section.model_fields.items():
        inner, listed = _inner(field.annotation)
        if inner is None or listed:
            default, text = _default(field), " ".join((field.description or "").split())
            rows.append(f"| `{name}` | {_type(field)} | {default} | {_cell(text)} |\n")
        if inner is not None:
            below.append((f"{prefix}{name}{'[]' if listed else ''}.", inner))
    if rows:
        yield f"\n## {prefix.rstrip('.')}\n\n| setting | type | default | meaning |\n|---|---|---|---|\n"
        yield from rows
    for inner_prefix, inner in below:
        yield from describe(inner, inner_prefix)


def _inner(annotation: Any) -> tuple[type[Section] | None, bool]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation, False
    if typing.get_origin(annotation) is list:
        (item,) = typing.get_args(annotation)
        if isinstance(item, type) and issubclass(item, Section):
            return item, True
    return None, False


def _type(field: FieldInfo) -> str:
    names = [_name(option) for option in _options(field.annotation)]
    bounds = [_bound(item) for item in field.metadata]
    return _cell(" or ".join(names) + "".join(f", {b}" for b in bounds if b))


def _options(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _name(annotation: Any) -> str:
    if typing.get_origin(annotation) is Literal:
        return ", ".join(f"`{word}`" for word in typing.get_args(annotation))
    if annotation is types.NoneType:
        return "null"
    origin = typing.get_origin(annotation)
    if origin is list:
        return f"list of {_name(typing.get_args(annotation)[0])}"
    if origin is dict:
        return "map"
    if issubclass(annotation, Section):
        return "sections"
    return {Path: "path", str: "text", bool: "bool", int: "int", float: "float"}[annotation]


def _bound(item: Any) -> str:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    return " ".join(f"{sign} {getattr(item, key)}" for key, sign in signs.items() if hasattr(item, key))


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return "see there"
    if field.default is PydanticUndefined:
        return "required"
    if field.default is None:
        return "null"
    if isinstance(field.default, bool):
        return str(field.default).lower()
    return f"`{field.default}`" if field.default != "" else "empty"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    main()

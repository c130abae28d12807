"""A user's own function, by import path. Knows Python's import system and nothing of what is loaded."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from megatron_meds.errors import UserError


class FunctionError(UserError, ValueError):
    """A `module:name` that leads to no function; says which setting holds it and what is wrong."""


def load_function(path: str, setting: str) -> Callable[..., Any]:
    """The function at `module:name`.

    Args:
        path: an importable module and a name in it, which may be dotted (`module:Class.method`).
        setting: name of the setting that holds the path, for messages.

    Raises:
        FunctionError: no colon, no such module, no such name, or not callable.
        Exception: whatever the module itself raises while it is imported.
    """
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise FunctionError(f"{setting} = {path!r}: should read module:name")
    try:
        found: Any = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there; something that it imports is not
        raise FunctionError(
            f"{setting} = {path!r}: no module {error.name!r}; put its folder on PYTHONPATH, or install it"
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise FunctionError(f"{setting} = {path!r}: {module_name} has no {name!r}")
        found = getattr(found, part)
    if not callable(found):
        raise FunctionError(f"{setting} = {path!r}: a {type(found).__name__}, not a function")
    return found

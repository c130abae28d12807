"""What a run writes down about itself, and what it shows while it runs.

`tracker` is what the loop holds; `sinks` are the places numbers go to, `samples` the trajectory files,
`view` the terminal. Imports nothing on its own.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_meds.tracking.samples import sample_rows as sample_rows
    from megatron_meds.tracking.tracker import Tracker as Tracker

_EXPORTS = {"Tracker": "tracker", "sample_rows": "samples"}


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)

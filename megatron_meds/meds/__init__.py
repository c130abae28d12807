"""MEDS: mistakes remembered by their layer logits, clustered, and punished the more often they are made.

Needs numpy and scikit-learn; knows trajectories and their ledger, and neither how a model is run nor
how replicas talk. Names are imported when they are first asked for, so that the settings can be read
without the rest, and pyarrow is needed only where memory is written or read (`state`).
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_meds.meds.clustering import cluster_many, cluster_rows
    from megatron_meds.meds.diagnostics import cluster_agreement, gibbs_gain, top1_eigen_ratio
    from megatron_meds.meds.features import make_features, select_layers
    from megatron_meds.meds.memory import MistakeMemory, Note, Visit
    from megatron_meds.meds.positions import AnswerToken, find_answer_token
    from megatron_meds.meds.shaping import Meds, penalty
    from megatron_meds.meds.sharding import Rows, ShardedMemory, owner
    from megatron_meds.meds.state import MemoryFileError, load_memory, save_memory

_HOME = {
    "AnswerToken": "positions",
    "Meds": "shaping",
    "MemoryFileError": "state",
    "MistakeMemory": "memory",
    "Note": "memory",
    "Rows": "sharding",
    "ShardedMemory": "sharding",
    "Visit": "memory",
    "cluster_agreement": "diagnostics",
    "cluster_many": "clustering",
    "cluster_rows": "clustering",
    "find_answer_token": "positions",
    "gibbs_gain": "diagnostics",
    "load_memory": "state",
    "make_features": "features",
    "owner": "sharding",
    "penalty": "shaping",
    "save_memory": "state",
    "select_layers": "features",
    "top1_eigen_ratio": "diagnostics",
}

__all__ = [
    "AnswerToken",
    "Meds",
    "MemoryFileError",
    "MistakeMemory",
    "Note",
    "Rows",
    "ShardedMemory",
    "Visit",
    "cluster_agreement",
    "cluster_many",
    "cluster_rows",
    "find_answer_token",
    "gibbs_gain",
    "load_memory",
    "make_features",
    "owner",
    "penalty",
    "save_memory",
    "select_layers",
    "top1_eigen_ratio",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)

"""Features of responses: which layer logits are kept, and in what form.

Layer logits are one number per response and decoder layer: lm_head(h_l)[y*] in fp32, read at the
position that predicts the answer's first token y* (`positions`). A response without one has a row of
NaN, so that no other row shifts. Knows arrays; knows neither models nor memory.

Letters: B responses, n of them with a feature, L layers, d features. Source: MEDS, arXiv 2604.11297.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

Last = int | Literal["half"] | None
FeatureFunction = Callable[[np.ndarray, list[Any]], np.ndarray]
"""A user's own: (layer logits [n, L] fp32, the n trajectories) -> features [n, d]."""


def select_layers(layer_logits: np.ndarray, last: Last = 14, difference: bool = False) -> np.ndarray:
    """The features that are compared: adjacent differences of all layers first, then the last ones.

    Args:
        layer_logits: [n, L]; no rows may also come as an empty list.
        last: columns kept, from the end; all where there are no more; `half` means L // 2, at least
            one; None: all.
        difference: take h[l + 1] - h[l] of all layers before.

    Returns:
        [n, d] of the dtype of `layer_logits`, a copy. NaN stays NaN.

    Raises:
        ValueError: no matrix, `last` below 1, or a difference of a single layer.
    """
    logits = np.asarray(layer_logits)
    if logits.shape == (0,):
        return logits.reshape(0, 0)
    if logits.ndim != 2:
        raise ValueError(f"layer logits of shape {logits.shape}, not [n, L]")
    layers = logits.shape[1]
    if difference and layers == 1:
        raise ValueError("the difference of layers needs two of them, the layer logits have one")
    count = layers if last is None else max(layers // 2, 1) if last == "half" else last
    if isinstance(count, str) or count < 1:
        raise ValueError(f"last = {last!r}: should be 1 or more, 'half' or None")
    columns = np.diff(logits, axis=1) if difference else logits
    return columns[:, -count:].copy()


def make_features(
    layer_logits: np.ndarray,
    trajectories: Sequence[Any],
    last: Last = 14,
    difference: bool = False,
    function: FeatureFunction | None = None,
) -> np.ndarray:
    """Features of a step's responses, row by row.

    Args:
        layer_logits: [B, L]; a row that is all NaN belongs to a response without a feature.
        trajectories: the B responses, for `function`.
        last, difference: see `select_layers`.
        function: a user's own instead; it sees the rows that have layer logits, and their trajectories.

    Returns:
        [B, d]; NaN in the rows without a feature. A row that is not finite for another reason stays so.

    Raises:
        ValueError: the counts differ, or `function` gave something else than a row of numbers for each.
    """
    logits = np.asarray(layer_logits, dtype=np.float32)
    if logits.ndim != 2 or len(logits) != len(trajectories):
        raise ValueError(f"layer logits of shape {logits.shape} for {len(trajectories)} trajectories")
    if function is None:
        return select_layers(logits, last, difference)
    present = np.flatnonzero(~np.isnan(logits).all(axis=1))
    if not len(present):
        return np.full((len(logits), 1), np.nan, dtype=np.float32)
    found = np.asarray(function(logits[present], [trajectories[i] for i in present]), dtype=np.float32)
    if found.ndim != 2 or len(found) != len(present):
        raise ValueError(
            f"meds.feature_function gave an array of shape {found.shape} for {len(present)} responses, "
            "not one row of features for each"
        )
    features = np.full((len(logits), found.shape[1]), np.nan, dtype=np.float32)
    features[present] = found
    return features

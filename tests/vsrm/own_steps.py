"""A reward function of a user's own for reasoning steps."""

import numpy as np


def halves(accuracies: np.ndarray) -> np.ndarray:
    """Half of what each step gained."""
    return np.diff(accuracies) / 2

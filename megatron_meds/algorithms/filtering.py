"""Which groups teach something: the predicate of dynamic sampling. Knows verdicts and nothing else."""

from collections.abc import Iterable


def mixed(correct: Iterable[bool]) -> bool:
    """Whether a group holds right and wrong answers, so that its outcome rewards differ.

    An empty group and a group of one are not mixed. Source: DAPO (arXiv 2503.14476), equation 11.
    """
    return len({bool(c) for c in correct}) == 2

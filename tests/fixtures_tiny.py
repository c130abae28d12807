"""The fixture `tiny`: folders of tiny models, each made once per session."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny import tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny(kind, **options) -> folder; the options are those of `tests.tiny.tiny_model`. Read only."""
    made: dict[tuple, Path] = {}

    def make(kind: str, **options) -> Path:
        key = (kind, *sorted(options.items(), key=lambda item: item[0]))
        if key not in made:
            made[key] = tiny_model(kind, tmp_path_factory.mktemp(kind), **options)
        return made[key]

    return make

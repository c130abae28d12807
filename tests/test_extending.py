"""The code of docs/extending.md does what the page says."""

import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from megatron_meds.algorithms import recipe
from megatron_meds.algorithms.settings import AlgorithmSettings
from megatron_meds.rewards import compose
from megatron_meds.rewards.settings import RewardSettings
from megatron_meds.trajectory import Prompt, RewardLedger, Trajectory, prompt_id

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(
    r"```python\n# ([^\n]+)\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL
)


def _code(name: str) -> types.ModuleType:
    """A block of the page as a module."""
    ((_, source),) = [block for block in BLOCKS if block[0] == name]
    module = types.ModuleType(Path(name).stem.replace(" ", "_"))
    exec(compile(source, name, "exec"), module.__dict__)
    return module


def _group(question: str, correct: list[bool], finish: str = "stop") -> list[Trajectory]:
    asked = Prompt(id=prompt_id(question), question=question, token_ids=(1, 2), answer="1")
    return [
        Trajectory(asked, k, [5] * (2 + k), "", [0.0] * (2 + k), finish, 0, correct=right)
        for k, right in enumerate(correct)
    ]


def test_the_reward_is_added_where_its_import_path_is_set(monkeypatch):
    monkeypatch.setitem(sys.modules, "my_rewards", _code("my_rewards.py"))
    trajectories = [*_group("a", [True, True, False]), *_group("b", [True], finish="length")]
    ledger = compose(trajectories, RewardSettings(function="my_rewards:right_and_brief"), max_tokens=8)
    np.testing.assert_allclose(ledger.totals("custom"), [0.2 / 2, 0.2 / 4, 0.0, np.nan])
    np.testing.assert_allclose(ledger.totals(), [1.1, 1.05, 0.0, np.nan])


def test_a_source_may_reward_any_token():
    trajectories = _group("a", [True, False])
    ledger = RewardLedger(trajectories)
    _code("a source at a token").add_first_token(ledger, trajectories, 0.5)
    assert [list(r) for r in ledger.token_rewards()] == [[0.5, 0.0], [0.5, 0.0, 0.0]]
    assert ledger.sources == ["first"]


def test_the_algorithm_is_resolved_by_its_name_and_learns_from_the_best_only(monkeypatch):
    best_of = _code("megatron_meds/algorithms/best_of.py").best_of
    monkeypatch.setitem(recipe._ALGORITHMS, "best_of", best_of)
    algorithm = recipe.resolve(
        AlgorithmSettings.model_construct(**vars(AlgorithmSettings()) | {"name": "best_of"})
    )
    trajectories = [*_group("a", [False, True, False, True]), *_group("b", [True, True])]
    ledger = RewardLedger(trajectories)
    for index, trajectory in enumerate(trajectories):
        ledger.add("outcome", index, float(bool(trajectory.correct)))
    ledger.mark_unscored("outcome", 3)
    first = [float(a[0]) for a in algorithm.advantages(ledger, trajectories)]
    assert first == pytest.approx([0.0, (2 / 3) / np.std([0, 1, 0], ddof=1), 0.0, 0.0, 0.0, 0.0], rel=1e-5)
    assert [len(a) for a in algorithm.advantages(ledger, trajectories)] == [len(t) for t in trajectories]


@pytest.mark.parametrize("block", [b for b in BLOCKS if (ROOT / b[0]).is_file()], ids=lambda b: b[0])
def test_quoted_lines_stand_in_the_files_they_are_quoted_from(block):
    file, lines = block
    assert lines in (ROOT / file).read_text()


def test_every_file_the_pages_link_to_is_there():
    for page in (ROOT / "docs").glob("*.md"):
        for target in re.findall(r"\]\(([^)#]+?)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"

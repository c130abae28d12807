"""The import contracts in pyproject.toml speak of every folder of the package."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_folder_stands_alone_or_is_forbidden_to_those_that_do():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    alone = contracts[0]
    named = {*alone["source_modules"], *alone["forbidden_modules"]}
    folders = {p.parent.name for p in (ROOT / "megatron_meds").glob("*/*.py")}
    assert {f"megatron_meds.{folder}" for folder in folders} <= named


def test_folders_that_stand_alone_are_kept_apart_too():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    apart = next(c for c in contracts if c["type"] == "independence")
    assert apart["modules"] == contracts[0]["source_modules"]

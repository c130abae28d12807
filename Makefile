# Every target sets the environment up on first use (tools/setup.sh) and says so.
.DEFAULT_GOAL := help
.PHONY: help setup quickstart test check format lock docs clean

help:  ## list the targets
	@grep -E '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed -E 's/: [^#]*##/\t/' | expand -t 14

setup:  ## make .venv and install the locked CPU environment
	@tools/setup.sh

quickstart: setup  ## train the tiny reasoner with DAPO and MEDS on this machine's CPU
	.venv/bin/megatron-meds train examples/tiny_reasoner/meds.yaml run.name=quickstart-$$(date +%Y%m%d-%H%M%S)

test: setup  ## run the tests, two at a time (ARGS="-k mesh" for some of them, "-n 0" one after the other)
	.venv/bin/python -m pytest -n 2 $(ARGS)

check: setup  ## formatting, lint, types, import contracts, generated documents
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/pyright
	.venv/bin/lint-imports
	.venv/bin/python tools/settings_reference.py --check
	.venv/bin/python tools/drawings.py --check

format: setup  ## format the code and mend what ruff can mend
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

docs: setup  ## write docs/settings.md from the settings tree, and the drawings
	.venv/bin/python tools/settings_reference.py
	.venv/bin/python tools/drawings.py

lock: setup  ## resolve the extras cpu and dev into requirements/cpu.txt
	tools/lock.sh

clean:  ## remove caches and build output (.venv and runs stay)
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
	find megatron_meds tests tools examples -name __pycache__ -type d -prune -exec rm -rf {} +

#!/usr/bin/env bash
# Resolves the extras `cpu` and `dev` of pyproject.toml into requirements/cpu.txt. Versions already there
# are kept where they still fit; `tools/lock.sh --upgrade` takes the newest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

lock=requirements/cpu.txt
resolved=$(mktemp)
trap 'rm -f "$resolved"' EXIT
cp $lock "$resolved"
.venv/bin/uv pip compile pyproject.toml --extra cpu --extra dev --quiet "$@" \
    --python-platform x86_64-manylinux_2_28 --python-version 3.12 \
    --no-annotate --no-header --no-emit-index-url --no-emit-find-links --output-file "$resolved"
{
    cat <<'HEADER'
# The CPU environment: extras `cpu` and `dev` of pyproject.toml, resolved. Made by `make lock`, installed
# with --no-deps by `make setup`. Valid for Python 3.12 and 3.13 on Linux.
HEADER
    grep -v '^#' "$resolved"
} >"$lock"

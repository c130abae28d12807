#!/usr/bin/env bash
# Makes .venv and installs what requirements/cpu.txt locks, and this project into it, editable.
# Does nothing when that was done before for the same lock. From the default package index only.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

uv_version=0.13.9
python=.venv/bin/python
stamp=.venv/installed.sha256

say() { printf 'setup: %s\n' "$*"; }

# A name on the PATH proves nothing: a pyenv shim exists for versions that only print an error.
usable() {
    "$1" -c 'import ensurepip, sys, venv; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 13))' \
        >/dev/null 2>&1 </dev/null
}

find_python() {
    local candidate
    for candidate in python3.12 python3.13 python3 python \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[23]*/bin/python3; do
        if usable "$candidate"; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    say "no Python 3.12 or 3.13 with venv found. Install one, for instance" >&2
    say "  apt install python3.12-venv    or    pyenv install 3.12    or    uv python install 3.12" >&2
    return 1
}

fingerprint() { { echo "$PWD"; cat requirements/cpu.txt pyproject.toml tools/setup.sh; } | sha256sum; }

if usable $python && [ "$(cat $stamp 2>/dev/null)" = "$(fingerprint)" ]; then
    exit 0
fi

start=$SECONDS
if ! usable $python; then
    base=$(find_python)
    say "making .venv with $("$base" --version) from $base"
    "$base" -m venv --clear .venv
fi
if [ "$(.venv/bin/uv --version 2>/dev/null | cut -d' ' -f2)" != "$uv_version" ]; then
    say "installing uv $uv_version"
    $python -m pip install --quiet --disable-pip-version-check "uv==$uv_version"
fi
say "installing $(grep -c == requirements/cpu.txt) packages of requirements/cpu.txt into .venv (about 7 GB)"
export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-300} VIRTUAL_ENV=$PWD/.venv
# Compiled once here: where Python may not write bytecode, every process would compile torch and vLLM again.
.venv/bin/uv pip install --quiet --no-deps --compile-bytecode --requirements requirements/cpu.txt
.venv/bin/uv pip install --quiet --no-deps --editable .
fingerprint >$stamp
say "done in $((SECONDS - start)) s"

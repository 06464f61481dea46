#!/usr/bin/env bash
# Set up the environment, check style, types and documentation, and run the tests.
#
#   bash scripts/test.sh                   # everything, as CI does
#   bash scripts/test.sh --fast            # without the slow tests (tests/slow.txt): between two edits
#   bash scripts/test.sh tests/losses -x   # the checks, and pytest with these arguments
#
# TEST_PROCESSES (default: one per core, at most 4) sets how many processes run the tests.
set -euo pipefail
# shellcheck disable=SC2034  # for the script that is sourced
extras=eval,plot,integrations,test,release
# shellcheck source-path=SCRIPTDIR source=_environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/_environment.sh"

options=()
if [[ "${1:-}" == --fast ]]; then
  shift
  options=(-m 'not slow and not inductor and not gpu')
fi

# In a new clone Python compiles what the tests import: on a core that mypy leaves idle.
[[ -d .mypy_cache ]] || "$python" -m pytest --collect-only --quiet &>/dev/null &

say "ruff"
"$python" -m ruff check .
"$python" -m ruff format --check .

say "mypy"
"$python" -m mypy

say "docs"
NO_MKDOCS_2_WARNING=1 "$python" -m mkdocs build --strict

say "pytest"
# The tensors are tiny: one thread is as fast as many, and tests that start several processes do not fight for cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
processes="${TEST_PROCESSES:-$("$python" -c 'import os; print(min(4, os.cpu_count() or 1))')}"
# A file stays in one process: its tests share what its fixtures make. tests/slow.txt orders the files.
# Tests with a scheduler, servers and killed processes depend on how a busy machine takes turns: one that fails is run
# once more. The summary names it and says why: a test that often needs it hides a race, in the test or in the product.
"$python" -m pytest --reruns 1 --rerun-show-tracebacks -ra --numprocesses "$processes" --dist loadfile --no-loadscope-reorder ${options[@]+"${options[@]}"} "$@"

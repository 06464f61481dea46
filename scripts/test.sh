#!/usr/bin/env bash
# Set up the environment, check style, types and documentation, and run the tests.
#
#   bash scripts/test.sh                   # the first tier: the core of training, less than six minutes on two cores
#   bash scripts/test.sh --all             # all tests, as in CI; needs more packages
#   bash scripts/test.sh tests/losses -x   # the checks, then pytest with these arguments
#
# TEST_PROCESSES sets the number of test processes (default: one per core, at most 4).
set -euo pipefail
extras=eval,test
# Tests of clusters, servers and killed processes depend on timing, so --all runs each failed test once more. The summary
# lists these tests with their errors, because a test that often needs a rerun hides a race condition.
options=()
case "${1:-}" in
  --all)
    shift
    # shellcheck disable=SC2034  # used by the sourced script
    extras=eval,plot,integrations,test,release
    options=(--reruns 1 --rerun-show-tracebacks)
    ;;
  "") options=(-m "not second_tier and not inductor and not gpu") ;;
esac
# shellcheck source-path=SCRIPTDIR source=_environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/_environment.sh"

# In a new clone, compile the imports of the tests on a core that mypy leaves idle.
[[ -d .mypy_cache ]] || "$python" -m pytest --collect-only --quiet ${options[@]+"${options[@]}"} &>/dev/null &

say "ruff"
"$python" -m ruff check .
"$python" -m ruff format --check .

say "mypy"
"$python" -m mypy

say "docs"
NO_MKDOCS_2_WARNING=1 "$python" -m mkdocs build --strict

say "pytest"
# The tensors are tiny, so one thread is as fast as many, and tests with several processes do not compete for cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
processes="${TEST_PROCESSES:-$("$python" -c 'import os; print(min(4, os.cpu_count() or 1))')}"
# Each file stays in one process, because its tests share fixtures. tests/all.txt orders the files.
"$python" -m pytest -ra --numprocesses "$processes" --dist loadfile --no-loadscope-reorder ${options[@]+"${options[@]}"} "$@"

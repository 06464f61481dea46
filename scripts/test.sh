#!/usr/bin/env bash
# Set up the environment, check style, types and documentation, and run the tests.
#
#   bash scripts/test.sh                   # the first tier: what every training needs, in less than six minutes on two cores
#   bash scripts/test.sh --all             # everything, as CI does; needs more packages
#   bash scripts/test.sh tests/losses -x   # the checks, and pytest with these arguments
#
# TEST_PROCESSES (default: one per core, at most 4) sets how many processes run the tests.
set -euo pipefail
extras=eval,test
# The tests of a cluster, servers and killed processes depend on how a busy machine takes turns: one of the second tier that
# fails is run once more. The summary names it and says why: a test that often needs it hides a race.
options=()
case "${1:-}" in
  --all)
    shift
    # shellcheck disable=SC2034  # for the script that is sourced
    extras=eval,plot,integrations,test,release
    options=(--reruns 1 --rerun-show-tracebacks)
    ;;
  "") options=(-m "not second_tier and not inductor and not gpu") ;;
esac
# shellcheck source-path=SCRIPTDIR source=_environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/_environment.sh"

# In a new clone Python compiles what the tests import: on a core that mypy leaves idle.
[[ -d .mypy_cache ]] || "$python" -m pytest --collect-only --quiet ${options[@]+"${options[@]}"} &>/dev/null &

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
# A file stays in one process: its tests share what its fixtures make. tests/all.txt orders the files.
"$python" -m pytest -ra --numprocesses "$processes" --dist loadfile --no-loadscope-reorder ${options[@]+"${options[@]}"} "$@"

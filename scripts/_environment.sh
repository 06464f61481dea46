# shellcheck shell=bash
# Sourced by the other scripts. Goes to the clone's root and sets $python, the interpreter of the virtual environment in
# .venv, which has this package installed in place with the extras that the other script names in $extras, if any, such as
# "eval,test". The first call makes the environment; a script that needs more adds it. Later calls take a fraction of a
# second, unless requirements.txt or pyproject.toml changed.
#
# PYTHON names the interpreter that makes the environment (default: python3), and EXTRAS further extras. Versions are those of
# requirements.lock; with UNLOCKED=1 they are the newest that requirements.txt allows. pip obeys its own PIP_* variables.

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
cd -- "$root" || exit
python="$root/.venv/bin/python"
lock=requirements.lock
[[ -z "${UNLOCKED:-}" ]] || lock=/dev/null
unset PYTHONDONTWRITEBYTECODE  # set in many container images: each process would compile all that it imports

say() {
  printf '\n==> %s\n' "$*"
}

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# Includes the clone's path: an environment that was moved or copied would import the package from the old place.
environment_fingerprint() {
  {
    printf '%s\n' "$root"
    "$python" --version
    cat requirements.txt pyproject.toml "$lock"
  } | "$python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

# The extras that are wanted and those that are installed, sorted, with commas between them.
all_extras() {
  { tr ',' '\n' <<<"${extras:-},${EXTRAS:-}"; cat .venv/.extras 2>/dev/null || true; } | sort -u | sed '/^$/d' | paste -sd, -
}

# .installed has the fingerprint, and .extras the extras, one a line.
environment_is_ready() {
  [[ -x "$python" && -f .venv/.installed && "$(cat .venv/.installed)" == "$(environment_fingerprint)" ]] &&
    [[ "$(all_extras)" == "$(paste -sd, .venv/.extras 2>/dev/null)" ]]
}

make_environment() {
  local base="${PYTHON:-python3}"
  command -v "$base" >/dev/null || fail "$base not found: install Python 3.10 or newer, or set PYTHON to its path"
  "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "$("$base" --version) is too old: Python 3.10 or newer is needed; set PYTHON to its path"
  if ! "$python" -m pip --version >/dev/null 2>&1; then
    say "Making the virtual environment in .venv"
    "$base" -m venv .venv || fail "$base cannot make virtual environments (on Debian and Ubuntu: apt install python3-venv)"
  fi
  say "Installing openclip_ext and its dependencies (the first time about 5 GB, most of it PyTorch)"
  local wanted
  wanted="$(all_extras)"
  # Python compiles what it imports: all 15,000 files of PyTorch and the others would take longer than the first imports.
  "$python" -m pip install --no-compile --constraint "$lock" -e ".${wanted:+[$wanted]}" ||
    fail "installation failed; see pip's message above. Run the script again to continue"
  tr ',' '\n' <<<"$wanted" >.venv/.extras
  environment_fingerprint >.venv/.installed
}

# Two scripts started at the same time must not install over each other. The lock ends with the subshell.
ensure_environment() {
  environment_is_ready && return
  mkdir -p .venv
  (
    if command -v flock >/dev/null; then flock 9; fi
    environment_is_ready || make_environment
  ) 9>.venv/.lock
}

ensure_environment

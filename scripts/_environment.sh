# shellcheck shell=bash
# The other scripts source this file. It changes to the root of the clone and sets $python to the interpreter in .venv. The
# first call creates .venv and installs this package in place, with the extras in $extras, such as "eval,test". Later calls
# add missing extras. They take a fraction of a second, unless requirements.txt or pyproject.toml changed.
#
# PYTHON sets the interpreter that creates .venv (default: python3). EXTRAS sets additional extras. requirements.lock sets the
# versions; UNLOCKED=1 installs the newest versions that requirements.txt allows. pip reads its own PIP_* variables.

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
cd -- "$root" || exit
python="$root/.venv/bin/python"
lock=requirements.lock
[[ -z "${UNLOCKED:-}" ]] || lock=/dev/null
unset PYTHONDONTWRITEBYTECODE  # many container images set it; each process would compile all modules that it imports

say() {
  printf '\n==> %s\n' "$*"
}

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# The state that .venv must have. It includes the path of the clone, because a moved environment would import the old package.
# The second line has the requested and the installed extras, sorted and separated by commas.
wanted_state() {
  local asked_and_known
  asked_and_known="${extras:-},${EXTRAS:-},$(sed -n 2p .venv/.installed 2>/dev/null || true)"
  printf '%s\n' "$root" "$(tr ',' '\n' <<<"$asked_and_known" | sort -u | sed '/^$/d' | paste -sd, -)"
  "$python" --version
  cat requirements.txt pyproject.toml "$lock"
}

ensure_environment() {
  [[ -x "$python" && -f .venv/.installed && "$(cat .venv/.installed)" == "$(wanted_state)" ]] && return
  # An environment whose Python is too old, as pip says below, is made again after the user has set PYTHON.
  if ! { "$python" -m pip --version && "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; } &>/dev/null; then
    say "Making the virtual environment in .venv"
    local base="${PYTHON:-python3}"
    "$base" -m venv --clear .venv || fail "$base cannot make virtual environments (on Debian and Ubuntu: apt install python3-venv)"
  fi
  say "Installing openclip_ext and its dependencies (the first time about 5 GB, most of it PyTorch)"
  local state wanted
  state="$(wanted_state)"
  wanted="$(sed -n 2p <<<"$state")"
  # Compiling all 15,000 files takes longer than the first imports, which compile only the imported files.
  "$python" -m pip install --no-compile --constraint "$lock" -e ".${wanted:+[$wanted]}" ||
    fail "installation failed; see pip's message above. Run the script again to continue"
  printf '%s\n' "$state" >.venv/.installed
}

ensure_environment

#!/usr/bin/env bash
# Makes .venv and installs megastable into it with the versions of constraints.txt. Returns at once when that is done.
#
#   bash launch/install.sh [EXTRA ...]     extras of pyproject.toml: wandb, mlflow, lm-eval, hf, gguf, store,
#                                          gpu, gputest, stacks, dev
#
# PYTHON names the interpreter (3.11 or newer; default: the first such python3 on PATH). What pip says goes to
# .venv/install.log. Several at once wait for each other; an interrupted one is found and begun again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case ${1-} in -h | --help) sed -n '2,/^set/{/^set/d; s/^# \{0,1\}//; p}' launch/install.sh; exit 0 ;; esac

stamp=.venv/.installed        # what is installed: place, sources, extras; written last
unfinished=.venv/.installing  # exists while pip may have left files half written
log=.venv/install.log

say() { printf 'install: %s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 2; }

[ "$(uname -s)" = Linux ] ||
  die "megastable needs Linux, and this is $(uname -s): use a Linux machine, container or virtual machine (on Windows: WSL)"

# A virtual environment does not survive a change of its path or of its Python's minor version.
place() {
  .venv/bin/python -Ic 'import sys; print("%d.%d" % sys.version_info[:2], end=" ")' 2>/dev/null && printf '%s\n' "$PWD"
}

sources() { cat pyproject.toml constraints.txt launch/install.sh | sha256sum | cut -d ' ' -f 1; }

read_stamp() {
  was_place='' was_sources='' was_extras=''
  [ ! -f "$stamp" ] || { read -r was_place; read -r was_sources; read -r was_extras; } <"$stamp" || true
}

is_current() {
  [ ! -e "$unfinished" ] || return 1
  read_stamp
  [ -n "$was_place" ] && [ "$was_place" = "$(place)" ] && [ "$was_sources" = "$(sources)" ] || return 1
  local extra
  for extra in "$@"; do [[ " $was_extras " == *" $extra "* ]] || return 1; done
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      "$candidate" -c 'import ensurepip, venv' 2>/dev/null ||
        die "$candidate has no venv module (on Debian and Ubuntu: apt-get install python3-venv)"
      command -v "$candidate"
      return
    fi
  done
  die "megastable needs Python 3.11 or newer; ${PYTHON:-python3} is $("${PYTHON:-python3}" -V 2>&1 || true)." \
    "Install one and name it: PYTHON=/path/to/python3.12 bash launch/install.sh"
}

stage() { # stage MESSAGE COMMAND...
  local message=$1 start=$SECONDS
  shift
  printf 'install: %s ... ' "$message"
  printf '\n== %s: %s\n' "$message" "$*" >>"$log"
  if "$@" >>"$log" 2>&1; then
    printf '%d s\n' $((SECONDS - start))
  else
    printf 'failed\n'
    tail -n 25 "$log" >&2
    rm -f "$unfinished" # pip has cleaned up behind itself: what is there can be built upon
    die "the install failed at '$message'; all of it is in $log. Run the same command again once the cause is gone"
  fi
}

known=$(sed -n '/^\[project.optional-dependencies\]/,/^\[tool/s/^\([a-z-]*\) = \[.*/\1/p' pyproject.toml | xargs)
for extra in "$@"; do
  [[ " $known " == *" $extra "* ]] || die "no extra named '$extra'; there are: $known"
done
is_current "$@" && exit 0

mkdir -p .venv
exec 9>>.venv/.lock
flock -n 9 || { say 'another install is running here, waiting for it'; flock 9; }
is_current "$@" && exit 0

read_stamp
if [ -e "$unfinished" ] || { [ -n "$was_place" ] && [ "$was_place" != "$(place)" ]; }; then
  say 'the environment in .venv is unfinished or was moved: making it again'
  find .venv -mindepth 1 -maxdepth 1 ! -name .lock -exec rm -rf {} +
  was_extras=''
fi
rm -f "$stamp" "$log"

extras=$(printf '%s\n' $was_extras "$@" | sort -u | xargs)
pip=(.venv/bin/python -m pip install --disable-pip-version-check --no-input --constraint constraints.txt)

touch "$unfinished"
if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  python=$(find_python) || { rm "$unfinished"; exit 2; }
  stage "virtual environment of $("$python" -V)" "$python" -m venv .venv
fi
stage 'build tools' "${pip[@]}" setuptools wheel
stage 'torch, the largest part' "${pip[@]}" torch
# Building DeepSpeed imports torch: in pip's isolation it would fetch another one, with all of CUDA.
stage 'DeepSpeed' env DS_BUILD_OPS=0 "${pip[@]}" --no-build-isolation deepspeed
stage "megastable${extras:+ with $extras}" "${pip[@]}" --no-build-isolation --editable ".${extras:+[${extras// /,}]}"

printf '%s\n' "$(place)" "$(sources)" "$extras" >"$stamp"
rm "$unfinished"
